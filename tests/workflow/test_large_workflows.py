"""The cost of an advance grows with the ended steps, not with the size of the job, the tables or the statistics."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from factories import step, workflow
from interlock.lifecycle import TaskRowEvent
from interlock.store.jobs import JOBS, ORCHESTRATION, STEPS
from interlock.store.tasks import TASKS, Outcome, claim_pending_tasks, settle_running_tasks
from interlock.store.workflows import put_workflow
from interlock.workflow.new_job import NewJob
from interlock.workflow.submit import submit_job
from job_driver import Failed, JobDriver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

TOUCHED = """
select coalesce(sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)), 0)::int as rows,
    coalesce(sum(n_tup_ins + n_tup_upd), 0)::int as written
from pg_stat_user_tables
where schemaname = 'interlock' and relname in ('tasks', 'jobs', 'workflow_steps', 'workflow_edges')
"""


async def touched(connection: Connection) -> tuple[int, int]:
    """Read the numbers of rows read and written so far."""
    await connection.execute("select pg_stat_force_next_flush()")
    await connection.execute("select pg_stat_clear_snapshot()")
    (row,) = await (await connection.execute(TOUCHED)).fetchall()
    return row["rows"], row["written"]


async def settle_all(driver: JobDriver, limit: int = 100) -> int:
    """Claim and settle a batch of steps."""
    types = ["t", "m"]
    claimed = await claim_pending_tasks(driver.connection, actor="w_1", types=types, limit=limit)
    outcomes = [Outcome(task.id, task.attempt, TaskRowEvent.SUCCEED, output={"result": None}) for task in claimed]
    await settle_running_tasks(driver.connection, outcomes, actor="w_1")
    return len(claimed)


def layered(layers: int, width: int) -> list[dict[str, Any]]:
    """Declare layers of steps, each of which waits for three of the layer before."""
    steps = [step(f"s0_{at}", type="t") for at in range(width)]
    for layer in range(1, layers):
        for at in range(width):
            after = [f"s{layer - 1}_{(at + near) % width}" for near in range(3)]
            steps.append(step(f"s{layer}_{at}", *after, type="t"))
    return steps


async def cost_of_a_batch(driver: JobDriver, layers: int, name: str) -> tuple[int, int, UUID]:
    """Run the first layer of a job and half of the second; return the cost of advancing ten steps."""
    await put_workflow(driver.connection, workflow(*layered(layers, 50), name=name))
    job = (await submit_job(driver.connection, NewJob(name, {}), actor="ada")).id
    await settle_all(driver, 50)
    await driver.advance()
    await settle_all(driver, 10)
    reads, writes = await touched(driver.connection)
    done = await driver.advance()
    assert done.advanced == 10
    more_reads, more_writes = await touched(driver.connection)
    return more_reads - reads, more_writes - writes, job


async def finish(driver: JobDriver, job: UUID) -> None:
    while (await driver.job(job))["status"] == "RUNNING":
        await settle_all(driver, 500)
        await driver.advance(limit=500)
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_the_cost_of_a_step_does_not_depend_on_the_size_of_its_job(driver: JobDriver) -> None:
    for _ in range(3):  # so that all plans are made
        *_, job = await cost_of_a_batch(driver, 4, "warm")
        await finish(driver, job)
    small_reads, small_writes, job = await cost_of_a_batch(driver, 4, "small")
    await finish(driver, job)
    large_reads, large_writes, job = await cost_of_a_batch(driver, 200, "large")
    assert (await driver.job(job))["open_steps"] == 10_000 - 60
    assert large_writes == small_writes
    assert large_reads <= small_reads * 1.2 + 20, "the size of the job makes no difference"


async def test_a_long_chain_is_skipped_in_one_transaction(driver: JobDriver) -> None:
    driver.outcomes = {"s0": Failed("boom")}
    chain = [step("s0"), *(step(f"s{at}", f"s{at - 1}") for at in range(1, 300))]
    job = await driver.submit(*chain)
    await driver.settle((await driver.claim())[0])
    done = await driver.advance()
    assert (done.skipped, done.finalized) == (299, 1)
    assert (await driver.job(job))["status"] == "FAILED"


async def test_the_cost_of_joining_a_fan_out_is_constant_per_part(driver: JobDriver) -> None:
    parts = 3_000
    driver.outcomes = {"find": list(range(parts))}
    job = await driver.submit(step("find"), step("m", "find", kind="map", over="find"))
    await driver.settle((await driver.claim())[0])
    assert (await driver.advance()).created == parts
    costs = []
    while await settle_all(driver, 500):
        before, _ = await touched(driver.connection)
        await driver.advance(limit=500)
        after, _ = await touched(driver.connection)
        costs.append(after - before)
    assert (await driver.job(job))["status"] == "COMPLETED"
    *counting, joining = costs[2:6]
    assert max(counting) <= min(counting) * 1.2 + 20, "later parts cost what earlier ones did"
    assert joining <= min(counting) * 1.2 + 20 + 3 * parts, "the map and the output of the job read each part once"


IDS = "array_fill('01a1e2cf-6c0c-75b3-83a4-94f638565840'::uuid, array[100])"
VALUES = {
    "ids": IDS,
    "job_ids": IDS,
    "task_ids": IDS,
    "workflow_ids": "'{}'",
    "skipped": IDS,
    "actor": "'o'",
    "results": "'{}'",
    "reasons": "'{}'",
    "skipped_by_failure": "'{}'",
    "errors": "'{}'",
    "failed_counts": "'{}'",
    "counted_ids": IDS,
    "counted_edges": "'{}'",
    "messages": "'{}'",
    "repeatable": "true",
    "steps": "'[]'",
    "upstreams": "'{}'",
    "jobs": "'[]'",
    "limit": "100",
    "each": "100",
    "lease": "'30 s'",
    "namespaces": "array['default']",
    "types": "array['x']",
    "attempts": "'{}'",
    "outputs": "'{}'",
    "others": "'[]'",
    "expected": "1",
}
# functions whose query is checked like a statement, with the types of the parameters in that query
FUNCTIONS = {
    "release_waiting_tasks": {
        "task_ids": "uuid[]",
        "only_held_by": "text",
        "new_reason": "text",
        "moment": "timestamptz",
        "counted_ids": "uuid[]",
        "counted_edges": "int[]",
    },
    "complete_running_jobs": {
        "job_ids": "uuid[]",
        "workflow_ids": "uuid[]",
        "failed_counts": "int[]",
        "new_reason": "text",
        "moment": "timestamptz",
    },
    "validate_submitted_jobs": {"job_ids": "uuid[]", "reasons": "text[]", "moment": "timestamptz"},
    "start_pending_jobs": {"job_ids": "uuid[]", "new_reason": "text", "moment": "timestamptz"},
    "insert_steps": {"job_ids": "uuid[]", "moment": "timestamptz"},
}
# the indexes that each statement may use; anything else would be a scan
HOT = {
    "claim_pending_tasks": {
        "tasks_claim",
        "tasks_pkey",
        "tasks_job",
        "jobs_pkey",
        "workflow_steps_pkey",
        "workflow_edges_downstream",
    },
    "settle_running_tasks": {"tasks_pkey", "waiters_pkey"},
    "take_ended_steps": {
        "tasks_pkey",
        "tasks_job",
        "jobs_pkey",
        "jobs_open",
        "workflow_edges_pkey",
        "workflow_steps_pkey",
    },
    "release_waiting_tasks": {"tasks_pkey"},
    "skip_waiting_tasks": {"tasks_pkey"},
    "update_waiting_steps": {"tasks_pkey", "namespaces_pkey", "jobs_pkey"},
    "update_jobs": {"jobs_pkey"},
    "complete_running_jobs": {"jobs_pkey", "waiters_pkey"},
    "validate_submitted_jobs": {"jobs_pkey", "jobs_open"},
    "start_pending_jobs": {"jobs_pkey", "jobs_open"},
    "insert_steps": {"jobs_pkey", "jobs_open", "workflow_steps_pkey", "namespaces_pkey"},
    "read_admissible_steps": {"jobs_pkey", "tasks_capped", "tasks_held_steps", "workflow_steps_pkey"},
    "read_next_compensations": {"tasks_held_steps"},
    "read_parent_steps": {"tasks_pkey", "jobs_parent_task", "jobs_pkey", "workflow_steps_pkey"},
    "succeed_waiting_tasks": {"tasks_pkey"},
    "fail_waiting_tasks": {"tasks_pkey"},
    "read_special_steps": {"tasks_pkey", "jobs_pkey", "workflow_steps_pkey", "signals_pkey", "tasks_parts"},
    "read_upstream_ends": {"tasks_job"},
    "read_ended_parts": {"tasks_pkey", "tasks_parts", "jobs_pkey", "workflow_steps_pkey"},
    "read_unfinished_parts": {"tasks_parts"},
    "read_steps_to_cancel": {"tasks_pkey"},
    "request_cancel_of_waiting_steps": {"tasks_pkey"},
    "supersede_upstream_steps": {"tasks_pkey", "tasks_job", "jobs_pkey", "workflow_edges_downstream"},
    "read_unfinished_children": {"jobs_children"},
    "read_reasons_to_cancel": {"jobs_pkey", "tasks_pkey"},
    "read_children_of_steps": {"jobs_parent_task"},
    "read_ends_of_jobs": {"jobs_pkey", "workflows_pkey", "tasks_job"},
    "read_due_waits": {"tasks_wait_until", "jobs_pkey", "workflow_steps_pkey"},
    "read_overdue_jobs": {"jobs_deadline"},
}
FILL = """
insert into interlock.workflows (id, name, version, definition, root_namespaces, plain_roots)
values ('01a1e2cf-6c0c-75b3-83a4-94f638565840', 'w', '1', '{}', '{default}', true);
insert into interlock.workflow_steps (workflow_id, step, position, kind, namespace, edges, priority, max_tries, spec)
select '01a1e2cf-6c0c-75b3-83a4-94f638565840', 's' || i, i, 'plain', 'default', 1, 0, 5, '{}'
from generate_series(1, %(steps)s) as i;
insert into interlock.workflow_edges (workflow_id, upstream, downstream, condition, branch)
select '01a1e2cf-6c0c-75b3-83a4-94f638565840', 's' || i, 's' || i + 1, 'after', false
from generate_series(1, %(steps)s) as i;
insert into interlock.jobs (task_description, workflow_id)
select 'w', '01a1e2cf-6c0c-75b3-83a4-94f638565840' from generate_series(1, %(jobs)s);
insert into interlock.tasks (type, state, held_by, job_id, step)
select 'x', 'waiting', 'dependency', jobs.id, 's' || i from interlock.jobs, generate_series(1, %(steps)s) as i;
"""


@pytest.fixture(params=[{"steps": 3, "jobs": 1}, {"steps": 100, "jobs": 300}], ids=["small", "large"])
def filled(request: pytest.FixtureRequest, url: str) -> Iterator[psycopg.Connection]:
    """Fill a database with one small job or with three hundred large ones."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
        connection.execute(re.sub(r"%\((\w+)\)s", lambda match: str(request.param[match[1]]), FILL).encode())
        connection.execute("vacuum analyze")
        connection.execute("set enable_seqscan = off")  # as the first statement of every transaction does
        yield connection


