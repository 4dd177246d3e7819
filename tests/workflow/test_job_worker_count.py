"""A job never has more pending or running steps than its worker_count, in any race."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from factories import step, workflow
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import connect
from interlock.store.limits import Limit, admit_limited_tasks, pause_namespace, put_limits, resume_namespace
from interlock.store.task_admin import cancel_unfinished_tasks
from interlock.store.tasks import Outcome, settle_running_tasks
from interlock.store.workflows import put_workflow
from interlock.workflow.advance import advance
from interlock.workflow.cancel import cancel_job
from interlock.workflow.signals import end_due_waits, send_signal
from job_driver import JobDriver, name_of

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask

pytestmark = pytest.mark.store


async def active(driver: JobDriver, job: UUID) -> set[str]:
    """Return the pending and running steps of a job."""
    return {name for name, state in (await driver.states(job)).items() if state in {"pending", "running"}}


async def retry(driver: JobDriver, claimed: ClaimedTask, delay: float) -> None:
    """End an attempt so that the step is retried."""
    outcome = Outcome(claimed.id, claimed.attempt, TaskRowEvent.RETRY, error={"message": "again"}, delay=delay)
    await settle_running_tasks(driver.connection, [outcome], actor="w_1", now=driver.now)


async def two_running(driver: JobDriver) -> tuple[UUID, ClaimedTask, ClaimedTask]:
    """Submit a job that may run two steps; return it, the claimed step s of another namespace, and the other one."""
    others = [step(name) for name in "abcd"]
    job = await driver.submit(*others, step("s", "a", namespace="inventory", priority=9), worker_count=2)
    first, second = await driver.claim()
    await driver.settle(first)
    await driver.advance()
    (claimed,) = await driver.claim()
    assert name_of(claimed) == "s"
    return job, claimed, second


async def test_a_step_counts_while_it_waits_for_its_next_try(driver: JobDriver) -> None:
    driver.now = datetime.now(UTC)
    job, claimed, other = await two_running(driver)
    await retry(driver, claimed, delay=3600)
    await driver.settle(other)
    await driver.advance()
    assert await active(driver, job) == {"s", "c"}
    driver.now += timedelta(hours=2)
    assert sorted(name_of(task) for task in await driver.claim()) == ["c", "s"]


async def test_a_returned_step_counts_for_a_transaction_that_began_earlier(driver: JobDriver, url: str) -> None:
    """now() is the start of the transaction: a run_at can be later by that clock and due already."""
    job, claimed, other = await two_running(driver)
    await driver.settle(other)
    async with connect(url) as early, early.transaction():
        await early.execute("select now()")
        await retry(driver, claimed, delay=0)
        await advance(early, actor="o_2")
    assert await active(driver, job) == {"s", "c"}


async def test_a_retried_step_waits_for_worker_count_again_after_a_pause(driver: JobDriver) -> None:
    driver.now = datetime.now(UTC)
    job, claimed, _ = await two_running(driver)
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


async def test_steps_that_the_engine_completes_do_not_count(driver: JobDriver) -> None:
    """A sleep, a signal, an approval, a map and a child wait and end beside a busy step; the parts of a map count."""
    driver.now = datetime.now(UTC)
    await put_workflow(driver.connection, workflow(step("inner"), name="kid"))
    job = await driver.submit(
        step("busy", priority=9),
        step("nap", kind="sleep", seconds=60),
        step("paid", kind="signal", signal="paid"),
        step("ok", kind="approval"),
        step("kid", kind="child", workflow="kid"),
        step("m", kind="map", over_input="xs"),
        step("none", kind="map", over_input="no"),
        step("z", "nap", "paid", "ok", "kid", "none"),
        input={"xs": [1], "no": []},
        worker_count=1,
    )
    claimed = {name_of(task): task for task in await driver.claim()}
    assert set(claimed) == {"busy", "inner"}, "the child job has no worker_count"
    await driver.settle(claimed["inner"])
    await send_signal(driver.connection, job, "paid", 1, actor="eva", now=driver.now)
    await send_signal(driver.connection, job, "ok", {"approved": True}, actor="eva", now=driver.now)
    driver.now += timedelta(minutes=1)
    assert await end_due_waits(driver.connection, actor="o_1", now=driver.now) == 1
    await driver.advance()
    await driver.advance()
    steps = await driver.steps(job)
    assert [steps[name]["state"] for name in ("nap", "paid", "ok", "kid", "none")] == ["done"] * 5
    assert [(steps[name]["state"], steps[name]["held_by"]) for name in ("m[0]", "z")] == [
        ("waiting", "worker_count")
    ] * 2
    await driver.settle(claimed["busy"])
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


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
