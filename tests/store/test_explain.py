"""Explain: every reason why a task or a job waits is reported down to its cause, from the database alone."""

from __future__ import annotations

import asyncio
import json
import shlex
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from cli_support import UNKNOWN, Shell
from factories import add_live_worker, enqueue_by_sql, step, workflow
from interlock import Interlock
from interlock.config import Config
from interlock.errors import InputError, UnknownJobError, UnknownNameError, UnknownTaskError
from interlock.lifecycle import SupervisedWorkerEvent, TaskRowEvent
from interlock.store.explain import EXPLAIN
from interlock.store.history import read_history
from interlock.store.limits import Limit, admit_limited_tasks, pause_namespace, put_limits
from interlock.store.schedules import Schedule, pause_schedules, put_schedules, resume_schedules
from interlock.store.stats import list_limits
from interlock.store.tasks import Outcome, claim_limited_tasks, claim_pending_tasks, settle_running_tasks
from interlock.store.workers import RegisteredProcess, create_worker, move_worker, read_worker, register_worker
from interlock.store.workflows import put_workflow
from interlock.workflow.cancel import cancel_job
from interlock.workflow.retry_from import retry_job_from
from job_driver import Failed, JobDriver
from jobs_app import chain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from interlock.client.explain import Explanation, Fact
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NO_ORCHESTRATOR = "no orchestrator is live, and without one no job goes on"


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
    own = (line for fact in found.facts for line in (fact.text, *map(str, fact.evidence), fact.remedy or ""))
    return "\n".join([f"{found.name} {found.state}", *own, *map(words, found.causes)])


def texts(found: Explanation) -> tuple[str, ...]:
    """List the sentences of the facts."""
    return tuple(fact.text for fact in found.facts)


def fact_of(found: Explanation, code: str) -> Fact:
    """Return the only fact with this code."""
    (fact,) = [fact for fact in found.facts if fact.code == code]
    return fact


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
    assert texts(found) == ("no live worker serves namespace 'default'; none is live",)
    await here(database, "elsewhere", "chain/2/ship", namespaces=("reports",))
    assert texts(await app.explain(task)) == ("no live worker serves namespace 'default'; elsewhere serves reports",)
    await here(database, "worker-1", "add", "chain/1/ship")
    expected = "no live worker has the handler chain/2/ship; worker-1 has chain/1/ship, add"
    assert texts(await app.explain(task)) == (expected,)


async def test_a_pending_task_says_what_those_do_who_could_run_it(app: Interlock, database: Connection) -> None:
    await here(database, "worker-1", "add")
    first = await enqueue_by_sql(database, type="add")
    assert "is about to be claimed: worker-1" in texts(await app.explain(first))[0]
    await claim_pending_tasks(database, actor="worker-1", types=["add"], limit=1)
    second = await enqueue_by_sql(database, type="add")
    assert texts(await app.explain(second)) == ("it waits for its turn at a worker: worker-1 holds 1",)
    await database.execute("update interlock.workers set status = 'PAUSED', event = 'pause'")
    assert texts(await app.explain(second)) == ("the workers that could run it are paused: worker-1",)
    later = await enqueue_by_sql(database, type="add", run_at=datetime(2999, 1, 1, tzinfo=UTC))
    assert texts(await app.explain(later)) == ("it is not due before 2999-01-01 00:00:00 UTC",)


async def test_a_running_task_names_its_worker_and_its_lease(app: Interlock, database: Connection) -> None:
    await here(database, "worker-1", "add")
    task = await enqueue_by_sql(database, type="add", max_tries=2)
    await claim_pending_tasks(database, actor="worker-1", types=["add"], limit=1)
    found = await app.explain(task)
    running = fact_of(found, "running")
    assert running.text == "worker-1 runs attempt 1, try 1 of 2"
    assert [(evidence.kind, evidence.id) for evidence in running.evidence] == [("worker", "worker-1")]
    assert "its lease lasts until" in (running.remedy or "")
    await database.execute("update interlock.workers set seen_until = now() - interval '1 minute'")
    said = words(await app.explain(task))
    assert "sent its last heartbeat at" in said
    assert "and then it is put back" in said
    await database.execute(
        "update interlock.tasks set lease_expires_at = now() - interval '1 s', cancel_requested_at = now()"
    )
    found = await app.explain(task)
    assert fact_of(found, "cancel_requested").command == f"interlock tasks cancel {task} --force --yes"
    expired = fact_of(found, "lease_expired")
    assert expired.remedy == "no worker is live: start one"
    assert expired.command == "interlock worker --app PACKAGE.MODULE:APP --namespaces default"


