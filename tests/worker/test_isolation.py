"""Tasks that are suspected of killing their worker: they run alone, soon, and without stopping the others."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import enqueue, task_row
from fault_injection import FaultyProxy, NetworkMode, gated_app
from interlock import Interlock
from interlock.client.explain import explain
from interlock.config import Config
from interlock.lifecycle import TaskState
from interlock.store.leader import acquire_leadership, read_leader
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.tasks import claim_pending_tasks
from interlock.worker import isolation
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings
from worker_support import until, worker_process

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.worker.process import WorkerStateMachine

pytestmark = [pytest.mark.flow, pytest.mark.chaos]

BUSY = WorkerSettings(duties=False, concurrency=3, poll_base=0.01, poll_cap=0.05, recovery_interval=0.05)


async def suspect(database: Connection, task_type: str, arguments: dict[str, Any] | None = None) -> UUID:
    """Enqueue a task whose first worker died, in one transaction: no other worker sees it before."""
    async with database.transaction():
        task = await enqueue(database, task_type, arguments)
        await claim_pending_tasks(database, actor="dead", types=[task_type], lease=timedelta(seconds=-1))
        await recover_expired_tasks(database, actor="me")
    assert (await task_row(database, task))["crashes"] == 1
    return task


class Crowd:
    """Counts the tasks that run beside each other in one worker."""

    def __init__(self, url: str) -> None:
        self.app = Interlock(config=Config(database_url=url))
        self.worker: WorkerStateMachine | None = None
        self.companions: list[int] = []
        self.done = 0

        @self.app.task
        async def nap() -> None:
            await asyncio.sleep(0.02)
            self.done += 1

        @self.app.task
        async def alone() -> None:
            for _ in range(20):
                assert self.worker is not None
                self.companions.append(len(self.worker.context.active) - 1)
                await asyncio.sleep(0.005)


async def test_a_worker_that_is_never_idle_runs_a_suspected_task_alone_and_goes_on(
    url: str, database: Connection
) -> None:
    crowd = Crowd(url)
    tasks = [await suspect(database, "alone") for _ in range(2)]
    for _ in range(500):
        await enqueue(database, "nap")
    async with serving(crowd.app, BUSY) as crowd.worker:
        await until(lambda: len(crowd.companions) == 40)
        assert crowd.done < 500, "it did not wait until the queue was empty"
        await until(lambda: crowd.worker is not None and crowd.worker.context.tasks_processed == 502)
    assert set(crowd.companions) == {0}
    for task in tasks:
        row = await task_row(database, task)
        assert (row["state"], row["tries"], row["crashes"]) == ("done", 1, 0)


async def test_a_worker_with_a_long_task_does_not_stand_still_for_a_suspected_one(
    url: str, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "DRAIN_LIMIT_S", 0.2)
    monkeypatch.setattr(isolation, "REST_S", 0.5)
    app, gate = gated_app(url)
    crowd = Crowd(url)
    app._tasks.update(crowd.app.tasks)  # noqa: SLF001 - both kinds of tasks in one worker
    await enqueue(database, "gated")
    async with serving(app, BUSY) as crowd.worker:
        await gate.entered[1].wait()
        task = await suspect(database, "alone")
        for _ in range(20):
            await enqueue(database, "nap")
        await until(lambda: crowd.done == 20)
        assert not crowd.companions, "it waits for a worker that runs nothing else"
        found = await explain(app, task)
        assert found.facts[0].text.startswith(
            "it is suspected of killing its worker (1 of 3 crashes): it waits for a worker"
        )
        gate.opened[1].set()
        await until(lambda: len(crowd.companions) == 20)
    assert set(crowd.companions) == {0}


async def test_only_one_busy_worker_makes_room_at_a_time(url: str, database: Connection) -> None:
    app, gate = gated_app(url)
    crowd = Crowd(url)
    app._tasks.update(crowd.app.tasks)  # noqa: SLF001 - both kinds of tasks in one worker
    assert await acquire_leadership(database, "another", duty=isolation.DUTY, lease=timedelta(hours=1))
    await enqueue(database, "gated")
    async with serving(app, BUSY) as crowd.worker:
        await gate.entered[1].wait()
        await suspect(database, "alone")
        await until(lambda: crowd.worker is not None and crowd.worker.components.fetcher.has_suspects)
        for _ in range(20):
            await enqueue(database, "nap")
        await until(lambda: crowd.done == 20)
        leader = await read_leader(database, duty=isolation.DUTY)
        assert leader is not None
        assert leader.holder == "another"
        gate.opened[1].set()
        await until(lambda: len(crowd.companions) == 20)  # a worker that runs nothing needs no permission


async def test_an_outage_that_costs_a_worker_its_leases_makes_no_task_suspected(url: str, database: Connection) -> None:
    async with FaultyProxy(url) as network:
        app, gate = gated_app(network.url)
        tasks = [await enqueue(database, "gated") for _ in range(5)]
        settings = replace(BUSY, concurrency=5, lease=6, shutdown_limit=5)
        async with serving(app, settings) as worker:
            await until(lambda: len(worker.context.active) == 5)
            attempts = list(worker.context.active.values())
            await network.cut()
            await until(lambda: all(attempt.is_terminal() for attempt in attempts))
            assert {attempt.state for attempt in attempts} == {TaskState.ABANDONED}
            recovered: list[Any] = []
            while len(recovered) < 5:
                recovered += await recover_expired_tasks(database, actor="another")
                await asyncio.sleep(0.01)
            network.mode = NetworkMode.PASSING
            await until(lambda: len(worker.context.active) == 5)  # side by side
            assert [(await task_row(database, task))["crashes"] for task in tasks] == [0] * 5
            gate.opened[2].set()
            await until(lambda: not worker.context.active)
    assert [(await task_row(database, task))["state"] for task in tasks] == ["done"] * 5


async def test_a_task_whose_worker_stood_still_stays_suspected(url: str, database: Connection) -> None:
    task = await enqueue(database, "nap", {"seconds": 600})
    with worker_process(url, INTERLOCK_LEASE="1.5", INTERLOCK_CONCURRENCY="2", INTERLOCK_GRACE="0") as process:
        while (await task_row(database, task))["state"] != "running":
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        while not await recover_expired_tasks(database, actor="another"):
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGCONT)
        while (await task_row(database, task))["attempt"] < 2:
            await asyncio.sleep(0.01)
        assert (await task_row(database, task))["crashes"] == 1, "it runs alone"


async def test_one_task_that_kills_its_worker_takes_no_other_with_it(url: str, database: Connection) -> None:
    healthy = [await enqueue(database, "nap", {"seconds": 0.5}) for _ in range(9)]
    bad = await enqueue(database, "kill_worker", {"after": 0.2})
    starts = 0

    async def has_ended() -> bool:
        rows = [await task_row(database, task) for task in (*healthy, bad)]
        return all(row["state"] in {"done", "error"} for row in rows)

    async with asyncio.timeout(120):
        while not await has_ended():
            starts += 1
            with worker_process(url, INTERLOCK_CONCURRENCY="10", INTERLOCK_LEASE="2") as process:
                while process.poll() is None and not await has_ended():
                    await asyncio.sleep(0.05)
    for task in healthy:
        row = await task_row(database, task)
        assert (row["state"], row["tries"]) == ("done", 1)
    row = await task_row(database, bad)
    assert (row["state"], row["event"], row["crashes"]) == ("error", "exhaust", 3)
    assert "killed its worker 3 times" in row["error"]["message"]
    assert starts <= 4
