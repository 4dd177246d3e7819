"""REST endpoints of workers: transitions, refused transitions, history, pagination and metrics."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from api_support import ADMIN_ACTOR
from interlock.lifecycle import JOB, SUPERVISED_WORKER, JobState, SupervisedWorkerEvent, SupervisedWorkerState
from interlock.store.workers import move_worker

if TYPE_CHECKING:
    import httpx

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

PATHS = {
    "start": "/api/workers/{}/start",
    **{name: f"/api/supervisor/workers/{{}}/{name}" for name in ("pause", "resume", "terminate")},
}
# what brings a worker into a state, by events of its table
WAYS: dict[str, list[str]] = {
    "IDLE": [],
    "RUNNING": ["start_task"],
    "PAUSED": ["start_task", "pause"],
    "COMPLETED": ["start_task", "complete_tasks"],
    "FAILED": ["start_task", "error_unrecoverable"],
    "TERMINATED": ["terminate"],
}


async def made(client: httpx.AsyncClient, database: Connection | None = None, state: str = "IDLE", **body: Any) -> str:
    """Make a worker, and bring it into a state."""
    answer = await client.post("/api/workers", json=body)
    assert answer.status_code == 201, answer.text
    id_ = str(answer.json()["id"])
    for event in WAYS[state]:
        assert database is not None
        await move_worker(database, id_, SupervisedWorkerEvent(event), actor="test")
    return id_


# --- the integration tests of the requirements


async def test_pause_running_worker(client: httpx.AsyncClient) -> None:
    response = await client.post("/api/workers", json={"workspace_id": "ws_test"})
    worker_id = response.json()["id"]
    assert response.json()["status"] == "IDLE"
    await client.post(f"/api/workers/{worker_id}/start")
    response = await client.post(f"/api/supervisor/workers/{worker_id}/pause", json={"reason": "Test pause"})
    assert response.status_code == 200
    assert response.json()["status"] == "PAUSED"
    assert response.json()["reason"] == "Test pause"


async def test_idempotent_pause(client: httpx.AsyncClient) -> None:
    for worker_id in ("w_test123", await made(client)):
        await client.post(f"/api/workers/{worker_id}/start")
        pause = {"request_id": f"req_abc123_{worker_id}"}
        response1 = await client.post(f"/api/supervisor/workers/{worker_id}/pause", json=pause)
        response2 = await client.post(f"/api/supervisor/workers/{worker_id}/pause", json=pause)
        assert response1.json() == response2.json()
        assert response1.status_code == response2.status_code


# --- the forbidden transitions of the requirements, by name


async def refused(client: httpx.AsyncClient, worker_id: str, act: str, source: str, target: str) -> None:
    """Try a move; it must be refused in the words of the table, and change nothing."""
    before = (await client.get(f"/api/workers/{worker_id}/history")).json()
    answer = await client.post(PATHS[act].format(worker_id))
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    said = answer.json()
    assert (said["code"], said["from"], said["to"]) == ("illegal_transition", source, target)
    state = SupervisedWorkerState(source)
    assert said["allowed"] == [str(to) for to in SUPERVISED_WORKER.allowed_targets(state)]
    assert said["detail"] == SUPERVISED_WORKER.validate_transition(state, SupervisedWorkerState(target))
    assert (await client.get(f"/api/workers/{worker_id}/history")).json() == before


async def test_idle_to_paused_cannot_pause_worker_that_has_not_started(client: httpx.AsyncClient) -> None:
    await refused(client, await made(client), "pause", "IDLE", "PAUSED")


async def test_idle_to_completed_cannot_complete_without_running(
    client: httpx.AsyncClient, database: Connection
) -> None:
    worker = await made(client)
    with pytest.raises(Exception, match=r"Invalid state transition: IDLE → COMPLETED. Allowed transitions from IDLE:"):
        await move_worker(database, worker, SupervisedWorkerEvent.COMPLETE_TASKS, actor="test")


async def test_completed_to_running_cannot_restart_completed_worker(
    client: httpx.AsyncClient, database: Connection
) -> None:
    worker = await made(client, database, "COMPLETED")
    await refused(client, worker, "start", "COMPLETED", "RUNNING")
    await refused(client, worker, "resume", "COMPLETED", "RUNNING")


async def test_completed_to_paused_is_a_terminal_state(client: httpx.AsyncClient, database: Connection) -> None:
    await refused(client, await made(client, database, "COMPLETED"), "pause", "COMPLETED", "PAUSED")


async def test_failed_to_running_create_new_worker_instead(client: httpx.AsyncClient, database: Connection) -> None:
    worker = await made(client, database, "FAILED")
    await refused(client, worker, "start", "FAILED", "RUNNING")
    await refused(client, worker, "resume", "FAILED", "RUNNING")


async def test_terminated_to_anything_no_transitions_allowed(client: httpx.AsyncClient) -> None:
    worker = await made(client)
    assert (await client.post(PATHS["terminate"].format(worker))).json()["status"] == "TERMINATED"
    for act, target in (("start", "RUNNING"), ("pause", "PAUSED"), ("resume", "RUNNING"), ("terminate", "TERMINATED")):
        await refused(client, worker, act, "TERMINATED", target)


async def test_a_worker_is_terminated_from_every_other_state(client: httpx.AsyncClient, database: Connection) -> None:
    for state in WAYS.keys() - {"TERMINATED"}:
        answer = await client.post(PATHS["terminate"].format(await made(client, database, state)))
        assert (answer.status_code, answer.json()["status"]) == (200, "TERMINATED"), state


async def test_a_409_names_the_event_that_leads_to_the_state(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATHS["resume"].format(await made(client)))
    assert answer.status_code == 409
    assert answer.json()["detail"] == "Invalid state transition: IDLE → RUNNING by resume. It takes start_task"


async def job_in(database: Connection, state: str) -> str:
    """Store a job that is in a state, without steps."""
    ways = {
        "SUBMITTED": [],
        "PENDING": ["PENDING"],
        "RUNNING": ["PENDING", "RUNNING"],
        "COMPLETED": ["PENDING", "RUNNING", "COMPLETED"],
        "FAILED": ["FAILED"],
        "CANCELED": ["CANCELED"],
    }
    cursor = await database.execute("insert into interlock.jobs (task_description) values ('test') returning id")
    row = await cursor.fetchone()
    assert row is not None
    for status in ways[state]:
        await database.execute("update interlock.jobs set status = %s where id = %s", [status, row["id"]])
    return str(row["id"])


async def test_submitted_to_running_must_go_through_pending(database: Connection) -> None:
    job = await job_in(database, "SUBMITTED")
    with pytest.raises(psycopg.Error, match="cannot move from 'SUBMITTED' to 'RUNNING'"):
        await database.execute("update interlock.jobs set status = 'RUNNING' where id = %s", [job])


async def refused_job(client: httpx.AsyncClient, database: Connection, state: str) -> None:
    """Try to move a job that has ended, over the API and in the database itself."""
    job = await job_in(database, state)
    answer = await client.post(f"/api/jobs/{job}/cancel")
    assert answer.status_code == 409
    said = answer.json()
    assert (said["from"], said["to"], said["allowed"]) == (state, "CANCELED", [])
    assert said["detail"] == JOB.validate_transition(JobState(state), JobState.CANCELED)
    for target in [to for to in JobState if to != state]:
        with pytest.raises(psycopg.Error, match="cannot move"):
            await database.execute("update interlock.jobs set status = %s where id = %s", [target, job])


async def test_completed_to_anything_is_a_terminal_state_of_a_job(
    client: httpx.AsyncClient, database: Connection
) -> None:
    await refused_job(client, database, "COMPLETED")


async def test_failed_to_running_create_new_job_instead(client: httpx.AsyncClient, database: Connection) -> None:
    await refused_job(client, database, "FAILED")


async def test_canceled_to_running_create_new_job_instead(client: httpx.AsyncClient, database: Connection) -> None:
    await refused_job(client, database, "CANCELED")


# --- workers


async def test_a_worker_keeps_its_spec_and_its_history(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {
        "workspace_id": "ws",
        "namespaces": ["mail", "mail", "x"],
        "concurrency": 4,
        "labels": {"team": "a"},
    }
    worker = await made(client, **body)
    await client.post(PATHS["start"].format(worker), json={"reason": "work is there"})
    found = (await client.get(f"/api/workers/{worker}")).json()
    assert found["spec"] == {"namespaces": ["mail", "x"], "concurrency": 4}
    assert (found["labels"], found["workspace_id"], found["live"]) == ({"team": "a"}, "ws", False)
    moves = (await client.get(f"/api/workers/{worker}/history")).json()["items"]
    assert [(m["from_state"], m["to_state"], m["event"], m["actor"]) for m in moves] == [
        (None, "IDLE", "create", ADMIN_ACTOR),
        ("IDLE", "RUNNING", "start_task", ADMIN_ACTOR),
    ]
    assert moves[1]["reason"] == "work is there"
    assert {move["database_role"] for move in moves} == {"interlock"}
    explained = (await client.get(f"/api/explain/worker/{worker}")).json()
    assert f"start_task by {ADMIN_ACTOR}: work is there" in [fact["text"] for fact in explained["facts"]]


async def test_pages_hold_every_worker_once_while_new_ones_are_created(client: httpx.AsyncClient) -> None:
    ids = [await made(client, workspace_id="a" if n % 2 else "b") for n in range(7)]
    seen: list[str] = []
    cursor: str | None = None
    while True:
        query: dict[str, str | int] = {"limit": 2, **({"cursor": cursor} if cursor else {})}
        page = (await client.get("/api/workers", params=query)).json()
        seen += [worker["id"] for worker in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
        await made(client)  # newer than all that is still to come
    assert seen == list(reversed(ids))
    found = (await client.get("/api/workers", params={"workspace_id": "a", "limit": 200})).json()
    assert [worker["id"] for worker in found["items"]] == [ids[5], ids[3], ids[1]]
    await client.post(PATHS["start"].format(ids[0]))
    running = (await client.get("/api/workers", params={"status": "RUNNING"})).json()["items"]
    assert [worker["id"] for worker in running] == [ids[0]]


async def test_transitions_of_workers_by_any_actor_are_metrics(client: httpx.AsyncClient, database: Connection) -> None:
    worker = await made(client, database, "PAUSED")
    await refused(client, worker, "pause", "PAUSED", "PAUSED")
    text = (await client.get("/metrics")).text
    assert 'supervised_worker_transitions_total{from_state="IDLE",to_state="RUNNING"} 1.0' in text
    assert 'supervised_worker_transitions_total{from_state="RUNNING",to_state="PAUSED"} 1.0' in text
    assert 'supervised_worker_state_duration_seconds_count{state="RUNNING"} 1.0' in text
    assert 'failed_transitions_total{from_state="PAUSED",machine="supervised worker",to_state="PAUSED"}' in text
    assert 'http_requests_total{method="POST",route="/api/workers",status="201"}' in text
    again = (await client.get("/metrics")).text
    assert 'supervised_worker_transitions_total{from_state="IDLE",to_state="RUNNING"} 1.0' in again, "counted once"
    assert worker not in again, "an id is no label"


async def test_concurrent_moves_of_one_worker_are_all_recorded(client: httpx.AsyncClient, database: Connection) -> None:
    worker = await made(client, database, "RUNNING")
    acts = ["pause", "resume"] * 30
    answers = await asyncio.gather(*(client.post(PATHS[act].format(worker)) for act in acts))
    assert {answer.status_code for answer in answers} == {200, 409}
    done = sum(answer.status_code == 200 for answer in answers)
    moves = (await client.get(f"/api/workers/{worker}/history", params={"limit": 200})).json()["items"]
    assert len(moves) == done + 2
    assert all(one["to_state"] == two["from_state"] for one, two in itertools.pairwise(moves))
    assert (await client.get(f"/api/workers/{worker}")).json()["status"] == moves[-1]["to_state"]