async def test_a_worker_is_found_by_the_process_that_tasks_name(app: Interlock, database: Connection) -> None:
    worker = await create_worker(database, actor="ada")
    process = f"{worker}-2-0c03324a"
    assert await app.explain(process) == await app.explain(worker)
    assert await app.explain(process, kind="worker", at=datetime.now(UTC)) is not None
    assert await read_history(database, "worker", process) == await read_history(database, "worker", worker)
    assert (await read_worker(database, process))["id"] == worker
    with pytest.raises(UnknownNameError):
        await app.explain(f"{worker}-2-0c03324")


async def test_a_worker_that_died_a_second_ago_is_not_called_live(app: Interlock, database: Connection) -> None:
    """Its row counts as live until its heartbeat expires: the answer says when it was last heard of, and no more."""
    await here(database, "worker-1", "add")
    task = await enqueue_by_sql(database, type="add")
    await claim_pending_tasks(database, actor="worker-1", types=["add"], limit=1)
    await database.execute(
        "update interlock.workers set heartbeat_at = now() - interval '1 s', seen_until = now() + interval '14 s'"
    )
    said = words(await app.explain(task))
    assert "is live" not in said
    assert "before this answer; without another one it counts as gone at" in said


async def test_a_full_concurrency_limit_names_its_holders(app: Interlock, database: Connection) -> None:
    await put_limits(database, [Limit("mail:*", max_running=1, max_starts=5, period=timedelta(seconds=60))])
    await here(database, "worker-1", "send")
    first = await enqueue_by_sql(database, type="send", limit_keys=["mail:a"])
    second = await enqueue_by_sql(database, type="send", limit_keys=["mail:a"])
    await admit_limited_tasks(database, actor="leader")
    (holder,) = await claim_limited_tasks(database, actor="worker-1", types=["send"], limit=1)
    waiting = second if holder.id == first else first
    found = await app.explain(waiting)
    full = fact_of(found, "limit_full")
    assert found.facts[0] is full, "the cause in the way comes first"
    assert full.text == "limit mail:a (rule mail:*): 1 of 1 are pending or running"
    ((kind, id_, text),) = [(evidence.kind, evidence.id, evidence.text) for evidence in full.evidence]
    assert (kind, id_) == ("task", str(holder.id))
    assert "is running: attempt 1 at worker worker-1, lease until 20" in text
    assert full.command == "interlock limits set 'mail:*' --max-running 2 --max-starts 5 --period 60"
    limit = await app.explain("mail:*", kind="limit")
    assert (limit.kind, limit.state) == ("limit", "full")
    assert [evidence.id for evidence in fact_of(limit, "limit_full").evidence] == [str(holder.id)]
    assert fact_of(limit, "backlog").text == "limit mail:a: 1 task waits for it"
    assert (await app.explain("mail:a")).state == "full", "a key is found without its kind"
    unused = await app.explain("mail:b", kind="limit")
    assert (unused.state, unused.facts[0].text) == ("open", "limit mail:b (rule mail:*): 0 of 1 are pending or running")


