"""The planner takes the index that each hot statement was given, with and without knowing the parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psycopg
import pytest

from interlock.store.doctor import DOCTOR
from interlock.store.explain import EXPLAIN
from interlock.store.jobs import JOBS, ORCHESTRATION, STEPS
from interlock.store.limits import LIMITS
from interlock.store.signals import SIGNALS
from interlock.store.tasks import TASKS, claim_statement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.postgres.embedded.server import EmbeddedServer

pytestmark = pytest.mark.store

STATEMENTS = {**TASKS, **JOBS, **ORCHESTRATION, **STEPS, **SIGNALS, **LIMITS, **DOCTOR, **EXPLAIN}
STATEMENTS |= {f"claim of {types}": claim_statement(types) for types in (1, 3, 50)}
CLAIM = {
    "namespaces": "array['default', 'other']",
    "types": "array['x']",
    "each": "50",
    "limit": "100",
    "lease": "'30 s'",
    "actor": "'w'",
    "callback_url": "null",
    "recent": "'6000 years'",
    "least_crashes": "0",
    "most_crashes": "0",
}
OUTCOME = """{"id": "01a1e2cf-6c0c-75b3-83a4-94f638565840", "attempt": 1, "event": "succeed"}"""
IDS = "array_fill('01a1e2cf-6c0c-75b3-83a4-94f638565840'::uuid, array[100])"
FILL = """
insert into interlock.tasks (type) select 'x' from generate_series(1, 40000);
update interlock.tasks set state = 'running', event = 'claim', attempt = 1, worker_id = 'w', lease_expires_at = now()
where id in (select id from interlock.tasks limit 30000);
update interlock.tasks
set state = 'done', event = 'succeed', settled_attempt = 1, lease_expires_at = null, updated_at = clock_timestamp()
where id in (select id from interlock.tasks where state = 'running' limit 28000);
"""
# One waiting task in ten waits for a signal.
WAITING = """
insert into interlock.tasks (type, state, held_by, wait_started_at, reason)
select 'x', 'waiting', case when number % 10 = 0 then 'signal' else 'dependencies' end, clock_timestamp(), 'waits'
from generate_series(1, 5000) as number;
"""


@pytest.fixture(scope="module")
def filled(template: str, server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    """Fill a database with 28,000 finished, 2,000 running and 10,000 pending tasks."""
    with psycopg.connect(server.url("postgres"), autocommit=True) as admin:
        admin.execute(f"create database plans template {template}".encode())
        with psycopg.connect(server.url("plans"), autocommit=True, prepare_threshold=None) as connection:
            connection.execute(FILL)
            connection.execute("vacuum analyze interlock.tasks")
            yield connection
        admin.execute("drop database plans with (force)")


def plan(connection: psycopg.Connection, name: str, /, **parameters: str) -> str:
    """Explain a statement as the server plans it for a prepared statement with these parameters."""
    return explained(connection, "explain", name, parameters)


def explained(connection: psycopg.Connection, explain: str, name: str, parameters: dict[str, str]) -> str:
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    text = re.sub(r"%\((\w+)\)s", number, STATEMENTS[name].sql).replace("%%", "%")
    connection.execute("deallocate all", prepare=False)
    connection.execute(f"prepare hot as {text}".encode())
    values = f"({', '.join(parameters.get(name, 'null') for name in names)})" if names else ""
    return "\n".join(line for (line,) in connection.execute(f"{explain} execute hot{values}".encode()))


@pytest.fixture(params=["force_generic_plan", "force_custom_plan"])
def mode(request: pytest.FixtureRequest, filled: psycopg.Connection) -> psycopg.Connection:
    filled.execute(f"set plan_cache_mode = {request.param}".encode())
    return filled


@pytest.mark.parametrize("types", [1, 3, 50])
@pytest.mark.parametrize("crashes", [{}, {"least_crashes": "1", "most_crashes": "3"}], ids=["others", "suspected"])
def test_claiming_merges_walks_of_the_claim_index_in_its_order(
    mode: psycopg.Connection, types: int, crashes: dict[str, str]
) -> None:
    names = ", ".join(f"'type {number}'" for number in range(types))
    text = plan(mode, f"claim of {types}", **{**CLAIM, **crashes, "types": f"array[{names}]"})
    assert text.count("Index Scan using tasks_claim on tasks") == types
    assert len(re.findall(r"Index Cond: \(.*type = .*crashes >= ", text)) == types
    assert ("Merge Append" in text) == (types > 1)
    assert not re.search(r"^ *(?:->)? *(?:Incremental )?Sort  ", text, re.MULTILINE)
    assert "Seq Scan" not in text


ANALYZE = "explain (analyze, timing off, buffers)"
OTHER_TYPES = """
insert into interlock.tasks (type, priority) select 'other', number % 5 from generate_series(1, 20000) as number;
insert into interlock.tasks (type, priority) select 'x', 1 from generate_series(1, 20);
insert into interlock.tasks (type, priority) select 'y', 2 from generate_series(1, 20);
insert into interlock.tasks (type, run_at) select 'y', now() + interval '1 hour' from generate_series(1, 20000);
"""


def test_a_claim_reads_no_tasks_of_other_types_and_locks_what_it_claims(url: str) -> None:
    """The statistics are those of the empty table, as after a bulk enqueue."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
        connection.execute("set plan_cache_mode = force_generic_plan; set enable_seqscan = off")
        plan(connection, "claim of 3", **CLAIM)
        connection.execute(OTHER_TYPES)
        given = {
            **CLAIM,
            "types": "array['x', 'y', 'z']",
            "namespaces": "array['default']",
            "each": "25",
            "limit": "25",
        }
        text = explained(connection, ANALYZE, "claim of 3", given)
        assert "Rows Removed by Filter" not in text
        rows = [int(found) for found in re.findall(r"Index Scan using tasks_claim .*actual rows=(\d+)", text)]
        assert rows == [5, 20, 0], "of `y` all that are due, and of `x` the rest"
        assert re.findall(r"LockRows .*actual rows=(\d+)\S* loops=(\d+)", text) == [("1", "25")]
        waiting = explained(connection, ANALYZE, "until_next_run", given)
        assert "Rows Removed by Filter" not in waiting
        assert all(int(found) <= 1 for found in re.findall(r"using tasks_claim .*actual rows=(\d+)", waiting))


