"""The doctor: nothing is said to be wrong that is not, and what is wrong is one line that says what to do."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from cli_support import Shell
from factories import add_live_worker, declare_limit_keys, enqueue_by_sql, rewrite, step
from interlock.store.doctor import DOCTOR, Finding, diagnose
from interlock.store.step_results import read_orchestration_failures
from interlock.store.tasks import claim_pending_tasks
from interlock.store.workers import RegisteredProcess, register_worker
from interlock.workflow.advance import MAX_MESSAGE_READS, advance
from job_driver import JobDriver

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store


async def here(database: Connection, id_: str, *types: str, role: str = "worker") -> None:
    await register_worker(database, RegisteredProcess(id_, role, ("default",), types), lease=timedelta(hours=1))


async def wrong(database: Connection) -> dict[str, Finding]:
    """Return the findings by subject."""
    return {finding.about: finding for finding in await diagnose(database) if finding.needs_attention}


async def test_tasks_of_a_key_without_a_limit_are_found(database: Connection) -> None:
    await declare_limit_keys(database, "mail")
    await enqueue_by_sql(database, type="add", limit_keys=["mail"])
    await database.execute("update interlock.tasks set state = 'pending', event = 'release', held_by = null")
    assert "limit" not in await wrong(database)
    await database.execute("delete from interlock.limits")
    found = (await wrong(database))["limit"]
    assert found.found == "no limit is declared for the key mail; its tasks run without one"


async def test_an_empty_database_is_well(database: Connection) -> None:
    findings = await diagnose(database)
    assert {finding.about for finding in findings} == {
        "database",
        "schema",
        "queue",
        "workers",
        "orchestrators",
        "leases",
    }
    assert not any(finding.needs_attention for finding in findings)
    assert await wrong(database) == {}


async def test_only_work_without_workers_is_reported(database: Connection) -> None:
    await enqueue_by_sql(database, type="add")
    found = await wrong(database)
    assert set(found) == {"workers", "namespace"}
    assert found["workers"].todo == "run `interlock worker`"
    assert found["namespace"].found.startswith("default: 1 task due, the oldest for ")
    assert found["namespace"].todo == "start a worker with --namespaces default"
    await here(database, "worker-1", "add")
    assert await wrong(database) == {}


async def test_a_type_without_a_worker_is_reported(database: Connection) -> None:
    await here(database, "worker-1", "add")
    for type_ in ("add", "chain/2/ship", "chain/2/ship"):
        await enqueue_by_sql(database, type=type_)
    found = await wrong(database)
    assert set(found) == {"handler"}
    assert found["handler"].found.startswith("chain/2/ship in default: 2 tasks due")
    assert found["handler"].details["tasks"] == 2


async def test_a_task_that_is_not_due_needs_nobody(database: Connection) -> None:
    await database.execute("select interlock.enqueue(type => 'add', delay => '1 hour')")
    assert await wrong(database) == {}


async def test_paused_workers_are_not_enough(database: Connection) -> None:
    await enqueue_by_sql(database, type="add")
    await here(database, "worker-1", "add")
    await database.execute("update interlock.workers set status = 'PAUSED', event = 'pause'")
    assert (await wrong(database))["workers"].found == "none is active: 1 paused, while there is work"


async def test_open_jobs_without_an_orchestrator_are_reported(database: Connection) -> None:
    driver = JobDriver(database)
    job = await driver.submit(step("a"))
    found = await wrong(database)
    assert found["orchestrators"].todo == "run `interlock orchestrator`"
    assert "jobs" not in found
    await rewrite(database, "jobs", "created_at = now() - interval '1 hour'")
    pending = (await wrong(database))["jobs"]
    assert pending.found.startswith(f"1 job PENDING, the oldest is {job}, 3600 s old: no live worker serves")
    assert pending.todo == f"`interlock explain {job}`"


async def test_stuck_results_and_archived_messages_are_reported(database: Connection) -> None:
    driver = JobDriver(database)
    await add_live_worker(database)
    await database.execute("update interlock.workers set types = '{a}'")
    await here(database, "o-1", role="orchestrator")
    job = await driver.submit(step("a"))
    (claimed,) = await driver.claim()
    await driver.settle(claimed)
    assert await wrong(database) == {}
    ages = "finished_at = now() - interval '10 minutes', created_at = now() - interval '1 hour'"
    await rewrite(database, "tasks", ages)
    await database.execute("update pgmq.q_orchestration_step_results set enqueued_at = now() - interval '10 minutes'")
    found = await wrong(database)
    assert set(found) == {"queue", "results"}
    assert found["results"].found == "1 step of 1 job ended without advancing their jobs, the first 600 s ago"
    assert found["queue"].found.startswith("orchestration_step_results: ")
    assert found["queue"].found.endswith(", the oldest for 600 s")
    await driver.advance()
    assert await wrong(database) == {}
    for number in range(12):
        await database.execute(
            "insert into interlock.orchestration_failures (msg_id, job_id, task_id, message, error) "
            "values (%s, %s, %s, '{}', 'OverflowError: too long')",
            [number, job, claimed.id],
        )
    dead = [finding for finding in await diagnose(database) if finding.about == "dead letter"]
    assert len(dead) == 11
    assert f"message 11 of job {job}, at " in dead[0].found
    assert dead[0].found.endswith("OverflowError: too long")
    assert "`interlock jobs replay`" in str(dead[0].todo)
    assert dead[-1].found == "2 messages more"


async def test_a_message_that_names_no_job_is_told_and_needs_nobody(database: Connection) -> None:
    await database.execute("select pgmq.send('orchestration_step_results', '{\"foo\": 1}')")
    for _ in range(MAX_MESSAGE_READS):
        await advance(database, actor="o", visibility=0)
    (row,) = await read_orchestration_failures(database)
    assert (row["job_id"], row["retry_at"]) == (None, None)
    (dead,) = [finding for finding in await diagnose(database) if finding.about == "dead letter"]
    assert not dead.needs_attention
    assert dead.found.startswith(f"message {row['msg_id']}, which names no job, at ")
    assert dead.todo is None, "there is nothing that anybody could do"


async def test_expired_leases_and_vanished_processes_are_reported(database: Connection) -> None:
    await here(database, "worker-1", "add")
    await enqueue_by_sql(database, type="add")
    await claim_pending_tasks(database, actor="worker-1", types=["add"], limit=1)
    await database.execute("update interlock.tasks set lease_expires_at = now() - interval '2 minutes'")
    await database.execute("update interlock.workers set seen_until = now() - interval '10 minutes'")
    found = await wrong(database)
    assert set(found) == {"leases", "vanished"}
    assert found["leases"].found == "1 lease expired and no task was recovered, the first 120 s ago"
    assert found["vanished"].found.startswith("worker worker-1 has sent no heartbeat for 600 s")
    await database.execute("update interlock.workers set seen_until = now() - interval '2 days'")
    assert "vanished" not in await wrong(database), "long ago is no news"


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
    assert found["schedule"].found == "nightly is stopped: no such zone"
    assert found["callbacks"].found == "1 webhook given up, the latest error: refused"


async def test_a_missing_queue_is_reported(database: Connection) -> None:
    await database.execute("drop view interlock.orchestration_messages")
    await database.execute("select pgmq.drop_queue('orchestration_step_results')")
    found = await wrong(database)
    assert "interlock migrate" in str(found["queue"].todo)
    await database.execute("drop schema pgmq cascade")
    assert (await wrong(database))["queue"].found.startswith("PGMQ is missing")


async def test_no_statement_reads_through_the_tasks(database: Connection) -> None:
    await database.execute("insert into interlock.tasks (type) select 'x' from generate_series(1, 20000)")
    await database.execute(
        "update interlock.tasks set state = 'canceled', event = 'cancel' "
        "where id in (select id from interlock.tasks limit 19000)"
    )
    await database.execute("vacuum analyze interlock.tasks")
    asked: dict[str, Any] = {"each": 10, "limit": 10, "threshold": "1 min", "reported_for": "1 day", "now": None}
    for name, statement in DOCTOR.items():
        cursor = await database.execute(b"explain " + statement.sql.encode(), asked)
        plan = "\n".join(str(row["QUERY PLAN"]) for row in await cursor.fetchall())
        assert "Seq Scan on tasks" not in plan, f"{name}\n{plan}"


@pytest.mark.flow
def test_the_command_exits_with_1_on_findings(url: str, make_database: Callable[[str], str]) -> None:
    shell = Shell(url)
    well = shell.run("doctor")
    assert (well.returncode, well.stderr.strip()) == (0, "all is well")
    shell.rows("select interlock.enqueue(type => 'add')")
    ill = shell.run("doctor")
    assert ill.returncode == 1
    assert ill.stdout.splitlines()[1].startswith("!   workers")
    document = json.loads(shell.run("doctor", "--json").stdout)
    assert document["needs_attention"] == 2
    assert {finding["about"] for finding in document["findings"] if finding["needs_attention"]} == {
        "workers",
        "namespace",
    }
    bare = Shell(make_database("template0")).run("doctor")
    assert bare.returncode == 1
    assert "run `interlock migrate`" in bare.stdout
    away = Shell("postgresql://nobody@127.0.0.1:1/none").run("doctor")
    assert away.returncode == 1
    assert "cannot connect to none at 127.0.0.1:1" in away.stdout
