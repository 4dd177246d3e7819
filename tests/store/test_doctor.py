"""The doctor: nothing is said to be wrong that is not, and what is wrong is one line that says what to do."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from chaos_app import app as chaos_app
from cli_support import Shell
from factories import add_live_worker, declare_limit_keys, enqueue, enqueue_by_sql, rewrite, step
from interlock.lifecycle import TaskRowEvent
from interlock.store.doctor import CODES, DOCTOR, Finding, examine
from interlock.store.jobs import read_jobs
from interlock.store.retention import Retention, delete_ended_jobs, delete_ended_tasks
from interlock.store.step_results import read_orchestration_failures, replay_results
from interlock.store.tasks import Outcome, claim_pending_tasks, settle_running_tasks
from interlock.store.workers import RegisteredProcess, register_worker
from interlock.worker.run import serving as serve_app
from interlock.worker.settings import WorkerSettings
from interlock.workflow.advance import MAX_MESSAGE_READS, advance
from job_driver import JobDriver
from jobs_support import app_at as jobs_at
from jobs_support import orchestrator_at
from workflow_simulation import ConnectionPool, WorkflowSimulation, random_case

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

SEEDS = range(int(os.environ.get("INTERLOCK_TEST_EXAMPLES") or 2))
MAX_TURNS = 6
ACTIONS_PER_TURN = 12
ALWAYS_TRUE = ("records_", "state_", "row_", "job_", "step_", "hold_", "workflow_", "key_", "guard_", "function_")


async def here(database: Connection, id_: str, *types: str, role: str = "worker") -> None:
    await register_worker(database, RegisteredProcess(id_, role, ("default",), types), lease=timedelta(hours=1))


async def wrong(database: Connection) -> dict[str, Finding]:
    """Return the findings by code."""
    return {finding.code: finding for finding in (await examine(database)).findings}


async def test_tasks_of_a_key_without_a_limit_are_found(database: Connection) -> None:
    await declare_limit_keys(database, "mail")
    await enqueue_by_sql(database, type="add", limit_keys=["mail"])
    await database.execute("update interlock.tasks set state = 'pending', event = 'release', held_by = null")
    assert "limit_undeclared" not in await wrong(database)
    await database.execute("delete from interlock.limits")
    found = (await wrong(database))["limit_undeclared"]
    assert found.message == "no limit is declared for the key mail; the tasks run without one"


async def test_an_empty_database_is_well(database: Connection) -> None:
    report = await examine(database)
    assert set(report.facts) == {"database", "schema", "queue", "workers", "orchestrators"}
    assert report.findings == ()


async def test_only_work_without_workers_is_reported(database: Connection) -> None:
    await enqueue_by_sql(database, type="add")
    found = await wrong(database)
    assert set(found) == {"workers_missing", "namespace_unserved"}
    assert found["workers_missing"].remedy == "run `interlock worker`"
    assert found["namespace_unserved"].message.startswith("default: 1 task due, the oldest for ")
    assert found["namespace_unserved"].remedy == "`interlock worker --namespaces default`"
    await here(database, "worker-1", "add")
    assert await wrong(database) == {}


async def test_a_type_without_a_worker_is_reported(database: Connection) -> None:
    await here(database, "worker-1", "add")
    for type_ in ("add", "chain/2/ship", "chain/2/ship"):
        await enqueue_by_sql(database, type=type_)
    found = await wrong(database)
    assert set(found) == {"type_unserved"}
    assert found["type_unserved"].message.startswith("chain/2/ship in default: 2 tasks due")
    assert found["type_unserved"].rows == 2


async def test_a_task_that_is_not_due_needs_nobody(database: Connection) -> None:
    await database.execute("select interlock.enqueue(type => 'add', delay => '1 hour')")
    assert await wrong(database) == {}


async def test_paused_workers_are_not_enough(database: Connection) -> None:
    await enqueue_by_sql(database, type="add")
    await here(database, "worker-1", "add")
    await database.execute("update interlock.workers set status = 'PAUSED', event = 'pause'")
    assert (await wrong(database))[
        "workers_missing"
    ].message == "workers: none is active: 1 paused, while there is work"


async def test_open_jobs_without_an_orchestrator_are_reported(database: Connection) -> None:
    driver = JobDriver(database)
    job = await driver.submit(step("a"))
    found = await wrong(database)
    assert found["orchestrators_missing"].remedy == "run `interlock orchestrator`"
    assert "job_not_started" not in found
    await rewrite(database, "jobs", "created_at = now() - interval '1 hour'")
    pending = (await wrong(database))["job_not_started"]
    assert pending.message.startswith(f"1 job PENDING, the oldest is {job}, 3600 s old: no live worker serves")
    assert pending.remedy == f"`interlock explain {job}`"


async def test_jobs_that_wait_for_their_key_or_their_time_are_well(database: Connection) -> None:
    driver = JobDriver(database)
    await here(database, "worker-1", "a")
    await here(database, "o-1", role="orchestrator")
    first = await driver.submit(step("a"), key="k", on_conflict="queue")
    queued = await driver.submit(step("a"), key="k", on_conflict="queue")
    debounced = await driver.submit(step("a"), name="other", debounce=7200.0, key="d")
    await rewrite(database, "jobs", "created_at = now() - interval '1 hour'")
    states = {row["status"] for row in await read_jobs(database, [queued, debounced])}
    assert states == {"PENDING", "SUBMITTED"}
    report = await examine(database)
    assert report.findings == ()
    assert report.facts["jobs PENDING"] == "1 job PENDING, all of which wait for their time or for another job"
    await database.execute(
        "update interlock.jobs set status = 'CANCELED', event = 'cancel', open_steps = 0, completed_at = now() "
        "where id = %s",
        [first],
    )
    assert "job_not_started" not in await wrong(database), "its turn has come just now"
    await rewrite(database, "jobs", f"completed_at = now() - interval '6 minutes' where id = '{first}'")
    assert f"the oldest is {queued}, 360 s old" in (await wrong(database))["job_not_started"].message
    await rewrite(database, "jobs", f"completed_at = now() where id = '{first}'")
    await rewrite(database, "jobs", f"not_before = now() - interval '5 minutes' where id = '{debounced}'")
    late = (await wrong(database))["job_not_started"]
    assert f"the oldest is {debounced}, 300 s old" in late.message


async def test_tasks_that_wait_for_a_limit_need_a_worker(database: Connection) -> None:
    await declare_limit_keys(database, "mail")
    await enqueue_by_sql(database, type="add", limit_keys=["mail"])
    assert set(await wrong(database)) == {"workers_missing"}, "only a leading worker admits it"
    await here(database, "worker-1", "add")
    assert await wrong(database) == {}


async def test_stuck_results_and_archived_messages_are_reported(database: Connection) -> None:
    driver = JobDriver(database)
    await add_live_worker(database)
    await database.execute("update interlock.workers set types = '{a}'")
    await here(database, "o-1", role="orchestrator")
    job = await driver.submit(step("a"))
    (claimed,) = await driver.claim()
    await driver.settle(claimed)
    assert await wrong(database) == {}
    ages = "finished_at = now() - interval '10 minutes', started_at = created_at - interval '1 hour', "
    ages += "created_at = created_at - interval '1 hour'"
    await rewrite(database, "tasks", ages)
    await database.execute("update pgmq.q_orchestration_step_results set enqueued_at = now() - interval '10 minutes'")
    found = await wrong(database)
    assert set(found) == {"queue_stalled"}, "the result is in the queue"
    assert found["queue_stalled"].message.startswith("orchestration_step_results: ")
    assert found["queue_stalled"].message.endswith(", the oldest for 600 s")
    await database.execute("delete from pgmq.q_orchestration_step_results")
    lost = await wrong(database)
    assert set(lost) == {"result_not_sent"}
    assert lost["result_not_sent"].sample == (str(job),), "the job whose results are to be sent again"
    await replay_results(database, job)
    await driver.advance()
    assert await wrong(database) == {}
    for number in range(12):
        await database.execute(
            "insert into interlock.orchestration_failures (msg_id, job_id, task_id, message, error) "
            "values (%s, %s, %s, '{}', 'OverflowError: too long')",
            [number, job, claimed.id],
        )
    dead = (await wrong(database))["message_failed"]
    assert dead.rows == 12
    assert dead.sample == ("11", "10", "9", "8", "7")
    assert dead.message.startswith(f"12 messages failed: message 11 of job {job}, at ")
    assert dead.message.endswith("OverflowError: too long")
    assert "`interlock jobs replay`" in dead.remedy


async def test_a_message_that_names_no_job_is_told_and_needs_nobody(database: Connection) -> None:
    await database.execute("select pgmq.send('orchestration_step_results', '{\"foo\": 1}')")
    for _ in range(MAX_MESSAGE_READS):
        await advance(database, actor="o", visibility=0)
    (row,) = await read_orchestration_failures(database)
    assert (row["job_id"], row["retry_at"]) == (None, None)
    dead = (await wrong(database))["message_ownerless"]
    assert dead.severity == "note", "there is nothing that anybody could do"
    assert dead.message.startswith(f"1 message failed: message {row['msg_id']}, which names no job, at ")


async def test_expired_leases_and_vanished_processes_are_reported(database: Connection) -> None:
    await here(database, "worker-1", "add")
    await enqueue_by_sql(database, type="add")
    await claim_pending_tasks(database, actor="worker-1", types=["add"], limit=1)
    await database.execute("update interlock.tasks set lease_expires_at = now() - interval '2 minutes'")
    await database.execute("update interlock.workers set seen_until = now() - interval '10 minutes'")
    found = await wrong(database)
    assert set(found) == {"lease_expired", "worker_vanished"}
    assert found["lease_expired"].message == "1 lease expired and no task was recovered, the first 120 s ago"
    assert found["worker_vanished"].message.startswith("worker worker-1 has sent no heartbeat for 600 s")
    await database.execute("update interlock.workers set seen_until = now() - interval '2 days'")
    assert "worker_vanished" not in await wrong(database), "long ago is no news"


async def test_broken_schedules_and_dead_webhooks_are_reported(database: Connection) -> None:
    await database.execute(
        "insert into interlock.schedules (name, type, cron, next_at, paused_at, error) "
        "values ('nightly', 'x', '0 3 * * *', now(), now(), 'no such zone')"
    )
    await database.execute(
        "insert into interlock.callbacks (task_id, attempt, state, url, error, given_up_at) "
        "values (gen_random_uuid(), 1, 'done', 'http://x', 'refused', now())"
    )
    found = await wrong(database)
    assert found["schedule_failed"].message == "schedule nightly is stopped: no such zone"
    assert found["webhook_given_up"].message == "1 webhook given up, the latest error: refused"


async def test_a_missing_queue_is_reported(database: Connection) -> None:
    await database.execute("drop view interlock.orchestration_messages")
    await database.execute("select pgmq.drop_queue('orchestration_step_results')")
    found = await wrong(database)
    assert "interlock migrate" in found["queue_missing"].remedy
    await database.execute("drop schema pgmq cascade")
    assert (await wrong(database))["queue_missing"].message.startswith("PGMQ is missing")


async def test_no_statement_reads_through_the_tasks(database: Connection) -> None:
    await database.execute("insert into interlock.tasks (type) select 'x' from generate_series(1, 20000)")
    await database.execute(
        "update interlock.tasks set state = 'canceled', event = 'cancel' "
        "where id in (select id from interlock.tasks limit 19000)"
    )
    await database.execute("vacuum analyze interlock.tasks")
    asked: dict[str, Any] = {
        "timeout": "1s",
        "each": 10,
        "limit": 10,
        "threshold": "1 min",
        "reported_for": "1 day",
        "now": None,
    }
    for name, statement in DOCTOR.items():
        cursor = await database.execute(b"explain " + statement.sql.encode(), asked)
        plan = "\n".join(str(row["QUERY PLAN"]) for row in await cursor.fetchall())
        assert "Seq Scan on tasks" not in plan, f"{name}\n{plan}"


@pytest.mark.flow
def test_the_command_is_a_monitor(url: str, make_database: Callable[[str], str]) -> None:
    shell = Shell(url)
    well = shell.run("doctor", "--full")
    assert (well.returncode, well.stderr.strip().partition(" (")[0]) == (0, "all is well")
    shell.rows("select interlock.enqueue(type => 'add')")
    waiting = shell.run("doctor")
    assert waiting.returncode == 3, "warnings only"
    assert waiting.stdout.splitlines()[1].startswith("warning  workers_missing")
    shell.rows("alter table interlock.tasks disable trigger guard_update")
    ill = shell.run("doctor", "--json")
    assert ill.returncode == 1
    document = json.loads(ill.stdout)
    assert document["severity"] == "error"
    (first, *rest) = document["findings"]
    assert first == {
        "code": "guard_disabled",
        "severity": "error",
        "rows": 1,
        "message": "triggers that do not fire for every session: guard_update on tasks",
        "remedy": CODES["guard_disabled"].remedy,
        "fixable": True,
        "sample": ["guard_update on tasks"],
    }
    assert {finding["code"] for finding in rest} == {"workers_missing", "namespace_unserved"}
    fixed = shell.run("doctor", "--fix")
    assert fixed.returncode == 3, "examined again"
    assert "files of functions and guards again" in fixed.stderr
    bare = Shell(make_database("template0")).run("doctor")
    assert bare.returncode == 1
    assert "`interlock migrate`" in bare.stdout
    away = Shell("postgresql://nobody@127.0.0.1:1/none").run("doctor")
    assert away.returncode == 1
    assert "cannot connect to none at 127.0.0.1:1" in away.stdout


async def test_an_id_that_is_used_again_after_retention_is_well(database: Connection) -> None:
    at_once = timedelta(0)
    task = uuid4()
    await here(database, "worker-1", "x")
    for _ in range(2):
        await enqueue(database, task_id=task)
        (claimed,) = await claim_pending_tasks(database, actor="worker-1", types=["x"], limit=1)
        await settle_running_tasks(database, [Outcome(task, claimed.attempt, TaskRowEvent.SUCCEED)], actor="worker-1")
        assert (await examine(database, full=True)).findings == ()
        await delete_ended_tasks(database, Retention(done=at_once, canceled=at_once, skipped=at_once, error=at_once))
        assert (await examine(database, full=True)).findings == ()
    await enqueue(database, task_id=task)
    for full in (False, True):
        assert (await examine(database, full=full)).findings == ()


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_busy_system_gives_no_false_alarm(url: str, database: Connection, seed: int) -> None:
    """Random workflows with random orders, faults and cancellations are examined again and again while they run.

    The simulation has a clock of its own and loses messages and workers: only what must always hold is looked at.
    """
    pool = ConnectionPool(url)
    simulation = WorkflowSimulation(pool, random_case(seed, cancel_rest=seed % 2 == 0))
    await simulation.begin()
    for turn in range(MAX_TURNS):
        has_ended = await simulation.act(ACTIONS_PER_TURN)
        if turn == 1 and seed % 3 == 0:
            await simulation.cancel_job(simulation.jobs[0])
        # the simulation has workers that live for ever, in a year that Python does not know
        await database.execute("update interlock.workers set seen_until = now() + interval '1 day'")
        report = await examine(database, full=turn % 2 == 0)
        assert "check_unfinished" not in {finding.code for finding in report.findings}
        found = [finding for finding in report.findings if finding.code.startswith(ALWAYS_TRUE)]
        # the clock of the simulation is not that of the records
        not_looked_at = {"job_not_started", "records_mistimed", "row_mistimed"}
        assert [finding for finding in found if finding.code not in not_looked_at] == []
        if has_ended:
            break
    await pool.close()


async def test_a_running_system_has_no_findings(url: str, database: Connection) -> None:
    """A worker and an orchestrator work, and retention deletes what has ended, while the database is examined."""
    at_once = timedelta(0)
    keep = Retention(done=at_once, canceled=at_once, skipped=at_once, error=at_once)
    app = jobs_at(url, declared=chaos_app)
    worker = jobs_at(url, declared=chaos_app)
    async with app, serve_app(worker, WorkerSettings(duties=False)), orchestrator_at(url):
        handles = [await app.submit(name, {"n": n}) for n in range(4) for name in ("chain", "order")]
        for turn in range(4):
            report = await examine(database, full=turn % 2 == 1)
            assert report.findings == ()
            await delete_ended_jobs(database, keep)
            await delete_ended_tasks(database, keep)
        assert handles
