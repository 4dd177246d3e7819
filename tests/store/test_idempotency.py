"""Requests that are sent again: one effect and one answer for each key, whatever happens in between."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest

from api_support import api_at, supervisor_at
from interlock.postgres.connection import connect
from interlock.store.access import (
    IdempotentRequest,
    claim_idempotency_key,
    delete_expired_idempotency_keys,
    store_idempotent_response,
)
from interlock.store.workers import RegisteredProcess, register_worker
from interlock.telemetry import metrics_registry
from processes import eventually

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

HOUR = timedelta(hours=1)


def counted(outcome: str) -> float:
    return metrics_registry.get_sample_value("idempotency_requests_total", {"outcome": outcome}) or 0.0


async def moves(client: httpx.AsyncClient, worker: str) -> list[str]:
    found = (await client.get(f"/api/workers/{worker}/history")).json()["items"]
    return [move["to_state"] for move in found]


async def running(client: httpx.AsyncClient) -> str:
    worker = str((await client.post("/api/workers", json={})).json()["id"])
    await client.post(f"/api/workers/{worker}/start")
    return worker


async def rows(database: Connection, statement: str) -> list[dict[str, Any]]:
    return await (await database.execute(statement.encode())).fetchall()


async def test_a_hundred_concurrent_requests_have_one_effect(url: str, database: Connection) -> None:
    hits, misses = counted("hit"), counted("miss")
    body = {"workspace_id": "ws", "request_id": "one"}
    async with api_at(url) as here, api_at(url) as there:
        for client in (here, there):  # a known token does not wait for its first check, which has a time limit
            await client.get("/api/workers")
        calls = [client.post("/api/workers", json=body) for client in (here, there) for _ in range(50)]
        answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    assert len(await rows(database, "select id from interlock.workers")) == 1
    assert (counted("hit") - hits, counted("miss") - misses) == (99, 1)
    ratio = metrics_registry.get_sample_value("idempotency_hit_ratio")
    assert ratio is not None
    assert 0 < ratio < 1


async def test_every_call_that_changes_something_takes_a_key(client: httpx.AsyncClient) -> None:
    worker = await running(client)
    task = (await client.post("/api/tasks", json={"type": "x", "delay": 60})).json()["id"]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/api/workers", {}),
        (f"/api/supervisor/workers/{worker}/pause", {}),
        (f"/api/supervisor/workers/{worker}/resume", {}),
        (f"/api/supervisor/workers/{worker}/terminate", {}),
        (f"/api/tasks/{task}/cancel", {}),
        (f"/api/tasks/{task}/requeue", {}),
        ("/api/tasks", {"type": "y"}),
        ("/api/jobs", {"workflow": "unknown"}),
        ("/api/namespaces/default/pause", {}),
        ("/api/namespaces/default/resume", {}),
    ]
    for number, (path, body) in enumerate(calls):
        key = {"Idempotency-Key": f"key {number}"}
        first = await client.post(path, json=body, headers=key)
        second = await client.post(path, json=body, headers=key)
        assert first.status_code < 500
        assert (first.content, first.status_code) == (second.content, second.status_code), path
        assert first.headers["content-type"] == second.headers["content-type"]
        assert second.headers["idempotency-replayed"] == "true", path


async def test_the_key_may_stand_in_the_body_or_in_the_header_and_must_be_one(client: httpx.AsyncClient) -> None:
    first = await client.post("/api/workers", json={"request_id": "k"})
    second = await client.post("/api/workers", json={}, headers={"Idempotency-Key": "k"})
    both = await client.post("/api/workers", json={"request_id": "k"}, headers={"Idempotency-Key": "k"})
    assert first.content == second.content == both.content
    two = await client.post("/api/workers", json={"request_id": "k"}, headers={"Idempotency-Key": "other"})
    assert two.status_code == 422
    assert two.json()["errors"][0]["field"] == "request_id"


async def test_a_key_with_another_body_or_path_is_refused(client: httpx.AsyncClient) -> None:
    conflicts = counted("conflict")
    worker = await running(client)
    path = f"/api/supervisor/workers/{worker}/pause"
    assert (await client.post(path, json={"request_id": "k", "reason": "a"})).status_code == 200
    for place, body in ((path, {"reason": "b"}), (path, {}), (path.replace("pause", "resume"), {"reason": "a"})):
        answer = await client.post(place, json={"request_id": "k", **body})
        assert (answer.status_code, answer.json()["code"]) == (422, "key_reused")
    assert await moves(client, worker) == ["IDLE", "RUNNING", "PAUSED"]
    assert counted("conflict") - conflicts == 3


async def test_a_refusal_is_an_answer_too(client: httpx.AsyncClient) -> None:
    worker = str((await client.post("/api/workers", json={})).json()["id"])
    path, body = f"/api/supervisor/workers/{worker}/pause", {"request_id": "k"}
    first = await client.post(path, json=body)
    assert first.status_code == 409
    await client.post(f"/api/workers/{worker}/start")
    second = await client.post(path, json=body)
    assert (second.status_code, second.content) == (409, first.content), "as it was answered, not as it would be now"
    assert await moves(client, worker) == ["IDLE", "RUNNING"]


async def test_a_body_that_was_never_understood_uses_up_no_key(client: httpx.AsyncClient) -> None:
    assert (await client.post("/api/workers", json={"request_id": "k", "concurrency": 0})).status_code == 422
    assert (await client.post("/api/workers", json={"request_id": "k", "concurrency": 1})).status_code == 201


async def test_an_expired_key_is_as_good_as_new_and_is_removed(client: httpx.AsyncClient, database: Connection) -> None:
    first = await client.post("/api/workers", json={"request_id": "k"})
    await client.post("/api/workers", json={"request_id": "kept"})
    expire = "update interlock.idempotency_keys set expires_at = now() - interval '1 s' where request_id = 'k'"
    await database.execute(expire.encode())
    second = await client.post("/api/workers", json={"request_id": "k"})
    assert second.status_code == 201
    assert second.json()["id"] != first.json()["id"]
    await database.execute(expire.encode())
    assert await delete_expired_idempotency_keys(database) == 1
    left = await rows(database, "select request_id from interlock.idempotency_keys")
    assert [row["request_id"] for row in left] == ["kept"]


@pytest.mark.store
async def test_a_key_is_free_after_a_rollback(url: str, database: Connection) -> None:
    request = IdempotentRequest("ada", "k", "POST /x", "digest")
    async with connect(url) as first, connect(url) as second:
        async with first.transaction(force_rollback=True):
            assert await claim_idempotency_key(first, request, lifetime=HOUR) is None
            waiting = asyncio.create_task(claim_idempotency_key(second, request, lifetime=HOUR))
            await asyncio.to_thread(eventually, lambda: is_waited_for(url))
            assert not waiting.done()
            await store_idempotent_response(first, request, 200, "{}")
        assert await waiting is None, "nothing was answered, so the next one takes it"
    assert len(await rows(database, "select 1 from interlock.idempotency_keys")) == 1


def is_waited_for(url: str) -> bool:
    with psycopg.connect(url, autocommit=True) as connection:
        waits = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        return bool(connection.execute(waits).fetchall())


@pytest.mark.chaos
async def test_only_answered_requests_are_recorded(url: str, database: Connection) -> None:
    """kill -9 in the middle of the transaction; then the same request to a new process, and to a third one."""
    worker = "w_elsewhere"
    await register_worker(database, RegisteredProcess(worker), lease=HOUR)
    path, body = f"/api/supervisor/workers/{worker}/pause", {"request_id": "k", "reason": "once"}
    with supervisor_at(url) as (process, address, said):
        async with httpx.AsyncClient(base_url=address, headers=said.headers) as client:
            with psycopg.connect(url) as holder:
                holder.execute("select 1 from interlock.workers where id = %s for update", [worker])
                half = asyncio.create_task(client.post(path, json=body))
                await asyncio.to_thread(eventually, lambda: is_waited_for(url))
                process.kill()  # it has taken the key, and waits for the row
                with pytest.raises(httpx.HTTPError):
                    await half
    answers = []
    for _ in range(2):
        with supervisor_at(url) as (_, address, said):
            async with httpx.AsyncClient(base_url=address, headers=said.headers) as client:
                answers.append(await client.post(path, json=body))
                assert await moves(client, worker) == ["IDLE", "RUNNING", "PAUSED"]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content == answers[1].content
    assert [answer.headers.get("idempotency-replayed") for answer in answers] == [None, "true"]
