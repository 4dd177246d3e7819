"""Access to the API: tokens, scopes, and addresses that require a token."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from api_support import add_token, api_at
from cli_support import Shell
from interlock.errors import InputError
from interlock.store.access import TokenScope, authenticate_token, create_token, list_tokens, revoke_token
from jobs_support import app_at

if TYPE_CHECKING:
    import httpx

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


@pytest.mark.store
async def test_a_token_is_stored_as_a_hash_and_recognised_until_it_is_revoked_or_expires(database: Connection) -> None:
    made, secret = await create_token(database, "ci", TokenScope.OPERATE, actor="ada")
    assert secret.startswith("il_")
    assert len(secret) >= 46, "256 bits of chance"
    dumped = await (await database.execute(b"select * from interlock.tokens")).fetchall()
    assert secret not in repr(dumped)
    known = await authenticate_token(database, secret)
    assert known is not None
    assert (known.name, known.scope) == ("ci", TokenScope.OPERATE)
    assert (await list_tokens(database))[0].last_used_at is not None
    assert await authenticate_token(database, secret + "x") is None
    assert await authenticate_token(database, "\ud800") is None
    with pytest.raises(InputError, match="a token 'ci' exists already"):
        await create_token(database, "ci", TokenScope.READ, actor="ada")
    with pytest.raises(InputError, match="printable"):
        await create_token(database, "a\nb", TokenScope.READ, actor="ada")
    assert await revoke_token(database, "ci", actor="ada")
    assert not await revoke_token(database, "ci", actor="ada")
    assert await authenticate_token(database, secret) is None
    assert await list_tokens(database) == []
    assert [(old.name, old.revoked_by) for old in await list_tokens(database, revoked=True)] == [(made.name, "ada")]
    _, short = await create_token(database, "ci", TokenScope.READ, actor="ada", lifetime=timedelta(minutes=1))
    assert await authenticate_token(database, short) is not None
    later = datetime.now(UTC) + timedelta(minutes=2)
    assert await authenticate_token(database, short, now=later) is None


@pytest.mark.store
async def test_the_database_takes_no_token_that_is_not_hashed_or_has_another_scope(database: Connection) -> None:
    insert = "insert into interlock.tokens (name, scope, token_hash, created_by) values ('x', %s, %s, 'me')"
    for scope, stored in (("root", b"x" * 32), ("read", b"il_plain")):
        with pytest.raises(psycopg.errors.CheckViolation):
            await database.execute(insert.encode(), [scope, stored])


async def test_each_scope_allows_what_it_says_and_no_more(url: str, database: Connection) -> None:
    async with api_at(url, sends_token=False) as client:
        wanted = {
            "read": [200, 403, 403, 403],
            "operate": [200, 201, 403, 403],
            "admin": [200, 201, 201, 404],
        }
        for scope, statuses in wanted.items():
            header = await add_token(database, scope)
            answers = [
                await client.get("/api/tasks", headers=header),
                await client.post("/api/tasks", json={"type": "x"}, headers=header),
                await client.post("/api/workers", json={}, headers=header),
                await client.post("/api/supervisor/workers/w_none/terminate", headers=header),
            ]
            assert [answer.status_code for answer in answers] == statuses, scope
        denied = await client.post("/api/workers", json={}, headers=await add_token(database, "read", "reader"))
        assert (denied.json()["code"], denied.json()["required"]) == ("insufficient_scope", "admin")
        assert 'error="insufficient_scope"' in denied.headers["www-authenticate"]


async def test_without_a_valid_token_only_401_is_returned(url: str, database: Connection) -> None:
    async with api_at(url, sends_token=False) as client:
        for path in ("/api/workers", "/api/tasks", "/api/jobs", "/api/status", "/api/namespaces", "/metrics"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["code"]) == (401, "missing_token"), path
            assert answer.headers["www-authenticate"].startswith("Bearer")
        for sent in ("Bearer il_wrong", "Basic YTpi", "Bearer"):
            answer = await client.get("/api/workers", headers={"Authorization": sent})
            assert (answer.status_code, answer.json()["code"]) == (401, "unknown_token"), sent
        assert (await client.post("/api/workers", json={})).status_code == 401
        for path in ("/healthz", "/readyz"):
            assert (await client.get(path)).status_code == 200
    assert await (await database.execute(b"select 1 from interlock.workers")).fetchall() == []


async def test_with_no_token_on_loopback_none_is_needed_but_one_that_is_sent_is_checked(
    url: str, database: Connection
) -> None:
    async with api_at(url, sends_token=False, supervisor_no_token=True) as client:
        assert (await client.post("/api/workers", json={})).status_code == 201
        wrong = await client.get("/api/workers", headers={"Authorization": "Bearer il_wrong"})
        assert wrong.status_code == 401
        weak = await client.post("/api/workers", json={}, headers=await add_token(database, "read"))
        assert weak.status_code == 403


async def test_every_record_of_a_move_has_the_name_of_the_token(url: str, database: Connection) -> None:
    async with api_at(url) as client:
        client.headers.update(await add_token(database, "admin", "alice"))
        worker = (await client.post("/api/workers", json={})).json()["id"]
        await client.post(f"/api/workers/{worker}/start")
        task = (await client.post("/api/tasks", json={"type": "x"})).json()["id"]
        await client.post(f"/api/tasks/{task}/cancel")
        assert await actors(client, f"/api/workers/{worker}/history") == {"token:alice"}
        assert await actors(client, f"/api/tasks/{task}/history") == {"token:alice"}


async def test_two_callers_with_one_key_neither_collide_nor_see_the_answer_of_the_other(
    url: str, database: Connection
) -> None:
    one, other = await add_token(database, "operate", "one"), await add_token(database, "operate", "other")
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/api/tasks", {"type": "x", "input": {"secret": 1}}),
        ("/api/jobs", {"workflow": "gates"}),
    ]
    async with api_at(url, app=app_at(url)) as client:
        for path, body in calls:
            keyed = {**body, "request_id": path}
            first = await client.post(path, json=keyed, headers=one)
            again = await client.post(path, json=keyed, headers=one)
            theirs = await client.post(path, json=keyed, headers=other)
            assert (first.status_code, theirs.status_code) == (201, 201), theirs.text
            assert again.content == first.content
            assert theirs.json()["id"] != first.json()["id"]
            assert (theirs.json()["created"], theirs.headers.get("idempotency-replayed")) == (True, None)
            different = await client.post(path, json={**keyed, "tags": ["a"]}, headers=other)
            assert (different.status_code, different.json()["code"]) == (422, "key_reused")
    # the engine keeps its keys for longer than the stored answers, and apart by actor as well
    await database.execute(b"delete from interlock.idempotency_keys")
    async with api_at(url, app=app_at(url)) as client:
        for path, body in calls:
            kept = await client.post(path, json={**body, "request_id": path}, headers=one)
            new = await client.post(
                path, json={**body, "request_id": path}, headers=await add_token(database, "operate", path)
            )
            assert (kept.status_code, kept.json()["created"]) == (200, False)
            assert (new.status_code, new.json()["created"]) == (201, True)


async def actors(client: httpx.AsyncClient, path: str) -> set[str]:
    return {move["actor"] for move in (await client.get(path)).json()["items"]}


def test_tokens_are_made_listed_and_revoked_on_the_command_line(url: str) -> None:
    shell = Shell(url)
    secret = shell.answer("token", "create", "ci", "--scope", "operate", "--days", "30")
    assert secret.startswith("il_")
    assert shell.run("token", "revoke", "ci").returncode == 0
    told = shell.answer("token", "list", "--all", "--json")
    (listed,) = json.loads(told)
    assert (listed["name"], listed["scope"], listed["revoked_by"][:4]) == ("ci", "operate", "cli:")
    assert secret not in told


def test_a_public_address_without_tokens_is_not_served(url: str) -> None:
    shell = Shell(url)
    refused = shell.run("supervisor", "--host", "0.0.0.0", "--port", "0")  # noqa: S104 - it is what is refused
    assert refused.returncode == 2
    assert "other hosts can reach 0.0.0.0, and there is no token" in refused.stderr
    assert "Traceback" not in refused.stderr
    for command in ("supervisor", "up"):
        open_ = shell.run(command, "--host", "0.0.0.0", "--port", "0", "--no-token")  # noqa: S104 - it is what is refused
        assert open_.returncode == 2
        assert "--no-token is for loopback addresses" in open_.stderr
