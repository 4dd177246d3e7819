"""Lost and archived messages: resent with backoff, or at once by a replay."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from factories import add_live_worker, step
from interlock.store.jobs import ORCHESTRATION
from interlock.store.step_results import (
    read_orchestration_failures,
    read_queue_state,
    refresh_pending_reasons,
    replay_results,
    resend_lost_results,
)
from interlock.workflow.advance import MAX_MESSAGE_READS, advance
from interlock.workflow.cancel import cancel_job
from job_driver import JobDriver

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

MINUTE = timedelta(minutes=1)


async def set_aside(driver: JobDriver) -> UUID:
    """Start a job whose first result cannot be advanced."""
    job = await driver.submit(step("a"), step("b", "a"))
    await driver.connection.execute(
        "create or replace function interlock.refuse() returns trigger language plpgsql as "
        "$$ begin raise 'not this one'; end $$"
    )
    await driver.connection.execute(
        "create trigger refuse before update on interlock.tasks for each row "
        "when (new.state = 'pending' and new.step = 'b') execute function interlock.refuse()"
    )
    await driver.settle((await driver.claim())[0])
    await fail(driver)
    return job


async def fail(driver: JobDriver) -> None:
    """Advance until the message is archived."""
    for _ in range(MAX_MESSAGE_READS):
        await advance(driver.connection, actor="o", visibility=0)
    assert (await read_queue_state(driver.connection))["waiting"] == 0


async def test_a_lost_message_is_resent(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("b", "a"))
    await driver.settle((await driver.claim())[0])
    await driver.connection.execute("select pgmq.purge_queue('orchestration_step_results')")
    later = datetime.now(UTC) + 2 * MINUTE
    assert await resend_lost_results(driver.connection) == 0
    assert await resend_lost_results(driver.connection, now=later) == 1
    assert await resend_lost_results(driver.connection, now=later) == 0
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"
    assert await resend_lost_results(driver.connection, now=later + 10 * MINUTE) == 0


async def test_a_result_whose_message_is_in_the_queue_is_not_resent(driver: JobDriver) -> None:
    await driver.submit(step("a"))
    await driver.settle((await driver.claim())[0])
    await driver.connection.execute(
        "update pgmq.q_orchestration_step_results set enqueued_at = enqueued_at - interval '10 minutes'"
    )
    assert await resend_lost_results(driver.connection, now=datetime.now(UTC) + 5 * MINUTE) == 0
    assert (await read_queue_state(driver.connection))["waiting"] == 1


async def test_steps_of_ended_jobs_are_marked_as_advanced(database: Connection) -> None:
    driver = JobDriver(database)
    job = await driver.submit(step("a"))
    await cancel_job(database, job, actor="ada")
    await driver.run()
    assert await resend_lost_results(database, now=datetime.now(UTC) + 2 * MINUTE) == 0
    (row,) = await (
        await database.execute("select count(*) as left from interlock.tasks where not advanced")
    ).fetchall()
    assert row["left"] == 0


async def test_resend_lost_results_uses_its_index(driver: JobDriver) -> None:
    await driver.connection.execute("set enable_seqscan = off")
    rows = await driver.connection.execute(
        "explain " + ORCHESTRATION["resend_lost_results"].sql, {"min_age": MINUTE, "limit": 100, "now": None}
    )
    text = "\n".join(row["QUERY PLAN"] for row in await rows.fetchall())
    assert "Index Scan using tasks_unadvanced" in text


async def test_an_archived_message_sets_the_reason_of_its_job_and_is_resent(driver: JobDriver) -> None:
    job = await set_aside(driver)
    row = await driver.job(job)
    assert row["reason"] == "a step result was set aside: StatementError: not this one"
    pauses = []
    for times in range(1, 4):
        (failure,) = await read_orchestration_failures(driver.connection)
        assert failure["times"] == times
        pauses.append(failure["retry_at"] - failure["failed_at"])
        assert await resend_lost_results(driver.connection, now=failure["retry_at"] - timedelta(seconds=1)) == 0
        assert await resend_lost_results(driver.connection, now=failure["retry_at"]) == 1
        assert await resend_lost_results(driver.connection, now=failure["retry_at"]) == 0
        await fail(driver)
    assert pauses == [MINUTE, 2 * MINUTE, 4 * MINUTE]
    await driver.connection.execute("drop trigger refuse on interlock.tasks")
    (failure,) = await read_orchestration_failures(driver.connection)
    await resend_lost_results(driver.connection, now=failure["retry_at"])
    await driver.advance()
    assert (await driver.job(job))["reason"] is None
    assert await read_orchestration_failures(driver.connection) == []
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


@pytest.mark.parametrize("by_job", [True, False])
async def test_a_replay_resends_archived_messages_at_once(driver: JobDriver, by_job: object) -> None:
    job = await set_aside(driver)
    await driver.connection.execute("drop trigger refuse on interlock.tasks")
    other = await driver.submit(step("a"), name="other")
    assert await replay_results(driver.connection, other) == 0
    assert await replay_results(driver.connection, job if by_job else None) == 1
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"
    assert (await read_queue_state(driver.connection))["archived"] == 0


async def test_a_replay_of_a_job_resends_its_lost_results(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("b", "a"))
    await driver.settle((await driver.claim())[0])
    await driver.connection.execute("select pgmq.purge_queue('orchestration_step_results')")
    assert await replay_results(driver.connection) == 0
    assert await replay_results(driver.connection, job) == 1
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_the_reason_of_a_job_that_waits_for_workers_is_refreshed(database: Connection) -> None:
    driver = JobDriver(database)
    job = await driver.submit(step("a", namespace="fulfillment"), step("b", namespace="inventory"))
    both = (await driver.job(job))["reason"]
    assert both == "no live worker serves namespaces 'fulfillment', 'inventory'"
    assert await refresh_pending_reasons(database) == 0
    await add_live_worker(database, "inventory")
    assert await refresh_pending_reasons(database) == 1
    assert (await driver.job(job))["reason"] == "no live worker serves namespace 'fulfillment'"
    assert await refresh_pending_reasons(database) == 0
