"""Moves of task rows that no attempt makes: release, hold, cancel, requeue and the recovery of expired leases.

Invariant: each function returns the tasks that it moved; tasks in any other state are left unchanged. An operation by
filter is a series of statements by id, so it never locks more than a page, and tasks that changed since they were
found are left alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from interlock.errors import StatementError
from interlock.lifecycle import TaskRowState
from interlock.postgres.connection import UNIQUE_VIOLATION, transaction
from interlock.postgres.query import run
from interlock.store.jobs import STEPS
from interlock.store.lists import LISTS, MAX_LOOKED_AT, ListPage, collect_pages, id_bounds, run_list
from interlock.store.step_results import SimpleStepMessage, send_messages
from interlock.store.tasks import MAX_CRASHES, TASKS, insert_webhooks, notify_ended_tasks, notify_tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

PAGE_SIZE = 500  # tasks that one statement of an operation by filter finds
# A lease also runs out when the worker lives but cannot renew it, because a handler holds the interpreter lock.
CRASHED = "it killed its worker %s times, or kept it from renewing the lease"


async def release_waiting_tasks(
    connection: Connection,
    ids: Sequence[UUID],
    *,
    actor: str,
    reason: str | None = None,
    held_by: str | None = None,
    now: datetime | None = None,
) -> list[UUID]:
    """Make waiting tasks pending and notify workers; return those that were waiting.

    With `held_by`, only tasks that are still held by exactly that are released.
    """
    parameters = {"ids": list(ids), "actor": actor, "reason": reason, "held_by": held_by, "now": now}
    return [id_ for row in await run(connection, TASKS["release_waiting_tasks"], parameters) for id_ in row["ids"]]


async def requeue_ended_tasks(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str | None = None, now: datetime | None = None
) -> list[UUID]:
    """Give tasks in `error` or `canceled` a new set of tries; return those that were in these states.

    Steps are left alone: their job is retried instead. Tasks with a limit are held for it again, so that a requeue does
    not exceed the limit.
    """
    parameters = {"ids": list(ids), "actor": actor, "reason": reason, "now": now}
    async with transaction(connection):
        rows = await run(connection, TASKS["requeue_ended_tasks"], parameters)
        limited = [row["id"] for row in rows if row["limit_keys"] is not None]
        if limited:
            await hold_pending_tasks(connection, limited, actor=actor, held_by="limit", detail="requeued", now=now)
            await run(connection, TASKS["notify_duties"], {"duties": ["limits"]})
        if rows:
            await notify_tasks(connection, [row["namespace"] for row in rows])
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
    """Cancel unfinished tasks and return those that were canceled.

    Running ones, and steps that wait for their parts or their child job, are canceled only with `running`.
    Webhooks are inserted in the same transaction, and result watchers are notified. `attempts` fences the cancellation
    of running tasks by the worker that holds them.
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
            await insert_webhooks(connection, [row["id"] for row in rows])
            awaited = [row["id"] for row in rows if row["awaited"]]
            await notify_ended_tasks(connection, awaited=awaited, limited=any(row["limit_keys"] for row in rows))
        if running and attempts is None:  # with attempts, the caller is the worker itself, or the worker is gone
            workers = [row["worker_id"] for row in rows if row["worker_id"] is not None]
            await run(connection, TASKS["notify_worker"], {"workers": workers})
    return [row["id"] for row in rows]


async def request_cancel_of_running_tasks(
    connection: Connection, ids: Sequence[UUID], *, reason: str | None = None, now: datetime | None = None
) -> list[UUID]:
    """Ask the workers that run these tasks to cancel them; return those that were running."""
    parameters = {"ids": list(ids), "reason": reason, "now": now}
    rows = await run(connection, TASKS["request_cancel_of_running_tasks"], parameters)
    if rows:
        await run(connection, TASKS["notify_worker"], {"workers": [row["worker_id"] for row in rows]})
    return [row["id"] for row in rows]


async def request_cancel_of_waiting_steps(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str | None = None, now: datetime | None = None
) -> list[dict[str, Any]]:
    """Mark steps that wait for their parts or their child job as to be canceled; return these steps."""
    parameters = {"ids": list(ids), "actor": actor, "reason": reason, "now": now}
    return await run(connection, STEPS["request_cancel_of_waiting_steps"], parameters)


class CanceledTasks(NamedTuple):
    """The tasks that a cancellation ended, and those that end once their work has stopped."""

    canceled: list[UUID]
    requested: list[UUID]


