"""Claims that do not lead to a run: the states of their attempts, and what happens to the tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from factories import enqueue, task_row
from fault_injection import FaultyProxy
from interlock import Interlock
from interlock.config import Config
from interlock.lifecycle import WorkerState
from interlock.store.tasks import read_task_history
from interlock.telemetry import series_of, shutdown_duration_seconds, shutdown_tasks_total
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.worker.process import WorkerStateMachine

pytestmark = pytest.mark.flow

CLAIM_OF_THIS_LEASE = b"29.75 seconds"  # a parameter of the claim, and of nothing else that the worker sends


def count(task_type: str, event: str) -> int:
    """Return how often an event has ended CLAIMING."""
    cell = series_of(task_type).cells.get(("claiming", event))
    return 0 if cell is None else cell.count


def claimed_app(url: str, task_type: str) -> Interlock:
    app = Interlock(config=Config(database_url=url, worker_name="test-worker"))

    @app.task(name=task_type)
    async def handle() -> None:
        return None

    return app


def is_idle(worker: WorkerStateMachine) -> bool:
    """Tell whether a worker waits for notifications, so that its next claim is one of tasks without a limit."""
    return worker.state is WorkerState.BACKING_OFF and worker.components.is_listening


async def events(database: Connection, task: UUID) -> list[str]:
    return [record.event for record in await read_task_history(database, task)]


def reader(metric: str) -> Callable[[], float]:
    """Return a function that reads a counter of shutdowns."""
    return shutdown_tasks_total.labels(metric)._value.get  # type: ignore[no-any-return]  # noqa: SLF001 - the library has no reader


async def test_a_claim_whose_reply_is_lost_has_failed_and_its_task_is_returned(url: str, database: Connection) -> None:
    async with FaultyProxy(url) as network:
        app = claimed_app(network.url, "lost_reply")
        async with serving(app, WorkerSettings(duties=False, lease=29.75, poll_cap=60.0)) as worker:
            await until(lambda: is_idle(worker))
            network.fatal = CLAIM_OF_THIS_LEASE
            task = await enqueue(database, "lost_reply")
            await until(lambda: worker.context.tasks_processed == 1, within=25)  # less than the lease
    assert await events(database, task) == ["create", "claim", "return", "claim", "succeed"]
    row = await task_row(database, task)
    assert (row["attempt"], row["tries"]) == (2, 1), "the lost claim has used up no try"
    assert count("lost_reply", "claim_failed") == 1
    assert count("lost_reply", "claim_succeeded") == 1


async def test_a_shutdown_during_the_claim_returns_what_it_claimed(url: str, database: Connection) -> None:
    task = await enqueue(database, "late_reply")
    returned = reader("returned")
    before = returned()
    async with FaultyProxy(url) as network:
        network.delayed = CLAIM_OF_THIS_LEASE
        app = claimed_app(network.url, "late_reply")
        async with serving(app, WorkerSettings(duties=False, lease=29.75)) as worker:
            await network.delaying.wait()
            worker.request_shutdown()
            network.release.set()
            await until(lambda: not worker.is_running())
    assert await events(database, task) == ["create", "claim", "return"]
    assert count("late_reply", "shutdown_requested") == 1
    assert returned() == before + 1


async def test_a_claim_that_takes_longer_than_its_lease_has_failed(url: str, database: Connection) -> None:
    async with FaultyProxy(url) as network:
        app = claimed_app(network.url, "slow_reply")
        settings = WorkerSettings(duties=False, lease=0.75, recovery_interval=3600, poll_cap=60.0)
        async with serving(app, settings) as worker:
            await until(lambda: is_idle(worker))
            network.delayed = b"0.75 seconds"
            task = await enqueue(database, "slow_reply")
            await network.delaying.wait()
            while not await lease_is_over(database, task):
                pass
            network.release.set()
            await until(lambda: worker.context.tasks_processed == 1)
    assert await events(database, task) == ["create", "claim", "return", "claim", "succeed"]
    assert count("slow_reply", "claim_failed") == 1


async def lease_is_over(database: Connection, task: UUID) -> bool:
    query = "select from interlock.tasks where id = %s and lease_expires_at < now()"
    return bool(await (await database.execute(query, [task])).fetchall())


async def test_a_shutdown_is_timed_and_the_tasks_it_found_are_counted(url: str, database: Connection) -> None:
    finished = reader("finished")
    before, timed = finished(), shutdown_duration_seconds._sum.get()  # noqa: SLF001 - the library has no reader
    app = claimed_app(url, "unused")

    @app.task
    async def linger() -> None:
        await until(lambda: worker.context.shutdown_requested)

    await enqueue(database, "linger")
    async with serving(app, WorkerSettings(duties=False)) as worker:
        await until(lambda: worker.context.active)
    assert finished() == before + 1
    assert shutdown_duration_seconds._sum.get() > timed  # noqa: SLF001 - see above
