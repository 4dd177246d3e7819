"""Counts and lists of the whole installation: the overview of `interlock status`, and transition counts for metrics.

Invariant: the overview only reads. A large table of ended tasks is scanned only on request (`whole`). Transitions are
counted from the records, for every client, into stored counts that never fall: not when a supervisor starts, and not
when retention drops records. A window is counted once its end is older than the longest transaction (`lag`), so that no
record of it can still appear. Refused moves are counted by the guards.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.postgres.connection import transaction
from interlock.postgres.migrate import applied_migrations, schema_version
from interlock.postgres.query import load_statements, run
from interlock.store.leader import Leader, read_clock, read_leader
from interlock.store.schedules import ScheduleState, list_schedules
from interlock.store.step_results import read_queue_state
from interlock.store.workers import LiveProcess, list_live_workers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from interlock.postgres.connection import Connection


STATUS = load_statements("status")
MOVES = load_statements("moves")
MAX_FULL_COUNT_BYTES = 256 * 1024 * 1024  # size of `tasks` up to which all rows are counted: about a million plain ones


class StateCount(NamedTuple):
    """The number of tasks of a namespace in a state, and the time since which the oldest due one waits."""

    namespace: str
    state: str
    tasks: int
    oldest_due_at: datetime | None


class JobCount(NamedTuple):
    """The number of jobs of a namespace in a state."""

    namespace: str
    status: str
    jobs: int


class PausedNamespace(NamedTuple):
    """A paused namespace: none of its tasks is claimed."""

    name: str
    paused_at: datetime
    paused_by: str | None
    reason: str | None


class LimitUse(NamedTuple):
    """A key, its rule and the use of it: `taken` tasks are pending or running; the rest falls into the current period.

    `rule` is the key or the pattern, None where no limit is declared. `next_at` is the time at which tasks that wait
    for the period go on. While an operator's override applies (`overridden_at`), `declared` has the bounds that an app
    declares, the period in seconds; None if none does.
    """

    key: str
    rule: str | None
    max_running: int | None
    max_starts: int | None
    max_weight: float | None
    max_cost: float | None
    period: timedelta | None
    share: float | None
    taken: int
    starts: int
    weight: float
    cost: float
    waiting: int
    next_at: datetime | None
    declared: dict[str, Any] | None
    overridden_by: str | None
    overridden_at: datetime | None
    override_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A snapshot of the installation. Without `complete`, only unfinished tasks and jobs are counted."""

    now: datetime
    schema: str
    counts: list[StateCount]
    complete: bool
    paused: list[PausedNamespace]
    limits: list[LimitUse]
    schedules: list[ScheduleState]
    leader: Leader | None
    jobs: list[JobCount]
    orchestration: dict[str, Any]
    processes: list[LiveProcess]


async def read_overview(connection: Connection, *, whole: bool = False, now: datetime | None = None) -> Overview:
    """Read the overview in one transaction; `whole` counts ended tasks and jobs even in a large table."""
    async with transaction(connection):
        moment = await read_clock(connection, now=now)
        (size,) = await run(connection, STATUS["read_tasks_size"], {})
        complete = whole or size["bytes"] <= MAX_FULL_COUNT_BYTES
        applied = await applied_migrations(connection)
        return Overview(
            now=moment,
            schema=schema_version(applied),
            counts=await (count_all_tasks if complete else count_unfinished_tasks)(connection, now=now),
            complete=complete,
            paused=await list_paused_namespaces(connection),
            limits=await list_limits(connection, now=now),
            schedules=await list_schedules(connection),
            leader=await read_leader(connection, now=now),
            jobs=await (count_all_jobs if complete else count_unfinished_jobs)(connection),
            orchestration=await read_queue_state(connection),
            processes=await list_live_workers(connection, now=now),
        )


async def count_all_tasks(connection: Connection, *, now: datetime | None = None) -> list[StateCount]:
    """Count all tasks by namespace and state."""
    return [StateCount(**row) for row in await run(connection, STATUS["count_all_tasks"], {"now": now})]


async def count_unfinished_tasks(connection: Connection, *, now: datetime | None = None) -> list[StateCount]:
    """Count unfinished tasks by namespace and state from partial indexes; of waiting ones, those that are held."""
    counts: dict[tuple[str, str], StateCount] = {}
    for row in await run(connection, STATUS["count_unfinished_tasks"], {"now": now}):
        count = StateCount(**row)
        before = counts.get(count[:2])
        # tasks held by a pause and tasks held by a limit are counted by two indexes: a namespace may appear twice
        counts[count[:2]] = count if before is None else count._replace(tasks=count.tasks + before.tasks)
    return list(counts.values())


