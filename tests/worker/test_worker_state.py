"""WorkerStateMachine: the transitions and invariants of seed 000 on the real class."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from interlock.errors import InvalidTransitionError, InvariantError
from interlock.lifecycle import TaskState, WorkerEvent, WorkerState
from interlock.model.options import NewTask
from interlock.postgres.connection import connect
from interlock.store.enqueue import enqueue_task
from interlock.store.tasks import claim_pending_tasks, read_tasks
from interlock.worker.process import WorkerStateMachine
from interlock.worker.settings import WorkerSettings
from worker_support import app_at, serving, until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

RUNNING = (WorkerEvent.INITIALIZED, WorkerEvent.CONNECTED, WorkerEvent.RECOVERY_COMPLETE)


def machine(*events: WorkerEvent) -> WorkerStateMachine:
    made = WorkerStateMachine(worker_id="w")
    for event in events:
        made.transition(event)
    return made


@pytest.mark.unit
def test_worker_startup_to_connecting() -> None:
    worker = machine()
    assert worker.state is WorkerState.STARTING
    assert worker.transition(WorkerEvent.INITIALIZED) is WorkerState.CONNECTING


@pytest.mark.unit
def test_worker_connecting_success_to_recovering() -> None:
    assert machine(*RUNNING[:2]).state is WorkerState.RECOVERING


@pytest.mark.unit
def test_worker_connecting_failure_retries() -> None:
    worker = machine(WorkerEvent.INITIALIZED, WorkerEvent.CONNECTION_FAILED)
    assert worker.state is WorkerState.CONNECTING
    assert worker.can_transition(WorkerEvent.CONNECTED)


@pytest.mark.unit
def test_worker_recovery_to_running() -> None:
    worker = machine(*RUNNING)
    assert worker.state is WorkerState.RUNNING
    assert worker.is_accepting_tasks()


@pytest.mark.unit
def test_worker_running_no_tasks_to_backing_off() -> None:
    worker = machine(*RUNNING, WorkerEvent.NO_TASKS_AVAILABLE)
    assert worker.state is WorkerState.BACKING_OFF
    assert not worker.is_accepting_tasks()


@pytest.mark.unit
def test_worker_backoff_complete_to_recovering() -> None:
    worker = machine(*RUNNING, WorkerEvent.NO_TASKS_AVAILABLE, WorkerEvent.BACKOFF_COMPLETE)
    assert worker.state is WorkerState.RECOVERING


@pytest.mark.unit
def test_worker_shutdown_from_running() -> None:
    worker = machine(*RUNNING)
    worker.request_shutdown()
    assert worker.state is WorkerState.SHUTTING_DOWN
    assert worker.context.shutdown_requested


@pytest.mark.unit
def test_worker_shutdown_from_backing_off() -> None:
    worker = machine(*RUNNING, WorkerEvent.NO_TASKS_AVAILABLE)
    worker.request_shutdown()
    assert worker.state is WorkerState.SHUTTING_DOWN


@pytest.mark.flow
async def test_worker_shutdown_waits_for_active_task(url: str, database: Connection) -> None:
    task = (await enqueue_task(database, NewTask("nap", {"seconds": 0.3}), actor="me")).id
    async with serving(url) as worker:
        await until(lambda: worker.context.active)
        worker.request_shutdown()
        assert worker.state is WorkerState.SHUTTING_DOWN
        assert worker.context.active, "the task goes on"
    assert not worker.is_running()
    assert (await read_tasks(database, [task]))[0]["state"] == "done"


@pytest.mark.unit
def test_worker_invalid_transition_raises_error() -> None:
    with pytest.raises(InvalidTransitionError, match="'shutdown_complete' is not allowed in state 'starting'"):
        machine().transition(WorkerEvent.SHUTDOWN_COMPLETE)


@pytest.mark.flow
async def test_worker_running_has_connection(url: str) -> None:
    seen: list[Any] = []
    async with serving(url) as worker:
        moved = worker.transition

        def look(event: WorkerEvent, reason: str | None = None, *, at: float | None = None) -> WorkerState:
            state = moved(event, reason, at=at)
            if state is WorkerState.RUNNING:
                seen.append(worker.context.connection)
            return state

        worker.transition = look  # type: ignore[method-assign]
        await until(lambda: seen)
    assert all(connection is not None for connection in seen)
    with pytest.raises(InvariantError):
        _ = machine(*RUNNING).connection


@pytest.mark.flow
async def test_worker_shutting_down_rejects_new_tasks(url: str, database: Connection) -> None:
    async with serving(url) as worker:
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        worker.request_shutdown()
        await enqueue_task(database, NewTask("add", {"a": 1, "b": 2}), actor="me")
        (claimed,) = await claim_pending_tasks(database, actor="w", types=["add"])
        with pytest.raises(InvariantError):
            await worker._start([claimed], time.monotonic() + 30, time.time())  # noqa: SLF001 - the rule is inside
    assert worker.context.tasks_processed == 0


@pytest.mark.flow
async def test_worker_shutdown_timeout_forces_stop(url: str, database: Connection) -> None:
    task = (await enqueue_task(database, NewTask("nap", {"seconds": 3600}), actor="me")).id
    async with serving(url, grace=0.1) as worker:
        await until(lambda: worker.context.active)
        worker.request_shutdown()
    assert not worker.is_running()
    (row,) = await read_tasks(database, [task])
    assert (row["state"], row["event"], row["tries"]) == ("pending", "return", 0), "returned, and no try used up"


@pytest.mark.flow
async def test_worker_stopped_releases_connection(url: str, database: Connection) -> None:
    async with serving(url) as worker:
        await until(lambda: worker.context.connection)
        worker.request_shutdown()
    assert worker.context.connection is None
    query = (
        "select count(*) as open from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    )

    async def gone() -> bool:
        (row,) = await (await database.execute(query)).fetchall()
        return bool(row["open"] == 0)

    while not await gone():
        await asyncio.sleep(0.01)


@pytest.mark.flow
async def test_worker_single_active_task(url: str, database: Connection) -> None:
    for _ in range(5):
        await enqueue_task(database, NewTask("nap", {"seconds": 0.01}), actor="me")
    most = 0
    async with serving(url) as worker:
        while worker.context.tasks_processed < 5:
            most = max(most, len(worker.context.active))
            assert (worker.context.current_task_sm is None) == (not worker.context.active)
            await asyncio.sleep(0)
    assert most == 1


@pytest.mark.flow
async def test_a_worker_reaches_at_most_its_concurrency(url: str, database: Connection) -> None:
    for _ in range(20):
        await enqueue_task(database, NewTask("nap", {"seconds": 0.02}), actor="me")
    most = 0
    async with serving(url, concurrency=4) as worker:
        while worker.context.tasks_processed < 20:
            held = worker.context.active.values()
            running = sum(attempt.state is TaskState.PROCESSING for attempt in held)
            assert running <= worker.context.occupied <= 4
            assert sum(attempt.state is TaskState.CLAIMING for attempt in held) <= 4
            assert len(held) <= 16
            most = max(most, running)
            await asyncio.sleep(0)
        assert worker.context.occupied == 0
    assert most == 4


@pytest.mark.flow
async def test_a_shutdown_before_the_database_was_ever_reached_stops_too() -> None:
    nowhere = app_at("postgresql://nobody@127.0.0.1:1/nothing")
    worker = WorkerStateMachine("w", nowhere, WorkerSettings(poll_base=0.01))
    serving_task = asyncio.create_task(worker.serve())
    await until(lambda: worker.context.backoff_count)
    assert worker.state is WorkerState.CONNECTING
    worker.request_shutdown()
    await serving_task
    assert not worker.is_running()


@pytest.mark.store
async def test_tasks_are_really_in_the_database_between_workers(url: str) -> None:
    async with connect(url) as connection:
        await enqueue_task(connection, NewTask("add", {"a": 1, "b": 1}), actor="me")
    async with serving(url) as worker:
        await until(lambda: worker.context.tasks_processed == 1)
