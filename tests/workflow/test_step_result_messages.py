"""Messages that are repeated, malformed or unexpected: jobs advance once, and correctly."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from factories import add_live_worker, step
from interlock.postgres.connection import connect
from interlock.store.step_results import read_orchestration_failures, read_queue_state
from interlock.store.task_admin import cancel_unfinished_tasks
from interlock.workflow.advance import MAX_MESSAGE_READS, advance, start_waiting_jobs
from job_driver import Failed, JobDriver

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store


async def replay(database: Connection) -> int:
    """Resend the message of every ended task."""
    rows = await database.execute(
        "select pgmq.send('orchestration_step_results', jsonb_build_object('job_id', job_id, 'task_id', id)) "
        "from interlock.tasks where job_id is not null order by random()"
    )
    return len(await rows.fetchall())


async def requeue_by_hand(driver: JobDriver, task_id: UUID) -> None:
    """Requeue a step by SQL, which the API does not allow."""
    await driver.connection.execute(
        "update interlock.tasks set state = 'pending', event = 'requeue', tries = 0, finished_at = null where id = %s",
        [task_id],
    )


async def snapshot(database: Connection) -> list[Any]:
    """Read everything that orchestration writes."""
    tasks = "select id, state, reason, unresolved, taken, failed, advanced, updated_at from interlock.tasks order by id"
    jobs = "select id, status, open_steps, failed_steps, output, error from interlock.jobs order by id"
    return [await (await database.execute(query)).fetchall() for query in (tasks, jobs)]


async def test_duplicates_and_replays_change_nothing(driver: JobDriver) -> None:
    driver.outcomes = {"a": [1, 2], "c": Failed("no")}
    job = await driver.submit(
        step("a", compensate="undo"), step("m", "a", kind="map", over="a"), step("c", "m"), step("d", "c")
    )
    for _ in range(3):
        for task in await driver.claim():
            await driver.settle(task)
        await replay(driver.connection)
        await driver.advance()
        await replay(driver.connection)
        before = await snapshot(driver.connection)
        done = await driver.advance(limit=1000)
        assert (done.advanced, done.duplicates) == (0, done.received)
        assert await snapshot(driver.connection) == before
    await driver.run()
    assert (await driver.job(job))["status"] == "FAILED"
    before = await snapshot(driver.connection)
    sent = await replay(driver.connection)
    assert (await driver.advance(limit=1000)).duplicates == sent
    assert await snapshot(driver.connection) == before
    assert (await read_queue_state(driver.connection)) == {"waiting": 0, "oldest_age": None, "archived": 0}


async def test_a_step_requeued_before_its_failure_was_advanced_counts_at_its_end(driver: JobDriver) -> None:
    driver.outcomes = {"a": Failed("once")}
    job = await driver.submit(step("a"), step("b", "a"))
    (task,) = await driver.claim()
    await driver.settle(task)
    await requeue_by_hand(driver, task.id)
    assert (await driver.advance()).duplicates == 1
    driver.outcomes = {}
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_requeued_step_does_not_count_against_worker_count(driver: JobDriver) -> None:
    driver.outcomes = {"a": Failed("once")}
    job = await driver.submit(step("a"), step("b"), step("c", "b"), step("d", "c"), worker_count=1)
    await driver.run(until=lambda: "a" in driver.ran)
    failed = (await driver.steps(job))["a"]
    assert failed["state"] == "error"
    await requeue_by_hand(driver, failed["id"])
    await driver.run()
    assert (await driver.states(job)) == {"a": "error", "b": "done", "c": "done", "d": "done"}
    assert (await driver.job(job))["status"] == "FAILED"


async def test_a_canceled_step_counts_as_failed(driver: JobDriver) -> None:
    observed = await driver.submit(step("a"), step("b", "a"), step("c", on_failure=["a"]), name="observed")
    recovered = await driver.submit(step("a"), step("b", "a"), step("c", recovers=["a"]), name="recovered")
    for id_ in (observed, recovered):
        found = await driver.steps(id_)
        await cancel_unfinished_tasks(driver.connection, [found["a"]["id"]], actor="ada", reason="not this one")
    await driver.run()
    assert await driver.states(observed) == {"a": "canceled", "b": "skipped", "c": "done"}
    row = await driver.job(observed)
    assert (row["status"], row["reason"]) == ("FAILED", "step a was canceled: not this one")
    assert await driver.states(recovered) == {"a": "canceled", "b": "done", "c": "done"}
    assert (await driver.job(recovered))["status"] == "COMPLETED"


async def test_a_step_canceled_before_the_start_is_advanced(database: Connection) -> None:
    driver = JobDriver(database)
    job = await driver.submit(step("a"), step("b"), step("c", "a", "b", join="any"))
    await cancel_unfinished_tasks(database, [(await driver.steps(job))["a"]["id"]], actor="ada", reason="no")
    await driver.advance()
    await add_live_worker(database)
    assert await start_waiting_jobs(database, actor="o") == 1
    await driver.run()
    assert await driver.states(job) == {"a": "canceled", "b": "done", "c": "done"}
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_move_by_any_client_is_advanced(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("b", "a"))
    (task,) = await driver.claim()
    await driver.connection.execute(
        "update interlock.tasks set state = 'done', event = 'succeed', settled_attempt = attempt, "
        "lease_expires_at = null, finished_at = now() where id = %s",
        [task.id],
    )
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_malformed_message_is_archived_and_holds_up_no_other(driver: JobDriver) -> None:
    bad = ['{"job_id": "nonsense"}', '"words"', "null", '{"task_id": 3}']
    for content in bad:
        await driver.connection.execute("select pgmq.send('orchestration_step_results', %s::jsonb)", [content])
    job = await driver.submit(step("a"), step("b", "a"))
    await driver.settle((await driver.claim())[0])
    for _ in range(MAX_MESSAGE_READS):
        await advance(driver.connection, actor="o", visibility=0)
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"
    failures = await read_orchestration_failures(driver.connection)
    assert len(failures) == len(bad)
    assert all("it is not" in row["error"] for row in failures)
    assert (await read_queue_state(driver.connection))["archived"] == len(bad)
    assert (await read_queue_state(driver.connection))["waiting"] == 0


async def test_a_job_that_cannot_be_advanced_holds_up_no_other_in_the_batch(driver: JobDriver) -> None:
    broken = await driver.submit(step("a"), step("b", "a"), name="broken")
    well = await driver.submit(step("a"), step("b", "a"), name="well")
    await driver.connection.execute(
        "create function interlock.refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$"
    )
    await driver.connection.execute(
        "create trigger refuse before update on interlock.tasks for each row "
        f"when (new.state = 'pending' and new.job_id = '{broken}') execute function interlock.refuse()".encode()
    )
    for task in await driver.claim():
        await driver.settle(task)
    done = await driver.advance()
    assert (done.received, done.advanced, done.failed) == (2, 1, 1)
    assert (await driver.states(well))["b"] == "pending"
    for _ in range(MAX_MESSAGE_READS - 1):
        await driver.connection.execute("update pgmq.q_orchestration_step_results set vt = now()")
        assert (await driver.advance()).failed == 1
    (failure,) = await read_orchestration_failures(driver.connection)
    assert failure["job_id"] == broken
    assert "not this one" in failure["error"]
    assert (await driver.states(broken)) == {"a": "done", "b": "waiting"}, "nothing of it is half done"


async def test_an_orchestrator_crash_loses_no_message(driver: JobDriver, url: str) -> None:
    job = await driver.submit(step("a"), step("b", "a"))
    await driver.settle((await driver.claim())[0])
    async with connect(url) as doomed, doomed.transaction(force_rollback=True):
        assert (await advance(doomed, actor="o")).released == 1
    assert (await driver.states(job))["b"] == "waiting"
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_advance_uses_the_time_of_the_caller(driver: JobDriver) -> None:
    driver.now = datetime(2026, 1, 1, tzinfo=UTC)
    job = await driver.submit(step("a"), timeout=60)
    await driver.run()
    row = await driver.job(job)
    assert row["created_at"] == row["started_at"] == row["completed_at"] == driver.now
