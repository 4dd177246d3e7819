"""Explain: every reason why a task or a job waits is reported down to its cause, from the database alone."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from cli_support import UNKNOWN, Shell
from factories import add_live_worker, enqueue_by_sql, step, workflow
from interlock import Interlock
from interlock.config import Config
from interlock.errors import InputError, UnknownTaskError
from interlock.store.explain import EXPLAIN
from interlock.store.limits import Limit, pause_namespace, put_limits
from interlock.store.tasks import claim_pending_tasks
from interlock.store.workers import RegisteredProcess, register_worker
from interlock.store.workflows import put_workflow
from interlock.workflow.cancel import cancel_job
from job_driver import Failed, JobDriver
from jobs_app import chain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from interlock.client.explain import Explanation
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NO_ORCHESTRATOR = "no orchestrator is live, and without one no job goes on: run `interlock orchestrator`"


@pytest.fixture
async def app(url: str) -> AsyncIterator[Interlock]:
    async with Interlock(config=Config(database_url=url), actor="ada") as opened:
        yield opened


@pytest.fixture
def driver(database: Connection) -> JobDriver:
    """Return a driver on a database without a live worker."""
    return JobDriver(database)


async def here(database: Connection, id_: str, *types: str, role: str = "worker", **more: Any) -> None:
    """Register a live process."""
    process = RegisteredProcess(id_, role, more.get("namespaces", ("default",)), types)
    await register_worker(database, process, lease=timedelta(hours=1))


def words(found: Explanation) -> str:
    """Everything that is said, in one text."""
    return "\n".join([f"{found.name} {found.state}", *found.facts, *map(words, found.causes)])


def roots(found: Explanation) -> list[str]:
    """Name what waits for nothing else."""
    return [name for cause in found.causes for name in roots(cause)] if found.causes else [found.name]


async def step_id(driver: JobDriver, job: UUID, name: str) -> UUID:
    id_: UUID = (await driver.steps(job))[name]["id"]
    return id_


async def test_a_pending_task_says_who_is_missing(app: Interlock, database: Connection) -> None:
    task = await enqueue_by_sql(database, type="chain/2/ship")
    found = await app.explain(task)
    assert (found.kind, found.state, found.name) == ("task", "pending", "chain/2/ship")
    assert found.facts == ("no live worker serves namespace 'default'; none is live",)
    await here(database, "elsewhere", "chain/2/ship", namespaces=("reports",))
    assert (await app.explain(task)).facts == ("no live worker serves namespace 'default'; elsewhere serves reports",)
    await here(database, "worker-1", "add", "chain/1/ship")
    expected = "no live worker has the handler chain/2/ship; worker-1 has chain/1/ship, add"
    assert (await app.explain(task)).facts == (expected,)


async def test_a_pending_task_says_what_those_do_who_could_run_it(app: Interlock, database: Connection) -> None:
    await here(database, "worker-1", "add")
    first = await enqueue_by_sql(database, type="add")
    assert "is about to be claimed: worker-1" in (await app.explain(first)).facts[0]
    await claim_pending_tasks(database, actor="worker-1", types=["add"], limit=1)
    second = await enqueue_by_sql(database, type="add")
    assert (await app.explain(second)).facts == ("it waits for its turn at a worker: worker-1 runs 1",)
    await database.execute("update interlock.workers set status = 'PAUSED', event = 'pause'")
    assert (await app.explain(second)).facts == ("the workers that could run it are paused: worker-1",)
    later = await enqueue_by_sql(database, type="add", run_at=datetime(2999, 1, 1, tzinfo=UTC))
    assert (await app.explain(later)).facts == ("it is not due before 2999-01-01 00:00:00 UTC",)


async def test_a_running_task_names_its_worker_and_its_lease(app: Interlock, database: Connection) -> None:
    await here(database, "worker-1", "add")
    task = await enqueue_by_sql(database, type="add", max_tries=2)
    await claim_pending_tasks(database, actor="worker-1", types=["add"], limit=1)
    facts = (await app.explain(task)).facts
    assert facts[0] == "worker-1 runs attempt 1, try 1 of 2"
    assert "its worker is live" in facts[1]
    await database.execute("update interlock.workers set seen_until = now() - interval '1 minute'")
    said = words(await app.explain(task))
    assert "sent its last heartbeat at" in said
    assert "and then it is put back" in said
    await database.execute(
        "update interlock.tasks set lease_expires_at = now() - interval '1 s', cancel_requested_at = now()"
    )
    said = words(await app.explain(task))
    assert "its lease ran out at" in said
    assert "no worker is live: start one" in said
    assert "its cancellation was asked for at" in said


async def test_a_held_task_names_the_limit_or_the_pause(app: Interlock, database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=1, max_starts=5, period=timedelta(seconds=60))])
    limited = await enqueue_by_sql(database, type="send", limit_keys=["mail"])
    facts = (await app.explain(limited)).facts
    assert facts[0] == "limit mail"
    assert facts[1] == "limit mail: 0 of 1 are pending or running"
    assert facts[2] == "limit mail: 0 of 5 in the last 60 s were started"
    await pause_namespace(database, "reports", "on fire", "ada")
    paused = await enqueue_by_sql(database, type="print", namespace="reports")
    facts = (await app.explain(paused)).facts
    assert facts[0] == "namespace reports is paused: on fire"
    assert "by ada; `interlock namespaces resume reports`" in facts[1]


async def test_an_ended_task_says_how_and_shows_its_last_moves(app: Interlock, database: Connection) -> None:
    task = await enqueue_by_sql(database, type="add")
    await app.handle(task).cancel("not wanted")
    facts = (await app.explain(task)).facts
    assert facts[0] == "not wanted"
    assert "pending -cancel-> canceled by ada: not wanted" in facts[-1]


async def test_an_id_of_nothing_is_a_clear_error(app: Interlock) -> None:
    with pytest.raises(UnknownTaskError, match=f"no task and no job {UNKNOWN}"):
        await app.explain(UNKNOWN)
    with pytest.raises(InputError):
        await app.explain("seven")


async def test_the_cause_is_found_through_other_steps(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(step("a"), step("b", "a"), step("c", "b"), step("x"), step("d", "c", "x"))
    found = await app.explain(await step_id(driver, job, "d"))
    assert found.facts[0].startswith(f"it is a step of job {job}, which is RUNNING")
    assert found.facts[1] == "waits for c, x"
    causes = {cause.name: cause for cause in found.causes}
    assert {name: cause.through for name, cause in causes.items()} == {"x": (), "a": ("c", "b")}
    assert causes["a"].facts == ("no live worker has the handler a; w_1 has none",)


async def test_a_long_chain_is_followed_to_its_start(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    chain = [step("s0"), *(step(f"s{n}", f"s{n - 1}") for n in range(1, 500))]
    job = await driver.submit(*chain)
    (cause,) = (await app.explain(await step_id(driver, job, "s499"))).causes
    assert (cause.name, len(cause.through)) == ("s0", 498)


async def test_many_paths_to_one_cause_are_listed_once(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    layers = [step("l0a"), step("l0b", "l0a")]
    for n in range(1, 40):
        layers += [step(f"l{n}{side}", f"l{n - 1}a", f"l{n - 1}b") for side in "ab"]
    job = await driver.submit(*layers)
    found = await app.explain(await step_id(driver, job, "l39a"))
    assert [cause.name for cause in found.causes] == ["l0a"]


async def test_a_job_without_workers_names_the_reason(app: Interlock, database: Connection, driver: JobDriver) -> None:
    job = await driver.submit(step("a", namespace="inventory"), step("b", "a"))
    found = await app.explain(job)
    assert (found.kind, found.state, found.name) == ("job", "PENDING", "w 1")
    assert found.facts == ("no live worker serves namespace 'inventory': start one that does",)
    behind = await app.explain(await step_id(driver, job, "b"))
    (first,) = behind.causes
    assert (first.name, first.facts) == ("a", ("waits for the job to start",))
    assert [cause.state for cause in first.causes] == ["PENDING"]
    await add_live_worker(database, "inventory")
    facts = (await app.explain(job)).facts
    assert facts == ("live workers serve its first steps: it starts when an orchestrator looks next", NO_ORCHESTRATOR)
    await here(database, "o-1", role="orchestrator", namespaces=())
    assert NO_ORCHESTRATOR not in (await app.explain(job)).facts


async def test_a_running_job_names_what_it_waits_for(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(*(step(f"r{n}") for n in range(12)), step("last", "r0"), timeout=60)
    found = await app.explain(job)
    assert found.facts[0] == "13 (12 pending, 1 waiting for other steps) of its steps are open"
    assert len(found.causes) == 10
    assert "there are more causes than are listed here" in found.facts
    assert any("it is canceled if it has not ended at" in fact for fact in found.facts)


async def test_maps_and_worker_counts_name_the_cause(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(
        step("pack", kind="map", over_input="items"), step("end", "pack"), input={"items": [1, 2, 3]}, worker_count=1
    )
    found = await app.explain(await step_id(driver, job, "end"))
    (pack,) = found.causes
    assert pack.facts == ("waits for 3 parts", "3 of its parts have not ended")
    assert [cause.name for cause in pack.causes] == ["pack[0]", "pack[1]", "pack[2]"]
    held = pack.causes[1]
    assert held.facts[0].startswith("the job runs at most 1 step")
    assert held.facts[1:] == ("its causes are listed elsewhere in this answer",)
    (active,) = (await app.explain(held.id)).causes
    assert (active.name, active.state) == ("pack[0]", "pending")


async def test_a_child_step_leads_into_its_child_job(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    await driver.submit(step("inner", kind="signal", signal="paid"), step("after", "inner"), name="child")
    job = await driver.submit(step("sub", kind="child", workflow="child"), step("end", "sub"), name="parent")
    found = await app.explain(await step_id(driver, job, "end"))
    (sub,) = found.causes
    (child,) = sub.causes
    assert (child.kind, child.name, child.state) == ("job", "child 1", "RUNNING")
    assert roots(found) == ["inner"]
    assert "waits for signal 'paid'" in words(found)


async def test_signal_timeouts_and_sleeps_name_a_time(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(step("boss", kind="approval", timeout=60), step("nap", kind="sleep", seconds=600))
    said = words(await app.explain(job))
    assert "2 (1 waiting for a signal, 1 waiting for a time) of its steps are open" in said
    assert "waits for approval" in said
    assert "it fails if no signal has arrived by" in said
    assert "sleeps until" in said
    await database.execute("update interlock.tasks set wait_until = now() - interval '1 minute' where step = 'nap'")
    said = words(await app.explain(job))
    assert "its sleep was over at" in said, "no orchestrator is live"


async def test_an_ended_step_names_its_message(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(step("a"), step("b", "a"))
    (claimed,) = await driver.claim()
    await driver.settle(claimed)
    found = await app.explain(await step_id(driver, job, "b"))
    (first,) = found.causes
    assert (first.name, first.state) == ("a", "done")
    assert "its step result waits for an orchestrator: 1 messages are in the queue" in first.facts[-1]
    assert "1 ended, but not processed by an orchestrator" in words(await app.explain(job))
    await database.execute("select pgmq.purge_queue('orchestration_step_results')")
    assert "its step result is not in the queue" in words(await app.explain(claimed.id))
    await database.execute(
        "insert into interlock.orchestration_failures (msg_id, job_id, task_id, message, error) "
        "values (1, %s, %s, '{}', 'OverflowError: too long')",
        [job, claimed.id],
    )
    assert "became a dead letter at" in words(await app.explain(claimed.id))
    said = words(await app.explain(job))
    assert "1 of its step results became dead letters" in said
    assert "OverflowError: too long" in said


async def test_a_job_that_ends_says_what_it_becomes(app: Interlock, database: Connection) -> None:
    driver = JobDriver(database, {"b": Failed("no")})
    await add_live_worker(database)
    job = await driver.submit(step("a", compensate="undo"), step("b", "a"))
    await driver.run(until=lambda: "b" in driver.ran)
    found = await app.explain(job)
    assert found.facts[0] == "it compensates, and becomes FAILED then: step b failed: no"
    assert [cause.name for cause in found.causes] == ["compensate:a"]
    await driver.run()
    ended = await app.explain(job)
    assert ended.state == "FAILED"
    assert ended.facts[0] == "step b failed: no"
    assert "RUNNING -error-> FAILED" in ended.facts[-1]
    assert not ended.causes
    failed = await app.explain(await step_id(driver, job, "b"))
    assert "ValueError: no" in failed.facts


async def test_a_canceling_job_waits_for_running_steps(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(step("a"), step("b", "a"))
    await driver.claim()
    await cancel_job(database, job, actor="ada", reason="changed my mind")
    found = await app.explain(job)
    assert found.facts[0] == "it becomes CANCELED once its last step has stopped: changed my mind"
    assert "its cancellation was asked for at" in words(found)


async def test_a_failed_job_names_the_child_job_that_it_waits_for(
    app: Interlock, database: Connection, driver: JobDriver
) -> None:
    await add_live_worker(database)
    await put_workflow(database, workflow(step("s", kind="signal", signal="s"), name="sub"))
    driver.outcomes = {"bad": Failed("no")}
    job = await driver.submit(step("c", kind="child", workflow="sub", wait=False), step("bad", "c"), timeout=60)
    await driver.run()
    (child,) = await app.find_jobs(parent=job)
    found = await app.explain(job)
    assert found.facts[:2] == (
        f"it becomes FAILED once its steps and its child job {child.id} have ended: step bad failed: no",
        f"`interlock jobs cancel {job}` cancels its child jobs; it becomes FAILED then",
    )
    assert "its child jobs are canceled if they have not ended at" in words(found)
    assert "a step result was lost" not in words(found)
    assert await app.job(job).cancel("too late")
    found = await app.explain(job)
    assert found.facts[1] == "its child jobs are being canceled: too late"
    assert "if they have not ended" not in words(found)


FILL = """
insert into interlock.tasks (type) select 'x' from generate_series(1, 20000);
insert into interlock.tasks (type, job_id, step, state, held_by, unresolved)
select 'x', id, 's' || n, 'waiting', 'dependency', 1 from interlock.jobs, generate_series(1, 5000) as n;
"""


async def test_no_statement_reads_through_the_tasks(database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(step("a"), step("b", "a"))
    for name in "cde":
        await driver.submit(step("a"), step("b", "a"), name=name)
    await database.execute(FILL)
    await database.execute("vacuum analyze interlock.tasks, interlock.jobs, interlock.workflow_edges")
    ids = [await step_id(driver, job, "a")]
    asked = {"ids": ids, "id": ids[0], "job_id": job, "step": "b", "limit": 11, "now": None}
    for name, statement in EXPLAIN.items():
        cursor = await database.execute(b"explain " + statement.sql.encode(), asked)
        plan = "\n".join(str(row["QUERY PLAN"]) for row in await cursor.fetchall())
        assert "Seq Scan on tasks" not in plan, f"{name}\n{plan}"


@pytest.mark.flow
def test_the_command_writes_the_chain_and_json(url: str) -> None:
    shell = Shell(url)
    job = shell.answer("submit", "chain", "--app", "jobs_app:app")
    ((third,),) = shell.rows("select id::text from interlock.tasks where job_id = %s and step = 'third'", job)
    said = shell.answer("explain", third).splitlines()
    assert said[0].startswith(f"step third ({third}) is waiting, since ")
    assert "waits for second" in said[2]
    assert said[3].strip().startswith("by way of second: step first (")
    assert f"job chain {chain.version}" in said[5]
    assert said[-1].strip() == "no live worker serves namespace 'default': start one that does"
    document = json.loads(shell.answer("explain", job, "--json"))
    assert (document["kind"], document["state"]) == ("job", "PENDING")
    unknown = shell.run("explain", UNKNOWN)
    assert unknown.returncode == 2
    assert f"there is no task and no job {UNKNOWN}" in unknown.stderr
