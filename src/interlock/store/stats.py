"""Counts and lists of the whole installation: the overview of `interlock status`, and transition counts for metrics.

Invariant: the overview only reads, and a bounded number of rows unless all are to be counted (`whole`): small counts
are exact, and those of many rows are estimated from a sample of the table and say so (`is_estimate`). Transitions are
counted from the records, for every client, into stored counts that never fall: not when a supervisor starts, and not
when retention drops records. A window is counted once its end is older than the longest transaction (`lag`), so that no
record of it can still appear. Refused moves are counted by the guards.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.lifecycle import JobState, TaskRowState
from interlock.postgres.connection import transaction
from interlock.postgres.migrate import applied_migrations, schema_version
from interlock.postgres.query import load_statements, run
from interlock.store.leader import Leader, read_clock, read_leader
from interlock.store.lists import LISTS
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
MAX_COUNTED = 10_000  # rows of a state, for pending ones of a namespace, that are counted one by one
MAX_FULL_COUNT_PAGES = 4_000  # size of a table up to which all rows are counted: about 150,000 plain tasks
MAX_PAIRS = 1_000  # of namespaces and types whose pending tasks are counted
OTHERS = "…"  # namespaces that are counted together
SAMPLE_PAGES = 500  # pages of a larger table that are read to estimate its counts


class StateCount(NamedTuple):
    """The number of tasks of a namespace in a state, and the time since which the oldest due one waits."""

    namespace: str
    state: str
    tasks: int
    oldest_due_at: datetime | None
    is_estimate: bool = False


class JobCount(NamedTuple):
    """The number of jobs of a namespace in a state."""

    namespace: str
    status: str
    jobs: int
    is_estimate: bool = False


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
    is_bound: bool = False  # more tasks than are counted may count against it or wait for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A snapshot of the installation."""

    now: datetime
    schema: str
    counts: list[StateCount]
    paused: list[PausedNamespace]
    limits: list[LimitUse]
    schedules: list[ScheduleState]
    leader: Leader | None
    jobs: list[JobCount]
    orchestration: dict[str, Any]
    processes: list[LiveProcess]


async def read_overview(connection: Connection, *, whole: bool = False, now: datetime | None = None) -> Overview:
    """Read the overview in one transaction; `whole` counts all tasks and jobs one by one, however many."""
    async with transaction(connection):
        moment = await read_clock(connection, now=now)
        applied = await applied_migrations(connection)
        return Overview(
            now=moment,
            schema=schema_version(applied),
            counts=await count_tasks(connection, whole=whole, now=now),
            paused=await list_paused_namespaces(connection),
            limits=await list_limits(connection, now=now),
            schedules=await list_schedules(connection),
            leader=await read_leader(connection, now=now),
            jobs=await count_jobs(connection, whole=whole),
            orchestration=await read_queue_state(connection),
            processes=await list_live_workers(connection, now=now),
        )


class _Sample:
    """Estimates of all counts of a table, read when the first one is needed."""

    def __init__(self, connection: Connection, table: str, key: str, pages: int) -> None:
        self._connection = connection
        self._table = table
        self._key = key
        self._percent = 100 * min(SAMPLE_PAGES / max(pages, 1), 1)
        self._counts: dict[tuple[str, str], int] | None = None

    async def read(self) -> dict[tuple[str, str], int]:
        """Return the estimates by namespace and state, with two significant digits."""
        if self._counts is None:
            statement = STATUS[f"sample_{self._table}"]
            rows = await run(self._connection, statement, {"percent": self._percent})
            self._counts = {(row["namespace"], row[self._key]): _rounded(row[self._table]) for row in rows}
        return self._counts

    async def at_least(self, namespace: str, state: str, counted: int) -> int:
        """Return the estimate of a count that is known to be at least so high."""
        return max((await self.read()).get((namespace, state), 0), counted)


def _rounded(count: int) -> int:
    digits = len(str(count))
    return round(count, 2 - digits) if digits > 2 else count  # noqa: PLR2004 - significant digits


async def count_tasks(connection: Connection, *, whole: bool = False, now: datetime | None = None) -> list[StateCount]:
    """Count tasks by namespace and state: exactly, one by one, in a small table or with `whole`."""
    async with transaction(connection):
        pages = await _pages(connection, "tasks")
        if whole or pages <= MAX_FULL_COUNT_PAGES:
            return [StateCount(**row) for row in await run(connection, STATUS["count_all_tasks"], {"now": now})]
        sample = _Sample(connection, "tasks", "state", pages)
        counts = await _count_unfinished_tasks(connection, sample, now)
        for row in await run(connection, STATUS["count_ended_tasks"], {"most": MAX_COUNTED}):
            counts.append(await _state_count(row, sample))
        for (namespace, state), tasks in (await sample.read()).items():
            if state == TaskRowState.DONE:
                counts.append(StateCount(namespace, state, tasks, None, is_estimate=True))
    return sorted(counts)


async def count_unfinished_tasks(connection: Connection, *, now: datetime | None = None) -> list[StateCount]:
    """Count unfinished tasks by namespace and state from partial indexes; of many namespaces, some together."""
    async with transaction(connection):
        sample = _Sample(connection, "tasks", "state", await _pages(connection, "tasks"))
        return sorted(await _count_unfinished_tasks(connection, sample, now))


