"""Explain at an earlier moment: reasons are stored when they change, and nothing else is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest

from factories import add_live_worker, enqueue_by_sql, step
from interlock import Interlock
from interlock.config import Config
from interlock.errors import InputError, UnknownNameError, UnknownTaskError
from interlock.lifecycle import SupervisedWorkerEvent, TaskRowEvent
from interlock.store.limits import Limit, pause_namespace, put_limits, resume_namespace
from interlock.store.retention import Retention, delete_expired
from interlock.store.schedules import Schedule, pause_schedules, put_schedules, resume_schedules
from interlock.store.tasks import Outcome, claim_pending_tasks, settle_running_tasks
from interlock.store.workers import RegisteredProcess, move_worker, record_heartbeat, register_worker
from job_driver import JobDriver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store


@pytest.fixture
async def app(url: str) -> AsyncIterator[Interlock]:
    async with Interlock(config=Config(database_url=url), actor="ada") as opened:
        yield opened


async def moment(database: Connection) -> datetime:
    """Return the server's time."""
    (row,) = await (await database.execute("select clock_timestamp() as now")).fetchall()
    now: datetime = row["now"]
    return now


async def reasons(database: Connection, kind: str) -> list[dict[str, Any]]:
    """Read the stored reasons of a kind."""
    query = "select subject, cause, reason from interlock.wait_reasons where kind = %s order by id"
    return list(await (await database.execute(query, [kind])).fetchall())


async def test_plain_tasks_and_steps_store_no_reasons(database: Connection) -> None:
    """Enqueue, claim and settle write nothing more than their records."""
    await add_live_worker(database)
    task = await enqueue_by_sql(database, type="add")
    (claimed,) = await claim_pending_tasks(database, actor="w", types=["add"], limit=1)
    await settle_running_tasks(database, [Outcome(task, claimed.attempt, TaskRowEvent.SUCCEED, output=1)], actor="w")
    driver = JobDriver(database)
    await driver.submit(step("a"), step("b", "a"), step("c", "b"))
    await driver.run()
    assert await reasons(database, "task") == []
    assert await reasons(database, "job") == []


async def test_the_reason_of_a_wait_is_stored_when_it_changes(app: Interlock, database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=1)])
    task = await enqueue_by_sql(database, type="send", limit_keys=["mail"])
    before = await moment(database)
    await database.execute("update interlock.tasks set reason = 'limit mail: 1 of 2 pending or running'")
    await database.execute("update interlock.tasks set reason = 'limit mail: 2 of 2 pending or running'")
    between = await moment(database)
    await pause_namespace(database, "default", "on fire", "ada")
    paused = await moment(database)
    await resume_namespace(database, "default", "ada")
    stored = [(row["cause"], row["reason"]) for row in await reasons(database, "task")]
    assert stored[:2] == [
        ("limit", "limit mail: 1 of 2 pending or running"),
        ("namespace", "namespace default is paused: on fire"),
    ], "other numbers are no other reason"
    await app.handle(task).cancel("not wanted")
    said = {
        at: [fact.text for fact in (await app.explain(task, at=at)).facts]
        for at in (before, between, paused, await moment(database))
    }
    assert [texts[0] for texts in said.values()] == [
        "limit mail",
        "limit mail: 1 of 2 pending or running",
        "namespace default is paused: on fire",
        "not wanted",
    ]
    then = await app.explain(task, at=paused)
    assert (then.state, then.at) == ("waiting", paused)
    assert all(fact.command is None for fact in then.facts), "a command for yesterday would be of no use"
    assert "it stayed so until" in then.facts[0].evidence[-1].text
    namespace = await app.explain("default", kind="namespace", at=paused)
    assert (namespace.state, namespace.facts[0].text) == ("paused", "paused by ada: on fire")
    assert (await app.explain("default", kind="namespace", at=between)).state == "active"


