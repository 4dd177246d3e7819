"""Tasks that a worker claims ahead of its free slots: bounded, never more run than slots, returned if they wait."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import enqueue
from interlock import Interlock, WorkerSettings, serving
from interlock.config import Config
from interlock.lifecycle import TaskState
from interlock.store.limits import Limit, pause_namespace, put_limits
from interlock.worker.prefetch import Prefetch
from worker_support import until, worker_process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.client.task_handle import TaskHandle
    from interlock.postgres.connection import Connection
    from interlock.worker.process import WorkerStateMachine

pytestmark = pytest.mark.flow

SLOTS = 4
SETTINGS = WorkerSettings(duties=False, concurrency=SLOTS, cancel_grace=0.05)
BLOCKED = 2 * SLOTS
HOUR = 3600.0
KILLED = {"INTERLOCK_LEASE": "1", "INTERLOCK_CONCURRENCY": str(SLOTS), "INTERLOCK_LOG_LEVEL": "error"}


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tasks that were settled a minute ago count, so that a slow machine claims ahead as well."""
    monkeypatch.setattr("interlock.worker.prefetch.PACE_WINDOW_S", 60.0)


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let as many tasks wait as may, also if half of them do, and no slot be kept for tasks with a limit."""
    monkeypatch.setattr("interlock.worker.fetcher.Fetcher.expects_limited_tasks", lambda _: False)
    monkeypatch.setattr(Prefetch, "room", lambda self: max(self.limit() - len(self), 0))


@pytest.fixture
def patience(pace: None, unlimited: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 - parts of it
    """Let tasks wait for a slot for as long as a test takes."""
    monkeypatch.setattr("interlock.worker.prefetch.MAX_PREFETCH_WAIT_S", HOUR)


class Bench:
    """An app with a task that ends at once and one that waits for a gate, and what has run."""

    def __init__(self, url: str) -> None:
        self.app = Interlock(config=Config(database_url=url, worker_name="test-worker"))
        self.gate = asyncio.Event()
        self.running = self.most = 0
        self.ran: list[int] = []

        @self.app.task
        async def quick() -> None:
            pass

        @self.app.task
        async def gated(number: int) -> int:
            self.ran.append(number)
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self.gate.wait()
            finally:
                self.running -= 1
            return number

    async def load(self, **options: Any) -> Sequence[TaskHandle[Any]]:
        """Enqueue tasks that give the worker its pace, and tasks behind them that block it."""
        await self.app.tasks["quick"].enqueue_many({} for _ in range(5 * SLOTS))
        return await self.app.tasks["gated"].enqueue_many(({"number": n} for n in range(BLOCKED)), **options)


def in_state(worker: WorkerStateMachine, state: TaskState) -> int:
    return sum(each.state is state and each.task_type == "gated" for each in list(worker.context.active.values()))


async def until_some_wait(worker: WorkerStateMachine) -> None:
    """Wait until all slots are taken by blocked handlers, as many tasks wait for one, and notifications arrive."""
    await until(lambda: worker.components.is_listening)
    await until(lambda: in_state(worker, TaskState.PROCESSING) == in_state(worker, TaskState.CLAIMING) == SLOTS)
    await until(lambda: len(worker.context.active) == 2 * SLOTS)


async def rows_of(database: Connection, task_type: str = "gated") -> list[tuple[Any, ...]]:
    """Return the state, last event, tries and crashes of the tasks of a type."""
    found = await database.execute(
        "select state, event, tries, crashes from interlock.tasks where type = %s order by id", [task_type]
    )
    return [tuple(row.values()) for row in await found.fetchall()]


async def until_rows(database: Connection, expected: list[tuple[Any, ...]]) -> None:
    async with asyncio.timeout(60):
        while sorted(await rows_of(database)) != sorted(expected):
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("patience")
async def test_tasks_wait_claimed_for_a_slot_and_never_more_run_than_there_are_slots(
    url: str, database: Connection
) -> None:
    bench = Bench(url)
    async with bench.app:
        await bench.load()
        async with serving(bench.app, SETTINGS) as worker:
            await until_some_wait(worker)
            assert worker.context.occupied == SLOTS
            assert await rows_of(database) == [("running", "claim", 1, 0)] * BLOCKED
            bench.gate.set()
            await until(lambda: not worker.context.active)
        assert (bench.most, sorted(bench.ran)) == (SLOTS, list(range(BLOCKED)))
        assert await rows_of(database) == [("done", "succeed", 1, 0)] * BLOCKED


@pytest.mark.usefixtures("pace", "unlimited")
async def test_tasks_whose_slots_stay_busy_are_returned_and_run_by_an_idle_worker(
    url: str, database: Connection
) -> None:
    busy, idle = Bench(url), Bench(url)
    idle.gate.set()
    async with busy.app, idle.app:
        await busy.load()
        async with serving(busy.app, SETTINGS) as worker:
            returned = [("running", "claim", 1, 0)] * SLOTS + [("pending", "return", 0, 0)] * SLOTS
            await until_rows(database, returned)
            assert worker.components.runner.prefetch.limit() == 0, "not at once again"
            async with serving(idle.app, SETTINGS):
                await until(lambda: len(idle.ran) == SLOTS)
            assert len(busy.ran) == SLOTS
            busy.gate.set()
            await until(lambda: not worker.context.active)
    assert await rows_of(database) == [("done", "succeed", 1, 0)] * BLOCKED
    assert sorted(busy.ran + idle.ran) == list(range(BLOCKED))


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("how", ["worker", "namespace"])
async def test_a_pause_returns_tasks_that_wait_for_a_slot(url: str, database: Connection, how: str) -> None:
    bench = Bench(url)
    async with bench.app:
        await bench.load()
        async with serving(bench.app, SETTINGS) as worker:
            await until_some_wait(worker)
            back = ("pending", "return", 0, 0)
            if how == "worker":
                worker.components.registration.enable(enabled=False)
            else:
                await pause_namespace(database, "default", None, "ada")
                await until(lambda: len(worker.context.active) == SLOTS)
                await pause_namespace(database, "default", None, "ada")  # holds what is pending
                back = ("waiting", "hold", 0, 0)
            await until_rows(database, [("running", "claim", 1, 0)] * SLOTS + [back] * SLOTS)
            bench.gate.set()
            await until(lambda: not worker.context.active)
            assert len(bench.ran) == SLOTS


@pytest.mark.usefixtures("patience")
async def test_a_shutdown_returns_tasks_that_wait_for_a_slot_at_once(url: str, database: Connection) -> None:
    bench = Bench(url)
    async with bench.app:
        await bench.load()
        async with serving(bench.app, SETTINGS) as worker:
            await until_some_wait(worker)
            worker.request_shutdown()
            await until_rows(database, [("running", "claim", 1, 0)] * SLOTS + [("pending", "return", 0, 0)] * SLOTS)
            bench.gate.set()
        assert await rows_of(database) == [("done", "succeed", 1, 0)] * SLOTS + [("pending", "return", 0, 0)] * SLOTS
        assert len(bench.ran) == SLOTS


@pytest.mark.usefixtures("patience")
async def test_a_canceled_task_that_waits_for_a_slot_is_never_started(url: str, database: Connection) -> None:
    bench = Bench(url)
    async with bench.app:
        handles = await bench.load()
        async with serving(bench.app, SETTINGS) as worker:
            await until_some_wait(worker)
            for handle in handles[SLOTS:]:
                await handle.cancel()
            await until(lambda: len(worker.context.active) == SLOTS)
            bench.gate.set()
            await until(lambda: not worker.context.active)
    assert [row[0] for row in await rows_of(database)] == ["done"] * SLOTS + ["canceled"] * SLOTS
    assert len(bench.ran) == SLOTS


@pytest.mark.usefixtures("patience")
async def test_a_task_whose_lease_is_lost_while_it_waits_is_not_started_with_the_old_attempt(
    url: str, database: Connection
) -> None:
    bench = Bench(url)
    async with bench.app:
        handles = await bench.load()
        async with serving(bench.app, SETTINGS) as worker:
            await until_some_wait(worker)
            for handle in handles[SLOTS:]:
                await handle.cancel(force=True)
            worker.components.leases.renew_now()
            await until(lambda: len(worker.context.active) == SLOTS)
            bench.gate.set()
            await until(lambda: not worker.context.active)
            for handle in handles[SLOTS:]:
                await handle.requeue()
            await until(lambda: len(bench.ran) == BLOCKED)
            await until(lambda: not worker.context.active)
    assert {row[0] for row in await rows_of(database)} == {"done"}
    assert bench.most == SLOTS


@pytest.mark.usefixtures("patience")
async def test_tasks_that_wait_for_a_slot_outlive_a_lost_connection_and_keep_their_leases(
    url: str, database: Connection
) -> None:
    bench = Bench(url)
    async with bench.app:
        await bench.load()
        async with serving(bench.app, SETTINGS.with_options(lease=1.0)) as worker:
            await until_some_wait(worker)
            leases = [attempt.lease_until for attempt in worker.context.active.values()]
            await database.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            await until(lambda: min(attempt.lease_until for attempt in worker.context.active.values()) > max(leases))
            bench.gate.set()
            await until(lambda: not worker.context.active)
    assert await rows_of(database) == [("done", "succeed", 1, 0)] * BLOCKED


@pytest.mark.usefixtures("pace")
async def test_tasks_with_a_limit_are_not_claimed_ahead(url: str, database: Connection) -> None:
    await put_limits(database, [Limit("api", max_starts=100, period=timedelta(hours=1))])
    bench = Bench(url)
    async with bench.app:
        await bench.app.tasks["quick"].enqueue_many({} for _ in range(5 * SLOTS))
        async with serving(bench.app, replace(SETTINGS, duties=True)) as worker:
            await until(lambda: worker.context.tasks_processed == 5 * SLOTS)
            for number in range(BLOCKED):
                await bench.app.tasks["gated"].options(limit_key="api").enqueue(number=number)
            await until(lambda: bench.running == SLOTS)
            assert worker.components.runner.prefetch.limit() == SLOTS
            assert len(worker.context.active) == SLOTS
            bench.gate.set()
            await until(lambda: len(bench.ran) == BLOCKED)
            await until(lambda: not worker.context.active)
    assert bench.most == SLOTS


@pytest.mark.usefixtures("patience")
async def test_a_worker_of_one_slot_claims_nothing_ahead(url: str) -> None:
    bench = Bench(url)
    async with bench.app:
        await bench.load()
        async with serving(bench.app, WorkerSettings(duties=False)) as worker:
            await until(lambda: bench.running)
            assert (len(worker.context.active), worker.components.runner.prefetch.limit()) == (1, 0)
            bench.gate.set()
            await until(lambda: len(bench.ran) == BLOCKED)


async def test_a_killed_worker_loses_no_task_and_no_try_of_those_that_it_held(url: str, database: Connection) -> None:
    app = Interlock(config=Config(database_url=url))

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    async with app:
        await add.enqueue_many({"a": number, "b": 1} for number in range(300))
        await enqueue(database, "kill_worker", {"after": 0.0})
        await add.enqueue_many({"a": number, "b": 1} for number in range(300))
        with worker_process(url, **KILLED) as victim:
            await asyncio.to_thread(victim.wait, 60)
        held = [row for row in await rows_of(database, "add") if row[0] == "running"]
        assert len(held) < 4 * SLOTS, "twice the slots, and as many for the tasks that may wait for one"
        async with serving(app, WorkerSettings(duties=False, concurrency=SLOTS, recovery_interval=0.05)):
            async with asyncio.timeout(60):
                while {row[0] for row in await rows_of(database, "add")} != {"done"}:
                    await asyncio.sleep(0.01)
    assert {row[2] for row in await rows_of(database, "add")} == {1}
