"""The history of tasks, jobs and workers: every recorded move, the time in each state, and a check by the lifecycle.

Invariant: a history is checked by `lifecycle.py` alone. A record that contradicts it, or the record before it, or the
row, has a `problem`; nothing is left out or corrected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import JOB, SUPERVISED_WORKER, TASK_ROW
from interlock.postgres.query import run
from interlock.store.jobs import JOBS
from interlock.store.stats import MOVES
from interlock.store.tasks import TASKS
from interlock.store.workers import WORKERS, resolve_worker_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.machine import Machine
    from interlock.postgres.connection import Connection

CREATE = "create"  # the event of the first record, which no lifecycle has
CLAIM = "claim"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRecord:
    """One recorded move: `lasted` is the time in `to_state`, None while it lasts; `attempt` is that of a task."""

    id: int
    from_state: str | None
    to_state: str
    event: str
    reason: str | None
    actor: str
    database_role: str
    recorded_at: datetime
    attempt: int | None = None
    lasted: timedelta | None = None
    problem: str | None = None  # how it contradicts the lifecycle, the record before it, or the row


MACHINES: Mapping[str, Machine[Any, Any]] = {"task": TASK_ROW, "job": JOB, "worker": SUPERVISED_WORKER}
_RECORDS = {
    "task": TASKS["read_task_history"],
    "job": JOBS["read_job_history"],
    "worker": WORKERS["read_worker_moves"],
}
_STATES = {
    "task": MOVES["read_task_state"],
    "job": MOVES["read_job_state"],
    "worker": MOVES["read_worker_state"],
}


async def read_history(
    connection: Connection, kind: str, id_: UUID | str, *, at: datetime | None = None
) -> list[HistoryRecord]:
    """Read and check the recorded moves of a task, job or worker, oldest first; with `at`, those up to that time.

    The list is empty when there are no records.
    """
    records = await _read_checked(connection, kind, id_, after=0, limit=None)
    return records if at is None else _until(records, at)


async def read_history_page(
    connection: Connection, kind: str, id_: UUID | str, *, after: int, limit: int
) -> list[HistoryRecord]:
    """Read and check at most `limit` recorded moves, oldest first, after the record `after` (0: from the first).

    The records around the page are read too: each is checked against the one before it, and lasts until the next.
    """
    records = await _read_checked(connection, kind, id_, after=max(after - 1, 0), limit=limit + 2)
    return [record for record in records if record.id > after][:limit]


async def _read_checked(
    connection: Connection, kind: str, id_: UUID | str, *, after: int, limit: int | None
) -> list[HistoryRecord]:
    if kind == "worker":
        id_ = await resolve_worker_id(connection, str(id_))
    found = await run(connection, _STATES[kind], {"id": id_})
    rows = await run(connection, _RECORDS[kind], {"id": id_, "after": after, "limit": limit})
    records = check_records(MACHINES[kind], [HistoryRecord(**row) for row in rows])
    if found and records and records[-1].id == found[0]["last_id"] and records[-1].to_state != found[0]["state"]:
        last = records[-1]
        text = f"the row is {found[0]['state']!r}, which no record says"
        records[-1] = replace(last, problem=_join(last.problem, text))
    return records


def _until(records: Sequence[HistoryRecord], at: datetime) -> list[HistoryRecord]:
    """Return the records up to a time; the last one lasts until then, as far as the question goes."""
    kept = [record for record in records if record.recorded_at <= at]
    return [*kept[:-1], replace(kept[-1], lasted=None)] if kept else []


def check_records(machine: Machine[Any, Any], records: Sequence[HistoryRecord]) -> list[HistoryRecord]:
    """Return the records with the time in each state, and with their contradictions to the lifecycle."""
    checked = []
    members: dict[str, str] = {str(state): state for state in machine.states}  # the rows have strings
    for place, record in enumerate(records):
        before = records[place - 1] if place else None
        after = records[place + 1] if place + 1 < len(records) else None
        lasted = None if after is None else max(after.recorded_at - record.recorded_at, timedelta(0))
        problems = [*_problems_of_move(machine, record), *_problems_of_chain(machine, record, before)]
        from_state = None if record.from_state is None else members.get(record.from_state, record.from_state)
        checked.append(
            replace(
                record,
                from_state=from_state,
                to_state=members.get(record.to_state, record.to_state),
                lasted=lasted,
                problem="; ".join(problems) or None,
            )
        )
    return checked


def _problems_of_move(machine: Machine[Any, Any], record: HistoryRecord) -> list[str]:
    """Check one move against the table of the lifecycle."""
    states = {str(state) for state in machine.states}
    if record.to_state not in states:
        return [f"{record.to_state!r} is no state of the {machine.name} lifecycle"]
    if record.from_state is None:
        if record.event != CREATE:
            return [f"the first record has the event {record.event!r}, not {CREATE!r}"]
        return [] if record.to_state in machine.initial else [f"it cannot begin as {record.to_state!r}"]
    target = machine.transitions.get((record.from_state, record.event))
    if target is None:
        return [f"the lifecycle has no {record.event!r} in {record.from_state!r}"]
    if target != record.to_state:
        return [f"{record.event!r} leads from {record.from_state!r} to {str(target)!r}, not to {record.to_state!r}"]
    return []


def _problems_of_chain(machine: Machine[Any, Any], record: HistoryRecord, before: HistoryRecord | None) -> list[str]:
    """Check that a record follows the one before it. An id can be used again when its row is gone."""
    if before is None:
        missing = "the records before it are missing: retention dropped them with their month, or they were deleted"
        return [] if record.from_state is None else [missing]
    if record.from_state is None and before.to_state in {str(state) for state in machine.final}:
        return [] if not record.attempt else [f"the first record has the attempt {record.attempt}, not 0"]
    if record.from_state != before.to_state:
        return [f"it begins in {record.from_state!r}, but the record before it ended in {before.to_state!r}"]
    if record.attempt is None or before.attempt is None:
        return []
    expected = before.attempt + (record.event == CLAIM)
    return [] if record.attempt == expected else [f"attempt {record.attempt} cannot follow attempt {before.attempt}"]


def _join(first: str | None, second: str) -> str:
    return second if first is None else f"{first}; {second}"