async def _count_unfinished_tasks(connection: Connection, sample: _Sample, now: datetime | None) -> list[StateCount]:
    parameters = {"most": MAX_COUNTED, "pairs": MAX_PAIRS, "now": now}
    rows = await run(connection, STATUS["count_pending_by_namespace"], parameters)
    others = await run(connection, STATUS["count_running_and_waiting_tasks"], {"most": MAX_COUNTED})
    counts = [await _state_count(row, sample) for row in (*rows, *others)]
    if rows and rows[0]["is_cut"]:
        pending = sum(count.tasks for count in counts if count.state == TaskRowState.PENDING)
        sampled = sum(tasks for (_, state), tasks in (await sample.read()).items() if state == TaskRowState.PENDING)
        counts.append(StateCount(OTHERS, TaskRowState.PENDING.value, max(sampled - pending, 0), None, is_estimate=True))
    return counts


async def _state_count(row: dict[str, Any], sample: _Sample) -> StateCount:
    namespace, state, is_bound = row["namespace"], row["state"], row["is_bound"]
    tasks = await sample.at_least(namespace, state, row["tasks"]) if is_bound else row["tasks"]
    return StateCount(namespace, state, tasks, row.get("oldest_due_at"), is_estimate=is_bound)


async def count_jobs(connection: Connection, *, whole: bool = False) -> list[JobCount]:
    """Count jobs by namespace and state: exactly, one by one, in a small table or with `whole`."""
    async with transaction(connection):
        pages = await _pages(connection, "jobs")
        if whole or pages <= MAX_FULL_COUNT_PAGES:
            return [JobCount(**row) for row in await run(connection, STATUS["count_all_jobs"], {})]
        sample = _Sample(connection, "jobs", "status", pages)
        counts = await _count_jobs(connection, "count_unfinished_jobs", sample)
        counts += await _count_jobs(connection, "count_unsuccessful_jobs", sample)
        for (namespace, status), jobs in (await sample.read()).items():
            if status == JobState.COMPLETED:
                counts.append(JobCount(namespace, status, jobs, is_estimate=True))
    return sorted(counts)


async def count_unfinished_jobs(connection: Connection) -> list[JobCount]:
    """Count unfinished jobs by namespace and state, by a partial index."""
    async with transaction(connection):
        sample = _Sample(connection, "jobs", "status", await _pages(connection, "jobs"))
        return await _count_jobs(connection, "count_unfinished_jobs", sample)


async def _count_jobs(connection: Connection, statement: str, sample: _Sample) -> list[JobCount]:
    counts = []
    for row in await run(connection, STATUS[statement], {"most": MAX_COUNTED}):
        namespace, status, is_bound = row["namespace"], row["status"], row["is_bound"]
        jobs = await sample.at_least(namespace, status, row["jobs"]) if is_bound else row["jobs"]
        counts.append(JobCount(namespace, status, jobs, is_estimate=is_bound))
    return counts


async def _pages(connection: Connection, table: str) -> int:
    """Return the pages of a table, and turn sequential scans off until the end of the transaction.

    The planner would read the whole table where its statistics are out of date.
    """
    (sizes,) = await run(connection, STATUS["read_table_sizes"], {})
    pages: int = sizes[table]
    if pages > MAX_FULL_COUNT_PAGES:
        await run(connection, LISTS["walk_indexes_of_lists"], {})
    return pages


async def list_paused_namespaces(connection: Connection) -> list[PausedNamespace]:
    """List paused namespaces."""
    return [PausedNamespace(**row) for row in await run(connection, STATUS["list_paused_namespaces"], {})]


async def list_limits(connection: Connection, *, now: datetime | None = None) -> list[LimitUse]:
    """List all keys in use and all rules; those with the most waiting tasks come first."""
    return [LimitUse(**row) for row in await run(connection, STATUS["list_limits"], {"most": MAX_COUNTED, "now": now})]


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


def estimated_jobs(overview: Overview) -> dict[str, list[str]]:
    """List the states of jobs whose counts are estimates, by namespace."""
    estimated: dict[str, list[str]] = {}
    for count in overview.jobs:
        if count.is_estimate:
            estimated.setdefault(count.namespace, []).append(count.status)
    return estimated


def overview_document(overview: Overview) -> dict[str, Any]:
    """Return the overview as a JSON document."""
    counted: dict[str, dict[str, Any]] = {}
    for count in overview.counts:
        entry = counted.setdefault(count.namespace, {"oldest_due_at": None, "tasks": {}, "estimated": []})
        entry["tasks"][count.state] = count.tasks
        if count.is_estimate:
            entry["estimated"].append(count.state)
        entry["oldest_due_at"] = count.oldest_due_at or entry["oldest_due_at"]
    return {
        "now": overview.now,
        "schema": overview.schema,
        "leader": None if overview.leader is None else overview.leader._asdict(),
        "namespaces": counted,
        "paused": [paused._asdict() for paused in overview.paused],
        "limits": [limit._asdict() for limit in overview.limits],
        "schedules": [schedule._asdict() for schedule in overview.schedules],
        "jobs": jobs_by_namespace(overview),
        "estimated_jobs": estimated_jobs(overview),
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
