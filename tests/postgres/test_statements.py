"""The named statements and the lifecycle tables hold each other: every move is written in exactly one statement."""

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

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

AGGREGATES = sorted(path.stem for path in Path(str(files("interlock").joinpath("sql", "queries"))).glob("*.sql"))
ALL = {name: statement for aggregate in AGGREGATES for name, statement in load_statements(aggregate).items()}
JOBS = load_statements("jobs")
WORKERS = load_statements("workers")


@pytest.mark.unit
def test_every_transition_is_written_in_exactly_one_statement_and_no_other_is() -> None:
    written = Counter(
        (move.machine, move.source, move.event, move.target) for statement in ALL.values() for move in statement.moves
    )
    declared = [
        (guard.machine.name, str(source), str(event), str(target))
        for guard in GUARDS
        for source, event, target in guard.machine.rows
    ]
    assert written == Counter(declared)


@pytest.mark.unit
def test_a_statement_has_the_literals_of_its_headers_and_writes_no_state_without_one() -> None:
    for statement in ALL.values():
        for move in statement.moves:
            for word in (move.event, move.target):
                assert f"'{word}'" in statement.sql, f"{statement.name} does not write {word}"
        writes_state = any(f"set {column} =" in statement.sql for column in ("state", "status"))
        assert writes_state == bool(statement.moves), f"{statement.name}: headers and text disagree"


@pytest.mark.unit
def test_statement_names_are_unique_across_files() -> None:
    assert len(ALL) == sum(len(load_statements(aggregate)) for aggregate in AGGREGATES)


@pytest.mark.unit
def test_the_driver_keeps_what_it_found_in_every_statement() -> None:
    """To look for the parameters of a long one, again at every claim, takes the client longer than to send it."""
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
        history = await run(database, JOBS["read_job_history"], {"id": job})
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
        history = await run(database, WORKERS["read_worker_history"], {"id": worker})
        assert {record["actor"] for record in history} == {"ada"}
        seen |= {(record["from_state"], record["event"], record["to_state"]) for record in history[1:]}
    assert seen == {(str(a), str(e), str(b)) for a, e, b in SUPERVISED_WORKER.rows}


@pytest.mark.unit
def test_every_transaction_is_opened_where_its_errors_become_ours() -> None:
    """A begin or a commit fails, too; those of migrations look at the driver's own errors, under `connect`."""
    source = Path(str(files("interlock")))
    exempt = {"postgres/connection.py", "postgres/migrate.py", "postgres/pgmq.py"}
    bare = [
        f"{path.relative_to(source)}:{number}"
        for path in sorted(source.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if ".transaction()" in line and "translated(" not in line and str(path.relative_to(source)) not in exempt
    ]
    assert bare == []