def test_every_hot_statement_uses_its_indexes(filled: psycopg.Connection) -> None:
    for name in HOT:
        check_plans(filled, name)
        filled.execute("deallocate hot")


def query_of_function(name: str) -> str:
    """Return the last statement of a database function."""
    for file in files("interlock").joinpath("sql", "functions").iterdir():
        found = re.search(
            rf"^create or replace function interlock\.{name}\(.*?"
            r"(?:return query\n|^ +(?=insert into))((?:(?!return query).)*?);\nend\n\$\$;",
            file.read_text(encoding="utf-8"),
            re.DOTALL | re.MULTILINE,
        )
        if found is not None:
            return found[1]
    raise LookupError(name)


def check_plans(filled: psycopg.Connection, name: str) -> None:
    """Check that generic and custom plans of a statement use only its indexes."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    if name in FUNCTIONS:
        query = query_of_function(name)
        text = re.sub(rf"(?<!\.)\b({'|'.join(FUNCTIONS[name])})\b", number, query)
    else:
        statement = {**TASKS, **JOBS, **ORCHESTRATION, **STEPS}[name]
        text = re.sub(r"%\((\w+)\)s", number, statement.sql).replace("%%", "%")
    types = ", ".join(FUNCTIONS[name][parameter] for parameter in names) if name in FUNCTIONS else ""
    filled.execute(f"prepare hot {f'({types})' if types else ''} as {text}".encode())
    values = ", ".join(VALUES.get(name, "null") for name in names)
    for mode in ("force_generic_plan", "force_custom_plan"):
        filled.execute(f"set plan_cache_mode = {mode}".encode())
        plan = "\n".join(line for (line,) in filled.execute(f"explain execute hot({values})".encode()))
        assert "Seq Scan" not in plan.replace("Seq Scan on settings", "one row"), f"{name}\n{plan}"
        # an entry of tasks_waiting that is found by its id is as good as one of the primary key
        by_id = r"using tasks_waiting on (tasks\w*( \w+)?  \(.*\n\s*Index Cond: \(id = )"
        found = re.sub(by_id, r"using tasks_pkey on \1", plan)
        used = set(re.findall(r"(?:Index(?: Only)? Scan|Bitmap Index Scan)(?: Backward)? (?:using|on) (\w+)", found))
        assert used <= HOT[name], f"{name}\n{plan}"
        # an index that is walked from end to end is a scan, too
        for line in re.findall(r"Index(?: Only)? Scan.*\n(.*)", plan):
            assert "Cond" in line, plan
            assert "job_id = ANY" not in line, plan
