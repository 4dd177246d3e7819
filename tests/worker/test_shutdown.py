"""Shutdown while the database is away or does not answer: the grace and the limit are kept."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from factories import enqueue, task_events, task_row
from fault_injection import FaultyProxy, NetworkMode, blocked_by, gated_app, locked
from interlock.lifecycle import TaskState, WorkerState
from interlock.model.options import NewTask
from interlock.postgres.notifier import WakeMode
from interlock.store.enqueue import enqueue_task
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings
from worker_support import until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = [pytest.mark.flow, pytest.mark.chaos]


async def test_grace_without_a_database_settles_on_reconnect(url: str, database: Connection) -> None:
    task = await enqueue(database, "gated")
    async with FaultyProxy(url) as network:
        app, gate = gated_app(network.url)
        settings = WorkerSettings(duties=False, concurrency=2, mode=WakeMode.POLLING, poll_base=0.01, poll_cap=0.1)
        async with serving(app, settings) as worker:
            await gate.entered[1].wait()
            (attempt,) = worker.context.active.values()
            await network.cut()
            await until(lambda: worker.state is WorkerState.CONNECTING)
            worker.request_shutdown()
            refused = network.refused
            await until(lambda: network.refused > refused + 5)  # it looks for the database, and the handler goes on
            still_running = attempt.state is TaskState.PROCESSING
            assert still_running
            gate.opened[1].set()
            await until(lambda: attempt.state is TaskState.REPORTING)
            network.mode = NetworkMode.PASSING
            await until(lambda: not worker.is_running())
    assert attempt.state is TaskState.COMPLETED
    assert await task_events(database, task) == ["create", "claim", "succeed"]


async def test_an_outage_in_the_middle_of_a_shutdown_costs_no_outcome(url: str, database: Connection) -> None:
    task = await enqueue(database, "gated")
    async with FaultyProxy(url) as network:
        app, gate = gated_app(network.url)
        settings = WorkerSettings(duties=False, mode=WakeMode.POLLING, poll_base=0.01, poll_cap=0.1)
        async with serving(app, settings) as worker:
            await gate.entered[1].wait()
            (attempt,) = worker.context.active.values()
            worker.request_shutdown()
            await network.cut()
            gate.opened[1].set()
            await until(lambda: attempt.state is TaskState.REPORTING)
            refused = network.refused
            await until(lambda: network.refused > refused + 5)
            assert worker.state is WorkerState.SHUTTING_DOWN, "what is finished is worth the time that there is"
            network.mode = NetworkMode.PASSING
            await until(lambda: not worker.is_running())
    assert attempt.state is TaskState.COMPLETED
    assert await task_events(database, task) == ["create", "claim", "succeed"]


async def test_an_interrupted_task_is_returned_on_reconnect(url: str, database: Connection) -> None:
    task = await enqueue(database, "gated")
    async with FaultyProxy(url) as network:
        app, gate = gated_app(network.url)
        settings = WorkerSettings(duties=False, grace=0.2, poll_base=0.01, poll_cap=0.1)
        async with serving(app, settings) as worker:
            await gate.entered[1].wait()
            (attempt,) = worker.context.active.values()
            await network.cut()
            worker.request_shutdown()
            await until(lambda: attempt.state is TaskState.REPORTING)
            network.mode = NetworkMode.PASSING
            await until(lambda: not worker.is_running())
    assert attempt.state is TaskState.COMPLETED
    returned = await task_row(database, task)
    assert (returned["state"], returned["event"], returned["tries"]) == ("pending", "return", 0)


@pytest.mark.parametrize("hurry", [False, True], ids=["grace", "hurry"])
async def test_the_shutdown_limit_holds_without_a_database(url: str, database: Connection, *, hurry: bool) -> None:
    task = await enqueue(database, "gated")
    async with FaultyProxy(url) as network:
        app, gate = gated_app(network.url)
        settings = WorkerSettings(duties=False, grace=20, shutdown_limit=30 if hurry else 3, poll_cap=0.1)
        async with serving(app, settings) as worker:
            await gate.entered[1].wait()
            await network.cut()
            began = time.monotonic()
            worker.request_shutdown()
            if hurry:
                worker.request_shutdown()
            await until(lambda: not worker.is_running())
            assert time.monotonic() - began < 18, "less than the grace"
    assert (await task_row(database, task))["state"] == "running", "it is left to its lease"


@pytest.mark.parametrize("mode", [WakeMode.HYBRID, WakeMode.POLLING])
async def test_the_shutdown_limit_holds_on_a_hanging_network(url: str, database: Connection, mode: WakeMode) -> None:
    """Also while the worker waits for the reply to a claim."""
    task = await enqueue(database, "gated")
    async with FaultyProxy(url) as network:
        app, gate = gated_app(network.url)
        settings = WorkerSettings(
            duties=False, concurrency=2, shutdown_limit=6, grace=1, mode=mode, poll_base=0.01, poll_cap=0.02
        )
        async with serving(app, settings) as worker:
            await gate.entered[1].wait()
            network.mode = NetworkMode.HANGING
            await asyncio.sleep(0.1 if mode is WakeMode.POLLING else 0)  # it looks every 20 ms, and now it waits
            began = time.monotonic()
            worker.request_shutdown()
            await until(lambda: not worker.is_running())
            assert time.monotonic() - began < 20, "the limit, and what a busy machine adds to it"
            await network.cut()
    assert (await task_row(database, task))["state"] == "running", "it is left to its lease"


async def test_an_outcome_that_waits_for_a_lock_is_waited_for_within_the_limit(url: str, database: Connection) -> None:
    task = await enqueue(database, "gated")
    app, gate = gated_app(url)
    async with serving(app, WorkerSettings(duties=False, grace=0)) as worker:
        await gate.entered[1].wait()
        async with locked(url, task) as holder:
            worker.request_shutdown()
            await blocked_by(database, holder)
            await asyncio.sleep(2.5)  # longer than it waits for handlers
            assert worker.is_running()
        await until(lambda: not worker.is_running())
    assert await task_events(database, task) == ["create", "claim", "return"]


async def test_a_second_request_ends_the_grace(url: str, database: Connection) -> None:
    task = await enqueue(database, "gated")
    app, gate = gated_app(url)
    async with serving(app, WorkerSettings(duties=False)) as worker:
        await gate.entered[1].wait()
        began = time.monotonic()
        worker.request_shutdown()
        worker.request_shutdown()
        await until(lambda: not worker.is_running())
        assert time.monotonic() - began < 18, "less than the grace"
    assert await task_events(database, task) == ["create", "claim", "return"]


@pytest.mark.unit
@pytest.mark.parametrize("limit", [0, 30.5])
def test_an_invalid_limit_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="shutdown_limit must be at"):
        WorkerSettings(shutdown_limit=limit)


async def test_a_returned_task_has_not_failed(url: str, database: Connection) -> None:
    """A handler stopped by a shutdown counts as processed, not as failed; one that raised counts as both."""
    app, gate = gated_app(url)

    @app.task(max_tries=1)
    async def raises() -> None:
        raise ValueError("no")

    await enqueue_task(database, NewTask("raises", {}, max_tries=1), actor="me")
    task = await enqueue(database, "gated")
    async with serving(app, WorkerSettings(duties=False, concurrency=2, grace=0)) as worker:
        await gate.entered[1].wait()
        await until(lambda: worker.context.tasks_failed == 1)
    assert (worker.context.tasks_processed, worker.context.tasks_failed) == (2, 1)
    assert worker.components.statistics.tasks.failed == 1
    returned = await task_row(database, task)
    assert (returned["state"], returned["tries"]) == ("pending", 0)
    assert await task_events(database, task) == ["create", "claim", "return"]
