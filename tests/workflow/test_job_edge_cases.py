"""Edge cases of jobs: concurrent cancellations, jobs that cannot be started or advanced, and invalid definitions."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import add_live_worker, step, workflow
from interlock.errors import DefinitionError, InputError
from interlock.lifecycle import TaskRowEvent
from interlock.model.graph import MAX_MAP_PARTS, check_definition
from interlock.postgres.connection import connect
from interlock.store.jobs import ORCHESTRATION
from interlock.store.retention import Retention, delete_ended_tasks
from interlock.store.step_results import read_queue_state
from interlock.store.task_admin import cancel_tasks, cancel_unfinished_tasks
from interlock.store.tasks import Outcome, settle_running_tasks
from interlock.store.workflows import put_workflow
from interlock.workflow.advance import advance, cancel_overdue_jobs, resend_cancellations, start_waiting_jobs
from interlock.workflow.cancel import cancel_job
from interlock.workflow.dry_run import dry_run
from interlock.workflow.new_job import NewJob
from interlock.workflow.retry_from import retry_job_from
from interlock.workflow.signals import end_due_waits
from interlock.workflow.submit import submit_job
from job_driver import Failed, JobDriver, name_of

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

REFUSE = "create function interlock.refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$"
ENDLESS = {"start": 0, "stop": 10**10, "size": 1}


async def refuse(database: Connection, job: UUID, table: str, condition: str) -> None:
    """Make the database refuse writes for a job until the trigger is dropped."""
    own = "id" if table == "jobs" else "job_id"
    await database.execute(REFUSE.replace("create function", "create or replace function").encode())
    await database.execute(
        f"create trigger refuse_{job.hex} before update on interlock.{table} for each row "
        f"when (new.{own} = '{job}' and {condition}) execute function interlock.refuse()".encode()
    )


async def until_blocked(database: Connection) -> None:
    """Wait until a session waits for a lock."""
    query = (
        "select count(*) as blocked from pg_stat_activity where datname = current_database() and "
        "wait_event_type = 'Lock'"
    )
    async with asyncio.timeout(30):
        while True:
            (row,) = await (await database.execute(query)).fetchall()
            if row["blocked"]:
                return
            await asyncio.sleep(0.02)


async def child_of(driver: JobDriver, *steps: dict[str, Any]) -> tuple[UUID, UUID]:
    """Start a job with a child of these steps."""
    await put_workflow(driver.connection, workflow(*steps, name="kid"))
    parent = await driver.submit(step("k", kind="child", workflow="kid"), name="parent")
    query = "select id from interlock.jobs where parent_job_id = %s"
    (row,) = await (await driver.connection.execute(query, [parent])).fetchall()
    return parent, row["id"]


# --- a cancellation and the end of steps in one batch


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_step_canceled_instead_of_skipped_counts_once(driver: JobDriver, cancel_first: Any) -> None:
    driver.outcomes = {"a": Failed("boom")}
    parent, kid = await child_of(driver, step("a"), step("b", "a"), step("x"))
    claimed = {name_of(task): task for task in await driver.claim()}
    if cancel_first:
        await cancel_job(driver.connection, parent, actor="ada")
    await driver.settle(claimed["a"])
    if not cancel_first:
        await cancel_job(driver.connection, parent, actor="ada")
    await driver.advance()
    await driver.advance()
    row = await driver.job(kid)
    assert (row["status"], row["ending"], row["open_steps"]) == ("RUNNING", "CANCELED", 1)
    assert await driver.states(kid) == {"a": "error", "b": "canceled", "x": "running"}
    await driver.settle(claimed["x"])
    await driver.run()
    assert (await driver.job(kid))["status"] == "CANCELED"
    assert (await driver.job(parent))["status"] == "CANCELED"
    assert (await read_queue_state(driver.connection))["archived"] == 0


async def test_a_job_canceled_in_the_same_batch_gets_no_parts_and_children(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("z"), name="grandkid"))
    driver.outcomes = {"l": [1, 2, 3]}
    steps = step("m", "l", kind="map", over="l"), step("g", "l", kind="child", workflow="grandkid")
    parent, kid = await child_of(driver, step("l"), *steps)
    for task in await driver.claim():
        await driver.settle(task)
    await cancel_job(driver.connection, parent, actor="ada")
    await driver.run()
    assert driver.ran == ["l"]
    assert await driver.states(kid) == {"l": "done", "m": "canceled", "g": "canceled"}
    (jobs,) = await (await driver.connection.execute("select count(*) as jobs from interlock.jobs")).fetchall()
    assert jobs["jobs"] == 2
    assert (await driver.job(kid))["status"] == "CANCELED"


async def test_a_message_does_not_cancel_or_end_a_job(driver: JobDriver) -> None:
    parent, kid = await child_of(driver, step("a"), step("b", "a"))
    lone = await driver.submit(step("a"), name="lone")
    steps = await driver.steps(parent)
    for content in (
        *({"job_id": str(job), "cancel": "no more", "admit": True} for job in (parent, kid, lone)),
        {"job_id": str(parent), "task_id": str(steps["k"]["id"]), "state": "done", "status": "COMPLETED"},
    ):
        await driver.connection.execute(
            "select pgmq.send('orchestration_step_results', %s::jsonb)", [json.dumps(content)]
        )
    done = await driver.advance()
    assert (done.received, done.finalized, done.failed) == (4, 0, 0)
    assert [(await driver.job(job))["status"] for job in (parent, kid, lone)] == ["RUNNING"] * 3
    assert (await driver.states(parent), await driver.states(kid)) == (
        {"k": "waiting"},
        {"a": "pending", "b": "waiting"},
    )
    await driver.run()
    assert [(await driver.job(job))["status"] for job in (parent, kid, lone)] == ["COMPLETED"] * 3


async def test_repeated_messages_cancel_a_child_once(driver: JobDriver) -> None:
    parent, kid = await child_of(driver, step("a", namespace="far"))
    assert (await driver.job(kid))["status"] == "PENDING"
    await cancel_job(driver.connection, parent, actor="ada")
    for _ in range(2):
        message = "jsonb_build_object('job_id', %s::text)"
        await driver.connection.execute(f"select pgmq.send('orchestration_step_results', {message})".encode(), [kid])
    await driver.run()
    assert [(await driver.job(job))["status"] for job in (parent, kid)] == ["CANCELED"] * 2
    ends = "select count(*) as ends from interlock.job_state_transitions where to_state = 'CANCELED' and job_id = %s"
    (row,) = await (await driver.connection.execute(ends, [kid])).fetchall()
    assert row["ends"] == 1


# --- two people at once


async def test_a_step_that_is_being_skipped_cannot_be_canceled(driver: JobDriver, url: str) -> None:
    driver.outcomes = {"a": Failed("boom")}
    job = await driver.submit(step("a"), step("b", "a"), step("x"), step("y", "x"))
    claimed = {name_of(task): task for task in await driver.claim()}
    await driver.settle(claimed["a"])
    waiting = (await driver.steps(job))["b"]["id"]
    async with connect(url) as person, connect(url) as orchestrator:
        async with person.transaction():
            # by hand, as in psql: no job is locked
            await person.execute(
                "update interlock.tasks set state = 'canceled', event = 'cancel' where id = %s", [waiting]
            )
            advancing = asyncio.create_task(advance(orchestrator, actor="o"))
            await until_blocked(driver.connection)
        await advancing
    await driver.advance()
    row = await driver.job(job)
    assert (row["status"], row["open_steps"]) == ("RUNNING", 2)
    await driver.settle(claimed["x"])
    await driver.run()
    assert await driver.states(job) == {"a": "error", "b": "canceled", "x": "done", "y": "done"}
    assert (await driver.job(job))["status"] == "FAILED"


async def test_a_root_step_canceled_while_its_job_starts_gets_no_parts(database: Connection, url: str) -> None:
    driver = JobDriver(database)
    job = await driver.submit(step("m", kind="map", over_input="xs"), step("x"), input={"xs": [1, 2]})
    await add_live_worker(database)
    root = (await driver.steps(job))["m"]["id"]
    async with connect(url) as person, connect(url) as orchestrator:
        async with person.transaction():
            await person.execute(
                "update interlock.tasks set state = 'canceled', event = 'cancel' where id = %s", [root]
            )
            starting = asyncio.create_task(start_waiting_jobs(orchestrator, actor="o"))
            await until_blocked(database)
        assert await starting == 1
    await driver.run()
    assert await driver.states(job) == {"m": "canceled", "x": "done"}
    assert (await driver.job(job))["status"] == "FAILED"


async def test_canceling_a_step_waits_for_the_advancing_transaction(driver: JobDriver, url: str) -> None:
    job = await driver.submit(step("a"), step("b", "a"))
    waiting = (await driver.steps(job))["b"]["id"]
    async with connect(url) as person, connect(url) as orchestrator:
        async with orchestrator.transaction():
            await orchestrator.execute("select from interlock.lock_jobs(array[%s])", [job])
            canceling = asyncio.create_task(cancel_unfinished_tasks(person, [waiting], actor="ada"))
            await until_blocked(driver.connection)
        assert await canceling == [waiting]


async def test_a_step_retried_while_its_job_is_canceled_does_not_run_again(driver: JobDriver, url: str) -> None:
    job = await driver.submit(step("a"))
    (task,) = await driver.claim()
    async with connect(url) as worker, connect(url) as person:
        async with worker.transaction():
            again = Outcome(task.id, task.attempt, TaskRowEvent.RETRY, delay=0.0, reason="again")
            await settle_running_tasks(worker, [again], actor="w_1")
            canceling = asyncio.create_task(cancel_job(person, job, actor="ada"))
            await until_blocked(driver.connection)
        assert await canceling
    assert await driver.states(job) == {"a": "canceled"}
    await driver.run()
    assert (await driver.job(job))["status"] == "CANCELED"


async def test_a_cancellation_that_deadlocks_with_a_worker_is_run_again(driver: JobDriver, url: str) -> None:
    job = await driver.submit(step("a"), step("b"))
    first, second = sorted(task.id for task in await driver.claim())
    touch = "update interlock.tasks set lease_expires_at = now() + interval '1 h' where id = %s"
    async with connect(url) as worker, connect(url) as person:
        await worker.execute("set deadlock_timeout = '1 min'")  # so that it is the other one that is stopped
        async with worker.transaction():
            await worker.execute(touch, [second])
            canceling = asyncio.create_task(cancel_job(person, job, actor="ada"))
            await until_blocked(driver.connection)
            await worker.execute(touch, [first])
        assert await canceling
    assert (await driver.job(job))["ending"] == "CANCELED"


async def test_a_child_submitted_while_its_parent_is_canceled_is_refused(driver: JobDriver, url: str) -> None:
    parent = await driver.submit(step("a"), name="parent")
    await put_workflow(driver.connection, workflow(step("a"), name="kid"))
    async with connect(url) as person, connect(url) as client:
        async with person.transaction():
            assert await cancel_job(person, parent, actor="ada")
            new = NewJob("kid", {}, parent_job_id=parent)
            submitting = asyncio.create_task(submit_job(client, new, actor="bob"))
            await until_blocked(driver.connection)
        with pytest.raises(InputError, match="cannot be a parent: it is CANCELED"):
            await submitting


async def test_canceling_a_step_cancels_its_child_job(driver: JobDriver) -> None:
    parent, kid = await child_of(driver, step("a"))
    waiting = (await driver.steps(parent))["k"]["id"]
    assert await cancel_tasks(driver.connection, [waiting], actor="ada") == ([], [waiting])
    await driver.advance()
    assert await driver.states(parent) == {"k": "waiting"}, "it ends with its child job"
    await driver.advance()
    await driver.run()
    assert driver.ran == []
    assert await driver.states(parent) == {"k": "canceled"}
    assert (await driver.job(parent))["reason"] == "step k was canceled by ada"
    row = await driver.job(kid)
    assert (row["status"], row["reason"]) == ("CANCELED", "the step that waited for it was canceled")


async def test_failure_handlers_of_a_canceled_child_step_run_after_its_child_has_compensated(
    driver: JobDriver,
) -> None:
    await put_workflow(driver.connection, workflow(step("c1", compensate="undo"), step("c2", "c1"), name="kid"))
    parent = await driver.submit(
        step("k", kind="child", workflow="kid"), step("rescue", recovers=["k"]), step("tell", on_failure=["k"])
    )
    await driver.run(until=lambda: "c1" in driver.ran)
    (c2,) = await driver.claim()
    await cancel_tasks(driver.connection, [(await driver.steps(parent))["k"]["id"]], actor="ada")
    await driver.run()
    assert driver.ran == ["c1"], "the step of the child still runs"
    await cancel_unfinished_tasks(driver.connection, [c2.id], actor="w_1", attempts=[c2.attempt], running=True)
    await driver.run()
    assert driver.ran[:2] == ["c1", "compensate:c1"]
    assert sorted(driver.ran[2:]) == ["rescue", "tell"]
    assert (await driver.states(parent))["k"] == "canceled"
    assert (await driver.job(parent))["status"] == "COMPLETED"


async def test_canceling_a_repeat_stops_it_even_if_its_child_completes_first(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("poll"), name="kid"))
    loop = step("k", kind="child", workflow="kid", repeat_until="output.poll == 'ready'", max_repeats=9)
    parent = await driver.submit(loop, name="parent")
    (poll,) = await driver.claim()
    await driver.settle(poll)
    await cancel_tasks(driver.connection, [(await driver.steps(parent))["k"]["id"]], actor="ada")
    await driver.advance(limit=1)
    await driver.run()
    assert driver.ran == ["poll"]
    row = await driver.job(parent)
    assert (row["status"], row["reason"]) == ("FAILED", "step k was canceled by ada")


async def test_a_lost_message_to_cancel_a_step_is_sent_again(driver: JobDriver) -> None:
    parent, kid = await child_of(driver, step("a"))
    await cancel_tasks(driver.connection, [(await driver.steps(parent))["k"]["id"]], actor="ada")
    await driver.connection.execute("delete from interlock.orchestration_messages")
    assert (await driver.advance()).received == 0
    assert await resend_cancellations(driver.connection) == 1
    await driver.advance()
    await driver.advance()
    await driver.run()
    assert ((await driver.job(kid))["status"], (await driver.job(parent))["status"]) == ("CANCELED", "FAILED")
    assert await resend_cancellations(driver.connection) == 0


# --- data that cannot be acted on


async def test_a_map_over_too_many_parts_fails(driver: JobDriver) -> None:
    for number, given in enumerate((ENDLESS, {"start": 0, "stop": 10**18, "size": 1})):
        driver.outcomes = {"l": given}
        job = await driver.submit(step("l"), step("m", "l", kind="map", over="l"), name=f"w{number}")
        await driver.run()
        row = await driver.job(job)
        assert row["status"] == "FAILED"
        assert row["reason"].startswith(f"step m failed: a map has at most {MAX_MAP_PARTS:,} parts")
    found = dry_run(workflow(step("m", kind="map", over_input="xs")), input={"xs": ENDLESS})
    assert found.reason is not None
    assert found.reason.endswith("parts, and this one would have 10,000,000,000")


@pytest.mark.parametrize("spec", [{"seconds": 1e12}, {"seconds": 2.6e11}, {"until": "9999-12-31T23:59:59-12:00"}])
async def test_a_sleep_that_is_too_long_fails(driver: JobDriver, spec: Any) -> None:
    job = await driver.submit(step("a"), step("nap", "a", kind="sleep", **spec))
    await driver.run()
    row = await driver.job(job)
    assert row["status"] == "FAILED"
    assert "a time must be in the years 1970 to 9998" in row["reason"]
    with pytest.raises(DefinitionError, match=next(iter(spec))):
        check_definition(workflow(step("nap", kind="sleep", **spec)))


async def test_a_sleep_until_a_time_outside_the_calendar_fails(driver: JobDriver) -> None:
    given = {"when": "0001-01-01T00:00:00+12:00"}
    job = await driver.submit(step("nap", kind="sleep", until="when"), input=given)
    row = await driver.job(job)
    assert row["status"] == "FAILED"
    assert row["reason"].startswith("step nap failed: ")
    assert await driver.states(job) == {"nap": "error"}


async def test_a_wait_that_is_too_long_fails(driver: JobDriver) -> None:
    job = await driver.submit(step("s", kind="signal", signal="paid", timeout=1e12))
    assert (await driver.job(job))["status"] == "FAILED"
    with pytest.raises(DefinitionError, match="at most 3155760000 seconds"):
        check_definition(workflow(step("s", kind="signal", signal="paid", timeout=1e12)))


async def test_a_job_timeout_that_is_too_long_is_refused(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a")))
    with pytest.raises(InputError, match="at most 3155760000 seconds"):
        await submit_job(driver.connection, NewJob("w", {}, timeout=1e12), actor="ada")
    with pytest.raises(DefinitionError, match="timeout"):
        check_definition(workflow(step("a"), timeout=1e12))


# --- what cannot be done holds up nothing else


async def test_a_job_that_fails_to_start_backs_off_and_holds_up_no_other(database: Connection) -> None:
    driver = JobDriver(database)
    bad = await driver.submit(step("a"), name="bad")
    good = await driver.submit(step("a"), name="good")
    await refuse(database, bad, "jobs", "new.status = 'RUNNING'")
    await add_live_worker(database)
    assert await start_waiting_jobs(database, actor="o") == 1
    assert (await driver.job(good))["status"] == "RUNNING"
    row = await driver.job(bad)
    assert row["status"] == "PENDING"
    assert row["reason"] == "could not be started: StatementError: not this one"
    assert await start_waiting_jobs(database, actor="o") == 0
    await database.execute(f"drop trigger refuse_{bad.hex} on interlock.jobs".encode())
    assert await start_waiting_jobs(database, actor="o", now=datetime.now(UTC) + timedelta(seconds=5)) == 1


async def test_a_pending_job_over_too_many_parts_starts_and_fails(database: Connection) -> None:
    driver = JobDriver(database)
    bad = await driver.submit(step("m", kind="map", over_input="xs"), name="bad", input={"xs": ENDLESS})
    good = await driver.submit(step("a"), name="good")
    await add_live_worker(database)
    assert await start_waiting_jobs(database, actor="o") == 2
    assert (await driver.job(bad))["status"] == "FAILED"
    assert (await driver.job(good))["status"] == "RUNNING"


async def test_a_job_whose_timeout_fails_holds_up_no_other(driver: JobDriver) -> None:
    steps = step("s", kind="signal", signal="x", timeout=1), step("a")
    bad = await driver.submit(*steps, name="bad", timeout=1)
    good = await driver.submit(*steps, name="good", timeout=1)
    await refuse(driver.connection, bad, "tasks", "new.state in ('canceled', 'error')")
    later = datetime.now(UTC) + timedelta(seconds=60)
    assert await end_due_waits(driver.connection, actor="o", now=later) == 1
    assert (await driver.states(good))["s"] == "error"
    assert (await driver.states(bad))["s"] == "waiting"
    assert (await driver.job(bad))["reason"].startswith("could not be advanced after a wait")
    assert await end_due_waits(driver.connection, actor="o", now=later) == 0
    assert await cancel_overdue_jobs(driver.connection, actor="o", now=later + timedelta(hours=2)) == 1
    assert (await driver.job(good))["ending"] == "CANCELED"
    assert (await driver.job(bad))["reason"].startswith("could not be canceled for its timeout")


async def test_jobs_of_unserved_workflows_are_not_read(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a", namespace="far"), name="far"))
    await put_workflow(driver.connection, workflow(step("a"), name="near"))
    await driver.connection.execute(
        "insert into interlock.jobs (workflow_id, task_description, namespace, root_namespaces, input) "
        "select id, name, 'default', root_namespaces, '{}' from interlock.workflows, generate_series(1, 5000)"
    )
    await driver.connection.execute("update interlock.jobs set status = 'PENDING', event = 'validate'")
    await driver.connection.execute("vacuum analyze interlock.jobs")
    # with statistics from before
    await driver.connection.execute(
        "update interlock.jobs set status = 'CANCELED', event = 'cancel' where task_description = 'near'"
    )
    for mode in ("force_generic_plan", "force_custom_plan"):
        await driver.connection.execute(f"set plan_cache_mode = {mode}".encode())
        query = "explain (analyze, costs off, timing off) " + ORCHESTRATION["read_startable_jobs"].sql
        rows = await (await driver.connection.execute(query, {"limit": 100, "now": None}, prepare=True)).fetchall()
        text = "\n".join(row["QUERY PLAN"] for row in rows)
        assert "Index Scan using jobs_pending" in text, text
        assert "Sort Key: jobs.created_at" not in text


# --- reported errors


async def test_a_canceled_downstream_step_does_not_handle_a_failure(driver: JobDriver) -> None:
    driver.outcomes = {"a": Failed("the real cause")}
    job = await driver.submit(step("a"), step("b", "a"))
    (task,) = await driver.claim()
    await driver.settle(task)
    await cancel_unfinished_tasks(driver.connection, [(await driver.steps(job))["b"]["id"]], actor="ada")
    await driver.run()
    row = await driver.job(job)
    assert (row["status"], row["reason"]) == ("FAILED", "step a failed: the real cause")
    assert row["error"]["steps"]["b"] == {"type": "canceled", "message": "canceled by ada"}, "a failure of its own"


async def test_a_recovery_that_is_canceled_does_not_recover_unless_it_is_recovered_itself(driver: JobDriver) -> None:
    driver.outcomes = {"a": Failed("no")}
    job = await driver.submit(step("a"), step("b", recovers=["a"]), step("c", recovers=["b"]))
    bare = await driver.submit(step("a"), step("b", recovers=["a"]), step("c", on_failure=["b"]), name="bare")
    await driver.run(until=lambda: driver.ran == ["a", "a"])
    await driver.advance()
    for id_ in (job, bare):
        await cancel_unfinished_tasks(driver.connection, [(await driver.steps(id_))["b"]["id"]], actor="ada")
    await driver.run()
    for id_, status in ((job, "COMPLETED"), (bare, "FAILED")):
        assert await driver.states(id_) == {"a": "error", "b": "canceled", "c": "done"}
        assert (await driver.job(id_))["status"] == status


async def test_the_reason_of_a_job_with_one_worker_is_in_the_singular(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("b"), step("c", "a"), worker_count=1)
    assert (await driver.steps(job))["b"]["reason"] == "the job runs at most 1 step at once"
    parts = await driver.submit(
        step("m", kind="map", over_input="xs"), input={"xs": [1, 2]}, worker_count=1, name="parts"
    )
    assert (await driver.steps(parts))["m[1]"]["reason"] == "the job runs at most 1 step at once"
    await driver.settle(next(task for task in await driver.claim() if name_of(task) == "a"))
    await driver.advance()
    assert (await driver.steps(job))["c"]["reason"] == "the job runs at most 1 step at once"


async def test_a_job_with_pruned_steps_cannot_be_retried(driver: JobDriver) -> None:
    driver.outcomes = {"ship": Failed("boom")}
    job = await driver.submit(step("charge"), step("ship", "charge"))
    await driver.run()
    soon = Retention(done=timedelta(0), canceled=None, skipped=None, error=None)
    await delete_ended_tasks(driver.connection, soon, now=datetime.now(UTC) + timedelta(days=1))
    if set(await driver.states(job)) == {"charge", "ship"}:  # steps of a job may be kept together; then by hand
        await driver.connection.execute("delete from interlock.tasks where job_id = %s and step = 'charge'", [job])
    for name in ("ship", "charge"):
        with pytest.raises(InputError, match=r"its steps were pruned \(charge\)"):
            await retry_job_from(driver.connection, job, name, actor="ada")
    with pytest.raises(InputError, match="has no step 'x'; it has charge, ship"):
        await retry_job_from(driver.connection, job, "x", actor="ada")
