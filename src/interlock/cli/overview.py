"""The whole queue on one page: what `interlock status` prints without a task.

Invariant: what is left out is said to be left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from interlock.cli.tables import age, distance, fields, table
from interlock.lifecycle import JobState, TaskRowState
from interlock.store.presence import LiveProcess
from interlock.store.schedules import ScheduleState
from interlock.store.status import LimitUse, Overview, StateCount, jobs_by_namespace

UNFINISHED = ("waiting", "pending", "running")
OPEN = (JobState.SUBMITTED, JobState.PENDING, JobState.RUNNING)
EVENTS = ("received", "dispatched", "completed", "failed", "mismatched", "fallback_hits")
SHOWN = 20  # limits and schedules; --json has them all


def overview(seen: Overview) -> str:
    """Write the page."""
    leader = (
        None if seen.leader is None else f"{seen.leader.holder}, for another {age(seen.leader.expires_at - seen.now)}"
    )
    head = fields((("schema", seen.schema), ("leader", leader or "none: is a worker running?")))
    parts = [head, _tasks(seen), *_jobs(seen)]
    parts += _section("paused", ("namespace", "since", "by", "reason"), _paused(seen))
    parts += _section("limits", ("limit", "running", "starts", "waiting"), map(_limit, seen.limits))
    parts += _section(
        "schedules",
        ("schedule", "type", "rhythm", "next", "last", "state"),
        (_schedule(schedule, seen.now) for schedule in seen.schedules),
    )
    parts += _section("processes", ("process", "role", "state", "namespaces", "seen"), _processes(seen))
    parts += _section("event systems", ("process", "events", *EVENTS), _events(seen.processes))
    return "\n\n".join(parts)


def _tasks(seen: Overview) -> str:
    """Count the tasks of each namespace by state."""
    states = [str(state) for state in TaskRowState if seen.complete or state in UNFINISHED]
    counted: dict[str, dict[str, StateCount]] = {}
    for count in seen.counts:
        counted.setdefault(count.namespace, {})[count.state] = count
    left_out = "" if seen.complete else "\nended tasks are not counted; --all counts them"
    if not counted:
        return "no tasks" + left_out
    rows = (
        (name, *(_count(counts, state) for state in states), _oldest(counts, seen.now))
        for name, counts in sorted(counted.items())
    )
    return table(("namespace", *states, "oldest due"), rows) + left_out


def _jobs(seen: Overview) -> list[str]:
    """Count the jobs of each namespace by state, and what waits for an orchestrator."""
    counted = jobs_by_namespace(seen)
    queue = seen.orchestration
    if not counted and not queue["waiting"] and not queue["archived"]:
        return []
    return [*_counted_jobs(counted, complete=seen.complete), _orchestration(seen)]


def _counted_jobs(counted: Mapping[str, Mapping[str, int]], *, complete: bool) -> list[str]:
    if not counted:
        return []
    states = [str(state) for state in JobState if complete or state in OPEN]
    rows = ((name, *(counts.get(state, 0) for state in states)) for name, counts in counted.items())
    return [table(("jobs of", *states), rows)]


def _orchestration(seen: Overview) -> str:
    queue = seen.orchestration
    oldest = "" if queue["oldest_age"] is None else f", the oldest for {queue['oldest_age']:.1f} s"
    return fields(
        (
            ("orchestrators", sum(process.role == "orchestrator" for process in seen.processes)),
            ("step results", f"{queue['waiting']} wait for an orchestrator{oldest}"),
            ("set aside", f"{queue['archived']}, which failed repeatedly" if queue["archived"] else None),
        )
    )


def _processes(seen: Overview) -> Iterable[Sequence[object]]:
    for process in seen.processes:
        heard = None if process.heartbeat_at is None else distance(process.heartbeat_at, seen.now)
        yield process.id, process.role, process.status, ", ".join(process.namespaces), heard


def _events(processes: Iterable[LiveProcess]) -> Iterable[Sequence[object]]:
    for process in processes:
        for system, figures in sorted(process.statistics.items()):
            yield process.id, system, *(figures.get(kind, "-") for kind in EVENTS)


def _count(counts: Mapping[str, StateCount], state: str) -> int:
    return counts[state].tasks if state in counts else 0


def _oldest(counts: Mapping[str, StateCount], now: datetime) -> str | None:
    due = counts["pending"].oldest_due_at if "pending" in counts else None
    return None if due is None else age(now - due)


def _section(name: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    every = list(rows)
    if not every:
        return []
    written = table(header, every[:SHOWN])
    more = len(every) - SHOWN
    return [f"{written}\n… and {more} more {name}; --json shows them all" if more > 0 else written]


def _paused(seen: Overview) -> Iterable[Sequence[object]]:
    return ((p.name, distance(p.paused_at, seen.now), p.paused_by, p.reason) for p in seen.paused)


def _limit(limit: LimitUse) -> Sequence[object]:
    running = "" if limit.max_running is None else f"{limit.taken} of {limit.max_running}"
    starts = (
        "" if limit.period is None else f"{limit.starts} of {limit.max_starts} per {limit.period.total_seconds():g} s"
    )
    return limit.key, running, starts, limit.waiting


def _schedule(schedule: ScheduleState, now: datetime) -> Sequence[object]:
    every = "" if schedule.every is None else f"every {schedule.every.total_seconds():g} s"
    rhythm = every or f"{schedule.cron} {schedule.timezone}"
    last = None if schedule.last_at is None else distance(schedule.last_at, now)
    state = "paused" if schedule.paused_at else "active"
    told = f"{state}: {schedule.error}" if schedule.error else state
    following = "" if schedule.paused_at else distance(schedule.next_at, now)
    return schedule.name, schedule.type, rhythm, following, last, told
