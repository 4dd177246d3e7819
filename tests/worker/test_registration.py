"""A worker's registration, heartbeat and remote commands."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from interlock.lifecycle import WorkerState
from interlock.model.options import NewTask
from interlock.postgres.notifier import WakeMode
from interlock.postgres.query import run
from interlock.store.enqueue import enqueue_task
from interlock.store.limits import pause_namespace
from interlock.store.remote_commands import Enable, EventStatus, Refresh, Status, Subscribe, Unsubscribe, call_processes
from interlock.store.workers import WORKERS, list_live_workers, read_worker_status
from interlock.telemetry import metrics_registry
from processes import eventually
from worker_support import serving, until, worker_process

if TYPE_CHECKING:
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.store.workers import LiveProcess
    from interlock.worker.process import WorkerStateMachine

pytestmark = pytest.mark.flow

ADD = NewTask("add", {"a": 1, "b": 2})


async def seen(database: Connection) -> LiveProcess:
    """Wait until there is one live process, and return it."""
    async with asyncio.timeout(60):
        while not (found := await list_live_workers(database)):
            await asyncio.sleep(0.01)
    return found[0]


async def move(database: Connection, statement: str, worker: WorkerStateMachine) -> None:
    """Change the row of a worker as a supervisor does, and notify the worker."""
    await run(
        database, WORKERS[statement], {"id": worker.worker_id, "reason": "for a test", "actor": "ada", "now": None}
    )
    await run(database, WORKERS["notify_control"], {"payload": worker.worker_id})


async def hearing(worker: WorkerStateMachine) -> None:
    await until(lambda: worker.state is WorkerState.BACKING_OFF and worker.components.is_listening)


async def test_a_worker_is_registered_until_it_stops(url: str, database: Connection) -> None:
    async with serving(url, namespaces=("default", "mail")) as worker:
        found = await seen(database)
        assert (found.id, found.role, found.status) == (worker.worker_id, "worker", "RUNNING")
        assert found.namespaces == ["default", "mail"]
        assert "add" in found.types
        assert found.statistics["orchestration"]["received"] == 0
    assert await list_live_workers(database) == []
    assert await read_worker_status(database, worker.worker_id) == "COMPLETED"


async def test_a_handler_that_blocks_the_loop_does_not_stop_the_heartbeat(url: str, database: Connection) -> None:
    await enqueue_task(database, NewTask("block_the_loop", {"seconds": 3600}), actor="me")

    def heartbeat() -> datetime | None:
        query = (
            "select heartbeat_at from interlock.workers "
            "where exists (select from interlock.tasks where state = 'running' and started_at < heartbeat_at)"
        )
        with psycopg.connect(url) as connection:
            rows = connection.execute(query).fetchall()
        return rows[0][0] if rows else None

    with worker_process(url):
        first = eventually(heartbeat)
        eventually(lambda: heartbeat() != first)


async def test_a_paused_worker_rests_until_it_is_resumed(url: str, database: Connection) -> None:
    async with serving(url, poll_base=0.01, poll_cap=0.02) as worker:
        await hearing(worker)
        await seen(database)
        await move(database, "pause_running_worker", worker)
        await until(lambda: not worker.components.registration.accepts_tasks)
        await enqueue_task(database, ADD, actor="me")
        looks = worker.context.backoff_count
        await until(lambda: worker.context.backoff_count > looks + 5)
        assert worker.context.tasks_processed == 0
        await move(database, "resume_paused_worker", worker)
        await until(lambda: worker.context.tasks_processed == 1)


async def test_a_paused_worker_keeps_what_it_runs(url: str, database: Connection) -> None:
    await enqueue_task(database, NewTask("nap", {"seconds": 3600}), actor="me")
    async with serving(url, grace=0, poll_base=60, poll_cap=60) as worker:
        await until(lambda: worker.context.active and worker.components.is_listening)
        await seen(database)
        await move(database, "pause_running_worker", worker)
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        assert worker.context.active


async def test_a_worker_whose_row_is_ended_shuts_down(url: str, database: Connection) -> None:
    async with serving(url, poll_base=60, poll_cap=60) as worker:
        await hearing(worker)
        await seen(database)
        await move(database, "terminate_worker", worker)
        await until(lambda: not worker.is_running())
    assert await read_worker_status(database, worker.worker_id) == "TERMINATED"


async def test_a_worker_obeys_commands_and_answers(url: str, database: Connection) -> None:
    async with serving(url, poll_base=60, poll_cap=60) as worker:
        await hearing(worker)

        async def tell(command: Any) -> dict[str, Any]:
            return (await call_processes(url, command, worker.worker_id))[worker.worker_id]

        status = await tell(Status())
        assert (status["role"], status["state"], status["enabled"], status["active"]) == (
            "worker",
            "backing_off",
            True,
            0,
        )
        assert await tell(Subscribe("mail")) == {"namespaces": ["default", "mail"]}
        await enqueue_task(database, NewTask("add", {"a": 1, "b": 2}, namespace="mail"), actor="me")
        await until(lambda: worker.context.tasks_processed == 1)
        assert (await tell(EventStatus()))["completed"] == 1
        while (await seen(database)).namespaces != ["default", "mail"]:
            await asyncio.sleep(0.01)
        assert await tell(Unsubscribe("default")) == {"namespaces": ["mail"]}
        assert "needs at least one namespace" in (await tell(Unsubscribe("mail")))["error"]
        assert await tell(Enable(enabled=False)) == {"enabled": False}
        await enqueue_task(database, NewTask("add", {"a": 1, "b": 2}, namespace="mail"), actor="me")
        assert await tell(Refresh()) == {"refreshed": True}
        assert (await tell(Status()))["tasks_processed"] == 1
        assert await tell(Enable(enabled=True)) == {"enabled": True}
        await until(lambda: worker.context.tasks_processed == 2)


async def test_a_refresh_forgets_what_was_read_of_the_database(url: str, database: Connection) -> None:
    async with serving(url, poll_base=60, poll_cap=60, recovery_interval=3600) as worker:
        await hearing(worker)
        await pause_namespace(database, "default", None, "ada")
        await until(lambda: worker.components.fetcher._paused)  # noqa: SLF001 - it has read of the pause
        await database.execute("update interlock.namespaces set paused_at = null")  # behind everybody's back
        await enqueue_task(database, ADD, actor="me")
        await call_processes(url, Refresh(), worker.worker_id)
        await until(lambda: worker.context.tasks_processed == 1)


@pytest.mark.parametrize("mode", [WakeMode.HYBRID, WakeMode.POLLING])
async def test_task_events_are_counted_in_every_wake_mode(url: str, database: Connection, mode: WakeMode) -> None:
    def metric(system: str, kind: str) -> float:
        return metrics_registry.get_sample_value("worker_events_total", {"system": system, "kind": kind}) or 0

    before = metric("handlers", "completed")
    async with serving(url, mode=mode, poll_base=0.01, poll_cap=0.02) as worker:
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        await enqueue_task(database, ADD, actor="me")
        await enqueue_task(database, NewTask("fail_for_good", {}), actor="me")
        await until(lambda: worker.context.tasks_processed == 2)
        counted = worker.components.statistics.document()
    tasks = counted["orchestration"]
    assert (tasks["received"], tasks["dispatched"], tasks["completed"], tasks["failed"]) == (2, 2, 2, 1)
    assert tasks["mismatched"] == 0
    assert mode is WakeMode.HYBRID or tasks["fallback_hits"] == 0, "who never listens has nothing to fall back from"
    assert (counted["handlers"]["completed"], counted["handlers"]["failed"]) == (1, 1)
    assert counted["handlers"]["received"] == 2
    assert metric("handlers", "completed") == before + 1


async def test_tasks_claimed_without_a_notification_are_counted(url: str, database: Connection) -> None:
    async with serving(url, poll_base=0.01, poll_cap=0.02) as worker:
        await hearing(worker)
        async with database.transaction():
            await database.execute("set local session_replication_role = replica")  # the notifying trigger does not run
            await database.execute("select interlock.enqueue('add', '{\"a\": 1, \"b\": 1}')")
        await until(lambda: worker.context.tasks_processed == 1)
        assert worker.components.statistics.tasks.fallback_hits == 1