async def test_the_command_for_a_limit_of_large_numbers_can_be_pasted(
    app: Interlock, database: Connection, url: str
) -> None:
    month = timedelta(days=30)
    await put_limits(database, [Limit("mail", max_running=1, max_cost=1_234_567.5, period=month, share=0.25)])
    await here(database, "worker-1", "send")
    for _ in range(2):
        await enqueue_by_sql(database, type="send", limit_keys=["mail"])
    await admit_limited_tasks(database, actor="leader")
    command = fact_of(await app.explain("mail", kind="limit"), "limit_full").command
    assert command == "interlock limits set mail --max-running 2 --max-cost 1234567.5 --period 2592000 --share 0.25"
    done = await asyncio.to_thread(Shell(url).run, *shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    used = (await list_limits(database))[0]
    assert (used.max_running, used.max_cost, used.period, used.share) == (2, 1_234_567.5, month, 0.25)


async def test_a_held_task_names_the_limit_or_the_pause(app: Interlock, database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=1, max_starts=5, period=timedelta(seconds=60))])
    await here(database, "worker-1", "send")
    limited = await enqueue_by_sql(database, type="send", limit_keys=["mail"])
    facts = texts(await app.explain(limited))
    assert facts[0] == "limit mail"
    assert facts[1] == "limit mail: 0 of 1 are pending or running"
    assert facts[2] == "limit mail: 0 of 5 in the last 60 s were started"
    await pause_namespace(database, "reports", "on fire", "ada")
    paused = await enqueue_by_sql(database, type="print", namespace="reports")
    fact = fact_of(await app.explain(paused), "namespace_paused")
    assert fact.text == "namespace reports is paused: on fire"
    assert "by ada" in fact.evidence[0].text
    assert fact.command == "interlock namespaces resume reports"


async def test_used_up_tries_say_how_many_and_give_the_command(app: Interlock, database: Connection) -> None:
    task = await enqueue_by_sql(database, type="add", max_tries=2)
    for _ in range(2):
        (claimed,) = await claim_pending_tasks(database, actor="w", types=["add"], limit=1)
        error = {"type": "ValueError", "message": "card declined"}
        event = TaskRowEvent.RETRY if claimed.attempt == 1 else TaskRowEvent.FAIL
        await settle_running_tasks(
            database, [Outcome(claimed.id, claimed.attempt, event, error=error, delay=0)], actor="w"
        )
    fact = fact_of(await app.explain(task), "tries_used_up")
    assert fact.text == "it used up its tries, 2 of 2: ValueError: card declined"
    assert fact.command == f"interlock tasks requeue {task}"


async def test_the_command_for_a_failed_step_names_a_step_of_the_workflow(
    app: Interlock, database: Connection, driver: JobDriver
) -> None:
    await add_live_worker(database)
    work = step("pack", "a", kind="map", over_input="items")
    job = await driver.submit(step("a", compensate="undo"), work, input={"items": [1]})
    driver.outcomes |= {"pack[0]": Failed("no"), "compensate:a": Failed("no")}
    await driver.run()
    found = fact_of(await app.explain(await step_id(driver, job, "pack[0]")), "failed")
    assert found.remedy == "when the cause is gone, its job can be submitted again from the whole step pack on"
    assert found.command == f"interlock jobs retry {job} pack"
    undone = fact_of(await app.explain(await step_id(driver, job, "compensate:a")), "failed")
    assert undone.remedy == "nothing runs a compensation again: undo by hand what it should have undone"
    assert undone.command is None
    assert await retry_job_from(database, job, found.command.rpartition(" ")[2], actor="ada")


async def test_a_webhook_that_fails_is_reported(app: Interlock, database: Connection) -> None:
    url = "https://user:secret@hooks.example/x?token=t"
    task = await enqueue_by_sql(database, type="add", callback_url=url)
    await app.handle(task).cancel()
    await database.execute(
        "insert into interlock.callbacks (task_id, attempt, state, url, tries, error, next_try_at) "
        "select %s, 0, 'canceled', %s, 3, 'HTTP 503', now() + interval '1 minute' "
        "where not exists (select from interlock.callbacks)",
        [task, url],
    )
    await database.execute("update interlock.callbacks set tries = 3, error = 'HTTP 503'")
    failing = fact_of(await app.explain(task), "webhook_failing")
    assert failing.text == "its webhook to hooks.example failed 3 times: HTTP 503"
    assert "it is tried again at" in (failing.remedy or "")
    await database.execute("update interlock.callbacks set given_up_at = now()")
    given_up = fact_of(await app.explain(task), "webhook_given_up")
    ((id_,),) = [
        tuple(row.values()) for row in await (await database.execute("select id from interlock.callbacks")).fetchall()
    ]
    assert given_up.command == f"interlock webhooks retry {id_}"


