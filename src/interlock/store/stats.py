"""The queue as a person wants to see it: each function runs the statement of the same name in `sql/status.sql`.

Invariant: looking changes nothing, and a table with millions of finished tasks is not read through unless asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.postgres.connection import transaction
from interlock.postgres.migrate import applied_migrations, schema_version
from interlock.postgres.query import load_statements, run
from interlock.store.leader import Leader, read_clock, read_leader
from interlock.store.schedules import ScheduleState, list_schedules
from interlock.store.step_results import queue_state
from interlock.store.workers import LiveProcess, list_live_workers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from interlock.postgres.connection import Connection


STATUS = load_statements("status")
SMALL = 256 * 1024 * 1024  # bytes of a table that is read through in a moment: about a million plain tasks


class StateCount(NamedTuple):
    """How many tasks of a namespace are in a state, and since when the oldest that is due waits for a worker."""

    namespace: str
    state: str
    tasks: int
    oldest_due_at: datetime | None


class JobCount(NamedTuple):
    """How many jobs of a namespace are in a state."""

    namespace: str
    status: str
    jobs: int


class PausedNamespace(NamedTuple):
    """A namespace that lets no task start."""

    name: str
    paused_at: datetime
    paused_by: str | None
    reason: str | None


class LimitUse(NamedTuple):
    """A limit, and how much of it is used: `taken` are pending or running, `starts` fall into its period."""

    key: str
    max_running: int | None
    max_starts: int | None
    period: timedelta | None
    taken: int
    starts: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The whole queue at one moment. Without `complete`, only what has not ended was counted."""

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
    """Read how the queue is; `whole` counts what has ended even where that takes long."""
    async with transaction(connection):
        moment = await read_clock(connection, now=now)
        (size,) = await run(connection, STATUS["read_tasks_size"], {})
        complete = whole or size["bytes"] <= SMALL
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
            orchestration=await queue_state(connection),
            processes=await list_live_workers(connection, now=now),
        )


async def count_all_tasks(connection: Connection, *, now: datetime | None = None) -> list[StateCount]:
    """Count all tasks by namespace and state."""
    return [StateCount(**row) for row in await run(connection, STATUS["count_all_tasks"], {"now": now})]


async def count_unfinished_tasks(connection: Connection, *, now: datetime | None = None) -> list[StateCount]:
    """Count what has not ended, by namespace and state, without a look at what has."""
    counts: dict[tuple[str, str], StateCount] = {}
    for row in await run(connection, STATUS["count_unfinished_tasks"], {"now": now}):
        count = StateCount(**row)
        before = counts.get(count[:2])
        # a namespace that is waited in for two reasons comes twice
        counts[count[:2]] = count if before is None else count._replace(tasks=count.tasks + before.tasks)
    return list(counts.values())


async def count_all_jobs(connection: Connection) -> list[JobCount]:
    """Count all jobs by namespace and state."""
    return [JobCount(**row) for row in await run(connection, STATUS["count_all_jobs"], {})]


async def count_unfinished_jobs(connection: Connection) -> list[JobCount]:
    """Count the jobs that have not ended, by namespace and state, without a look at those that have."""
    return [JobCount(**row) for row in await run(connection, STATUS["count_unfinished_jobs"], {})]


async def list_paused_namespaces(connection: Connection) -> list[PausedNamespace]:
    """List the namespaces that are paused."""
    return [PausedNamespace(**row) for row in await run(connection, STATUS["list_paused_namespaces"], {})]


async def list_limits(connection: Connection, *, now: datetime | None = None) -> list[LimitUse]:
    """List all limits with their use; those that most tasks wait for come first."""
    return [LimitUse(**row) for row in await run(connection, STATUS["list_limits"], {"now": now})]


async def read_task_details(connection: Connection, task_id: UUID) -> dict[str, Any] | None:
    """Read everything that is stored of a task; None when there is none."""
    rows = await run(connection, STATUS["read_task_details"], {"id": task_id})
    return rows[0] if rows else None


def jobs_by_namespace(seen: Overview) -> dict[str, dict[str, int]]:
    """Count the jobs of each namespace by state."""
    counted: dict[str, dict[str, int]] = {}
    for count in seen.jobs:
        counted.setdefault(count.namespace, {})[count.status] = count.jobs
    return counted


def overview_document(seen: Overview) -> dict[str, Any]:
    """Give the whole queue as a document, complete."""
    counted: dict[str, dict[str, Any]] = {}
    for count in seen.counts:
        entry = counted.setdefault(count.namespace, {"oldest_due_at": None, "tasks": {}})
        entry["tasks"][count.state] = count.tasks
        entry["oldest_due_at"] = count.oldest_due_at or entry["oldest_due_at"]
    return {
        "now": seen.now,
        "schema": seen.schema,
        "leader": None if seen.leader is None else seen.leader._asdict(),
        "namespaces": counted,
        "ended_are_counted": seen.complete,
        "paused": [paused._asdict() for paused in seen.paused],
        "limits": [limit._asdict() for limit in seen.limits],
        "schedules": [schedule._asdict() for schedule in seen.schedules],
        "jobs": jobs_by_namespace(seen),
        "orchestration": seen.orchestration,
        "processes": [{**process._asdict(), "role": process.role} for process in seen.processes],
    }


# SECTION store/moves
# Moves of workers and jobs as figures: how many, and how long the state before each of them lasted.
#
# Invariant: what is counted are the records, whoever made the move. A stretch of time is counted once its end has
# passed
# by as long as a transaction may take, so that none of its records is still to come.

MOVES = load_statements("moves")


class CountedMove(NamedTuple):
    """Moves between two states that took about as long: `bucket` is how many of the bounds they reached."""

    from_state: str
    to_state: str
    bucket: int
    moves: int
    seconds: float


async def read_complete_until(connection: Connection, lag: timedelta) -> datetime:
    """Give the moment up to which all records are there."""
    (row,) = await run(connection, MOVES["read_complete_until"], {"lag": lag})
    moment: datetime = row["moment"]
    return moment


async def count_moves(
    connection: Connection, machine: str, *, since: datetime, until: datetime, bounds: Sequence[float]
) -> list[CountedMove]:
    """Count the moves of workers, or of jobs, that were recorded in a stretch of time."""
    parameters = {"since": since, "until": until, "bounds": list(bounds)}
    return [CountedMove(**row) for row in await run(connection, MOVES[f"count_{machine}_moves"], parameters)]
