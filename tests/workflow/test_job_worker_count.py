"""A job never has more pending or running steps than its worker_count, in any race."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import connect
from interlock.store.limits import Limit, admit_limited_tasks, pause_namespace, put_limits, resume_namespace
from interlock.store.task_admin import cancel_unfinished_tasks
from interlock.store.tasks import Outcome, settle_running_tasks
from interlock.workflow.advance import advance
from interlock.workflow.cancel import cancel_job
from interlock.workflow.signals import send_signal
from workflow_support import Hand, name_of, serve, step

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask

pytestmark = pytest.mark.store

SIGNAL = step("s", kind="signal", signal="go", namespace="inventory", priority=9)


@pytest.fixture
async def hand(database: Connection) -> Hand:
    """Return a Hand on a database with a live worker."""
    await serve(database)
    return Hand(database)


async def active(hand: Hand, job: UUID) -> set[str]:
    """Return the pending and running steps of a job."""
    return {name for name, state in (await hand.states(job)).items() if state in {"pending", "running"}}


async def retry(hand: Hand, claimed: ClaimedTask, delay: float) -> None:
    """End an attempt so that the step is retried."""
    outcome = Outcome(claimed.id, claimed.attempt, TaskRowEvent.RETRY, error={"message": "again"}, delay=delay)
    await settle_running_tasks(hand.connection, [outcome], actor="w_1", now=hand.now)


async def signaled(hand: Hand) -> tuple[UUID, ClaimedTask, ClaimedTask]:
    """Submit a job that may run two steps; give it, the claimed step of its signal, and the other one that runs."""
    others = [step(name) for name in "abcd"]
    job = await hand.submit(SIGNAL, *others, worker_count=2)
    first, second = await hand.claim()
    await send_signal(hand.connection, job, "go", 1, actor="eva", now=hand.now)
    await hand.settle(first)
    await hand.advance()
    (claimed,) = await hand.claim()
    assert name_of(claimed) == "s"
    return job, claimed, second


async def test_a_built_in_step_counts_while_it_waits_for_its_next_try(hand: Hand) -> None:
    hand.now = datetime.now(UTC)
    job, claimed, other = await signaled(hand)
    await retry(hand, claimed, delay=3600)
    await hand.settle(other)
    await hand.advance()
    assert await active(hand, job) == {"s", "c"}
    hand.now += timedelta(hours=2)
    assert sorted(name_of(task) for task in await hand.claim()) == ["c", "s"]


async def test_a_returned_step_counts_for_a_transaction_that_began_earlier(hand: Hand, url: str) -> None:
    """now() is the start of the transaction: a run_at can be later by that clock and due already."""
    job, claimed, other = await signaled(hand)
    await hand.settle(other)
    async with connect(url) as early, early.transaction():
        await early.execute("select now()")
        await retry(hand, claimed, delay=0)
        await advance(early, actor="o_2")
    assert await active(hand, job) == {"s", "c"}


async def test_a_retried_step_waits_for_worker_count_again_after_a_pause(hand: Hand) -> None:
    hand.now = datetime.now(UTC)
    job, claimed, _ = await signaled(hand)
    await retry(hand, claimed, delay=3600)
    await pause_namespace(hand.connection, "inventory", None, "ada", now=hand.now)
    await hand.advance()
    assert await active(hand, job) == {"b", "c"}
    await resume_namespace(hand.connection, "inventory", "ada", now=hand.now)
    assert (await hand.steps(job))["s"]["held_by"] == "worker_count"
    await hand.advance()
    assert await active(hand, job) == {"b", "c"}
    hand.now += timedelta(hours=2)
    await hand.run()
    assert (await hand.job(job))["status"] == "RUNNING", "b was claimed, and not settled"
    assert (await hand.states(job))["s"] == "done"


async def test_a_limit_does_not_release_a_step_that_waits_for_another_cause(hand: Hand, url: str) -> None:
    await put_limits(hand.connection, [Limit("mail", max_running=1)])
    job = await hand.submit(step("a", namespace="inventory", limit_key="mail"), step("b"), worker_count=1)
    async with connect(url) as leader:
        async with hand.connection.transaction():
            await pause_namespace(hand.connection, "inventory", None, "ada")
            letting = asyncio.create_task(admit_limited_tasks(leader, actor="leader"))
            await blocked(url, leader)
        assert (await letting).released == 0
    assert (await hand.steps(job))["a"]["held_by"] == "namespace"
    await hand.advance()
    assert await active(hand, job) == {"b"}


async def blocked(url: str, connection: Connection) -> None:
    """Wait until a session waits for a lock of another one."""
    query = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    async with connect(url) as watcher, asyncio.timeout(30):
        while not await (await watcher.execute(query, [connection.info.backend_pid])).fetchall():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("state", ["pending", "running"])
async def test_a_compensation_canceled_before_its_turn_activates_no_other(hand: Hand, state: str) -> None:
    names = ["a", "b", "c"]
    steps = [step(name, *names[:at][-1:], compensate="undo") for at, name in enumerate(names)]
    job = await hand.submit(*steps, step("z", "c"), worker_count=1)
    await hand.run(until=lambda: "c" in hand.ran)
    await cancel_job(hand.connection, job, actor="ada")
    await hand.advance()
    running = await hand.claim() if state == "running" else []
    assert await active(hand, job) == {"compensate:c"}
    await cancel_unfinished_tasks(hand.connection, [(await hand.steps(job))["compensate:b"]["id"]], actor="ada")
    await hand.advance()
    assert await active(hand, job) == {"compensate:c"}
    for claimed in running or await hand.claim():
        await hand.settle(claimed)
    await hand.advance()
    assert await active(hand, job) == {"compensate:a"}
    await cancel_unfinished_tasks(hand.connection, [(await hand.steps(job))["compensate:a"]["id"]], actor="ada")
    await hand.run()
    assert (await hand.job(job))["status"] == "CANCELED"
