"""Sign-in of browsers: one-time codes, session cookies, CSRF tokens."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import httpx
import pytest

from api_support import ADMIN_HEADERS, ADMIN_TOKEN, HERE, add_token, api_at
from interlock.store.access import (
    authenticate_session,
    create_session_by_code,
    create_session_by_token,
    create_sign_in_code,
    delete_expired_sign_ins,
    hash_token,
    revoke_token,
)
from interlock.supervisor.http.sessions import FAILURES_PER_MINUTE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


@pytest.fixture
async def browser(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client that keeps cookies and sends no bearer token; the token `test` exists."""
    async with api_at(url) as client:
        del client.headers["Authorization"]
        yield client


async def signed_in(browser: httpx.AsyncClient) -> dict[str, str]:
    """Sign in with the admin token; return the header with the CSRF token."""
    answer = await browser.post("/ui/session", json={"token": ADMIN_TOKEN})
    assert answer.status_code == 201, answer.text
    return {"X-CSRF-Token": answer.json()["csrf_token"]}


async def test_code_works_once(browser: httpx.AsyncClient, database: Connection) -> None:
    code = await create_sign_in_code(database, "test")
    first = await browser.post("/ui/session", json={"code": code})
    assert (first.status_code, first.json()["actor"], first.json()["scope"]) == (201, "token:test", "admin")
    browser.cookies.clear()
    second = await browser.post("/ui/session", json={"code": code})
    assert (second.status_code, second.json()["code"]) == (401, "sign_in_failed")
    assert "set-cookie" not in second.headers


async def test_a_code_expires_after_two_minutes(browser: httpx.AsyncClient, database: Connection) -> None:
    code = await create_sign_in_code(database, "test", now=datetime.now(UTC) - timedelta(seconds=121))
    assert (await browser.post("/ui/session", json={"code": code})).status_code == 401
    fresh = await create_sign_in_code(database, "test", now=datetime.now(UTC) - timedelta(seconds=100))
    assert (await browser.post("/ui/session", json={"code": fresh})).status_code == 201


async def test_codes_and_sessions_are_stored_as_hashes(browser: httpx.AsyncClient, database: Connection) -> None:
    code = await create_sign_in_code(database, "test")
    await signed_in(browser)
    (session,) = browser.cookies.values()
    assert (len(code), len(session)) == (43, 43), "32 random bytes each"
    for table, column, secret in (("sign_in_codes", "code_hash", code), ("sessions", "session_hash", session)):
        rows = await (await database.execute(f"select * from interlock.{table}".encode())).fetchall()
        assert [row[column] for row in rows] == [hash_token(secret)]
        assert secret not in repr(rows)


async def test_the_cookie_is_strict_hidden_from_scripts_and_secure_under_tls(browser: httpx.AsyncClient) -> None:
    plain = (await browser.post("/ui/session", json={"token": ADMIN_TOKEN})).headers["set-cookie"]
    assert plain.startswith("interlock_session=")
    assert {"HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"} <= set(plain.split("; "))
    assert "Secure" not in plain.split("; ")
    behind = {"Origin": HERE.replace("http:", "https:")}  # a proxy ends TLS
    secure = (await browser.post("/ui/session", json={"token": ADMIN_TOKEN}, headers=behind)).headers["set-cookie"]
    assert secure.startswith("__Host-interlock_session=")
    assert {"HttpOnly", "SameSite=strict", "Path=/", "Secure"} <= set(secure.split("; "))
    assert "Domain" not in secure


async def test_supervisors_on_two_ports_of_a_host_have_cookies_of_their_own(browser: httpx.AsyncClient) -> None:
    browser.base_url = httpx.URL("http://localhost:8322")
    await signed_in(browser)
    assert list(browser.cookies.keys()) == ["interlock_session_8322"]
    assert (await browser.get("/ui/session")).status_code == 200


async def test_the_cookie_does_not_count_for_the_api(browser: httpx.AsyncClient) -> None:
    csrf = await signed_in(browser)
    assert (await browser.get("/ui/session")).status_code == 200
    for path in ("/api/tasks", "/api/status", "/metrics"):
        answer = await browser.get(path, headers=csrf)
        assert (answer.status_code, answer.json()["code"]) == (401, "missing_token"), path
    assert (await browser.post("/api/tasks", json={"type": "x"}, headers=csrf)).status_code == 401


async def test_a_revoked_token_ends_its_sessions(browser: httpx.AsyncClient, database: Connection) -> None:
    await signed_in(browser)
    code = await create_sign_in_code(database, "test")
    assert (await browser.get("/ui/session")).status_code == 200
    assert await revoke_token(database, "test", actor="ada")
    assert (await browser.get("/ui/session")).status_code == 401
    assert (await browser.post("/ui/session", json={"code": code})).status_code == 401


