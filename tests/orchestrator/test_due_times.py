"""Due times: an orchestrator wakes for the earliest one that any process stored, however long its tick is."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import add_live_worker, step
from interlock import Interlock
from interlock.config import Config
from interlock.orchestrator.run import orchestrating
from interlock.orchestrator.settings import OrchestratorSettings
from interlock.postgres.connection import connect
from interlock.store.jobs import until_next_due
from interlock.store.workers import list_live_workers
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings
from job_driver import JobDriver
from jobs_support import orchestrator_at, register_idle_worker
from notifier_support import notifier_at, record
from worker_support import until

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

NO_POLLING = {"tick": 60.0, "events_tick": 60.0}
DAY_S = 86_400
PROMPT_S = 10.0  # far below the tick


async def until_row(database: Connection, query: str, *parameters: Any) -> None:
    """Wait, less long than a tick, until a query finds a row."""
    async with asyncio.timeout(PROMPT_S):
        while not await (await database.execute(query, parameters)).fetchall():
            await asyncio.sleep(0.01)


async def until_canceled(database: Connection, job: UUID) -> None:
    await until_row(database, "select from interlock.jobs where id = %s and status = 'CANCELED'", job)


async def test_a_job_timeout_ends_the_job_when_it_is_due(url: str, database: Connection, jobs: Interlock) -> None:
    await register_idle_worker(database)
    async with orchestrator_at(url, **NO_POLLING) as running:
        await until(lambda: running.is_listening)
        job = await jobs.submit("gates", timeout=0.3)
        await until_canceled(database, job.id)
    assert "timeout of 0.3 s is over" in str((await job.status()).reason)


async def test_a_job_timeout_stops_a_running_handler_at_once(url: str, jobs: Interlock) -> None:
    async with orchestrator_at(url, **NO_POLLING), serving(jobs, WorkerSettings(duties=False, cancel_grace=60)):
        job = await jobs.submit("slow", timeout=0.3)
        async with asyncio.timeout(PROMPT_S):
            while not (await job.status()).has_ended:
                await asyncio.sleep(0.01)
    assert [row.state for row in await job.steps()] == ["canceled"]


async def test_a_signal_timeout_ends_the_wait_when_it_is_due(url: str, database: Connection) -> None:
    await add_live_worker(database)
    async with orchestrator_at(url, **NO_POLLING) as running:
        await until(lambda: running.is_listening)
        job = await JobDriver(database).submit(step("s", kind="signal", signal="paid", timeout=0.3))
        await until_row(database, "select from interlock.tasks where job_id = %s and state <> 'waiting'", job)


async def test_a_sleep_ends_when_it_is_due(url: str, database: Connection) -> None:
    await add_live_worker(database)
    async with orchestrator_at(url, **NO_POLLING) as running:
        await until(lambda: running.is_listening)
        steps = step("a", kind="sleep", seconds=0.3), step("b", "a", kind="sleep", seconds=0.3)
        job = await JobDriver(database).submit(*steps)
        await until_row(database, "select from interlock.jobs where id = %s and status = 'COMPLETED'", job)


async def test_a_debounced_job_starts_when_it_is_due(url: str, database: Connection, jobs: Interlock) -> None:
    await register_idle_worker(database)
    async with orchestrator_at(url, **NO_POLLING) as running:
        await until(lambda: running.is_listening)
        job = await jobs.submit("gates", key="k", debounce=0.3)
        await until_row(database, "select from interlock.jobs where id = %s and status = 'RUNNING'", job.id)


async def test_a_due_time_before_the_one_it_waits_for_wakes_it(url: str, database: Connection) -> None:
    await add_live_worker(database)
    driver = JobDriver(database)
    late = await driver.submit(step("s", kind="signal", signal="x"), timeout=3600)
    async with orchestrator_at(url, **NO_POLLING) as running:
        await until(lambda: running.is_listening)
        early = await driver.submit(step("s", kind="signal", signal="x", timeout=50), name="early", timeout=40)
        async with connect(url) as other:
            await other.execute(
                "update interlock.jobs set deadline_at = now() + interval '0.3 s' where id = %s", [early]
            )
        await until_canceled(database, early)
    assert (await driver.job(late))["status"] == "RUNNING"


async def test_due_times_that_are_stored_before_the_start_are_met(url: str, database: Connection) -> None:
    await add_live_worker(database)
    job = await JobDriver(database).submit(step("s", kind="signal", signal="x"), timeout=0.5)
    async with orchestrator_at(url, **NO_POLLING):
        await until_canceled(database, job)


async def test_a_due_time_is_met_after_the_connections_were_lost(url: str, database: Connection) -> None:
    await add_live_worker(database)
    async with orchestrator_at(url, retry_base=0.01, retry_cap=0.05, **NO_POLLING) as running:
        await until(lambda: running.is_listening)
        job = await JobDriver(database).submit(step("s", kind="signal", signal="x"), timeout=1)
        await database.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
        await until_canceled(database, job)


async def test_several_orchestrators_end_each_due_job_once(url: str, database: Connection) -> None:
    await add_live_worker(database)
    driver = JobDriver(database)
    async with orchestrator_at(url, **NO_POLLING) as one, orchestrator_at(url, **NO_POLLING) as other:
        await until(lambda: one.is_listening and other.is_listening)
        wait = step("s", kind="signal", signal="x")
        ids = [await driver.submit(wait, name=f"w{n}", timeout=0.2 + n / 50) for n in range(10)]
        for id_ in ids:
            await until_canceled(database, id_)
    events = "select count(*) as n from interlock.job_state_transitions where job_id = any (%s) and event = 'cancel'"
    (row,) = await (await database.execute(events, [ids])).fetchall()
    assert row["n"] == 10


async def test_the_clock_of_the_app_decides_what_is_due(url: str, database: Connection) -> None:
    await add_live_worker(database)
    job = await JobDriver(database).submit(step("s", kind="signal", signal="x"), timeout=3600)
    later = datetime.now(UTC) + timedelta(hours=2)
    settings = OrchestratorSettings(tick=60)
    async with orchestrating(Interlock(config=Config(database_url=url), clock=lambda: later), settings):
        await until_canceled(database, job)


@pytest.mark.store
async def test_only_a_due_time_before_all_others_is_notified(url: str, database: Connection) -> None:
    await add_live_worker(database)
    driver = JobDriver(database)
    wait = step("s", kind="signal", signal="x")

    async def notifications(*timeouts: float | None) -> list[str]:
        received.clear()
        for timeout in timeouts:
            await driver.submit(wait, name=f"timeout {timeout}", timeout=timeout)
        await database.execute("notify interlock_orchestration, 'end'")
        await until(lambda: received[-1:] == ["end"])
        return received[:-1]

    async with notifier_at(url) as notifier:
        received, _ = record(notifier, "interlock_orchestration")
        await until(lambda: notifier.is_listening)
        assert await notifications(None, 3600) == []
        assert await notifications(50) == ["due"]
        assert await notifications(51, 52, 3601) == []
        assert await notifications(40) == ["due"]
        received.clear()
        await driver.submit(step("s", kind="signal", signal="x", timeout=30), name="signal", timeout=35)
        await database.execute("notify interlock_orchestration, 'end'")
        await until(lambda: received[-1:] == ["end"])
        assert received == ["due", "end"]


@pytest.mark.store
async def test_the_next_due_time_is_the_earliest_one_that_has_not_passed(database: Connection) -> None:
    await add_live_worker(database)
    driver = JobDriver(database)
    driver.now = now = datetime.now(UTC)
    assert await until_next_due(database, now=now) == DAY_S
    job = await driver.submit(step("s", kind="signal", signal="x", timeout=70), timeout=90)
    assert await until_next_due(database, now=now) == 70
    assert await until_next_due(database, now=now + timedelta(seconds=70)) == 20
    assert await until_next_due(database, now=now + timedelta(seconds=90)) == DAY_S
    await database.execute("update interlock.jobs set not_before = %s where id = %s", [now + timedelta(seconds=5), job])
    assert await until_next_due(database, now=now) == 5


async def test_heartbeats_do_not_wait_for_the_tick(url: str, database: Connection) -> None:
    async with orchestrator_at(url, presence=0.3, **NO_POLLING) as running:
        seen: set[datetime | None] = set()
        async with asyncio.timeout(PROMPT_S):
            while len(seen) < 3:
                seen |= {row.heartbeat_at for row in await list_live_workers(database) if row.id == running.id}
                await asyncio.sleep(0.02)


@pytest.mark.unit
def test_a_tick_that_would_sleep_over_due_times_is_refused() -> None:
    with pytest.raises(ValueError, match="tick must be at most 60, got 61"):
        OrchestratorSettings(tick=61)
