"""Named statements, database functions and lifecycle tables agree: every transition is written in exactly one place."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
from psycopg._queries import MAX_CACHED_STATEMENT_LENGTH

from interlock.lifecycle import JOB, SUPERVISED_WORKER
from interlock.postgres.guards import GUARDS, generate, render
from interlock.postgres.query import as_json, load_statements, run
from interlock.store.jobs import read_job_history
from sql_text import AGGREGATES, Move, writers, written_targets

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

WRITERS = list(writers())
ALL = {name: statement for aggregate in AGGREGATES for name, statement in load_statements(aggregate).items()}
JOBS = load_statements("jobs")
WORKERS = load_statements("workers")
SOURCE = Path(str(files("interlock")))

# Statements whose name is put together at run time, and the expression that does so.
NAMED_BY_EXPRESSION = {
    "count_job_moves": "count_{machine}_moves",
    "count_task_moves": "count_{machine}_moves",
    "count_worker_moves": "count_{machine}_moves",
    "read_explained_jobs": "read_explained_{kind}s",
    "read_explained_tasks": "read_explained_{kind}s",
    "sample_jobs": "sample_{self._table}",
    "sample_tasks": "sample_{self._table}",
}


@pytest.mark.unit
def test_every_transition_is_written_in_exactly_one_place() -> None:
    """In a named statement or in a database function; no other transition is written."""
    written = Counter(move for writer in WRITERS for move in writer.moves)
    declared = Counter(
        Move(guard.machine.name, str(source), str(event), str(target))
        for guard in GUARDS
        for source, event, target in guard.machine.rows
    )
    assert written == declared


@pytest.mark.unit
def test_headers_declare_exactly_the_states_that_a_text_writes() -> None:
    for writer in WRITERS:
        declared: dict[str, set[str]] = {}
        for move in writer.moves:
            declared.setdefault(move.machine, set()).add(move.target)
            assert f"'{move.event}'" in writer.sql, f"{writer.name} does not write the event {move.event}"
        assert written_targets(writer.sql) == declared, f"{writer.name}: headers and text disagree"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("sql", "targets"),
    [
        ("update interlock.tasks set state = 'done', event = 'x' where state = 'running'", {"task": {"done"}}),
        ("update interlock.tasks as t\nset a = (select 1, 2), state = 'done'", {"task": {"done"}}),
        (
            "update interlock.jobs set status = case when x = 'FAILED' then 'COMPLETED' else status end, event = 'y'",
            {"job": {"COMPLETED"}},
        ),
        ("update interlock.workers set status = %(status)s", {"supervised worker": {"?"}}),
        ("update interlock.callbacks set state = 'done'", {}),
        ("update interlock.tasks set output = null where state = 'running'", {}),
    ],
)
def test_undeclared_moves_are_seen(sql: str, targets: dict[str, set[str]]) -> None:
    assert written_targets(sql) == targets


@pytest.mark.unit
def test_every_statement_has_a_caller() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    unused = [name for name in ALL if f'"{NAMED_BY_EXPRESSION.get(name, name)}"' not in source]
    assert unused == []


@pytest.mark.unit
def test_statement_names_are_unique_across_files() -> None:
    assert len(ALL) == sum(len(load_statements(aggregate)) for aggregate in AGGREGATES)


@pytest.mark.unit
def test_every_statement_is_short_enough_for_the_cache_of_the_driver() -> None:
    """psycopg parses the parameters of a longer one on every call, which takes longer than sending it."""
    for statement in ALL.values():
        assert len(statement.sql) <= MAX_CACHED_STATEMENT_LENGTH, f"{statement.name} is too long"


@pytest.mark.lifecycle
def test_guards_sql_is_generated_from_the_tables(tmp_path: Path) -> None:
    stored = Path(str(files("interlock").joinpath("sql", "guards.sql")))
    assert stored.read_text(encoding="utf-8") == render(), "lifecycle.py changed: run `interlock migrate --generate`"
    copy = tmp_path / "guards.sql"
    copy.write_bytes(stored.read_bytes())
    assert not generate(copy)
    copy.write_text("an older table", encoding="utf-8")
    assert generate(copy)
    assert copy.read_text(encoding="utf-8") == render()


async def one(database: Connection, statements: Any, name: str, **parameters: Any) -> Any:
    given = {"actor": "ada", "now": None, "reason": "why not", "error": as_json({}), **parameters}
    rows = await run(database, statements[name], given)
    return rows[0]["id"] if rows else None


@pytest.mark.store
async def test_every_job_statement_makes_its_moves_and_is_recorded(database: Connection) -> None:
    async def move(name: str, id_: UUID) -> Any:
        told = as_json([{"id": id_, "workflow": "x", "namespace": "default", "reason": "why not"}])
        given = {"ids": [id_], "jobs": told, "reasons": ["why not"], "failed_steps": [0], "workflow_ids": [None]}
        return await one(database, JOBS, name, **given)

    paths = [
        ["validate_submitted_jobs", "start_pending_jobs", "complete_running_jobs"],
        ["validate_submitted_jobs", "start_pending_jobs", "fail_running_jobs"],
        ["validate_submitted_jobs", "start_pending_jobs", "cancel_unfinished_jobs"],
        ["validate_submitted_jobs", "cancel_unfinished_jobs"],
        ["cancel_unfinished_jobs"],
        ["reject_submitted_jobs"],
    ]
    seen = set()
    for path in paths:
        job = uuid4()
        for name in ["insert_jobs", *path]:
            assert await move(name, job) == job
            assert await move(name, job) is None, "a second time changes nothing"
        history = await read_job_history(database, job)
        assert [record["reason"] for record in history[1:]] == ["why not"] * len(path)
        seen |= {(record["from_state"], record["event"], record["to_state"]) for record in history[1:]}
    assert seen == {(str(a), str(e), str(b)) for a, e, b in JOB.rows}


@pytest.mark.store
async def test_every_worker_statement_makes_its_moves_and_is_recorded(database: Connection) -> None:
    paths = [
        ["terminate_worker"],
        ["start_idle_worker", "terminate_worker"],
        ["start_idle_worker", "pause_running_worker", "resume_paused_worker", "complete_running_worker"],
        ["start_idle_worker", "pause_running_worker", "terminate_worker"],
        ["start_idle_worker", "complete_running_worker", "terminate_worker"],
        ["start_idle_worker", "fail_running_worker", "terminate_worker"],
    ]
    seen = set()
    for path in paths:
        worker = await one(
            database, WORKERS, "insert_worker", id=f"w_{uuid4()}", workspace_id="ws", metadata=as_json({})
        )
        for name in path:
            assert await one(database, WORKERS, name, id=worker) == worker
            assert await one(database, WORKERS, name, id=worker) is None, "a second time changes nothing"
        history = await run(database, WORKERS["read_worker_moves"], {"id": worker, "after": 0, "limit": 100})
        assert {record["actor"] for record in history} == {"ada"}
        seen |= {(record["from_state"], record["event"], record["to_state"]) for record in history[1:]}
    assert seen == {(str(a), str(e), str(b)) for a, e, b in SUPERVISED_WORKER.rows}


@pytest.mark.unit
def test_every_transaction_is_opened_where_its_errors_become_ours() -> None:
    """BEGIN and COMMIT can fail, too. Migrations handle the driver's own errors, under `connect`."""
    exempt = {"postgres/connection.py", "postgres/migrate.py", "postgres/pgmq.py"}
    bare = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if ".transaction()" in line and "translated(" not in line and str(path.relative_to(SOURCE)) not in exempt
    ]
    assert bare == []
