"""Scenarios that prove that a condition of a statement is needed: rows, calls, and what becomes of the row.

A table has a `Guarded` for each statement: a row that it applies to and, for each condition, a row or a call that
differs in exactly that. The statement as shipped must leave the row alone; without the condition it must not.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import psycopg
from psycopg.types.datetime import TimestamptzLoader

from interlock.lifecycle import JOB, SUPERVISED_WORKER
from interlock.postgres.query import as_json, load_statements
from sql_text import AGGREGATES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from psycopg.abc import Buffer

    from interlock.machine import Machine
    from interlock.postgres.connection import Connection

    Row = dict[str, Any]
    MakeRow = Callable[["Scene"], Awaitable[Row]]
    Call = Callable[[Row], Mapping[str, Any]]

NOW = datetime(2030, 1, 1, tzinfo=UTC)  # later than the defaults of inserted rows
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
OTHER = UUID(int=1)  # the id of no row
VIEWS = {"orchestration_messages"}
NOBODY = "nobody"  # the id of no worker

STATEMENTS = {name: each for aggregate in AGGREGATES for name, each in load_statements(aggregate).items()}
DEFAULTS: dict[str, Any] = {"actor": "ada", "now": NOW, "limit": 100, "each": 100, "batch": 100}

_PARAMETER = re.compile(r"%\((\w+)\)s")
# Events that lead to a state.
_JOB_PATHS: dict[str, tuple[str, ...]] = {
    "SUBMITTED": (),
    "PENDING": ("validate",),
    "RUNNING": ("validate", "allocate_resources"),
    "COMPLETED": ("validate", "allocate_resources", "success"),
    "FAILED": ("validate", "allocate_resources", "error"),
    "CANCELED": ("cancel",),
}
_WORKER_PATHS: dict[str, tuple[str, ...]] = {
    "IDLE": (),
    "RUNNING": ("start_task",),
    "PAUSED": ("start_task", "pause"),
    "COMPLETED": ("start_task", "complete_tasks"),
    "FAILED": ("start_task", "error_unrecoverable"),
    "TERMINATED": ("terminate",),
}

# How a missing condition shows: the row is not as it must be, or the database refuses the write, or a function stops at
# a value that it cannot handle.
CaughtBy = Literal["row", "guard", "constraint", "function"]


@dataclass(frozen=True)
class Needed:
    """A condition, what goes wrong without it, and the scenario that shows it.

    `row` and `call` replace or add to those of the statement. The row must stay as it is, or, with `expect`, end with
    these values; a read must not return it, or return it with these values. `meanwhile` is a change of the row that
    another transaction commits after the statement has read the row and before it writes.

    `along_with` are repetitions of the condition at other places of the statement, which are removed with it.

    With `instead`, the text is a part of the SQL outside of the conditions that the parser finds, such as a column that
    later statements of a function test; it is replaced by `instead`.
    """

    text: str
    risk: str
    row: MakeRow | None = None
    call: Mapping[str, Any] | Call = field(default_factory=dict)
    expect: Mapping[str, Any] | None = None
    caught_by: CaughtBy = "row"
    meanwhile: str | None = None
    instead: str | None = None
    along_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class Redundant:
    """A condition whose removal changes no outcome, and why it is there."""

    text: str
    reason: str


@dataclass(frozen=True)
class Guarded:
    """A statement, or a function as `name()`, with a row that it applies to and the parameters of the call.

    `sql` is the call of a function that no statement of the same name calls with all parameters.
    """

    name: str
    row: MakeRow
    call: Call
    conditions: tuple[Needed | Redundant, ...]
    sql: str | None = None


class GuardedWrite(Guarded):
    """A statement that writes."""


class GuardedRead(Guarded):
    """A statement that chooses, and mostly locks, the rows that later statements of the transaction write."""


def by_id(**parameters: Any) -> Call:
    """Call for one row: `id` and its list."""
    return lambda row: {"id": row["id"], "ids": [row["id"]], **parameters}


class _Timestamps(TimestamptzLoader):
    """Loads infinity, which Python does not have, as the last time of Python."""

    def load(self, data: Buffer) -> datetime:
        """Load one value."""
        return datetime.max.replace(tzinfo=UTC) if bytes(data) == b"infinity" else super().load(data)


class Scene:
    """A database in which a scenario runs: makes rows with the statements as shipped, and reads them."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        connection.adapters.register_loader("timestamptz", _Timestamps)
        self._numbers = count(1)

    async def execute(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Run SQL with named parameters; those that are not given have a default or are null."""
        given = {**dict.fromkeys(_PARAMETER.findall(sql)), **DEFAULTS, **(parameters or {})}
        cursor = await self.connection.execute(sql.encode(), given)
        return await cursor.fetchall() if cursor.description is not None else []

    async def run(self, name: str, **parameters: Any) -> list[Row]:
        """Run a statement as shipped."""
        return await self.execute(STATEMENTS[name].sql, parameters)

    async def insert(self, table: str, columns: Mapping[str, Any]) -> Row:
        """Insert a row; dicts become jsonb."""
        values = {name: as_json(value) if isinstance(value, dict) else value for name, value in columns.items()}
        (row,) = await self.execute(
            f"insert into interlock.{table} ({', '.join(values)}) "
            f"values ({', '.join(f'%({name})s' for name in values)}) returning *",
            values,
        )
        return row

    async def update(self, table: str, key: Any, assignments: str, **parameters: Any) -> None:
        """Update one row by its id."""
        await self.execute(f"update interlock.{table} set {assignments} where id = %(key)s", {"key": key, **parameters})

    async def move(
        self, table: str, machine: Machine[Any, Any], key: Any, events: tuple[str, ...], at: datetime
    ) -> None:
        """Move a job or a worker by its machine."""
        (state,) = machine.initial
        for event in events:
            state = machine.next(state, event)
            await self.update(
                table,
                key,
                "status = %(status)s, event = %(event)s, updated_at = %(at)s",
                status=state,
                event=event,
                at=at,
            )

    async def read(self, row: Row) -> Row | None:
        """Read a row again, with its place in the table, which every write changes. None if it is deleted."""
        table, key = row["_table"], row["_key"]
        place = "" if table in VIEWS else ", ctid::text as ctid"
        found = await self.execute(
            f"select *{place} from interlock.{table} where {key} = %(value)s", {"value": row[key]}
        )
        return {**found[0], "_table": table, "_key": key} if found else None

    async def made(self, table: str, key_value: Any, key: str = "id") -> Row:
        """Return a row that was made."""
        row = await self.read({"_table": table, "_key": key, key: key_value})
        assert row is not None
        return row

    def number(self) -> int:
        """Return a number that no other row of the scene has."""
        return next(self._numbers)


def task(
    state: str,
    *,
    job: MakeRow | None = None,
    claims: int | None = None,
    lease_expires_at: datetime = NOW + MINUTE,
    worker_id: str = "w_1",
    at: datetime = NOW - HOUR,
    **columns: Any,
) -> MakeRow:
    """Make a task, or with `job` a step; `at` is the time of its moves.

    `claims` is the number of its attempts: by default 1 if it has run. A pending task with attempts was returned.
    """

    async def make(scene: Scene) -> Row:
        given = {"type": "x", "run_at": NOW - HOUR, **columns}
        if job is not None:
            given |= {"job_id": (await job(scene))["id"], "step": columns.get("step", f"step_{scene.number()}")}
        begins = "waiting" if state in {"waiting", "skipped"} else "pending"
        if begins == "waiting":
            given.setdefault("held_by", "dependency")
        id_ = (await scene.insert("tasks", {**given, "state": begins}))["id"]
        if state == "canceled":
            await scene.run("cancel_unfinished_tasks", ids=[id_], attempts=[None], running=False, now=at)
        elif state == "skipped":
            await scene.run("skip_waiting_tasks", ids=[id_], reasons=["no"], skipped_by_failure=[False], now=at)
        elif state != begins or claims:
            attempts = claims or 1
            for attempt in range(1, attempts + 1):
                if attempt > 1:
                    await settle(scene, id_, attempt - 1, "return", at)
                await scene.update(
                    "tasks",
                    id_,
                    "state = 'running', event = 'claim', attempt = attempt + 1, tries = tries + 1, "
                    "worker_id = %(worker_id)s, lease_expires_at = %(lease)s, updated_at = %(at)s",
                    worker_id=worker_id,
                    lease=lease_expires_at,
                    at=at,
                )
            event = {"done": "succeed", "error": "fail", "pending": "return"}.get(state)
            if event is not None:
                await settle(scene, id_, attempts, event, at)
        return await scene.made("tasks", id_)

    return make


async def settle(scene: Scene, id_: UUID, attempt: int, event: str, at: datetime = NOW) -> None:
    """Settle one attempt with the statement as shipped."""
    outcome = as_json([{"id": str(id_), "attempt": attempt, "event": event}])
    await scene.run("settle_running_tasks", ids=[], attempts=[], outputs=[], others=outcome, expected=1, now=at)


def job(
    status: str,
    *,
    workflow: MakeRow | None = None,
    events: tuple[str, ...] | None = None,
    at: datetime = NOW - HOUR,
    **columns: Any,
) -> MakeRow:
    """Make a job, by the events that lead to the status unless others are given; `at` is the time of its moves."""

    async def make(scene: Scene) -> Row:
        given = {"task_description": "w", "created_at": at, **columns}
        if workflow is not None:
            given["workflow_id"] = (await workflow(scene))["id"]
        id_ = (await scene.insert("jobs", given))["id"]
        await scene.move("jobs", JOB, id_, events or _JOB_PATHS[status], at)
        return await scene.made("jobs", id_)

    return make


def worker(status: str, *, events: tuple[str, ...] | None = None, at: datetime = NOW - HOUR, **columns: Any) -> MakeRow:
    """Make a worker row, by the events that lead to the status unless others are given."""

    async def make(scene: Scene) -> Row:
        id_ = (await scene.insert("workers", {"id": f"w_{scene.number()}", **columns}))["id"]
        await scene.move("workers", SUPERVISED_WORKER, id_, events or _WORKER_PATHS[status], at)
        return await scene.made("workers", id_)

    return make


def record(table: str, key: str = "id", /, **columns: Any) -> MakeRow:
    """Make a row of a table without a machine."""

    async def make(scene: Scene) -> Row:
        return await scene.made(table, (await scene.insert(table, columns))[key], key)

    return make


def beside(row: MakeRow, *, before: tuple[MakeRow, ...] = (), after: tuple[MakeRow, ...] = ()) -> MakeRow:
    """Make a row, and others before and after it."""

    async def make(scene: Scene) -> Row:
        for other in before:
            await other(scene)
        made = await row(scene)
        for other in after:
            await other(scene)
        return made

    return make


def changed(row: MakeRow, sql: str) -> MakeRow:
    """Make a row and run SQL, in which `%(id)s` is its id."""

    async def make(scene: Scene) -> Row:
        made = await row(scene)
        await scene.execute(sql, made)
        return await scene.made(made["_table"], made[made["_key"]], made["_key"])

    return make


async def play(scene: Scene, guarded: Guarded, needed: Needed, text: str, other: Connection | None = None) -> str:
    """Play one scenario with the given text of the statement; tell what became of the row.

    `other` is the connection on which the change of `meanwhile` is made.
    """
    row = await (needed.row or guarded.row)(scene)
    before = await scene.read(row)
    given = {**guarded.call(row), **(needed.call(row) if callable(needed.call) else needed.call)}
    if guarded.name.endswith("()"):
        await scene.connection.execute(text.encode())
        text = guarded.sql or STATEMENTS[guarded.name.removesuffix("()")].sql
    try:
        if other is None:
            returned = await scene.execute(text, given)
        else:
            returned = await _execute_across(scene, text, given, other, needed, row)
    except psycopg.Error as error:
        if (error.sqlstate or "").startswith("IL"):
            return "guard"
        if isinstance(error, psycopg.IntegrityError):
            return "constraint"
        if isinstance(error, psycopg.DataError):
            return "function"
        raise
    if isinstance(guarded, GuardedRead):
        found = [each for each in returned if each.get(row["_key"], row[row["_key"]]) == row[row["_key"]]]
    else:
        after = await scene.read(row)
        found = [after] if after is not None else []
    if needed.expect is not None:
        is_right = found != [] and all(_fits(each, needed.expect) for each in found)
    else:
        is_right = found == ([] if isinstance(guarded, GuardedRead) else [before])
    return "right" if is_right else "row"


async def _execute_across(
    scene: Scene, text: str, given: Mapping[str, Any], other: Connection, needed: Needed, row: Row
) -> list[Row]:
    """Run a statement that waits for another transaction, which has changed the row and commits then."""
    assert needed.meanwhile is not None
    assert needed.expect is not None, "the other transaction changes the row: say what must be left of it"
    async with other.transaction():
        await other.execute(needed.meanwhile.encode(), {"id": row["id"]})
        running = asyncio.create_task(scene.execute(text, given))
        blocked = False
        while not blocked and not running.done():
            cursor = await other.execute(
                "select cardinality(pg_blocking_pids(%s)) > 0 as blocked", [scene.connection.info.backend_pid]
            )
            blocked = (await cursor.fetchall())[0]["blocked"]
            await asyncio.sleep(0.002)
    return await running


def _fits(found: Any, expected: Any) -> bool:
    """Tell whether a value is the expected one; of a row or document, the expected fields count."""
    if isinstance(expected, Mapping) and isinstance(found, dict):
        return all(_fits(found[name], value) for name, value in expected.items())
    return bool(found == expected)
