"""What is done to tasks from outside, by people, limits and workflows: release, hold, cancel, skip and requeue.

Invariant: each act gives the tasks that it moved; the others were not in a state for it, and are as they were.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from interlock.errors import StatementError
from interlock.postgres.connection import UNIQUE_VIOLATION, transaction
from interlock.postgres.query import run
from interlock.store.tasks import TASKS, insert_callbacks, notify_ended, notify_tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection


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
            await hold_pending_tasks(connection, limited, actor=actor, held_by="limit", detail="requeued", now=now)
            await run(connection, TASKS["notify_duties"], {"duties": ["limits"]})
        if rows:
            await run(connection, TASKS["notify_tasks"], {"namespaces": [row["namespace"] for row in rows]})
    return [row["id"] for row in rows]


async def hold_pending_tasks(
    connection: Connection,
    ids: Sequence[UUID],
    *,
    actor: str,
    held_by: Literal["namespace", "limit"],
    detail: str | None = None,
    now: datetime | None = None,
) -> list[UUID]:
    """Hold pending tasks for their namespace or their limit; return those that were pending.

    The database makes the reason of `held_by` and `detail`.
    """
    parameters = {"ids": list(ids), "actor": actor, "held_by": held_by, "detail": detail, "now": now}
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


# SECTION store/selection
# Tasks by filter: finding them page by page, and acting on what was found.
#
# Invariant: an act by filter is a series of small statements by id, so that it never locks more than a batch, and what
# changed since it was found is left alone.

PAGE_SIZE = 500


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Which tasks are meant; None means any."""

    states: tuple[str, ...] | None = None
    namespace: str | None = None
    type: str | None = None
    tag: str | None = None
    standalone: bool = False  # only tasks that belong to no job


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """What a list of tasks tells of each."""

    id: UUID
    namespace: str
    type: str
    state: str
    reason: str | None
    priority: int
    run_at: datetime
    attempt: int
    tries: int
    max_tries: int
    created_at: datetime
    finished_at: datetime | None
    tags: list[str] | None


async def find_tasks(
    connection: Connection, wanted: TaskFilter, *, limit: int = PAGE_SIZE, before: UUID | None = None
) -> list[TaskSummary]:
    """Find tasks, newest first; `before` is the last id of the page before."""
    parameters = _parameters(wanted) | {"limit": limit, "before": before}
    return [TaskSummary(**row) for row in await run(connection, TASKS["find_tasks"], parameters)]


async def count_steps(connection: Connection, wanted: TaskFilter) -> int:
    """Count the tasks of a filter that belong to a job."""
    (row,) = await run(connection, TASKS["count_steps"], _parameters(wanted))
    steps: int = row["steps"]
    return steps


def _parameters(wanted: TaskFilter) -> dict[str, Any]:
    return {**asdict(wanted), "states": None if wanted.states is None else list(wanted.states)}


async def iterate_task_pages(
    connection: Connection, wanted: TaskFilter, limit: int | None
) -> AsyncIterator[list[TaskSummary]]:
    """Find all tasks of a filter, a page at a time, up to a limit."""
    left = limit
    before: UUID | None = None
    while left is None or left > 0:
        size = PAGE_SIZE if left is None else min(PAGE_SIZE, left)
        page = await find_tasks(connection, wanted, limit=size, before=before)
        if page:
            yield page
        if len(page) < size:
            return
        before = page[-1].id
        left = None if left is None else left - len(page)


async def requeue_unless_duplicate(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str | None, now: datetime | None
) -> list[UUID]:
    """Requeue tasks; one whose unique key another task has taken stays where it is, and holds up no other."""
    try:
        async with transaction(connection):  # a refusal leaves the caller's transaction, if there is one, as it was
            return await requeue_ended_tasks(connection, ids, actor=actor, reason=reason, now=now)
    except StatementError as error:
        if error.sqlstate != UNIQUE_VIOLATION:
            raise
    if len(ids) == 1:
        return []
    requeued = []
    for id_ in ids:
        requeued += await requeue_unless_duplicate(connection, [id_], actor=actor, reason=reason, now=now)
    return requeued


# SECTION store/recovery
# Taking back what dead workers held.
#
# Invariant: a task whose lease ran out gets another try, or ends if it has none left; one that somebody wants
# canceled is
# canceled. Whoever waits for it hears of it.


class RecoveredTask(NamedTuple):
    """A task whose lease had run out: `expire` put it back; `exhaust` ended it, or a `cancel` that was asked for."""

    id: UUID
    event: str
    namespace: str
    limit_key: str | None


async def recover_expired_tasks(
    connection: Connection, *, actor: str, limit: int = 500, now: datetime | None = None
) -> list[RecoveredTask]:
    """Take back tasks whose lease ran out, and tell what became of each: us, and whoever waits for it.

    What somebody wants canceled is canceled: there may be no worker any more that could be asked.
    """
    parameters = {"limit": limit, "actor": actor, "now": now}
    async with transaction(connection):
        unwanted = await _cancel_unwanted_tasks(connection, parameters)
        recovered = [RecoveredTask(**row) for row in await run(connection, TASKS["recover_expired_tasks"], parameters)]
        if recovered:
            ended = [task.id for task in recovered if task.event == "exhaust"]
            await insert_callbacks(connection, ended)
            await notify_ended(connection, awaited=ended, limited=any(task.limit_key for task in recovered))
            await notify_tasks(connection, {task.namespace for task in recovered if task.event == "expire"})
    return unwanted + recovered


async def _cancel_unwanted_tasks(connection: Connection, parameters: Mapping[str, Any]) -> list[RecoveredTask]:
    rows = await run(connection, TASKS["lock_expired_tasks_to_cancel"], parameters)
    for reason in {row["reason"] for row in rows}:
        alike = [row for row in rows if row["reason"] == reason]
        await cancel_unfinished_tasks(
            connection,
            [row["id"] for row in alike],
            attempts=[row["attempt"] for row in alike],
            running=True,
            actor=parameters["actor"],
            reason=reason,
            now=parameters["now"],
        )
    return [RecoveredTask(row["id"], "cancel", row["namespace"], row["limit_key"]) for row in rows]
