"""What is done to tasks from outside, by people, limits and workflows: release, hold, cancel, skip and requeue.

Invariant: each act gives the tasks that it moved; the others were not in a state for it, and are as they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.store.database import run, transaction
from interlock.store.tasks import TASKS, insert_callbacks, notify_ended

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.store.database import Connection


async def release_waiting_tasks(
    connection: Connection,
    ids: Sequence[UUID],
    *,
    actor: str,
    reason: str | None = None,
    held_by: str | None = None,
    now: datetime | None = None,
) -> list[UUID]:
    """Let waiting tasks become claimable, and say so to the workers; give those that were waiting.

    With `held_by`, only those that still wait for just that.
    """
    common = {"actor": actor, "reason": reason, "held_by": held_by, "now": now}
    parameters = {"ids": list(ids), "run_ats": [], "inputs": [], **common}
    return [id_ for row in await run(connection, TASKS["release_waiting_tasks"], parameters) for id_ in row["ids"]]


async def requeue_ended_tasks(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str | None = None, now: datetime | None = None
) -> list[UUID]:
    """Give tasks that ended in error or were canceled a new set of tries; give those that had ended so.

    Steps are left alone: they belong to their job, which is retried instead. Tasks with a limit wait for it anew: an
    operator's act must not run past it either.
    """
    parameters = {"ids": list(ids), "actor": actor, "reason": reason, "now": now}
    async with transaction(connection):
        rows = await run(connection, TASKS["requeue_ended_tasks"], parameters)
        limited = [row["id"] for row in rows if row["limit_key"] is not None]
        if limited:
            why = "requeued, waits for its limit"
            await hold_pending_tasks(connection, limited, actor=actor, reason=why, held_by="limit", now=now)
            await run(connection, TASKS["notify_duties"], {"duties": ["limits"]})
        if rows:
            await run(connection, TASKS["notify_tasks"], {"namespaces": [row["namespace"] for row in rows]})
    return [row["id"] for row in rows]


async def hold_pending_tasks(
    connection: Connection,
    ids: Sequence[UUID],
    *,
    actor: str,
    reason: str,
    held_by: str,
    now: datetime | None = None,
) -> list[UUID]:
    """Keep pending tasks from being claimed, with the reason; give those that were pending."""
    parameters = {"ids": list(ids), "actor": actor, "reason": reason, "held_by": held_by, "now": now}
    return [row["id"] for row in await run(connection, TASKS["hold_pending_tasks"], parameters)]


async def cancel_unfinished_tasks(
    connection: Connection,
    ids: Sequence[UUID],
    *,
    actor: str,
    reason: str | None = None,
    attempts: Sequence[int | None] | None = None,
    running: bool = False,
    now: datetime | None = None,
) -> list[UUID]:
    """Cancel tasks that have not ended, running ones only if told so; give those that were canceled.

    A task with a callback is told of in the same transaction, and whoever waits for it is woken.
    """
    parameters = {
        "ids": list(ids),
        "attempts": list(attempts) if attempts is not None else [None] * len(ids),
        "running": running,
        "actor": actor,
        "reason": reason,
        "now": now,
    }
    async with transaction(connection):
        if attempts is None:
            await run(connection, TASKS["lock_jobs_of_steps"], {"ids": list(ids)})
        rows = await run(connection, TASKS["cancel_unfinished_tasks"], parameters)
        if rows:
            await _tell_of_canceled(connection, rows)
        if running and attempts is None:  # else it is the worker itself that says so, or there is none
            ran = [row["worker_id"] for row in rows if row["worker_id"] is not None]
            await run(connection, TASKS["notify_worker"], {"workers": ran})
    return [row["id"] for row in rows]


async def _tell_of_canceled(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    await insert_callbacks(connection, [row["id"] for row in rows])
    await notify_ended(
        connection,
        awaited=[row["id"] for row in rows if row["awaited"]],
        limited=any(row["limit_key"] for row in rows),
    )


async def request_cancel_of_running_tasks(
    connection: Connection, ids: Sequence[UUID], *, reason: str | None = None, now: datetime | None = None
) -> list[UUID]:
    """Ask the workers that run these tasks to cancel them; give those that were running."""
    parameters = {"ids": list(ids), "reason": reason, "now": now}
    rows = await run(connection, TASKS["request_cancel_of_running_tasks"], parameters)
    if rows:
        await run(connection, TASKS["notify_worker"], {"workers": [row["worker_id"] for row in rows]})
    return [row["id"] for row in rows]


async def skip_waiting_tasks(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str, now: datetime | None = None
) -> list[UUID]:
    """Skip waiting tasks whose branch was not taken; give those that were waiting."""
    parameters = {
        "ids": list(ids),
        "reasons": [reason] * len(ids),
        "poisoned": [False] * len(ids),
        "errors": [None] * len(ids),
        "actor": actor,
        "now": now,
    }
    return [row["id"] for row in await run(connection, TASKS["skip_waiting_tasks"], parameters)]
