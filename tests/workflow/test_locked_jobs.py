"""A transaction that keeps a job or a step locked holds up that job only."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import add_live_worker, step
from interlock.errors import StoreError
from interlock.postgres.connection import connect
from interlock.store.doctor import examine
from interlock.store.step_results import read_orchestration_failures, read_queue_state, replay_results
from interlock.workflow.advance import MAX_MESSAGE_READS, advance, cancel_overdue_jobs, start_waiting_jobs
from interlock.workflow.cancel import cancel_job
from interlock.workflow.signals import end_due_waits, send_signal
from job_driver import JobDriver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NONE_WAITING: dict[str, Any] = {"waiting": 0, "oldest_age": None, "archived": 0}


@asynccontextmanager
async def held(url: str, table: str, *ids: UUID) -> AsyncIterator[None]:
    """Lock rows in a transaction that stays open."""
    async with connect(url) as person, person.transaction():
        await person.execute(f"select from interlock.{table} where id = any (%s) for update".encode(), [list(ids)])
        yield


async def let_come_back(driver: JobDriver, reads: int = 1) -> None:
    """Make deferred messages visible again, with this read count."""
    await driver.connection.execute("update pgmq.q_orchestration_step_results set vt = now(), read_ct = %s", [reads])


async def settle_all(driver: JobDriver) -> None:
    for task in await driver.claim():
        await driver.settle(task)


async def test_a_locked_job_holds_up_no_other_and_advances_after_the_lock(driver: JobDriver, url: str) -> None:
    stuck = await driver.submit(step("a"), step("b"), step("c", "a", "b"), name="stuck")
    free = [await driver.submit(step("a"), step("b", "a"), name="free") for _ in range(3)]
    await settle_all(driver)
    async with held(url, "jobs", stuck):
        await driver.advance()
        await let_come_back(driver, reads=MAX_MESSAGE_READS)
        await driver.advance()
        await settle_all(driver)
        await driver.advance()
        assert (await driver.states(stuck))["c"] == "waiting"
        assert [(await driver.job(job))["status"] for job in free] == ["COMPLETED"] * 3
    assert (await read_queue_state(driver.connection))["waiting"] == 2
    assert (await read_queue_state(driver.connection))["archived"] == 0, "to be held is no failure"
    await let_come_back(driver)
    await driver.run()
    assert (await driver.job(stuck))["status"] == "COMPLETED"
    assert await read_queue_state(driver.connection) == NONE_WAITING


async def test_messages_of_a_locked_job_are_deferred_with_backoff(driver: JobDriver, url: str) -> None:
    stuck = await driver.submit(step("a"))
    await settle_all(driver)
    query = "select read_ct, round(extract(epoch from vt - now())) as pause from pgmq.q_orchestration_step_results"
    pauses = []
    async with held(url, "jobs", stuck):
        for reads in (0, 7):
            await let_come_back(driver, reads)
            assert await driver.advance() == (0,) * 8
            (row,) = await (await driver.connection.execute(query)).fetchall()
            pauses.append((row["read_ct"], int(row["pause"])))
    assert pauses == [(1, 2), (8, 32)]


async def test_an_orchestrator_crash_at_a_locked_job_delays_one_message(driver: JobDriver, url: str) -> None:
    stuck = await driver.submit(step("a"), name="stuck")
    free = [await driver.submit(step("a"), name="free") for _ in range(5)]
    await settle_all(driver)
    visible = "select count(*) as messages from pgmq.q_orchestration_step_results where vt <= clock_timestamp()"

    async def count() -> int:
        (row,) = await (await driver.connection.execute(visible)).fetchall()
        found: int = row["messages"]
        return found

    async with held(url, "jobs", stuck), connect(url) as doomed:
        dying = asyncio.create_task(advance(doomed, actor="o_2"))
        while await count() == 6:  # until it has taken the first by itself
            await asyncio.sleep(0.01)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        assert await count() >= 5
    await driver.run()
    assert [(await driver.job(job))["status"] for job in free] == ["COMPLETED"] * 5


async def test_a_deferred_message_is_archived_on_failure_and_resent(driver: JobDriver, url: str) -> None:
    stuck = await driver.submit(step("a"), step("b", "a"))
    await settle_all(driver)
    async with held(url, "jobs", stuck):
        await let_come_back(driver, reads=MAX_MESSAGE_READS)
        await driver.advance()
    assert (await read_queue_state(driver.connection))["archived"] == 0
    await driver.connection.execute(
        "alter table interlock.tasks add constraint broken check (step <> 'b' or state <> 'pending')"
    )
    await let_come_back(driver, reads=MAX_MESSAGE_READS)
    assert (await driver.advance()).failed == 1
    (failure,) = await read_orchestration_failures(driver.connection)
    assert failure["retry_at"] - failure["failed_at"] == timedelta(minutes=1)
    await driver.connection.execute("alter table interlock.tasks drop constraint broken")
    assert await replay_results(driver.connection) == 1
    await driver.run()
    assert (await driver.job(stuck))["status"] == "COMPLETED"


async def test_a_locked_step_holds_up_only_its_own_job(driver: JobDriver, url: str) -> None:
    stuck = await driver.submit(step("a"), step("b", "a"), name="stuck")
    free = await driver.submit(step("a"), name="free")
    await settle_all(driver)
    async with held(url, "tasks", (await driver.steps(stuck))["b"]["id"]):
        await driver.advance()
        assert (await driver.job(free))["status"] == "COMPLETED"
    await let_come_back(driver)
    await driver.run()
    assert (await driver.job(stuck))["status"] == "COMPLETED"


async def test_timeouts_and_starts_leave_locked_jobs_for_later(database: Connection, url: str) -> None:
    driver = JobDriver(database)
    steps = step("s", kind="signal", signal="x", timeout=60), step("a")
    waiting = [await driver.submit(*steps) for _ in range(2)]
    async with held(url, "jobs", waiting[0]):
        await add_live_worker(database)
        assert await start_waiting_jobs(database, actor="o_1") == 1
        assert [(await driver.job(job))["status"] for job in waiting] == ["PENDING", "RUNNING"]
    assert await start_waiting_jobs(database, actor="o_1") == 1
    late = datetime.now(UTC) + timedelta(minutes=2)
    async with held(url, "jobs", waiting[0]):
        assert await end_due_waits(database, actor="o_1", now=late) == 1
    assert await end_due_waits(database, actor="o_1", now=late) == 1
    overdue = [await driver.submit(step("a"), name="late", timeout=1) for _ in range(2)]
    async with held(url, "jobs", overdue[0]):
        assert await cancel_overdue_jobs(database, actor="o_1", now=late) == 1
        assert [(await driver.job(job))["ending"] for job in overdue] == [None, "CANCELED"]
    assert await cancel_overdue_jobs(database, actor="o_1", now=late) == 1


async def test_an_interactive_lock_timeout_is_named(
    driver: JobDriver, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.workflow.cancel.INTERACTIVE_LOCK_TIMEOUT", "50ms")
    monkeypatch.setattr("interlock.workflow.signals.INTERACTIVE_LOCK_TIMEOUT", "50ms")
    job = await driver.submit(step("s", kind="signal", signal="go"))
    async with held(url, "jobs", job):
        with pytest.raises(StoreError, match="the job is locked by another transaction"):
            await cancel_job(driver.connection, job, actor="ada")
        with pytest.raises(StoreError, match="`interlock doctor` names it"):
            await send_signal(driver.connection, job, "go", 1, actor="ada")
    assert await send_signal(driver.connection, job, "go", 1, actor="ada")
    (row,) = await (await driver.connection.execute("show lock_timeout")).fetchall()
    assert row["lock_timeout"] == "0", "only that transaction was impatient"


async def test_the_doctor_names_the_transaction_that_locks_a_job(driver: JobDriver, url: str) -> None:
    job = await driver.submit(step("a"))
    async with held(url, "jobs", job):
        report = await examine(driver.connection)
        assert not [finding for finding in report.findings if finding.code == "transaction_long"]
        late = datetime.now(UTC) + timedelta(minutes=2)
        report = await examine(driver.connection, now=late)
        (found,) = [finding for finding in report.findings if finding.code == "transaction_long"]
        assert "(interlock, idle in transaction) has been open for 1" in found.message
        assert "and locks rows of jobs, which are blocked" in found.message
        assert found.remedy.endswith(f"select pg_terminate_backend({found.sample[0]})")
