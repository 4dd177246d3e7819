"""Pages as the server answers: size, policy, escaping, sign-in, and acts that only a session can do."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from dashboard_support import dashboard_at, sign_in
from factories import enqueue, task_row
from interlock.dashboard.pages import NAVIGATION
from interlock.dashboard.render import CONTENT_SECURITY_POLICY, STATIC_FILES, environment, static_url
from interlock.lifecycle import MACHINES
from interlock.store.figures import Figure, add_figures
from interlock.store.limits import Limit, put_limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store
MAX_FIRST_PAGE = 60 * 1024
MAX_SCRIPT = 12 * 1024
HOSTILE = "<script>alert(1)<script>\"'&"
KEY = {"Idempotency-Key": "one"}


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with dashboard_at(url) as (client, _):
        yield client


async def test_first_page_is_below_60_kb(client: httpx.AsyncClient, database: Connection) -> None:
    await sign_in(client, database)
    await enqueue(database)
    page = await client.get("/")
    assert page.status_code == 200
    size = len(page.content)
    for name in (name for name in STATIC_FILES if static_url(name) in page.text):
        file = await client.get(static_url(name))
        assert "immutable" in file.headers["cache-control"]
        size += len(file.content)
    assert size < MAX_FIRST_PAGE
    assert len((await client.get(static_url("dash.js"))).content) <= MAX_SCRIPT


async def test_every_page_keeps_the_content_security_policy(client: httpx.AsyncClient, database: Connection) -> None:
    await sign_in(client, database)
    for path in ("/", "/machines", *(f"/machines/{name}" for name in MACHINES), "/machines/none"):
        page = await client.get(path, follow_redirects=True)
        assert page.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert page.headers["content-type"].startswith("text/html")
        assert not re.search(r"<[^>]+\s(style|on\w+)=", page.text), f"{path} has an inline style or handler"
        assert not re.search(r"<script(?![^>]*\ssrc=)", page.text)
        assert not re.search(r'(?:src|href)="(?:https?:)?//', page.text), f"{path} leaves the origin"
        assert len(re.findall(r"<h1[ >]", page.text)) == 1
        assert page.status_code == (404 if path == "/machines/none" else 200)


@pytest.mark.unit
def test_no_template_switches_escaping_off() -> None:
    for name in environment().list_templates():
        text = files("interlock.dashboard").joinpath("templates", name).read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe|autoescape\s+false|Markup\(", text), name


@pytest.mark.unit
def test_every_page_has_its_own_shortcut() -> None:
    items = [item for _, group in NAVIGATION for item in group]
    assert len({item.shortcut for item in items}) == len({item.key for item in items}) == len(items)


async def test_links_of_what_needs_attention_quote_names(client: httpx.AsyncClient, database: Connection) -> None:
    odd = "a&state=done#<b>"
    await sign_in(client, database)
    await enqueue(database, namespace=odd)
    attempt: dict[str, Any] = {"machine": "task", "total": 5, "namespace": odd, "type": odd, "from_state": "running"}
    await add_figures(database, [Figure("move", **attempt, event="retry", to_state="pending")])
    await put_limits(database, [Limit(odd, max_starts=1, period=timedelta(minutes=1))])
    await enqueue(database, namespace=odd, limit_keys=(odd,))
    page = (await client.get("/")).text
    links = {html.unescape(link) for link in re.findall(r'<a class="btn" href="([^"]*)">See', page)}
    name = quote(odd, safe="")
    assert links == {
        f"/tasks?state=pending&ns={name}",
        f"/tasks?state=error&type={name}&ns={name}",
        f"/limits/{name}",
    }
    assert "0 of 1 starts per 1 min" in page
    assert "0 of 1 starts per 1 min" in page


async def test_hostile_names_are_text(client: httpx.AsyncClient, database: Connection) -> None:
    await sign_in(client, database)
    await enqueue(database, HOSTILE, namespace=HOSTILE)
    for path in ("/", "/machines/task"):
        page = await client.get(path, params={"ns": HOSTILE})
        assert page.status_code == 200
        assert "<script>alert" not in page.text
        assert "&lt;script&gt;alert(1)" in page.text


async def test_without_a_session_pages_lead_to_sign_in(client: httpx.AsyncClient) -> None:
    answer = await client.get("/machines/job?rates=1h")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/ui/enter?next=%2Fmachines%2Fjob%3Frates%3D1h"
    assert (await client.get("/ui/events?t=nav")).status_code == 401


async def test_a_token_for_one_namespace_sees_no_other(client: httpx.AsyncClient, database: Connection) -> None:
    await enqueue(database, namespace="mine")
    for _ in range(4):
        await enqueue(database, namespace="theirs")
    await sign_in(client, database, "read", "mine")
    page = await client.get("/")
    assert page.status_code == 200
    assert "theirs" not in page.text
    assert "pending: 1 tasks" in page.text
    assert (await client.get("/", params={"ns": "theirs"})).status_code == 403


async def test_an_act_needs_session_csrf_scope_and_key(client: httpx.AsyncClient, database: Connection) -> None:
    task = await enqueue(database)
    path = f"/ui/act/api/tasks/{task}/cancel"
    assert (await client.post(path, json={}, headers=KEY)).status_code == 401
    csrf = await sign_in(client, database, "read")
    refused = await client.post(path, json={}, headers={**KEY, **csrf})
    assert (refused.status_code, refused.json()["code"]) == (403, "insufficient_scope")
    csrf = await sign_in(client, database, "operate")
    for headers in (KEY, {**KEY, "X-CSRF-Token": "0" * 64}):
        assert (await client.post(path, json={}, headers=headers)).json()["code"] == "invalid_csrf_token"
    assert (await client.post(path, json={}, headers=csrf)).status_code == 422
    other = {**csrf, **KEY, "Origin": "https://elsewhere.example"}
    assert (await client.post(path, json={}, headers=other)).status_code == 403
    assert (await task_row(database, task))["state"] == "pending"
    done = await client.post(path, json={"reason": "seen"}, headers={**KEY, **csrf})
    assert done.status_code == 200, done.text
    again = await client.post(path, json={"reason": "seen"}, headers={**KEY, **csrf})
    assert again.headers["idempotency-replayed"] == "true"
    row = await task_row(database, task)
    assert (row["state"], row["reason"]) == ("canceled", "seen")
    records = await database.execute("select actor from interlock.audit_logs where event = 'cancel'")
    assert [record["actor"] for record in await records.fetchall()] == ["token:viewer-operate"]


async def test_a_browser_that_is_read_only_cannot_act(client: httpx.AsyncClient, database: Connection) -> None:
    csrf = await sign_in(client, database)
    client.cookies.set("interlock_read_only", "1")
    task = await enqueue(database)
    answer = await client.post(f"/ui/act/api/tasks/{task}/cancel", json={}, headers={**KEY, **csrf})
    assert answer.status_code == 403
    assert (await task_row(database, task))["state"] == "pending"


async def test_reads_are_not_acts(client: httpx.AsyncClient, database: Connection) -> None:
    csrf = await sign_in(client, database)
    assert (await client.get("/ui/act/api/tasks", headers={**KEY, **csrf})).status_code in {404, 405}