async def count_all_jobs(connection: Connection) -> list[JobCount]:
    """Count all jobs by namespace and state."""
    return [JobCount(**row) for row in await run(connection, STATUS["count_all_jobs"], {})]


async def count_unfinished_jobs(connection: Connection) -> list[JobCount]:
    """Count unfinished jobs by namespace and state, by a partial index only."""
    return [JobCount(**row) for row in await run(connection, STATUS["count_unfinished_jobs"], {})]


async def list_paused_namespaces(connection: Connection) -> list[PausedNamespace]:
    """List paused namespaces."""
    return [PausedNamespace(**row) for row in await run(connection, STATUS["list_paused_namespaces"], {})]


async def list_limits(connection: Connection, *, now: datetime | None = None) -> list[LimitUse]:
    """List all keys in use and all rules; those with the most waiting tasks come first."""
    return [LimitUse(**row) for row in await run(connection, STATUS["list_limits"], {"now": now})]


async def read_task_details(connection: Connection, task_id: UUID) -> dict[str, Any] | None:
    """Read the whole row of a task with its webhook; None when the task does not exist."""
    rows = await run(connection, STATUS["read_task_details"], {"id": task_id})
    return rows[0] if rows else None


def jobs_by_namespace(overview: Overview) -> dict[str, dict[str, int]]:
    """Group the job counts by namespace and state."""
    counted: dict[str, dict[str, int]] = {}
    for count in overview.jobs:
        counted.setdefault(count.namespace, {})[count.status] = count.jobs
    return counted


def overview_document(overview: Overview) -> dict[str, Any]:
    """Return the overview as a JSON document."""
    counted: dict[str, dict[str, Any]] = {}
    for count in overview.counts:
        entry = counted.setdefault(count.namespace, {"oldest_due_at": None, "tasks": {}})
        entry["tasks"][count.state] = count.tasks
        entry["oldest_due_at"] = count.oldest_due_at or entry["oldest_due_at"]
    return {
        "now": overview.now,
        "schema": overview.schema,
        "leader": None if overview.leader is None else overview.leader._asdict(),
        "namespaces": counted,
        "ended_are_counted": overview.complete,
        "paused": [paused._asdict() for paused in overview.paused],
        "limits": [limit._asdict() for limit in overview.limits],
        "schedules": [schedule._asdict() for schedule in overview.schedules],
        "jobs": jobs_by_namespace(overview),
        "orchestration": overview.orchestration,
        "processes": [{**process._asdict(), "role": process.role} for process in overview.processes],
    }


class CountedMove(NamedTuple):
    """A histogram bucket of one transition: `bucket` bounds were reached by the time spent in `from_state`."""

    machine: str
    from_state: str
    to_state: str
    bucket: int
    moves: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RefusedMove:
    """How often a move was refused, to any client, since the database was created or recovered from a crash."""

    machine: str
    from_state: str
    to_state: str
    count: int


async def count_new_moves(
    connection: Connection, machine: str, *, lag: timedelta, window: timedelta, bounds: Sequence[float]
) -> bool:
    """Add recorded moves of workers or jobs to the stored counts: those after the last count, at most of a `window`.

    Only moves older than `lag` are counted: those of a transaction carry times before its commit. Returns whether more
    are to be counted.
    """
    parameters = {"lag": lag, "window": window, "bounds": list(bounds)}
    rows = await run(connection, MOVES[f"count_{machine}_moves"], parameters)
    return bool(rows and rows[0]["is_behind"])


async def read_move_counts(connection: Connection) -> list[CountedMove]:
    """Read the stored counts."""
    return [CountedMove(**row) for row in await run(connection, MOVES["read_move_counts"], {})]


async def read_refused_moves(connection: Connection) -> list[RefusedMove]:
    """Read how often each move was refused."""
    return [RefusedMove(**row) for row in await run(connection, MOVES["read_refused_moves"], {})]


async def add_refused_moves(connection: Connection, refused: RefusedMove) -> None:
    """Count refusals that did not reach the guards of the database."""
    await run(connection, MOVES["add_refused_moves"], asdict(refused))
