"""Expired leases: the handler is stopped in time and its attempt writes nothing, whatever the renewals do."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest

from factories import enqueue, run_sql, task_events, task_row
from fault_injection import FaultyProxy, NetworkMode, blocked_by, gated_app, locked
from interlock import Interlock, TaskContext
from interlock.lifecycle import TaskState, WorkerState
from interlock.model.options import NewTask
from interlock.postgres.connection import connect
from interlock.store.enqueue import enqueue_task
from interlock.store.tasks import notify_tasks
from interlock.telemetry import metrics_registry
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings
from processes import eventually
from worker_support import until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = [pytest.mark.flow, pytest.mark.chaos]


def lost() -> float:
    return metrics_registry.get_sample_value("leases_lost_total") or 0


EXPIRE = "update interlock.tasks set state = 'pending', event = 'expire', lease_expires_at = null"


async def test_a_lease_runs_out_in_time_while_its_renewal_hangs(url: str, database: Connection) -> None:
    """The renewal waits for a lock of the table; the expiry of the lease is noticed all the same."""
    task = await enqueue(database, "gated")
    app, gate = gated_app(url)
    async with serving(app, WorkerSettings(duties=False, lease=6, recovery_interval=3600)) as worker:
        await gate.entered[1].wait()
        (attempt,) = worker.context.active.values()
        async with connect(url) as holder, holder.transaction():
            await holder.execute("lock table interlock.tasks in share mode")
            first = await blocked_by(database, holder)
            await blocked_by(database, holder, but=first)  # the first renewal was given up, and this is another
            await until(attempt.is_terminal)
        assert attempt.state is TaskState.ABANDONED
        assert not worker.context.active, "its slot is free"
        assert (await task_row(database, task))["state"] == "running"
    assert await task_events(database, task) == ["create", "claim"], "an attempt that lost its lease writes nothing"


async def test_a_locked_row_does_not_cost_the_attempts_beside_it_their_leases(url: str, database: Connection) -> None:
    task, other = await enqueue(database, "gated"), await enqueue(database, "gated")
    app, gate = gated_app(url)
    async with serving(app, WorkerSettings(duties=False, concurrency=2, lease=2, recovery_interval=3600)) as worker:
        await until(lambda: len(worker.context.active) == 2)
        attempts = {attempt.key[0]: attempt for attempt in worker.context.active.values()}
        async with locked(url, task):
            await until(attempts[task].is_terminal)
            until_then = attempts[other].lease_until
            await until(lambda: attempts[other].lease_until > until_then)
        gate.opened[1].set()
        await until(attempts[other].is_terminal)
    assert attempts[task].state is TaskState.ABANDONED
    assert attempts[other].state is TaskState.COMPLETED


async def test_a_lease_runs_out_in_time_when_the_network_swallows_everything(url: str, database: Connection) -> None:
    task = await enqueue(database, "gated")
    async with FaultyProxy(url) as network:
        app, gate = gated_app(network.url)
        settings = WorkerSettings(duties=False, lease=1.5, recovery_interval=3600, shutdown_limit=3)
        async with serving(app, settings) as worker:
            await gate.entered[1].wait()
            (attempt,) = worker.context.active.values()
            network.mode = NetworkMode.HANGING
            await until(attempt.is_terminal)
            assert attempt.state is TaskState.ABANDONED
            network.mode = NetworkMode.PASSING
    assert await task_events(database, task) == ["create", "claim"]


async def test_renewals_go_on_over_a_new_connection_after_one_that_hung(url: str, database: Connection) -> None:
    await enqueue(database, "gated")
    async with FaultyProxy(url) as network:
        app, gate = gated_app(network.url)
        settings = WorkerSettings(duties=False, lease=9, recovery_interval=3600, shutdown_limit=5)
        async with serving(app, settings) as worker:
            await gate.entered[1].wait()
            (attempt,) = worker.context.active.values()
            until_then = attempt.lease_until
            network.mode = NetworkMode.HANGING
            worker.components.leases.renew_now()
            await until(lambda: time.monotonic() > until_then - 7.5)  # by then the renewal is on its way
            network.mode = NetworkMode.PASSING  # for new connections; what was swallowed never comes
            await until(lambda: attempt.lease_until > until_then)
            gate.opened[1].set()
            await until(attempt.is_terminal)


async def test_a_reclaimed_task_runs_its_second_attempt_only(url: str, database: Connection) -> None:
    task = await enqueue(database, "gated")
    app, gate = gated_app(url)
    settings = WorkerSettings(duties=False, concurrency=2, recovery_interval=3600, poll_base=0.01, poll_cap=0.05)
    async with serving(app, settings) as worker:
        context = worker.context
        await gate.entered[1].wait()
        before = lost()
        (first,) = context.active.values()
        await database.execute(EXPIRE)
        await notify_tasks(database, ["default"])
        await gate.entered[2].wait()
        (second,) = context.active.values()
        assert second is not first
        await until(first.is_terminal)
        assert first.state is TaskState.ABANDONED
        assert context.active == {task.int: second}, "the end of the first does not free the second's slot"
        assert context.current_task_sm is second
        assert context.tasks_processed == 1
        gate.opened[2].set()
        await until(lambda: worker.state is WorkerState.BACKING_OFF and not context.active)
        assert context.tasks_processed == 2
    assert lost() - before == 1
    assert second.state is TaskState.COMPLETED
    done = await task_row(database, task)
    assert (done["state"], done["attempt"], done["output"]) == ("done", 2, 2)
    assert await task_events(database, task) == ["create", "claim", "expire", "claim", "succeed"]


async def test_a_loss_that_the_keeper_and_the_report_find_is_counted_once(url: str, database: Connection) -> None:
    """The handler blocks the loop, so that it returns before it can be stopped; its settle is fenced off."""
    app = Interlock(url)
    entered, released = threading.Event(), threading.Event()

    @app.task
    async def blocks() -> None:
        entered.set()
        released.wait(30)

    before = lost()

    def take_away() -> None:
        assert entered.wait(30)
        run_sql(url, EXPIRE)
        eventually(lambda: lost() > before)
        released.set()

    await enqueue_task(database, NewTask("blocks", {}), actor="me")
    taking = asyncio.create_task(asyncio.to_thread(take_away))
    settings = WorkerSettings(duties=False, lease=1.5, recovery_interval=3600, poll_base=30, poll_cap=30)
    async with serving(app, settings) as worker:
        await until(lambda: worker.context.active)
        (attempt,) = worker.context.active.values()
        await until(attempt.is_terminal)
        await taking
        assert worker.components.statistics.tasks.mismatched == 1, "it was reported, and fenced off"
    assert lost() - before == 1


async def test_a_transactional_task_that_was_lost_is_counted(url: str, database: Connection) -> None:
    app = Interlock(url)

    @app.task(transactional=True)
    async def transact(ctx: TaskContext) -> None:
        assert ctx.connection is not database
        await database.execute(EXPIRE + ", run_at = now() + interval '1 hour'")

    before = lost()
    await enqueue_task(database, NewTask("transact", {}), actor="me")
    async with serving(app, WorkerSettings(duties=False, lease=600, recovery_interval=3600)) as worker:
        await until(lambda: worker.context.tasks_processed == 1)
    assert lost() - before == 1