def test_a_claim_of_recent_tasks_reads_no_entries_of_claimed_ones(url: str) -> None:
    """A snapshot that is held open keeps vacuum, and the claims themselves, from removing these entries."""
    with (
        psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection,
        psycopg.connect(url) as holder,
    ):
        connection.execute("set plan_cache_mode = force_generic_plan; set enable_seqscan = off")
        connection.execute(
            "insert into interlock.tasks (type, priority, run_at) "
            "select 'x', number % 3, now() - interval '1 minute' from generate_series(1, 5000) as number"
        )
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select from interlock.tasks limit 1")
        given = {**CLAIM, "types": "array['x']", "namespaces": "array['default']", "each": "5000", "limit": "5000"}
        assert "Update on tasks" in explained(connection, ANALYZE, "claim of 1", given)
        reads = []
        for recent in ("'6000 years'", "'10 s'"):
            text = explained(connection, ANALYZE, "claim of 1", {**given, "recent": recent})
            (read,) = re.findall(r"Index Scan using tasks_claim.*?Buffers: shared hit=(\d+)", text, re.DOTALL)
            reads.append(int(read))
        assert reads[0] > 5 * reads[1]


def test_looking_for_suspected_tasks_reads_no_others(mode: psycopg.Connection) -> None:
    text = plan(mode, "has_suspected_tasks", namespaces=CLAIM["namespaces"], types=CLAIM["types"])
    assert "Scan using tasks_claim" in text
    assert re.search(r"Index Cond: \(.*crashes > 0", text)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("read_pending_of_namespace", {"name": "'default'", "batch": "100"}),
        ("read_due_types", {"each": "100"}),
        ("count_due_types", {"name": "'default'", "limit": "100"}),
    ],
)
def test_other_readers_of_pending_tasks_walk_the_claim_index(
    mode: psycopg.Connection, name: str, parameters: dict[str, str]
) -> None:
    text = plan(mode, name, **parameters)
    assert "Scan using tasks_claim" in text
    assert not re.search(r"Sort Key: [^(]*run_at", text)
    assert "Seq Scan on tasks" not in text


def test_a_claim_does_not_call_the_function_that_takes_tokens(mode: psycopg.Connection) -> None:
    """Its condition is a parameter: a filter that is evaluated once, before the function."""
    text = plan(mode, "claim of 3", **CLAIM)
    assert "tasks_claim_limited" not in text
    assert "take_limited_tasks" not in text
    if "ProjectSet" in text:
        assert "One-Time Filter" in text


