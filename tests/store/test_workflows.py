"""Workflows and jobs in the database: declared, submitted, started, read, canceled."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from factories import add_live_worker, step, workflow
from interlock.errors import DefinitionChangedError, InputError, RequestReusedError, StoreError
from interlock.postgres.connection import connect
from interlock.postgres.migrate import grant, migrate
from interlock.postgres.pgmq import use_queue
from interlock.store.jobs import JobFilter, find_jobs, read_job_history
from interlock.store.step_results import read_queue_state
from interlock.store.tasks import read_task_history
from interlock.store.workflows import list_workflows, put_workflow, read_workflow
from interlock.workflow.advance import cancel_overdue_jobs, start_waiting_jobs
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob
from interlock.workflow.queued_jobs import start_queued_jobs, validate_submitted_jobs
from interlock.workflow.submit import submit_job, submit_jobs
from job_driver import Failed, JobDriver

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store


async def test_a_workflow_is_stored_once_and_never_changes(database: Connection) -> None:
    document = workflow(step("a"), step("b", "a"))
    stored = await put_workflow(database, document)
    assert await put_workflow(database, dict(reversed(document.items()))) == stored, "the order of keys is no change"
    with pytest.raises(DefinitionChangedError, match=r"'w' version '1' is stored with another.*step 'b' was removed"):
        await put_workflow(database, workflow(step("a"), step("c", "a")))
    newer = await put_workflow(database, workflow(step("a"), version="2"))
    assert newer != stored
    found = await read_workflow(database, "w")
    assert found is not None
    assert (found.id, found.version, found.namespace) == (newer, "2", "default"), "the newest unless one is named"
    old = await read_workflow(database, "w", "1")
    assert old is not None
    assert old.definition == document
    assert await read_workflow(database, "w", "3") is None
    assert [(row.name, row.version) for row in await list_workflows(database)] == [("w", "2"), ("w", "1")]


async def test_a_job_whose_first_steps_are_served_starts_with_its_submit(driver: JobDriver) -> None:
    job = await driver.submit(step("a", priority=3, max_tries=2), step("b", "a"), input={"x": 1})
    row = await driver.job(job)
    assert (row["status"], row["workflow"], row["version"], row["input"]) == ("RUNNING", "w", "1", {"x": 1})
    assert (row["open_steps"], row["actor"], row["correlation_id"], row["depth"]) == (2, "ada", job, 0)
    assert row["started_at"] is not None
    history = await read_job_history(driver.connection, job)
    assert [record["event"] for record in history] == ["create", "validate", "allocate_resources"]
    steps = await driver.steps(job)
    assert [(name, found["state"]) for name, found in steps.items()] == [("a", "pending"), ("b", "waiting")]
    assert (steps["b"]["held_by"], steps["b"]["reason"]) == ("dependency", "waits for a")
    assert (steps["a"]["priority"], steps["a"]["max_tries"], steps["b"]["upstreams"]) == (3, 2, ["a"])
    assert (await driver.advance()).received == 0, "no orchestrator is needed for that"


async def test_a_job_without_workers_is_pending_with_the_reason(database: Connection) -> None:
    driver = JobDriver(database)
    job = await driver.submit(step("a", namespace="inventory"), step("b", namespace="fulfillment"), step("c", "a", "b"))
    row = await driver.job(job)
    assert row["status"] == "PENDING"
    assert row["reason"] == "no live worker serves namespaces 'fulfillment', 'inventory'"
    assert set((await driver.states(job)).values()) == {"waiting"}
    await add_live_worker(database, "inventory", worker="w_1")
    assert await start_waiting_jobs(database, actor="o") == 0, "one of two is not enough"
    await add_live_worker(database, "fulfillment", worker="w_2")
    assert await start_waiting_jobs(database, actor="o") == 1
    assert await start_waiting_jobs(database, actor="o") == 0
    assert await driver.states(job) == {"a": "pending", "b": "pending", "c": "waiting"}
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_paused_or_silent_worker_is_not_live(database: Connection) -> None:
    await add_live_worker(database)
    await database.execute("update interlock.workers set seen_until = now() - interval '1 s'")
    job = await JobDriver(database).submit(step("a"))
    row = await JobDriver(database).job(job)
    assert row["reason"] == "no live worker serves namespace 'default'"
    await database.execute(
        "update interlock.workers set seen_until = now() + interval '1 h', status = 'PAUSED', event = 'pause'"
    )
    assert await start_waiting_jobs(database, actor="o") == 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"input": {"amount": 2}}, "input"),
        ({"version": "2"}, "version"),
        ({"worker_count": 2}, "worker_count"),
        ({"timeout": 5.0}, "timeout"),
        ({"tags": ["eu"]}, "tags"),
        ({"attributes": {"customer": 7}}, "attributes"),
        ({"input": {}, "worker_count": 2}, "input, worker_count"),
    ],
)
async def test_a_used_request_id_with_another_request_is_refused(
    driver: JobDriver, changed: dict[str, Any], named: str
) -> None:
    await put_workflow(driver.connection, workflow(step("a"), version="2"))
    first = await driver.submit(step("a"), input={"amount": 1}, request_id="r")
    same = NewJob("w", {"amount": 1.0}, request_id="r", correlation_id=uuid4())
    assert await submit_job(driver.connection, same, actor="ada") == (first, False)
    with pytest.raises(RequestReusedError, match=rf"'r' was used before, for job {first} with another {named};"):
        await submit_job(driver.connection, replace(same, **changed), actor="ada")
    twice = [NewJob("w", {"n": 1}, request_id="s"), NewJob("w", {"n": 2}, request_id="s")]
    with pytest.raises(RequestReusedError):
        await submit_jobs(driver.connection, twice, actor="ada")
    assert len(await find_jobs(driver.connection)) == 1


async def test_a_request_id_makes_one_job(driver: JobDriver) -> None:
    first = await driver.submit(step("a"), request_id="r")
    again = await submit_job(driver.connection, NewJob("w", {}, request_id="r"), actor="ada")
    assert again == (first, False)
    both = await submit_jobs(
        driver.connection, [NewJob("w", {}, request_id="r"), NewJob("w", {}, request_id="s")], actor="ada"
    )
    assert [made.created for made in both] == [False, True]
    assert len(await find_jobs(driver.connection)) == 2
    await put_workflow(driver.connection, workflow(step("a"), name="other"))
    with pytest.raises(RequestReusedError, match=rf"'r' was used before, for job {first} with another workflow"):
        await submit_jobs(driver.connection, [NewJob("other", {}), NewJob("other", {}, request_id="r")], actor="ada")
    assert len(await find_jobs(driver.connection)) == 2, "all or none"
    mine = uuid4()
    assert await submit_job(driver.connection, NewJob("w", {}, job_id=mine), actor="ada") == (mine, True)
    assert await submit_job(driver.connection, NewJob("w", {}, job_id=mine), actor="ada") == (mine, False)


async def test_invalid_jobs_are_refused(driver: JobDriver) -> None:
    await driver.submit(step("a"))

    async def refused(match: str, job: NewJob) -> None:
        with pytest.raises(InputError, match=match):
            await submit_job(driver.connection, job, actor="ada")

    await refused(r"there is no workflow 'x'; known are w", NewJob("x", {}))
    await refused(r"workflow 'w' has no version '9'; it has 1", NewJob("w", {}, version="9"))
    await refused(r"worker_count must be a whole number from 1 to 10", NewJob("w", {}, worker_count=11))
    await refused(r"timeout must be a positive number of seconds", NewJob("w", {}, timeout=0))
    await refused(r"cannot be a parent: there is no such job", NewJob("w", {}, parent_job_id=uuid4()))


async def test_a_parent_job_must_not_be_over(driver: JobDriver) -> None:
    parent = await driver.submit(step("a"))
    child = await submit_job(driver.connection, NewJob("w", {}, parent_job_id=parent), actor="ada")
    assert (await driver.job(child.id))["depth"] == 1
    await driver.run()
    with pytest.raises(InputError, match="it is COMPLETED"):
        await submit_job(driver.connection, NewJob("w", {}, parent_job_id=parent), actor="ada")


async def test_without_its_queue_a_job_is_refused_and_tasks_work(driver: JobDriver) -> None:
    await driver.submit(step("a"))
    await driver.run()
    await driver.connection.execute("drop schema pgmq cascade")
    with pytest.raises(StoreError, match=r"jobs need PGMQ .*run `interlock migrate`"):
        await submit_job(driver.connection, NewJob("w", {}), actor="ada")


async def test_another_queue_can_be_used_once_the_old_one_is_empty(driver: JobDriver) -> None:
    assert not await use_queue(driver.connection, "orchestration_step_results")
    job = await driver.submit(step("a"), step("b", "a"))
    (task,) = await driver.claim()
    await driver.settle(task)
    with pytest.raises(Exception, match="still has 1 messages"):
        await use_queue(driver.connection, "other")
    await driver.advance()
    assert await use_queue(driver.connection, "other")
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"
    total = await driver.connection.execute("select total_messages from pgmq.metrics('other')")
    assert (await total.fetchall())[0]["total_messages"] == 1
    notes: list[str] = []
    await migrate(driver.connection, note=notes.append, queue="third")
    assert notes[-1] == "the results of steps go over the queue third"
    await migrate(driver.connection, note=notes.append, queue="third")
    assert "PGMQ is there already" in notes[-1]
    with pytest.raises(Exception, match="must be made of"):
        await use_queue(driver.connection, "No such; name")


async def test_find_jobs_filters(driver: JobDriver) -> None:
    first = await driver.submit(step("a"))
    await driver.run()
    second = await driver.submit(step("a"), name="other")
    found = await find_jobs(driver.connection)
    assert [row["id"] for row in found] == [second, first], "newest first"
    assert [row["id"] for row in await find_jobs(driver.connection, before=second)] == [first]


async def test_find_jobs_meets_all_conditions_of_a_filter(driver: JobDriver) -> None:
    driver.now = datetime(2026, 1, 1, tzinfo=UTC)
    first = await driver.submit(step("a"), tags=["eu", "vip"], attributes={"customer": 7, "paid": True})
    await driver.run()
    driver.now = datetime(2026, 1, 2, tzinfo=UTC)
    second = await driver.submit(step("a"), tags=["eu"], attributes={"customer": "7"}, parent_job_id=None)
    third = await driver.submit(step("a"), step("b"), version="2", attributes={"customer": 7.0})
    fourth = await driver.submit(step("a"), name="other")

    async def found(**conditions: Any) -> list[UUID]:
        return [row["id"] for row in await find_jobs(driver.connection, JobFilter(**conditions), now=driver.now)]

    assert await found() == [fourth, third, second, first]
    assert await found(statuses=["COMPLETED"]) == [first]
    assert await found(statuses=["COMPLETED", "RUNNING"], workflow="w") == [third, second, first]
    assert await found(workflow="w", version="1") == [second, first]
    assert await found(workflow="other", namespace="default") == [fourth]
    assert await found(namespace="elsewhere") == []
    assert await found(tags=["eu"]) == [second, first]
    assert await found(tags=["vip", "eu"]) == [first]
    assert await found(attributes={"customer": 7}) == [third, first], "7 and 7.0 are the same number"
    assert await found(attributes={"customer": "7"}) == [second], "a string is not a number"
    assert await found(attributes={"customer": 7, "paid": True}) == [first]
    assert await found(created_before=driver.now) == [first]
    assert await found(created_after=driver.now, tags=["eu"]) == [second]
    page = await find_jobs(driver.connection, JobFilter(tags=["eu"]), limit=1)
    rest = await find_jobs(driver.connection, JobFilter(tags=["eu"]), before=page[-1]["id"])
    assert [row["id"] for row in (*page, *rest)] == [second, first]


async def test_a_job_takes_tags_attributes_and_webhook_of_its_workflow_unless_it_has_its_own(driver: JobDriver) -> None:
    defaults: dict[str, Any] = {"tags": ["eu"], "attributes": {"team": "ops"}, "callback_url": "https://a.example/x"}
    await put_workflow(driver.connection, workflow(step("a"), **defaults))
    plain = await submit_job(driver.connection, NewJob("w", {}), actor="ada")
    own: dict[str, Any] = {"tags": [], "attributes": {"customer": 7}, "callback_url": "https://b.example/y"}
    other = await submit_job(driver.connection, NewJob("w", {}, **own), actor="ada")
    assert {name: (await driver.job(plain.id))[name] for name in defaults} == defaults
    assert {name: (await driver.job(other.id))[name] for name in own} == own
    parent = await driver.submit(step("k", kind="child", workflow="w"), name="parent", tags=["us"])
    (child,) = await find_jobs(driver.connection, JobFilter(parent=parent))
    assert child["tags"] == ["eu"], "a child has the tags of its own workflow, not those of its parent"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tags": "eu"}, "tags must be a sequence of non-empty strings, got 'eu'"),
        ({"tags": [f"t{n}" for n in range(101)]}, "tags must be at most 100, got 101"),
        ({"tags": ["x" * 2001]}, "each of the tags must have at most 2,000 bytes"),
        ({"attributes": ["customer"]}, "attributes must be a mapping of names to strings, numbers or booleans"),
        ({"attributes": {str(n): n for n in range(51)}}, "attributes must be at most 50, got 51"),
        ({"attributes": {"a": {"b": 1}}}, "attributes['a'] must be a string, a number or a boolean, got {'b': 1}"),
        ({"attributes": {"a": None}}, "attributes['a'] must be a string, a number or a boolean, got None"),
        ({"attributes": {"a": float("nan")}}, "attributes['a'] must be a string, a number or a boolean, got nan"),
        ({"attributes": {"a": "\0"}}, "attributes['a'] must be a string, a number or a boolean"),
        ({"attributes": {"a": "x" * 2001}}, "attributes['a'] must have at most 2,000 bytes"),
        ({"attributes": {"": 1}}, "each name of the attributes must be a non-empty string, got ''"),
        ({"callback_url": "ftp://a"}, "callback_url"),
    ],
)
async def test_invalid_tags_and_attributes_are_refused(driver: JobDriver, options: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        await driver.submit(step("a"), **options)
    assert message in str(refused.value)
    assert await find_jobs(driver.connection) == []


async def test_canceling_a_pending_job_ends_it_at_once(database: Connection) -> None:
    driver = JobDriver(database)
    job = await driver.submit(step("a"), step("b", "a"))
    assert await cancel_job(database, job, actor="ada", reason="no need")
    row = await driver.job(job)
    assert (row["status"], row["reason"]) == ("CANCELED", "no need")
    assert set((await driver.states(job)).values()) == {"canceled"}
    assert not await cancel_job(database, job, actor="ada"), "a second time changes nothing"
    assert not await cancel_job(database, uuid4(), actor="ada")
    await driver.run()
    assert (await read_queue_state(database))["waiting"] == 0


async def test_canceling_a_running_job_requests_cancellation_and_activates_nothing(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("b"), step("c", "a"))
    (running,) = await driver.claim(limit=1)
    assert await cancel_job(driver.connection, job, actor="ada", reason="enough")
    row = await driver.job(job)
    assert (row["status"], row["ending"], row["reason"]) == ("RUNNING", "CANCELED", "is being canceled: enough")
    states = await driver.states(job)
    assert sorted(states.values()) == ["canceled", "canceled", "running"]
    found = await driver.connection.execute(
        "select cancel_requested_at from interlock.tasks where id = %s", [running.id]
    )
    assert (await found.fetchall())[0]["cancel_requested_at"] is not None
    await driver.run()
    assert (await driver.job(job))["status"] == "RUNNING", "what runs is waited for"
    await driver.settle(running)
    await driver.run()
    row = await driver.job(job)
    assert (row["status"], row["reason"], row["open_steps"]) == ("CANCELED", "enough", 0)
    assert not await cancel_job(driver.connection, job, actor="ada")


async def test_a_job_is_canceled_after_its_timeout(driver: JobDriver) -> None:
    slow = await driver.submit(step("a"), timeout=60)
    await driver.submit(step("a"), name="patient")
    row = await driver.job(slow)
    assert (row["deadline_at"] - row["created_at"]).total_seconds() == 60
    assert await cancel_overdue_jobs(driver.connection, actor="o") == 0
    assert await cancel_overdue_jobs(driver.connection, actor="o", now=row["deadline_at"]) == 1
    assert await cancel_overdue_jobs(driver.connection, actor="o", now=row["deadline_at"]) == 0
    await driver.run()
    row = await driver.job(slow)
    assert (row["status"], row["reason"]) == ("CANCELED", "the job's timeout of 60 s is over")


async def test_the_timeout_of_a_submit_overrides_that_of_the_workflow(driver: JobDriver) -> None:
    await put_workflow(driver.connection, workflow(step("a"), timeout=60))
    made = await submit_job(driver.connection, NewJob("w", {}, timeout=5), actor="ada")
    assert (await driver.job(made.id))["timeout_seconds"] == 5


async def test_every_move_of_a_step_is_recorded_with_its_actor(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("b", "a"))
    await driver.run()
    steps = await driver.steps(job)
    records = await read_task_history(driver.connection, steps["b"]["id"])
    assert [(record.event, record.actor) for record in records] == [
        ("create", "ada"),
        ("release", "o_1"),
        ("claim", "w_1"),
        ("succeed", "w_1"),
    ]


async def test_a_granted_role_can_run_jobs(driver: JobDriver, url: str) -> None:
    await driver.connection.execute("create role lodger login")
    try:
        await grant(driver.connection, "lodger")
        async with connect(url.replace("interlock@", "lodger@", 1)) as connection:
            lodger = JobDriver(connection, {"b": Failed("no")})
            job = await lodger.submit(step("a"), step("m", "a", kind="map", over="a"), step("b", "m"))
            lodger.outcomes["a"] = [1, 2]
            await lodger.run()
            assert (await lodger.job(job))["status"] == "FAILED"
            await connection.execute("select interlock.submit('w', key => 'k')")
            assert await validate_submitted_jobs(connection, actor="o_1") == 1
            assert await start_queued_jobs(connection, actor="o_1") == 1
            with pytest.raises(Exception, match="permission denied"):
                await connection.execute("update interlock.settings set orchestration_queue = 'x'")
    finally:
        await driver.connection.execute("drop owned by lodger cascade")
        await driver.connection.execute("drop role lodger")


async def test_a_job_without_a_timeout_has_no_deadline(driver: JobDriver) -> None:
    job = await driver.submit(step("a"))
    assert (await driver.job(job))["deadline_at"] is None