async def cancel_tasks(
    connection: Connection,
    ids: Sequence[UUID],
    *,
    actor: str,
    reason: str | None = None,
    force: bool = False,
    now: datetime | None = None,
) -> CanceledTasks:
    """Cancel tasks that do no work now, and ask for the others to be stopped: by their workers, or by an orchestrator.

    An orchestrator stops the parts of maps and child jobs. With `force`, all of them are canceled at once.
    """
    async with transaction(connection):
        canceled = await cancel_unfinished_tasks(connection, ids, actor=actor, reason=reason, running=force, now=now)
        ended = set(canceled)
        rest = [id_ for id_ in ids if id_ not in ended]
        if not rest:
            return CanceledTasks(canceled, [])
        requested = await request_cancel_of_running_tasks(connection, rest, reason=reason, now=now)
        waiting = await request_cancel_of_waiting_steps(connection, rest, actor=actor, reason=reason, now=now)
        if waiting:
            await run(connection, *send_messages(SimpleStepMessage(row["job_id"], row["id"]) for row in waiting))
    return CanceledTasks(canceled, requested + [row["id"] for row in waiting])


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Conditions on tasks; None means any."""

    states: tuple[str, ...] | None = None
    namespace: str | None = None
    type: str | None = None
    tag: str | None = None
    standalone: bool = False  # only tasks that belong to no job
    steps_only: bool = False  # only tasks that belong to a job
    namespaces: Sequence[str] | None = None  # in one of these
    job_id: UUID | None = None
    worker: str | None = None  # that holds or held it; also all processes of a supervised worker
    correlation_id: UUID | None = None
    request_ids: Sequence[str] | None = None  # one of these
    unique_key: str | None = None
    created_after: datetime | None = None  # at this time or later
    created_before: datetime | None = None
    ids: tuple[UUID, ...] | None = None  # one of these


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """The columns of a task that lists show."""

    id: UUID
    namespace: str
    type: str
    state: TaskRowState
    reason: str | None
    priority: int
    run_at: datetime
    attempt: int
    tries: int
    max_tries: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    tags: list[str] | None
    worker_id: str | None
    job_id: UUID | None
    step: str | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", TaskRowState(self.state))  # the row has a string


async def find_task_page(
    connection: Connection,
    wanted: TaskFilter,
    *,
    limit: int = PAGE_SIZE,
    before: UUID | None = None,
    now: datetime | None = None,
) -> ListPage[TaskSummary]:
    """Find one page of tasks, newest first, by one bounded statement; `before` is `next` of the previous page."""
    bounds = id_bounds(wanted.created_after, wanted.created_before, before, now)
    source = await _indexed_condition(connection, wanted)
    parameters = {
        **asdict(wanted),
        "states": _list_or_none(wanted.states),
        "namespaces": _list_or_none(wanted.namespaces),
        "ids": None if wanted.ids is None else list(wanted.ids),
        "request_ids": _list_or_none(wanted.request_ids),
        **bounds,
        "source": source,
        "indexed_states": _list_or_none(wanted.states) if source == "states" else None,
    }
    statements = {None: "find_tasks", "ids": "find_tasks_by_id"}
    statement = LISTS[statements.get(source, "find_tasks_by_index")]
    selective = wanted != TaskFilter(**({} if source is None else {source: getattr(wanted, source)}))
    return await run_list(
        connection,
        statement,
        parameters,
        lambda row: TaskSummary(**row),
        limit=limit,
        selective=selective,
        by_index=source is not None,
    )


async def _indexed_condition(connection: Connection, wanted: TaskFilter) -> str | None:
    """Return the condition whose index to walk; None for the primary key."""
    for name in ("ids", "request_ids", "unique_key", "job_id", "correlation_id"):
        if getattr(wanted, name) is not None:
            return name
    if wanted.states is None or TaskRowState.DONE in wanted.states:
        return None
    if TaskRowState.PENDING in wanted.states:
        (row,) = await run(connection, LISTS["count_pending_tasks"], {"most": MAX_LOOKED_AT + 1})
        if row["tasks"] > MAX_LOOKED_AT:
            return None
    return "states"


def _list_or_none(values: Sequence[str] | None) -> list[str] | None:
    return None if values is None else [str(value) for value in values]


async def find_tasks(
    connection: Connection,
    wanted: TaskFilter,
    *,
    limit: int = PAGE_SIZE,
    before: UUID | None = None,
    now: datetime | None = None,
) -> list[TaskSummary]:
    """Find up to `limit` tasks, newest first, by as many bounded statements as it takes."""

    async def read_page(cursor: UUID | None, left: int) -> ListPage[TaskSummary]:
        return await find_task_page(connection, wanted, limit=left, before=cursor, now=now)

    return await collect_pages(read_page, limit, before)


async def count_steps(connection: Connection, wanted: TaskFilter) -> int:
    """Count the steps among the tasks of a filter."""
    steps = replace(wanted, standalone=False, steps_only=True)
    return sum([len(page) async for page in iterate_task_pages(connection, steps, None)])


async def iterate_task_pages(
    connection: Connection,
    wanted: TaskFilter,
    limit: int | None,
    *,
    before: UUID | None = None,
    horizon: datetime | None = None,
    now: datetime | None = None,
) -> AsyncIterator[list[TaskSummary]]:
    """Yield the tasks of a filter page by page, newest first, up to `limit` tasks; only those older than `before`.

    Tasks that have been enqueued or have ended after `horizon` are left out and do not count towards `limit`.
    """
    left = limit
    while left is None or left > 0:
        size = PAGE_SIZE if left is None else min(PAGE_SIZE, left)
        page = await find_task_page(connection, wanted, limit=size, before=before, now=now)
        tasks = page.items
        if horizon is not None:
            tasks = [task for task in tasks if (task.finished_at or task.created_at) <= horizon]
        if tasks:
            yield tasks
        if page.next is None:
            return
        before = page.next
        left = None if left is None else left - len(tasks)


async def requeue_unless_duplicate(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str | None, now: datetime | None
) -> list[UUID]:
    """Requeue tasks, except those whose unique key another task has by now.

    When a batch hits a unique violation, it is repeated task by task, so that one duplicate does not block the others.
    """
    try:
        async with transaction(connection):  # a savepoint, when the caller is in a transaction
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


class RecoveredTask(NamedTuple):
    """A task whose lease expired: `expire` made it pending, `exhaust` ended it in error, `cancel` canceled it."""

    id: UUID
    event: str
    namespace: str
    limit_keys: list[str] | None


async def recover_expired_tasks(
    connection: Connection,
    *,
    actor: str,
    limit: int = 500,
    recent_s: float | None = None,
    now: datetime | None = None,
) -> list[RecoveredTask]:
    """Recover tasks whose lease expired: pending again, or in error after MAX_CRASHES in a row; notify result watchers.

    They use up no try, because a task beside them may have killed their worker; from now on each runs alone. Tasks
    whose cancellation was requested are canceled here, because their worker may be gone. With `recent_s`, only leases
    that expired within so many seconds count.
    """
    parameters = {
        "limit": limit,
        "actor": actor,
        "max_crashes": MAX_CRASHES,
        "message": CRASHED,
        "recent": None if recent_s is None else f"{recent_s} seconds",
        "now": now,
    }
    async with transaction(connection):
        canceled = await _cancel_expired_tasks(connection, parameters)
        recovered = [RecoveredTask(**row) for row in await run(connection, TASKS["recover_expired_tasks"], parameters)]
        if recovered:
            ended = [task.id for task in recovered if task.event == "exhaust"]
            await insert_webhooks(connection, ended)
            limited = any(task.limit_keys for task in recovered)
            await notify_ended_tasks(connection, awaited=ended, limited=limited)
            expired = {task.namespace for task in recovered if task.event == "expire"}
            await notify_tasks(connection, expired, limited=limited)
    return canceled + recovered


async def exonerate_tasks(
    connection: Connection, attempts: Mapping[UUID, int], *, now: datetime | None = None
) -> dict[UUID, int]:
    """Clear the suspicion against tasks that lost these attempts although their worker lives, and notify workers.

    Return the attempts whose expired lease has not been recovered yet: exonerate them later.
    """
    parameters = {"ids": list(attempts), "attempts": list(attempts.values()), "now": now}
    rows = await run(connection, TASKS["exonerate_tasks"], parameters)
    cleared = {row["namespace"] for row in rows if row["namespace"] is not None}
    if cleared:
        await notify_tasks(connection, cleared)
    return {row["id"]: attempts[row["id"]] for row in rows if row["namespace"] is None}


async def _cancel_expired_tasks(connection: Connection, parameters: Mapping[str, Any]) -> list[RecoveredTask]:
    rows = await run(connection, TASKS["lock_expired_tasks_to_cancel"], parameters)
    for reason in {row["reason"] for row in rows}:
        group = [row for row in rows if row["reason"] == reason]
        await cancel_unfinished_tasks(
            connection,
            [row["id"] for row in group],
            attempts=[row["attempt"] for row in group],
            running=True,
            actor=parameters["actor"],
            reason=reason,
            now=parameters["now"],
        )
    return [RecoveredTask(row["id"], "cancel", row["namespace"], row["limit_keys"]) for row in rows]
