"""The whole queue on one page: what `interlock status` prints without a task.

Invariant: what is left out is said to be left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from interlock.cli.tables import age, distance, fields, table
from interlock.lifecycle import TaskRowState
from interlock.store.schedules import ScheduleState
from interlock.store.status import LimitUse, Overview, StateCount

UNFINISHED = ("waiting", "pending", "running")
SHOWN = 20  # limits and schedules; --json has them all


def overview(seen: Overview) -> str:
    """Write the page."""
    leader = (
        None if seen.leader is None else f"{seen.leader.holder}, for another {age(seen.leader.expires_at - seen.now)}"
    )
    head = fields((("schema", seen.schema), ("leader", leader or "none: is a worker running?")))
    parts = [head, _tasks(seen)]
    parts += _section("paused", ("namespace", "since", "by", "reason"), _paused(seen))
    parts += _section("limits", ("limit", "running", "starts", "waiting"), map(_limit, seen.limits))
    parts += _section(
        "schedules",
        ("schedule", "type", "rhythm", "next", "last", "state"),
        (_schedule(schedule, seen.now) for schedule in seen.schedules),
    )
    return "\n\n".join(parts)


def overview_json(seen: Overview) -> dict[str, Any]:
    """Give the same as a document, complete."""
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
    }


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
