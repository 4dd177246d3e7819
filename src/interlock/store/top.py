"""Reads the figures of `interlock top`: namespaces with rates and latencies, workers, running tasks and open jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import TaskRowState
from interlock.postgres.query import load_statements, run
from interlock.store.explain import count_running_by_worker
from interlock.store.leader import read_clock
from interlock.store.stats import count_unfinished_jobs, count_unfinished_tasks, list_paused_namespaces
from interlock.store.workers import list_live_workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.store.stats import StateCount

TOP = load_statements("top")
RATE_WINDOW = timedelta(seconds=5)
SAMPLE_SIZE = 5_000  # moves of a window that are joined with their tasks
MAX_LISTED = 100  # tasks and jobs


@dataclass(slots=True, kw_only=True)
class NamespaceFigures:
    """A namespace: tasks by state, moves per second, seconds of waiting and running (p50, p99), the oldest due task."""

    name: str
    depth: dict[str, int] = field(default_factory=dict)
    estimated: set[str] = field(default_factory=set)  # states whose depth is an estimate
    oldest_due_at: datetime | None = None
    paused_by: str | None = None
    arrived: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    failed: float = 0.0
    waited: tuple[float, float] | None = None
    ran: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFigures:
    """A live process: its state, slots, tasks in hand and last heartbeat."""

    id: str
    role: str
    status: str
    slots: int | None
    running: int
    namespaces: Sequence[str]
    heartbeat_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSnapshot:
    """All figures of one moment."""

    now: datetime
    namespaces: Sequence[NamespaceFigures]
    workers: Sequence[WorkerFigures]
    tasks: Sequence[dict[str, Any]]
    jobs: Sequence[dict[str, Any]]
    jobs_by_state: dict[str, int]


@dataclass(frozen=True, slots=True)
class Depths:
    """The counts of unfinished tasks and jobs: the expensive part, which is read less often in a large database."""

    tasks: Sequence[StateCount]
    jobs: dict[str, int]


async def read_depths(connection: Connection, *, now: datetime | None = None) -> Depths:
    """Count the unfinished tasks and jobs."""
    jobs: dict[str, int] = {}
    for count in await count_unfinished_jobs(connection):
        jobs[count.status] = jobs.get(count.status, 0) + count.jobs
    return Depths(await count_unfinished_tasks(connection, now=now), jobs)


async def read_top(connection: Connection, depths: Depths, *, now: datetime | None = None) -> TopSnapshot:
    """Read the figures of this moment, and join them with the counts."""
    namespaces = _by_namespace(depths.tasks)
    parameters = {"window": RATE_WINDOW, "sample": SAMPLE_SIZE, "now": now}
    for row in await run(connection, TOP["read_rates"], parameters):
        _add_rates(namespaces.setdefault(row["namespace"], NamespaceFigures(name=row["namespace"])), row)
    for paused in await list_paused_namespaces(connection):
        found = namespaces.setdefault(paused.name, NamespaceFigures(name=paused.name))
        found.paused_by = paused.paused_by or "someone"
    running = await count_running_by_worker(connection)
    workers = [
        WorkerFigures(
            id=process.id,
            role=process.role,
            status=process.status,
            slots=process.slots,
            running=running.get(process.id, 0),
            namespaces=process.namespaces,
            heartbeat_at=process.heartbeat_at,
        )
        for process in await list_live_workers(connection, now=now)
    ]
    for worker in workers:
        for name in worker.namespaces:
            namespaces.setdefault(name, NamespaceFigures(name=name))
    return TopSnapshot(
        now=await read_clock(connection, now=now),
        namespaces=[namespaces[name] for name in sorted(namespaces)],
        workers=workers,
        tasks=await run(connection, TOP["list_running_tasks"], {"limit": MAX_LISTED}),
        jobs=await run(connection, TOP["list_open_jobs"], {"limit": MAX_LISTED}),
        jobs_by_state=depths.jobs,
    )


def _by_namespace(counts: Iterable[StateCount]) -> dict[str, NamespaceFigures]:
    found: dict[str, NamespaceFigures] = {}
    for count in counts:
        figures = found.setdefault(count.namespace, NamespaceFigures(name=count.namespace))
        figures.depth[count.state] = count.tasks
        if count.is_estimate:
            figures.estimated.add(count.state)
        if count.state == TaskRowState.PENDING:
            figures.oldest_due_at = count.oldest_due_at
    return found


def _add_rates(figures: NamespaceFigures, row: dict[str, Any]) -> None:
    seconds = RATE_WINDOW.total_seconds()
    for name in ("arrived", "started", "ended", "failed"):
        setattr(figures, name, row[name] * row["scale"] / seconds)
    figures.waited = _pair(row["waited"])
    figures.ran = _pair(row["ran"])


def _pair(values: Sequence[float | None] | None) -> tuple[float, float] | None:
    if values is None or values[0] is None or values[1] is None:
        return None
    return values[0], values[1]
