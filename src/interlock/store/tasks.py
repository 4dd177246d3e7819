"""The moves of task rows: each function runs the statement of the same name in `sql/tasks.sql`.

Invariant: whoever settles or renews names the attempt that it holds; an attempt that is no longer the one that runs
is answered with Lost, and has written nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import TaskRowEvent, TaskRowState
from interlock.store.database import as_json, run
from interlock.store.statements import load_statements

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.store.database import Connection

TASKS = load_statements("tasks")
_OUTCOME_COLUMNS = ("ids", "attempts", "events", "reasons", "outputs", "errors", "costs", "run_ats")


@dataclass(frozen=True, slots=True)
class ClaimedTask:
    """What a worker gets with a claim: the task, and the attempt that fences everything it does to it."""

    id: UUID
    type: str
    attempt: int
    tries: int
    max_tries: int
    input: Any
    lease_expires_at: datetime


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: one of succeed, fail, retry and return, and what goes with it."""

    id: UUID
    attempt: int
    event: TaskRowEvent
    output: Any = None
    error: Any = None
    reason: str | None = None
    cost: float | None = None
    run_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """An attempt that does not hold the task any more: recovered, canceled or claimed anew in the meantime."""

    id: UUID
    attempt: int


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a task's history."""

    from_state: str | None
    to_state: str
    event: str
    reason: str | None
    actor: str
    attempt: int
    recorded_at: datetime


async def insert_task(
    connection: Connection,
    task_type: str,
    input: Any,  # noqa: A002 - the word of the table and of the API
    *,
    actor: str,
    id: UUID | None = None,  # noqa: A002 - the word of the table and of the API
    namespace: str = "default",
    state: TaskRowState = TaskRowState.PENDING,
    reason: str | None = None,
    priority: int = 0,
    run_at: datetime | None = None,
    max_tries: int = 5,
    now: datetime | None = None,
) -> UUID | None:
    """Store one task and give its id; None when a task with that id is there already."""
    parameters = {
        "id": id,
        "namespace": namespace,
        "type": task_type,
        "state": state,
        "reason": reason,
        "priority": priority,
        "run_at": run_at,
        "max_tries": max_tries,
        "job_id": None,
        "step": None,
        "input": as_json(input),
        "actor": actor,
        "now": now,
    }
    rows = await run(connection, TASKS["insert_task"], parameters)
    return rows[0]["id"] if rows else None


async def claim_pending_tasks(
    connection: Connection,
    *,
    actor: str,
    namespace: str = "default",
    limit: int = 1,
    lease: timedelta = timedelta(seconds=30),
    now: datetime | None = None,
) -> list[ClaimedTask]:
    """Claim up to `limit` tasks of a namespace for the worker `actor`."""
    parameters = {"namespace": namespace, "limit": limit, "lease": lease, "actor": actor, "now": now}
    return [ClaimedTask(**row) for row in await run(connection, TASKS["claim_pending_tasks"], parameters)]


async def renew_running_tasks(
    connection: Connection,
    held: Sequence[tuple[UUID, int]],
    *,
    lease: timedelta = timedelta(seconds=30),
    now: datetime | None = None,
) -> list[Lost]:
    """Prolong the leases of these attempts; give those that are lost."""
    parameters = {"ids": [id_ for id_, _ in held], "attempts": [n for _, n in held], "lease": lease, "now": now}
    kept = {row["id"] for row in await run(connection, TASKS["renew_running_tasks"], parameters)}
    return [Lost(id_, attempt) for id_, attempt in held if id_ not in kept]


async def settle_running_tasks(
    connection: Connection, outcomes: Sequence[Outcome], *, actor: str, now: datetime | None = None
) -> list[Lost]:
    """Write how these attempts ended, in one statement; give those that are lost and wrote nothing."""
    columns: dict[str, list[Any]] = {name: [] for name in _OUTCOME_COLUMNS}
    for outcome in outcomes:
        for name, value in zip(_OUTCOME_COLUMNS, _outcome_row(outcome), strict=True):
            columns[name].append(value)
    rows = await run(connection, TASKS["settle_running_tasks"], {**columns, "actor": actor, "now": now})
    settled = {row["id"] for row in rows}
    return [Lost(outcome.id, outcome.attempt) for outcome in outcomes if outcome.id not in settled]


def _outcome_row(outcome: Outcome) -> tuple[Any, ...]:
    return (
        outcome.id,
        outcome.attempt,
        str(outcome.event),
        outcome.reason,
        as_json(outcome.output),
        as_json(outcome.error),
        outcome.cost,
        outcome.run_at,
    )


async def recover_expired_tasks(
    connection: Connection, *, actor: str, limit: int = 1000, now: datetime | None = None
) -> dict[UUID, TaskRowEvent]:
    """Take back tasks whose lease ran out; give what became of each: `expire` or `exhaust`."""
    parameters = {"limit": limit, "actor": actor, "now": now}
    rows = await run(connection, TASKS["recover_expired_tasks"], parameters)
    return {row["id"]: TaskRowEvent(row["event"]) for row in rows}


async def _move(
    connection: Connection, name: str, ids: Sequence[UUID], actor: str, reason: str | None, now: datetime | None
) -> list[UUID]:
    parameters = {"ids": list(ids), "actor": actor, "reason": reason, "now": now}
    return [row["id"] for row in await run(connection, TASKS[name], parameters)]


async def release_waiting_tasks(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str | None = None, now: datetime | None = None
) -> list[UUID]:
    """Let waiting tasks become claimable; give those that were waiting."""
    return await _move(connection, "release_waiting_tasks", ids, actor, reason, now)


async def hold_pending_tasks(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str, now: datetime | None = None
) -> list[UUID]:
    """Keep pending tasks from being claimed, with the reason; give those that were pending."""
    return await _move(connection, "hold_pending_tasks", ids, actor, reason, now)


async def cancel_unfinished_tasks(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str | None = None, now: datetime | None = None
) -> list[UUID]:
    """Cancel tasks that have not ended; give those that had not."""
    return await _move(connection, "cancel_unfinished_tasks", ids, actor, reason, now)


async def skip_waiting_tasks(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str, now: datetime | None = None
) -> list[UUID]:
    """Skip waiting tasks whose branch was not taken; give those that were waiting."""
    return await _move(connection, "skip_waiting_tasks", ids, actor, reason, now)


async def requeue_ended_tasks(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str | None = None, now: datetime | None = None
) -> list[UUID]:
    """Give tasks that ended in error or were canceled a new set of tries; give those that had ended so."""
    return await _move(connection, "requeue_ended_tasks", ids, actor, reason, now)


async def read_task_history(connection: Connection, task_id: UUID) -> list[Record]:
    """Read every move that a task made, oldest first."""
    return [Record(**row) for row in await run(connection, TASKS["read_task_history"], {"id": task_id})]