async def test_an_ended_task_says_how_and_shows_its_last_moves(app: Interlock, database: Connection) -> None:
    task = await enqueue_by_sql(database, type="add")
    await app.handle(task).cancel("not wanted")
    fact = fact_of(await app.explain(task), "canceled")
    assert fact.text == "not wanted"
    assert "pending -cancel-> canceled by ada: not wanted" in fact.evidence[-1].text


async def test_an_id_of_nothing_is_a_clear_error(app: Interlock) -> None:
    with pytest.raises(UnknownTaskError, match=f"no task and no job {UNKNOWN}"):
        await app.explain(UNKNOWN)
    with pytest.raises(UnknownJobError, match=f"there is no job {UNKNOWN}"):
        await app.explain(UNKNOWN, kind="job")
    with pytest.raises(UnknownNameError, match="'seven' is neither the id of a task or a job nor the name of a worker"):
        await app.explain("seven")
    with pytest.raises(InputError, match="the kind must be one of task, step, job"):
        await app.explain("seven", kind="thing")
    for kind in ("namespace", "schedule", "limit"):
        with pytest.raises(UnknownNameError, match=f"there is no {kind} 'seven'"):
            await app.explain("seven", kind=kind)


async def test_the_cause_is_found_through_other_steps(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(step("a"), step("b", "a"), step("c", "b"), step("x"), step("d", "c", "x"))
    found = await app.explain(await step_id(driver, job, "d"))
    assert found.facts[0].text == "waits for c, x"
    assert fact_of(found, "step_of_job").text.startswith(f"it is a step of job {job}, which is RUNNING")
    causes = {cause.name: cause for cause in found.causes}
    assert {name: cause.through for name, cause in causes.items()} == {"x": (), "a": ("c", "b")}
    assert texts(causes["a"]) == ("no live worker has the handler a; w_1 has none",)


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
    (fact,) = found.facts
    assert (fact.code, fact.text) == ("no_worker", "no live worker serves namespace 'inventory'")
    assert fact.command == "interlock worker --app PACKAGE.MODULE:APP --namespaces inventory"
    behind = await app.explain(await step_id(driver, job, "b"))
    (first,) = behind.causes
    assert (first.name, texts(first)) == ("a", ("waits for the job to start",))
    assert [cause.state for cause in first.causes] == ["PENDING"]
    await add_live_worker(database, "inventory")
    facts = texts(await app.explain(job))
    assert facts == (NO_ORCHESTRATOR, "live workers serve its first steps: it starts when an orchestrator looks next")
    await here(database, "o-1", role="orchestrator", namespaces=())
    assert NO_ORCHESTRATOR not in texts(await app.explain(job))


async def test_a_running_job_names_what_it_waits_for(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(*(step(f"r{n}") for n in range(12)), step("last", "r0"), timeout=60)
    found = await app.explain(job)
    assert fact_of(found, "open_steps").text == "13 of its steps are open: 12 pending, 1 waiting for other steps"
    assert len(found.causes) == 10
    assert "there are more causes than are listed here" in texts(found)
    assert "it is canceled if it has not ended at" in fact_of(found, "deadline").text


async def test_maps_and_worker_counts_name_the_cause(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(
        step("pack", kind="map", over_input="items"), step("end", "pack"), input={"items": [1, 2, 3]}, worker_count=1
    )
    found = await app.explain(await step_id(driver, job, "end"))
    (pack,) = found.causes
    assert texts(pack) == ("waits for 3 parts", "3 of its parts have not ended")
    assert [cause.name for cause in pack.causes] == ["pack[0]", "pack[1]", "pack[2]"]
    held = pack.causes[1]
    assert held.facts[0].text.startswith("the job runs at most 1 step")
    assert texts(held)[1:] == ("its causes are listed elsewhere in this answer",)
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
    assert "2 of its steps are open: 1 waiting for an approval, 1 waiting for a time" in said
    assert "waits for approval" in said
    assert "it fails if no answer has arrived by" in said
    assert "sleeps until" in said
    await database.execute("update interlock.tasks set wait_until = now() - interval '1 minute' where step = 'nap'")
    said = words(await app.explain(job))
    assert "its sleep was over at" in said, "no orchestrator is live"


async def test_signals_and_approvals_give_the_command(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(step("boss", kind="approval"), step("pay", kind="signal", signal="money in"))
    found = await app.explain(job)
    open_steps = "2 of its steps are open: 1 waiting for an approval, 1 waiting for a signal"
    assert fact_of(found, "open_steps").text == open_steps
    facts = {cause.name: cause.facts[0] for cause in found.causes}
    assert facts["boss"].code == "waits_for_approval"
    assert facts["boss"].command == f"interlock jobs approve {job} boss"
    assert facts["pay"].code == "waits_for_signal"
    assert facts["pay"].command == f"interlock jobs signal {job} 'money in'"
    assert facts["pay"].since is not None


async def test_missing_workers_give_a_remedy(app: Interlock, database: Connection) -> None:
    task = await enqueue_by_sql(database, type="print", namespace="reports")
    fact = fact_of(await app.explain(task), "no_worker")
    assert fact.command == "interlock worker --app PACKAGE.MODULE:APP --namespaces reports"
    await here(database, "worker-1", "print")
    fact = fact_of(await app.explain(task), "no_worker")
    assert fact.command == "interlock workers subscribe worker-1 reports", "it has the handler already"
    await here(database, "worker-2", "other", namespaces=("reports",))
    fact = fact_of(await app.explain(task), "no_handler")
    assert fact.command == "interlock worker --app PACKAGE.MODULE:APP --namespaces reports"
    namespace = await app.explain("reports")
    assert (namespace.kind, namespace.state) == ("namespace", "active")
    assert [fact.code for fact in namespace.facts] == ["no_handler", "backlog"]


async def test_a_supervised_worker_that_runs_tasks_is_not_idle(app: Interlock, database: Connection) -> None:
    """It claims under the name of its process, and not under the id of its row."""
    await here(database, "w_1", "add")
    await database.execute("update interlock.workers set instance = 'host-1-abc'")
    await enqueue_by_sql(database, type="add")
    await claim_pending_tasks(database, actor="host-1-abc", types=["add"], limit=1)
    second = await enqueue_by_sql(database, type="add")
    assert texts(await app.explain(second)) == ("it waits for its turn at a worker: w_1 holds 1",)
    held = fact_of(await app.explain("w_1"), "tasks_in_hand")
    assert held.text == "it runs 1 task"


async def test_a_paused_and_a_silent_worker_are_explained(app: Interlock, database: Connection) -> None:
    await here(database, "worker-1", "add")
    idle = await app.explain("worker-1")
    assert idle.facts[0].text == "it runs nothing, and nothing is due in its namespaces"
    await enqueue_by_sql(database, type="other")
    assert "have types that it lacks: other" in fact_of(await app.explain("worker-1"), "no_handler").text
    await move_worker(database, "worker-1", SupervisedWorkerEvent.PAUSE, actor="ada", reason="disk")
    found = await app.explain("worker-1")
    assert (found.kind, found.state) == ("worker", "PAUSED")
    assert found.facts[0].text == "pause by ada: disk"
    assert found.facts[0].command == "interlock workers resume worker-1"
    await database.execute("update interlock.workers set seen_until = now() - interval '1 s'")
    found = await app.explain("worker-1", kind="worker")
    assert found.facts[0].code == "no_heartbeat"
    assert found.facts[0].command == "interlock workers terminate worker-1"


async def test_schedules_are_explained(app: Interlock, database: Connection) -> None:
    await put_schedules(database, [Schedule("nightly", "clean", every=timedelta(hours=1))])
    found = await app.explain("nightly")
    assert (found.kind, found.state) == ("schedule", "active")
    assert "its next tick is at" in fact_of(found, "next_tick").text
    await database.execute("update interlock.schedules set next_at = now() - interval '1 hour', error = 'no such type'")
    found = await app.explain("nightly")
    assert found.state == "failing"
    assert [fact.code for fact in found.facts] == ["schedule_failed", "no_leader", "schedule_overdue", "last_tick"]
    assert found.facts[0].command == "interlock schedules run nightly"
    await pause_schedules(database, ["nightly"], actor="ada", reason="stock-taking")
    fact = fact_of(await app.explain("nightly"), "schedule_paused")
    assert fact.command == "interlock schedules resume nightly"
    assert fact.text.endswith(" by ada: stock-taking")
    await resume_schedules(database, ["nightly"], actor="bob", reason="all counted")
    (evidence,) = fact_of(await app.explain("nightly"), "next_tick").evidence
    assert evidence.text == "it was resumed by bob: all counted"


async def test_a_name_of_several_kinds_is_asked_back(app: Interlock, database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=1)])
    await pause_namespace(database, "mail", None, "ada")
    with pytest.raises(InputError, match="`interlock explain namespace mail`, `interlock explain limit mail`"):
        await app.explain("mail")
    assert (await app.explain("mail", kind="namespace")).state == "paused"


async def test_an_ended_step_names_its_message(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(step("a"), step("b", "a"))
    (claimed,) = await driver.claim()
    await driver.settle(claimed)
    found = await app.explain(await step_id(driver, job, "b"))
    (first,) = found.causes
    assert (first.name, first.state) == ("a", "done")
    assert "its step result waits for an orchestrator: 1 messages are in the queue" in first.facts[0].text
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
    assert fact_of(found, "compensates").text == "it compensates, and becomes FAILED then: step b failed: no"
    assert [cause.name for cause in found.causes] == ["compensate:a"]
    await driver.run()
    ended = await app.explain(job)
    assert ended.state == "FAILED"
    assert (ended.facts[0].text, ended.facts[0].command) == ("step b failed: no", f"interlock jobs retry {job}")
    assert "RUNNING -error-> FAILED" in ended.facts[0].evidence[-1].text
    assert not ended.causes
    failed = await app.explain(await step_id(driver, job, "b"))
    assert "ValueError: no" in failed.facts[0].text
    assert failed.facts[0].command == f"interlock jobs retry {job} b"


async def test_a_canceling_job_waits_for_running_steps(app: Interlock, database: Connection, driver: JobDriver) -> None:
    await add_live_worker(database)
    job = await driver.submit(step("a"), step("b", "a"))
    await driver.claim()
    await cancel_job(database, job, actor="ada", reason="changed my mind")
    found = await app.explain(job)
    assert fact_of(found, "ends_soon").text == "it becomes CANCELED once its last step has stopped: changed my mind"
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
    fact = fact_of(found, "waits_for_children")
    assert fact.text == f"it becomes FAILED once its steps and its child job {child.id} have ended: step bad failed: no"
    assert fact.command == f"interlock jobs cancel {job}"
    assert "its child jobs are canceled if they have not ended at" in words(found)
    assert "a step result was lost" not in words(found)
    assert await app.job(job).cancel("too late")
    found = await app.explain(job)
    fact = fact_of(found, "waits_for_children")
    assert (fact.evidence[-1].text, fact.command) == ("its child jobs are being canceled: too late", None)
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
    asked = {
        "ids": ids,
        "id": ids[0],
        "job_id": job,
        "step": "b",
        "limit": 11,
        "holders": 5,
        "now": None,
        "name": "reports",
        "names": ["w"],
        "key": "k",
        "request_id": "r",
        "at": datetime.now(UTC),
        "kind": "task",
        "subject": "x",
    }
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
    assert said[1].strip() == "waits for second"
    assert any(line.strip().startswith("by way of second: step first (") for line in said)
    assert any(line.strip().startswith(f"job chain {chain.version}") for line in said)
    assert said[-2].strip() == "start one that does:"
    assert said[-1].strip() == "interlock worker --app PACKAGE.MODULE:APP --namespaces default"
    document = json.loads(shell.answer("explain", job, "--json"))
    assert (document["kind"], document["state"]) == ("job", "PENDING")
    unknown = shell.run("explain", UNKNOWN)
    assert unknown.returncode == 2
    assert f"there is no task and no job {UNKNOWN}" in unknown.stderr