async def test_a_session_ends_after_twelve_hours_or_two_idle_ones(
    browser: httpx.AsyncClient, database: Connection
) -> None:
    del browser  # the token exists
    now = datetime.now(UTC)
    session = await create_session_by_token(database, ADMIN_TOKEN, now=now)
    assert session is not None
    for hours, valid in ((1.9, True), (3.8, True), (5.9, False)):
        at = now + timedelta(hours=hours)
        assert (await authenticate_session(database, session, now=at) is not None) is valid, hours
    lasting = await create_session_by_token(database, ADMIN_TOKEN, now=now)
    assert lasting is not None
    for hours in range(1, 12):
        assert await authenticate_session(database, lasting, now=now + timedelta(hours=hours)) is not None
    assert await authenticate_session(database, lasting, now=now + timedelta(hours=12)) is None
    await create_sign_in_code(database, "test", now=now)
    assert await delete_expired_sign_ins(database, now=now + timedelta(seconds=119)) == 0
    assert await delete_expired_sign_ins(database, now=now + timedelta(hours=12)) == 3
    assert await create_session_by_code(database, "unknown") is None


async def test_signing_out_needs_the_csrf_token_and_ends_the_session(browser: httpx.AsyncClient) -> None:
    csrf = await signed_in(browser)
    cookies = dict(browser.cookies)
    for sent in (None, b"", b"0" * 64, b"\xc3\xa9"):
        wrong = [] if sent is None else [(b"X-CSRF-Token", sent)]
        answer = await browser.delete("/ui/session", headers=wrong)
        assert (answer.status_code, answer.json()["code"]) == (403, "invalid_csrf_token"), sent
    assert (await browser.get("/ui/session")).json()["csrf_token"] == csrf["X-CSRF-Token"]
    assert (await browser.delete("/ui/session", headers=csrf)).status_code == 204
    assert not browser.cookies
    browser.cookies.update(cookies)
    assert (await browser.get("/ui/session")).status_code == 401


async def test_cross_site_post_is_refused(browser: httpx.AsyncClient) -> None:
    csrf = await signed_in(browser)
    for headers in (
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        for method, body in (("POST", {"token": ADMIN_TOKEN}), ("DELETE", None)):
            answer = await browser.request(method, "/ui/session", json=body, headers=csrf | headers)
            assert (answer.status_code, answer.json()["code"]) == (403, "cross_origin")
    form = await browser.post("/ui/session", data={"token": ADMIN_TOKEN})
    assert form.status_code == 415


async def test_failed_sign_ins_of_an_address_are_limited_and_valid_ones_are_not(
    browser: httpx.AsyncClient, database: Connection
) -> None:
    for _ in range(FAILURES_PER_MINUTE):
        assert (await browser.post("/ui/session", json={"token": "il_wrong"})).status_code == 401
    for wrong in ({"token": "il_wrong"}, {"code": "wrong"}):
        limited = await browser.post("/ui/session", json=wrong)
        assert (limited.status_code, limited.json()["code"]) == (429, "too_many_requests")
        assert int(limited.headers["retry-after"]) > 1
    for valid in ({"token": ADMIN_TOKEN}, {"code": await create_sign_in_code(database, "test")}):
        assert (await browser.post("/ui/session", json=valid)).status_code == 201
    assert (await browser.get("/api/tasks", headers=ADMIN_HEADERS)).status_code == 200


async def test_failed_sign_ins_behind_a_proxy_count_for_the_address_that_it_names(url: str) -> None:
    async with api_at(url, sends_token=False, supervisor_proxies=("127.0.0.1",)) as browser:
        statuses = [
            (await browser.post("/ui/session", json={"code": "wrong"}, headers={"X-Forwarded-For": client})).status_code
            for client in [*["192.0.2.7"] * (FAILURES_PER_MINUTE + 1), "192.0.2.8"]
        ]
    assert statuses == [*[401] * FAILURES_PER_MINUTE, 429, 401]


@pytest.mark.parametrize("body", [{}, {"code": "a", "token": "b"}, {"code": ""}, {"code": "a", "more": 1}])
async def test_a_sign_in_has_either_a_code_or_a_token(browser: httpx.AsyncClient, body: dict[str, object]) -> None:
    answer = await browser.post("/ui/session", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


async def test_a_session_has_the_scope_and_the_namespaces_of_its_token(
    browser: httpx.AsyncClient, database: Connection
) -> None:
    secret = (await add_token(database, "read", "reader", "mail", "billing"))["Authorization"].removeprefix("Bearer ")
    said = (await browser.post("/ui/session", json={"token": secret})).json()
    assert (said["actor"], said["scope"], said["namespaces"]) == ("token:reader", "read", ["billing", "mail"])


async def test_without_tokens_everybody_is_signed_in_and_csrf_is_still_needed(url: str) -> None:
    async with api_at(url, sends_token=False, supervisor_no_token=True) as browser:
        said = (await browser.get("/ui/session")).json()
        assert (said["actor"], said["scope"]) == ("api", "admin")
        assert (await browser.delete("/ui/session")).status_code == 403
        csrf = {"X-CSRF-Token": said["csrf_token"]}
        assert (await browser.delete("/ui/session", headers=csrf)).status_code == 204


async def test_the_sign_in_page_is_self_contained_under_a_strict_policy(browser: httpx.AsyncClient) -> None:
    page = await browser.get("/ui/enter")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["referrer-policy"] == "no-referrer"
    for name in ("enter.js", "enter.css"):
        assert f'"{name}"' in page.text
        assert (await browser.get(f"/ui/{name}")).status_code == 200
    assert "http://" not in page.text
    assert "<script>" not in page.text