def test_looking_for_the_next_due_task_walks_the_claim_index(mode: psycopg.Connection) -> None:
    text = plan(mode, "until_next_run", namespaces=CLAIM["namespaces"], types=CLAIM["types"])
    assert text.count("Index Scan using tasks_claim") + text.count("Index Only Scan using tasks_claim") == 2
    assert len(re.findall(r"Index Cond: \(.*run_at > ", text)) == 2, "tasks that were due before are not read"
    assert "Sort" not in text
    assert "Seq Scan" not in text


def test_looking_for_the_next_due_time_of_jobs_walks_one_index_for_each_kind(mode: psycopg.Connection) -> None:
    text = plan(mode, "until_next_due")
    for index in ("jobs_deadline", "jobs_not_before", "tasks_wait_until"):
        assert f"Scan using {index}" in text
    assert "Seq Scan" not in text


def test_settling_goes_by_primary_key_and_not_by_the_lease_index(mode: psycopg.Connection) -> None:
    text = plan(mode, "settle_running_tasks", actor="'w'", outcomes=f"'[{OUTCOME}]'")
    assert "Index Scan using tasks_pkey" in text
    assert "tasks_lease" not in text
    assert "Seq Scan on tasks" not in text


LIMITED = """
insert into interlock.tasks (type) select 'x' from generate_series(1, 20000);
insert into interlock.tasks (type, state, held_by, limit_keys)
select 'x', 'waiting', 'limit', array['k' || mod(n, 50), 'all'] from generate_series(1, 5000) as n;
update interlock.tasks set state = 'pending', event = 'release', held_by = null
where id in (select id from interlock.tasks where state = 'waiting' limit 300);
"""


@pytest.fixture
def limited(url: str) -> Iterator[psycopg.Connection]:
    """Return a database with 20,000 tasks without a limit, and 5,000 with limits in 50 lanes."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
        connection.execute(LIMITED)
        connection.execute("vacuum analyze interlock.tasks")
        yield connection


@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
def test_admission_under_limits_goes_by_its_indexes(limited: psycopg.Connection, mode: str) -> None:
    limited.execute(f"set plan_cache_mode = {mode}".encode())
    limited.execute(STATEMENTS["walk_indexes"].sql.replace("true", "false").encode())  # for the session
    lanes = """'[{"keys": ["k1", "all"], "tasks": 5}]'"""
    statements = {
        "read_waiting_lanes": {},
        "read_limit_usage": {"keys": "array['k1', 'all']"},
        "read_admissible_tasks": {"lanes": lanes, "served_only": "true"},
        "read_unserved_tasks": {"batch": "100"},
        "write_limit_reasons": {"lanes": lanes, "each": "100", "served_only": "true"},
        "read_admitted_keys": {},
        "read_excess_tasks": {"keys": "array['k1']", "tasks": "array[5]", "due_only": "array[true]", "batch": "100"},
        "next_limited_run_at": {},
    }
    plans = {name: plan(limited, name, **parameters) for name, parameters in statements.items()}
    for name, text in plans.items():
        assert "Seq Scan on tasks" not in text, f"{name}: {text}"
    assert "Index Only Scan using tasks_limit_waiting" in plans["read_waiting_lanes"], plans["read_waiting_lanes"]
    for name in ("read_admissible_tasks", "write_limit_reasons"):
        assert "Index Scan using tasks_limit_waiting" in plans[name], plans[name]
    assert "using tasks_limit_due" in plans["next_limited_run_at"], plans["next_limited_run_at"]


@pytest.fixture
def fresh(url: str) -> Iterator[psycopg.Connection]:
    """Return a small table whose statistics know pending rows only, as after a bulk enqueue."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
        connection.execute("insert into interlock.tasks (type) select 'x' from generate_series(1, 3000)")
        connection.execute("vacuum analyze interlock.tasks")
        yield connection


def test_a_small_table_with_stale_statistics_is_not_scanned_for_every_batch(fresh: psycopg.Connection) -> None:
    claim = plan(fresh, "claim of 3", **CLAIM)
    settle = plan(fresh, "settle_running_tasks", actor="'w'", expected="1", outcomes=f"'[{OUTCOME}]'")
    for text in (claim, settle):
        assert "Index Scan using tasks_pkey" in text
        assert "Seq Scan on tasks" not in text


