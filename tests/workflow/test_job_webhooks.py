"""Webhooks of jobs: one for each end, written with it by whichever statement ends the job, and posted like a task's."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from factories import step, workflow
from interlock.store.webhooks import list_given_up_webhooks
from interlock.store.workflows import put_workflow
from interlock.worker.maintenance.webhooks import WebhooksDuty, WebhookSettings
from interlock.workflow.advance import cancel_overdue_jobs
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob
from interlock.workflow.submit import reject_job, submit_job
from job_driver import Failed, JobDriver
from webhook_receiver import Receiver

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

URL = "https://shop.example/hook"


async def outbox(connection: Connection) -> list[tuple[Any, ...]]:
    query = "select job_id, task_id, attempt, state, url from interlock.callbacks order by id"
    return [tuple(row.values()) for row in await (await connection.execute(query)).fetchall()]


def of_job(job: UUID, status: str) -> list[tuple[Any, ...]]:
    return [(job, None, None, status, URL)]


async def test_a_completed_job_has_one_webhook(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("b", "a"), callback_url=URL)
    await driver.submit(step("a"), step("b", "a"))
    assert await outbox(driver.connection) == []
    await driver.run()
    assert await outbox(driver.connection) == of_job(job, "COMPLETED")


async def test_a_job_that_the_orchestrator_completes_has_one_webhook(driver: JobDriver) -> None:
    driver.outcomes = {"d": "x"}
    job = await driver.submit(
        step("d", kind="decision", branches=["x", "y"]), step("x", "d"), step("y", "d"), callback_url=URL
    )
    await driver.run()
    assert await outbox(driver.connection) == of_job(job, "COMPLETED")


async def test_a_failed_job_has_one_webhook_after_its_compensations(driver: JobDriver) -> None:
    driver.outcomes = {"b": Failed("no")}
    job = await driver.submit(step("a", compensate="undo"), step("b", "a"), callback_url=URL)
    seen: list[Any] = []
    while not seen and (claimed := await driver.claim()):
        for task in claimed:
            assert await outbox(driver.connection) == [], "it has not ended"
            await driver.settle(task)
        await driver.advance()
        seen = await outbox(driver.connection)
    assert driver.ran == ["a", "b", "compensate:a"]
    assert seen == of_job(job, "FAILED")


@pytest.mark.parametrize("starts", [True, False])
async def test_a_canceled_job_has_one_webhook(driver: JobDriver, starts: bool) -> None:  # noqa: FBT001 - a parameter of the test
    if not starts:
        await driver.connection.execute("update interlock.workers set seen_until = now()")
    job = await driver.submit(step("a"), callback_url=URL)
    assert await cancel_job(driver.connection, job, actor="ada")
    assert not await cancel_job(driver.connection, job, actor="ada")
    await driver.run()
    assert (await driver.job(job))["status"] == "CANCELED"
    assert await outbox(driver.connection) == of_job(job, "CANCELED")


async def test_an_overdue_job_has_one_webhook(driver: JobDriver) -> None:
    driver.now = datetime(2030, 1, 1, tzinfo=UTC)
    job = await driver.submit(step("a"), callback_url=URL, timeout=5)
    driver.now = datetime(2030, 1, 2, tzinfo=UTC)
    assert await cancel_overdue_jobs(driver.connection, actor="o", now=driver.now) == 1
    await driver.run()
    assert await outbox(driver.connection) == of_job(job, "CANCELED")


async def test_a_rejected_job_has_the_webhook_of_its_workflow(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a"), callback_url=URL))
    job = await reject_job(driver.connection, NewJob("w", {}), "does not fit", actor="ada")
    assert job is not None
    assert await outbox(driver.connection) == of_job(job, "FAILED")


async def test_the_webhook_belongs_to_the_transaction_of_the_end(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), callback_url=URL)
    end = "update interlock.jobs set status = 'FAILED', event = 'error' where id = %s"
    async with driver.connection.transaction(force_rollback=True):
        await driver.connection.execute(end, [job])
        assert await outbox(driver.connection) == of_job(job, "FAILED")
    assert await outbox(driver.connection) == []
    await driver.connection.execute(end, [job])
    assert await outbox(driver.connection) == of_job(job, "FAILED"), "a client with psql ends it"


async def test_no_client_can_send_webhooks_by_a_trigger_of_its_own(driver: JobDriver) -> None:
    await driver.connection.execute("create table mine (id uuid, status text, callback_url text)")
    await driver.connection.execute(
        "create trigger t after insert on mine for each row execute function interlock.insert_job_webhook()"
    )
    with pytest.raises(psycopg.Error, match=r"is a trigger of interlock\.jobs only"):
        await driver.connection.execute("insert into mine values (gen_random_uuid(), 'FAILED', 'https://a.example')")


async def test_the_webhook_of_a_job_is_posted_with_its_status_and_workflow(driver: JobDriver) -> None:
    async with Receiver().listen() as receiver:
        job = await driver.submit(
            step("a"), name="order", version="2", callback_url=f"http://127.0.0.1:{receiver.port}/hook"
        )
        await driver.run()
        duty = WebhooksDuty(WebhookSettings(secret="hunter2", allow_private=True))  # noqa: S106 - of the test
        await duty.run_once(driver.connection)
    (got,) = receiver.received
    assert json.loads(got.body) == {"job_id": str(job), "status": "COMPLETED", "workflow": "order", "version": "2"}
    assert "interlock-signature" in got.headers
    assert await outbox(driver.connection) == []
    assert (await driver.job(job))["callback"] is None


async def test_a_webhook_of_a_job_that_was_given_up_is_a_dead_letter(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), callback_url="http://127.0.0.1:1/hook")
    await driver.run()
    await WebhooksDuty(WebhookSettings()).run_once(driver.connection)
    (dead,) = await list_given_up_webhooks(driver.connection)
    assert (dead.job_id, dead.task_id, dead.state) == (job, None, "COMPLETED")
    assert dead.error == "the receiver's address is not public; see callback_allow_private"
    shown = (await driver.job(job))["callback"]
    assert (shown["tries"], shown["error"]) == (1, dead.error)


async def test_a_child_job_has_the_webhook_of_its_own_workflow(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a"), name="kid"))
    parent = await driver.submit(step("k", kind="child", workflow="kid"), name="parent", callback_url=URL)
    await driver.run()
    assert await outbox(driver.connection) == of_job(parent, "COMPLETED")


async def test_a_job_of_an_app_without_a_url_of_its_own_uses_the_one_of_the_app(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a")))
    job = await submit_job(driver.connection, NewJob("w", {}, default_callback_url=URL), actor="ada")
    assert (await driver.job(job.id))["callback_url"] == URL