async def test_missing_workers_of_an_earlier_moment_are_named(app: Interlock, database: Connection) -> None:
    task = await enqueue_by_sql(database, type="add")
    unserved = await moment(database)
    first = RegisteredProcess("worker-1", namespaces=("default",), types=("other",))
    await register_worker(database, first, lease=timedelta(hours=1))
    no_handler = await moment(database)
    deployed = RegisteredProcess("worker-1", namespaces=("default",), types=("add", "other"))
    await record_heartbeat(database, deployed, lease=timedelta(hours=1))
    served = await moment(database)
    await move_worker(database, "worker-1", SupervisedWorkerEvent.PAUSE, actor="ada", reason="disk")
    paused = await moment(database)
    await move_worker(database, "worker-1", SupervisedWorkerEvent.RESUME, actor="ada")
    await database.execute("update interlock.workers set seen_until = clock_timestamp()")
    silent = await moment(database)
    await record_heartbeat(database, deployed, lease=timedelta(hours=1))
    back = await moment(database)

    async def said(at: datetime) -> str:
        return (await app.explain(task, at=at)).facts[0].text

    assert await said(unserved) == "no live worker serves namespace 'default'; none is live"
    assert await said(no_handler) == "no live worker has the handler add; worker-1 has other"
    assert await said(served) == "live workers could run it: worker-1; how busy they were then is not stored"
    assert await said(paused) == "the workers that could run it are paused: worker-1"
    assert await said(silent) == "no live worker serves namespace 'default'; none is live"
    assert await said(back) == await said(served)
    worker = await app.explain("worker-1", at=paused)
    assert (worker.state, worker.facts[0].text) == ("PAUSED", "disk")
    worker = await app.explain("worker-1", at=silent)
    assert worker.facts[0].code == "no_heartbeat"
    assert "its process sent no heartbeat until" in worker.facts[0].text


async def test_a_job_of_an_earlier_moment_shows_its_open_steps(app: Interlock, database: Connection) -> None:
    await add_live_worker(database)
    driver = JobDriver(database)
    job = await driver.submit(step("a"), step("boss", "a", kind="approval"))
    early = await moment(database)
    await driver.run(until=lambda: "a" in driver.ran)
    await driver.advance()
    waiting = await moment(database)
    assert [(cause.name, cause.state) for cause in (await app.explain(job, at=early)).causes] == [
        ("a", "pending"),
        ("boss", "waiting"),
    ]
    (boss,) = (await app.explain(job, kind="job", at=waiting)).causes
    assert boss.facts[0].text == "waits for approval", "the step first waited for a"


async def test_a_schedule_of_an_earlier_moment(app: Interlock, database: Connection) -> None:
    await put_schedules(database, [Schedule("nightly", "clean", every=timedelta(hours=1))])
    active = await moment(database)
    await pause_schedules(database, ["nightly"], actor="ada", reason="stock-taking")
    paused = await moment(database)
    await resume_schedules(database, ["nightly"], actor="bob")
    told = [await app.explain("nightly", at=at) for at in (active, paused, await moment(database))]
    assert [(one.state, one.facts[0].code, one.facts[0].text) for one in told] == [
        ("active", "schedule_active", "active"),
        ("paused", "schedule_paused", "paused by ada: stock-taking"),
        ("active", "schedule_active", "resumed by bob"),
    ]
    with pytest.raises(UnknownNameError, match="nothing is stored of schedule 'nightly'"):
        await app.explain("nightly", at=active - timedelta(days=1))


async def test_moments_without_records_are_refused(app: Interlock, database: Connection) -> None:
    task = await enqueue_by_sql(database, type="add")
    with pytest.raises(UnknownTaskError, match="its first one is of"):
        await app.explain(task, at=datetime(2020, 1, 1, tzinfo=UTC))
    with pytest.raises(InputError, match="out of range"):
        await app.explain(task, at=datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))))
    with pytest.raises(InputError, match="must not be in the future"):
        await app.explain(task, at=datetime(2999, 1, 1, tzinfo=UTC))
    await put_limits(database, [Limit("mail", max_running=1)])
    with pytest.raises(InputError, match="the use of a limit is not kept"):
        await app.explain("mail", kind="limit", at=await moment(database))


async def test_retention_deletes_old_reasons_and_keeps_what_still_holds(database: Connection) -> None:
    await register_worker(database, RegisteredProcess("worker-1", namespaces=("a",)), lease=timedelta(hours=1))
    await register_worker(database, RegisteredProcess("worker-2", namespaces=("a",)), lease=timedelta(hours=1))
    await record_heartbeat(database, RegisteredProcess("worker-1", namespaces=("b",)), lease=timedelta(hours=1))
    await pause_namespace(database, "a", None, "ada")
    await resume_namespace(database, "a", "ada")
    await database.execute("update interlock.wait_reasons set since = now() - interval '100 days'")
    await delete_expired(database, Retention(records=timedelta(days=90)))
    kept = [
        (row["subject"], row["reason"]) for kind in ("worker", "namespace") for row in await reasons(database, kind)
    ]
    assert kept == [("worker-2", "a"), ("worker-1", "b"), ("a", "resumed")]
