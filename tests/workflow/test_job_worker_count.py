"""A job never has more pending or running steps than its worker_count, in any race."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from factories import step
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import connect
from interlock.store.limits import Limit, admit_limited_tasks, pause_namespace, put_limits, resume_namespace
from interlock.store.task_admin import cancel_unfinished_tasks
from interlock.store.tasks import Outcome, settle_running_tasks
from interlock.workflow.advance import advance
from interlock.workflow.cancel import cancel_job
from interlock.workflow.signals import send_signal
from job_driver import JobDriver, name_of

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask

pytestmark = pytest.mark.store

SIGNAL = step("s", kind="signal", signal="go", namespace="inventory", priority=9)


async def active(driver: JobDriver, job: UUID) -> set[str]:
    """Return the pending and running steps of a job."""
    return {name for name, state in (await driver.states(job)).items() if state in {"pending", "running"}}


async def retry(driver: JobDriver, claimed: ClaimedTask, delay: float) -> None:
    """End an attempt so that the step is retried."""
    outcome = Outcome(claimed.id, claimed.attempt, TaskRowEvent.RETRY, error={"message": "again"}, delay=delay)
    await settle_running_tasks(driver.connection, [outcome], actor="w_1", now=driver.now)


async def signaled(driver: JobDriver) -> tuple[UUID, ClaimedTask, ClaimedTask]:
    """Submit a job that may run two steps; give it, the claimed step of its signal, and the other one that runs."""
    others = [step(name) for name in "abcd"]
    job = await driver.submit(SIGNAL, *others, worker_count=2)
    first, second = await driver.claim()
    await send_signal(driver.connection, job, "go", 1, actor="eva", now=driver.now)
    await driver.settle(first)
    await driver.advance()
    (claimed,) = await driver.claim()
    assert name_of(claimed) == "s"
    return job, claimed, second


async def test_a_built_in_step_counts_while_it_waits_for_its_next_try(driver: JobDriver) -> None:
    driver.now = datetime.now(UTC)
    job, claimed, other = await signaled(driver)
    await retry(driver, claimed, delay=3600)
    await driver.settle(other)
    await driver.advance()
    assert await active(driver, job) == {"s", "c"}
    driver.now += timedelta(hours=2)
    assert sorted(name_of(task) for task in await driver.claim()) == ["c", "s"]


async def test_a_returned_step_counts_for_a_transaction_that_began_earlier(driver: JobDriver, url: str) -> None:
    """now() is the start of the transaction: a run_at can be later by that clock and due already."""
    job, claimed, other = await signaled(driver)
    await driver.settle(other)
    async with connect(url) as early, early.transaction():
        await early.execute("select now()")
        await retry(driver, claimed, delay=0)
        await advance(early, actor="o_2")
    assert await active(driver, job) == {"s", "c"}


async def test_a_retried_step_waits_for_worker_count_again_after_a_pause(driver: JobDriver) -> None:
    driver.now = datetime.now(UTC)
    job, claimed, _ = await signaled(driver)
    await retry(driver, claimed, delay=3600)
    await pause_namespace(driver.connection, "inventory", None, "ada", now=driver.now)
    await driver.advance()
    assert await active(driver, job) == {"b", "c"}
    await resume_namespace(driver.connection, "inventory", "ada", now=driver.now)
    assert (await driver.steps(job))["s"]["held_by"] == "worker_count"
    await driver.advance()
    assert await active(driver, job) == {"b", "c"}
    driver.now += timedelta(hours=2)
    await driver.run()
    assert (await driver.job(job))["status"] == "RUNNING", "b was claimed, and not settled"
    assert (await driver.states(job))["s"] == "done"


async def test_a_limit_does_not_release_a_step_that_waits_for_another_cause(driver: JobDriver, url: str) -> None:
    await put_limits(driver.connection, [Limit("mail", max_running=1)])
    job = await driver.submit(step("a", namespace="inventory", limit_key="mail"), step("b"), worker_count=1)
    async with connect(url) as leader:
        async with driver.connection.transaction():
            await pause_namespace(driver.connection, "inventory", None, "ada")
            letting = asyncio.create_task(admit_limited_tasks(leader, actor="leader"))
            await blocked(url, leader)
        assert (await letting).released == 0
    assert (await driver.steps(job))["a"]["held_by"] == "namespace"
    await driver.advance()
    assert await active(driver, job) == {"b"}


async def blocked(url: str, connection: Connection) -> None:
    """Wait until a session waits for a lock of another one."""
    query = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    async with connect(url) as watcher, asyncio.timeout(30):
        while not await (await watcher.execute(query, [connection.info.backend_pid])).fetchall():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("state", ["pending", "running"])
async def test_a_compensation_canceled_before_its_turn_activates_no_other(driver: JobDriver, state: str) -> None:
    names = ["a", "b", "c"]
    steps = [step(name, *names[:at][-1:], compensate="undo") for at, name in enumerate(names)]
    job = await driver.submit(*steps, step("z", "c"), worker_count=1)
    await driver.run(until=lambda: "c" in driver.ran)
    await cancel_job(driver.connection, job, actor="ada")
    await driver.advance()
    running = await driver.claim() if state == "running" else []
    assert await active(driver, job) == {"compensate:c"}
    await cancel_unfinished_tasks(driver.connection, [(await driver.steps(job))["compensate:b"]["id"]], actor="ada")
    await driver.advance()
    assert await active(driver, job) == {"compensate:c"}
    for claimed in running or await driver.claim():
        await driver.settle(claimed)
    await driver.advance()
    assert await active(driver, job) == {"compensate:a"}
    await cancel_unfinished_tasks(driver.connection, [(await driver.steps(job))["compensate:a"]["id"]], actor="ada")
    await driver.run()
    assert (await driver.job(job))["status"] == "CANCELED"
