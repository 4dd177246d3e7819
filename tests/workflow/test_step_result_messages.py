"""Messages that are repeated, malformed or unexpected: jobs advance once, and correctly."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from interlock.postgres.connection import connect
from interlock.store.step_results import read_orchestration_failures, read_queue_state
from interlock.store.task_admin import cancel_unfinished_tasks
from interlock.workflow.advance import MAX_MESSAGE_READS, advance, start_waiting_jobs
from workflow_support import Failed, Hand, serve, step

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store


@pytest.fixture
async def hand(database: Connection) -> Hand:
    """Return a Hand on a database with a live worker."""
    await serve(database)
    return Hand(database)


async def replay(database: Connection) -> int:
    """Resend the message of every ended task."""
    rows = await database.execute(
        "select pgmq.send('orchestration_step_results', jsonb_build_object('job_id', job_id, 'task_id', id)) "
        "from interlock.tasks where job_id is not null order by random()"
    )
    return len(await rows.fetchall())


async def requeue_by_hand(hand: Hand, task_id: UUID) -> None:
    """Requeue a step by SQL, which the API does not allow."""
    await hand.connection.execute(
        "update interlock.tasks set state = 'pending', event = 'requeue', tries = 0, finished_at = null where id = %s",
        [task_id],
    )


async def snapshot(database: Connection) -> list[Any]:
    """Read everything that orchestration writes."""
    tasks = "select id, state, reason, unresolved, taken, failed, advanced, updated_at from interlock.tasks order by id"
    jobs = "select id, status, open_steps, failed_steps, output, error from interlock.jobs order by id"
    return [await (await database.execute(query)).fetchall() for query in (tasks, jobs)]


async def test_duplicates_and_replays_change_nothing(hand: Hand) -> None:
    hand.outcomes = {"a": [1, 2], "c": Failed("no")}
    job = await hand.submit(
        step("a", compensate="undo"), step("m", "a", kind="map", over="a"), step("c", "m"), step("d", "c")
    )
    for _ in range(3):
        for task in await hand.claim():
            await hand.settle(task)
        await replay(hand.connection)
        await hand.advance()
        await replay(hand.connection)
        before = await snapshot(hand.connection)
        done = await hand.advance(limit=1000)
        assert (done.advanced, done.duplicates) == (0, done.received)
        assert await snapshot(hand.connection) == before
    await hand.run()
    assert (await hand.job(job))["status"] == "FAILED"
    before = await snapshot(hand.connection)
    sent = await replay(hand.connection)
    assert (await hand.advance(limit=1000)).duplicates == sent
    assert await snapshot(hand.connection) == before
    assert (await read_queue_state(hand.connection)) == {"waiting": 0, "oldest_age": None, "archived": 0}


async def test_a_step_requeued_before_its_failure_was_advanced_counts_at_its_end(hand: Hand) -> None:
    hand.outcomes = {"a": Failed("once")}
    job = await hand.submit(step("a"), step("b", "a"))
    (task,) = await hand.claim()
    await hand.settle(task)
    await requeue_by_hand(hand, task.id)
    assert (await hand.advance()).duplicates == 1
    hand.outcomes = {}
    await hand.run()
    assert (await hand.job(job))["status"] == "COMPLETED"


async def test_a_step_requeued_after_it_was_advanced_does_not_count_against_worker_count(hand: Hand) -> None:
    hand.outcomes = {"a": Failed("once")}
    job = await hand.submit(step("a"), step("b"), step("c", "b"), step("d", "c"), worker_count=1)
    await hand.run(until=lambda: "a" in hand.ran)
    failed = (await hand.steps(job))["a"]
    assert failed["state"] == "error"
    await requeue_by_hand(hand, failed["id"])
    await hand.run()
    assert (await hand.states(job)) == {"a": "error", "b": "done", "c": "done", "d": "done"}
    assert (await hand.job(job))["status"] == "FAILED"


async def test_a_canceled_step_counts_as_failed(hand: Hand) -> None:
    job = await hand.submit(step("a"), step("b", "a"), step("c", after_failure=["a"]))
    lone = await hand.submit(step("a"), step("b", "a"), name="lone")
    for id_ in (job, lone):
        found = await hand.steps(id_)
        await cancel_unfinished_tasks(hand.connection, [found["a"]["id"]], actor="ada", reason="not this one")
    await hand.run()
    assert await hand.states(job) == {"a": "canceled", "b": "skipped", "c": "done"}
    assert (await hand.job(job))["status"] == "COMPLETED"
    row = await hand.job(lone)
    assert (row["status"], row["reason"]) == ("FAILED", "step a was canceled: not this one")


async def test_a_step_canceled_before_its_job_starts_is_advanced_at_the_start(
    database: Connection,
) -> None:
    hand = Hand(database)
    job = await hand.submit(step("a"), step("b"), step("c", "a", "b", join="any"))
    await cancel_unfinished_tasks(database, [(await hand.steps(job))["a"]["id"]], actor="ada", reason="no")
    await hand.advance()
    await serve(database)
    assert await start_waiting_jobs(database, actor="o") == 1
    await hand.run()
    assert await hand.states(job) == {"a": "canceled", "b": "done", "c": "done"}
    assert (await hand.job(job))["status"] == "COMPLETED"


async def test_a_move_by_any_client_is_advanced(hand: Hand) -> None:
    job = await hand.submit(step("a"), step("b", "a"))
    (task,) = await hand.claim()
    await hand.connection.execute(
        "update interlock.tasks set state = 'done', event = 'succeed', lease_expires_at = null, finished_at = now() "
        "where id = %s",
        [task.id],
    )
    await hand.run()
    assert (await hand.job(job))["status"] == "COMPLETED"


async def test_a_malformed_message_is_archived_and_holds_up_no_other(hand: Hand) -> None:
    bad = ['{"job_id": "nonsense"}', '"words"', "null", '{"task_id": 3}']
    for content in bad:
        await hand.connection.execute("select pgmq.send('orchestration_step_results', %s::jsonb)", [content])
    job = await hand.submit(step("a"), step("b", "a"))
    await hand.settle((await hand.claim())[0])
    for _ in range(MAX_MESSAGE_READS):
        await advance(hand.connection, actor="o", visibility=0)
    await hand.run()
    assert (await hand.job(job))["status"] == "COMPLETED"
    failures = await read_orchestration_failures(hand.connection)
    assert len(failures) == len(bad)
    assert all("it is not" in row["error"] for row in failures)
    assert (await read_queue_state(hand.connection))["archived"] == len(bad)
    assert (await read_queue_state(hand.connection))["waiting"] == 0


async def test_a_job_that_cannot_be_advanced_holds_up_no_other_in_the_batch(hand: Hand) -> None:
    broken = await hand.submit(step("a"), step("b", "a"), name="broken")
    well = await hand.submit(step("a"), step("b", "a"), name="well")
    await hand.connection.execute(
        "create function interlock.refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$"
    )
    await hand.connection.execute(
        "create trigger refuse before update on interlock.tasks for each row "
        f"when (new.state = 'pending' and new.job_id = '{broken}') execute function interlock.refuse()".encode()
    )
    for task in await hand.claim():
        await hand.settle(task)
    done = await hand.advance()
    assert (done.received, done.advanced, done.failed) == (2, 1, 1)
    assert (await hand.states(well))["b"] == "pending"
    for _ in range(MAX_MESSAGE_READS - 1):
        await hand.connection.execute("update pgmq.q_orchestration_step_results set vt = now()")
        assert (await hand.advance()).failed == 1
    (failure,) = await read_orchestration_failures(hand.connection)
    assert failure["job_id"] == broken
    assert "not this one" in failure["error"]
    assert (await hand.states(broken)) == {"a": "done", "b": "waiting"}, "nothing of it is half done"


async def test_an_orchestrator_that_dies_loses_no_message(hand: Hand, url: str) -> None:
    job = await hand.submit(step("a"), step("b", "a"))
    await hand.settle((await hand.claim())[0])
    async with connect(url) as doomed, doomed.transaction(force_rollback=True):
        assert (await advance(doomed, actor="o")).released == 1
    assert (await hand.states(job))["b"] == "waiting"
    await hand.run()
    assert (await hand.job(job))["status"] == "COMPLETED"


async def test_advance_uses_the_time_of_the_caller(hand: Hand) -> None:
    hand.now = datetime(2026, 1, 1, tzinfo=UTC)
    job = await hand.submit(step("a"), timeout=60)
    await hand.run()
    row = await hand.job(job)
    assert row["created_at"] == row["started_at"] == row["completed_at"] == hand.now
