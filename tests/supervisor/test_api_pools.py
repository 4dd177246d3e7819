"""REST endpoints of pools, transitions by state, forced terminations, and counts that outlive a supervisor."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from api_support import api_at
from interlock import StateTransitionRequest, StateTransitionResult
from interlock.store.access import TokenScope, create_token
from interlock.store.pools import even_out_pools, hold_bound_pool
from interlock.store.stats import RefusedMove, read_refused_moves
from interlock.store.workers import RegisteredProcess, register_worker

if TYPE_CHECKING:
    import httpx

    from cli_support import Shell
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


async def test_a_pool_is_created_scaled_listed_and_deleted(client: httpx.AsyncClient, database: Connection) -> None:
    body = {"name": "mail", "desired": 2, "namespaces": ["mail"], "concurrency": 4, "labels": {"team": "a"}}
    made = await client.post("/api/pools", json=body)
    assert made.status_code == 201, made.text
    assert made.json()["spec"] == {"namespaces": ["mail"], "concurrency": 4}
    assert (await client.post("/api/pools", json=body)).json()["code"] == "not_possible"
    await even_out_pools(database, "one")
    shown = (await client.get("/api/pools/mail")).json()
    assert (shown["desired"], shown["members"], shown["live"]) == (2, 2, 0)
    workers = (await client.get("/api/workers?pool=mail")).json()["items"]
    assert [(row["pool"], row["status"], row["suspected_tasks"]) for row in workers] == [("mail", "RUNNING", [])] * 2
    scaled = await client.post("/api/pools/mail/scale", json={"desired": 5, "request_id": "r1"})
    again = await client.post("/api/pools/mail/scale", json={"desired": 5, "request_id": "r1"})
    assert scaled.json()["desired"] == 5
    for desired in (True, "3", 2.0):
        refused = await client.post("/api/pools/mail/scale", json={"desired": desired})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request"), desired
    assert scaled.content == again.content
    await client.post("/api/pools", json={"name": "a", "desired": 0})
    first = (await client.get("/api/pools?limit=1")).json()
    second = (await client.get("/api/pools", params={"limit": 1, "cursor": first["next"]})).json()
    assert [page["items"][0]["name"] for page in (first, second)] == ["a", "mail"]
    assert second["next"] is None
    key = {"Idempotency-Key": "k"}
    gone = await client.delete("/api/pools/mail", headers=key)
    assert (gone.status_code, gone.json()["name"]) == (200, "mail")
    assert (await client.delete("/api/pools/mail", headers=key)).content == gone.content
    assert (await client.get("/api/pools/mail")).json()["code"] == "unknown_pool"
    ended = (await client.get("/api/workers?pool=mail&status=COMPLETED")).json()["items"]
    assert len(ended) == 2


async def test_the_pool_of_a_running_supervisor_is_scaled_and_not_deleted(
    client: httpx.AsyncClient, database: Connection
) -> None:
    assert await hold_bound_pool(database, "up", 2, supervisor="one", lease=timedelta(minutes=1))
    refused = await client.delete("/api/pools/up")
    assert (refused.status_code, refused.json()["code"]) == (409, "not_possible")
    assert (await client.post("/api/pools/up/scale", json={"desired": 0})).json()["desired"] == 0


@pytest.mark.parametrize(
    "body", [{"name": "a/b", "desired": 1}, {"name": "a", "desired": -1}, {"name": "a", "desired": 1001}, {"name": "a"}]
)
async def test_a_pool_that_cannot_be_addressed_or_counted_is_refused(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    assert (await client.post("/api/pools", json=body)).status_code == 422


async def test_scaling_needs_operate_and_creating_needs_admin(url: str, database: Connection) -> None:
    _, token = await create_token(database, "ci", TokenScope.OPERATE, actor="ada")
    async with api_at(url) as client:
        await client.post("/api/pools", json={"name": "mail", "desired": 0})
        headers = {"Authorization": f"Bearer {token}"}
        scaled = await client.post("/api/pools/mail/scale", json={"desired": 1}, headers=headers)
        assert (scaled.status_code, scaled.json()["actor"]) == (200, "token:ci")
        for refused in (
            await client.post("/api/pools", json={"name": "b", "desired": 1}, headers=headers),
            await client.delete("/api/pools/mail", headers=headers),
        ):
            assert refused.status_code == 403


async def test_failed_workers_of_no_pool_and_pending_tasks_are_not_ready(
    client: httpx.AsyncClient, database: Connection
) -> None:
    async def code() -> str | None:
        found: str | None = (await client.get("/readyz")).json().get("code")
        return found

    worker = (await client.post("/api/workers", json={})).json()["id"]
    await client.post(f"/api/workers/{worker}/start")
    task = (await client.post("/api/tasks", json={"type": "x"})).json()["id"]
    assert await code() is None, "no worker has failed"
    await client.post(f"/api/supervisor/workers/{worker}/transition", json={"worker_id": worker, "to_state": "FAILED"})
    assert await code() == "no_live_worker"
    await register_worker(database, RegisteredProcess("by hand"))
    assert await code() is None, "another worker is live"
    await client.post("/api/supervisor/workers/by hand/terminate")
    assert await code() == "no_live_worker"
    await client.post(f"/api/tasks/{task}/cancel")
    assert await code() is None, "nothing waits for a worker"
    await client.post("/api/tasks", json={"type": "x"})
    assert await code() == "no_live_worker"
    await client.post(f"/api/supervisor/workers/{worker}/terminate")
    assert await code() is None, "the operator has dealt with it"


# --- transitions by state


def test_the_models_have_the_fields_of_the_requirements() -> None:
    assert set(StateTransitionRequest.model_fields) == {"worker_id", "to_state", "reason", "request_id"}
    result = {"worker_id", "from_state", "to_state", "timestamp", "success", "error"}
    assert set(StateTransitionResult.model_fields) == result


async def test_a_transition_request_moves_a_worker_and_an_illegal_one_is_409(client: httpx.AsyncClient) -> None:
    worker = (await client.post("/api/workers", json={})).json()["id"]
    path = f"/api/supervisor/workers/{worker}/transition"

    async def move(state: str, **more: Any) -> httpx.Response:
        body = {"worker_id": worker, "to_state": state, **more}
        return await client.post(path, json=StateTransitionRequest(**body).model_dump(mode="json"))

    started = await move("RUNNING", reason="go", request_id="t1")
    result = StateTransitionResult.model_validate(started.json())
    assert (started.status_code, result.from_state, result.to_state, result.success) == (200, "IDLE", "RUNNING", True)
    assert (await move("RUNNING", reason="go", request_id="t1")).content == started.content
    assert (await move("COMPLETED")).status_code == 200
    for target in ("RUNNING", "IDLE", "COMPLETED"):
        refused = await move(target)
        assert (refused.status_code, refused.json()["code"]) == (409, "illegal_transition")
        said = StateTransitionResult.model_validate(refused.json())
        assert (said.from_state, said.to_state, said.success) == ("COMPLETED", target, False)
        assert said.error == refused.json()["detail"]
    other = await client.post(path, json={"worker_id": "w_other", "to_state": "RUNNING"})
    assert other.status_code == 422
    unknown = await client.post(
        "/api/supervisor/workers/nobody/transition", json={"worker_id": "nobody", "to_state": "RUNNING"}
    )
    assert unknown.json()["code"] == "unknown_worker"


async def test_force_needs_a_supervised_worker(client: httpx.AsyncClient, database: Connection) -> None:
    await register_worker(database, RegisteredProcess("by hand"))
    answer = await client.post("/api/supervisor/workers/by hand/terminate", json={"force": True})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
    assert "not started by a supervisor" in answer.json()["detail"]
    worker = (await client.post("/api/workers", json={})).json()["id"]
    path = f"/api/supervisor/workers/{worker}/terminate"
    assert (await client.post(path, json={"force": True})).json()["status"] == "TERMINATED"
    assert (await client.post(path, json={"force": True})).status_code == 409, "no process is left to kill"


# --- counts in the database


async def test_workers_of_pools_are_metrics(url: str, database: Connection) -> None:
    async with api_at(url) as client:
        await client.post("/api/pools", json={"name": "mail", "desired": 3})
        await even_out_pools(database, "s1")
        await database.execute(
            "update interlock.workers set restart_at = now() + interval '1 hour' "
            "where id = (select id from interlock.workers limit 1)"
        )
        shown = (await client.get("/api/pools/mail")).json()
        assert (shown["live"], shown["starting"], shown["backing_off"]) == (0, 2, 1)
        lines = (await client.get("/metrics")).text.splitlines()
        for name, number in (("desired", 3), ("live", 0), ("starting", 2), ("backing_off", 1)):
            assert f'pool_workers_{name}{{pool="mail"}} {number}.0' in lines
        await client.delete("/api/pools/mail")
        assert 'pool="mail"' not in (await client.get("/metrics")).text


async def test_refusals_of_all_clients_are_counted_and_survive_a_restart(url: str, database: Connection) -> None:
    with psycopg.connect(url, autocommit=True) as raw:
        raw.execute("insert into interlock.workers (id) values ('w')")
        for _ in range(2):
            with pytest.raises(psycopg.Error), raw.transaction():
                raw.execute("update interlock.workers set status = 'PAUSED' where id = 'w'")
        raw.execute("insert into interlock.tasks (type) values ('x')")
        with pytest.raises(psycopg.Error):
            raw.execute("update interlock.tasks set state = 'done'")
    async with api_at(url) as client:
        assert (await client.post("/api/supervisor/workers/w/pause")).status_code == 409
        await client.post("/api/workers/w/start")
    async with api_at(url) as client:  # another supervisor
        text = (await client.get("/metrics")).text
    assert 'failed_transitions_total{from_state="IDLE",machine="supervised worker",to_state="PAUSED"} 3.0' in text
    assert 'supervised_worker_transitions_total{from_state="IDLE",to_state="RUNNING"} 1.0' in text
    assert RefusedMove("task", "pending", "done", 1) in await read_refused_moves(database)


async def test_counted_transitions_stay_when_their_records_are_dropped(url: str, database: Connection) -> None:
    async with api_at(url) as client:
        worker = (await client.post("/api/workers", json={})).json()["id"]
        await client.post(f"/api/workers/{worker}/start")
        counted = 'supervised_worker_transitions_total{from_state="IDLE",to_state="RUNNING"} 1.0'
        assert counted in (await client.get("/metrics")).text
        await database.execute("select interlock.drop_records_before('2200-01-01')")
        assert counted in (await client.get("/metrics")).text


async def test_a_role_without_rights_on_the_counters_is_refused_and_counted(url: str, database: Connection) -> None:
    await database.execute("drop role if exists plain_client")
    await database.execute("create role plain_client")
    try:
        await database.execute("grant usage on schema interlock to plain_client")
        await database.execute("grant select, insert, update on interlock.tasks to plain_client")
        with psycopg.connect(url, autocommit=True) as raw:
            raw.execute("set role plain_client")
            raw.execute("insert into interlock.tasks (type) values ('x')")
            with pytest.raises(psycopg.Error, match="cannot move from 'pending' to 'done'"):
                raw.execute("update interlock.tasks set state = 'done'")
        assert RefusedMove("task", "pending", "done", 1) in await read_refused_moves(database)
    finally:
        await database.execute("drop owned by plain_client")
        await database.execute("drop role plain_client")


# --- the command line


def test_pools_on_the_command_line(shell: Shell) -> None:
    shell.answer("workers", "add-pool", "mail", "3", "--namespaces", "mail,post", "--concurrency", "4")
    assert "mail" in shell.answer("workers", "pools")
    shell.answer("workers", "scale", "mail", "0")
    assert shell.rows("select desired, spec from interlock.pools") == [
        (0, {"namespaces": ["mail", "post"], "concurrency": 4})
    ]
    shell.answer("workers", "delete-pool", "mail")
    assert shell.rows("select * from interlock.pools") == []