def test_renewing_goes_by_primary_key(mode: psycopg.Connection) -> None:
    text = plan(mode, "renew_running_tasks", ids=IDS, attempts="array_fill(1, array[100])", lease="'30 s'")
    assert "Index Scan using tasks_pkey" in text
    assert "Seq Scan on tasks" not in text


def test_recovery_walks_the_lease_index(mode: psycopg.Connection) -> None:
    text = plan(mode, "recover_expired_tasks", limit="100", actor="'w'")
    assert "Index Scan using tasks_lease" in text
    assert "Seq Scan" not in text


@pytest.mark.parametrize("name", ["read_special_steps", "read_ended_parts"])
def test_a_plan_that_is_made_while_tables_are_empty_goes_by_the_keys(url: str, name: str) -> None:
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
        connection.execute("set plan_cache_mode = force_generic_plan")  # as orchestration transactions do
        connection.execute("set enable_seqscan = off")
        text = plan(connection, name, ids=IDS)
    assert "Index Cond: (id = ANY" in text
    assert re.search(r"Index Cond: \(id = \w+\.job_id\)", text)
    assert "Join Filter" not in text
    assert "Hash" not in text


@pytest.fixture
def many_jobs(url: str) -> Iterator[psycopg.Connection]:
    """Return a table of 20,000 pending and ended jobs, of which 200 wait for 20 keys and 20 were submitted by SQL."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
        connection.execute(
            "insert into interlock.workflows (name, version, definition, root_namespaces, plain_roots) "
            "values ('w', '1', '{}', '{}', true)"
        )
        connection.execute(
            "insert into interlock.jobs (task_description, workflow_id, key, key_order, on_conflict) "
            "select 'w', workflows.id, case when keyed then (n % 20)::text end, case when keyed then n end, "
            "case when keyed then 'queue' end "
            "from interlock.workflows, generate_series(1, 20000) as n, "
            "lateral (select n between 19781 and 19980) as found (keyed)"
        )
        connection.execute(
            "update interlock.jobs set status = 'PENDING', event = 'validate' "
            "where id not in (select id from interlock.jobs where key is null order by id desc limit 20)"
        )
        connection.execute(
            "update interlock.jobs set status = 'CANCELED', event = 'cancel' "
            "where id in (select id from interlock.jobs where key is null and status = 'PENDING' limit 15000)"
        )
        connection.execute("vacuum analyze interlock.jobs")
        yield connection


@pytest.mark.parametrize("mode_name", ["force_generic_plan", "force_custom_plan"])
@pytest.mark.parametrize(
    ("statement", "index"),
    [
        ("read_queued_jobs", "jobs_key_waiting"),
        ("read_replaced_jobs", "jobs_key_waiting"),
        ("refresh_key_reasons", "jobs_key_waiting"),
        ("read_submitted_jobs", "jobs_submitted"),
    ],
)
def test_jobs_that_wait_for_keys_are_found_among_those_only(
    many_jobs: psycopg.Connection, mode_name: str, statement: str, index: str
) -> None:
    many_jobs.execute(f"set plan_cache_mode = {mode_name}".encode())
    text = plan(many_jobs, statement, limit="100")
    assert index in text
    assert "Seq Scan on jobs" not in text


def test_the_inbox_is_read_from_an_index_of_what_waits_for_a_signal(url: str) -> None:
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
        connection.execute(WAITING)
        connection.execute("vacuum analyze interlock.tasks")
        connection.execute("set plan_cache_mode = force_custom_plan")  # the statement is not prepared
        for conditions in (
            {},
            {"assignee": "'eva'"},
            {"after": "now()", "after_id": "'01a1e2cf-6c0c-75b3-83a4-94f638565840'", "kind": "'approval'"},
        ):
            text = plan(connection, "read_inbox", limit="100", window="10000", **conditions)
            assert "tasks_inbox" in text, conditions
            assert "Seq Scan on tasks" not in text, conditions


def test_the_signals_of_a_step_are_found_by_job_and_name(mode: psycopg.Connection) -> None:
    mode.execute("set enable_seqscan = off")  # as in the transactions of the orchestrator
    parameters = {"job_ids": IDS, "names": "array_fill('go'::text, array[100])", "counts": "array_fill(1, array[100])"}
    assert "signals_job" in plan(mode, "read_unconsumed_signals", **parameters)
    mode.execute("reset enable_seqscan")
