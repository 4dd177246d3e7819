"""Handles of enqueued tasks, and operations on all tasks that match a filter.

Invariant: a handle keeps no state of the task; every answer comes from the database.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, Unpack

from interlock.errors import InputError, StoreError, TaskFailedError, UnknownTaskError
from interlock.lifecycle import TASK_ROW, TaskRowState
from interlock.model.options import check_id, check_text, check_time
from interlock.store.history import read_history
from interlock.store.task_actions import read_horizon
from interlock.store.task_admin import (
    TaskFilter,
    TaskSummary,
    cancel_tasks,
    iterate_task_pages,
    requeue_unless_duplicate,
)
from interlock.store.tasks import read_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.client.task import Task
    from interlock.postgres.connection import Connection
    from interlock.store.history import HistoryRecord


R_co = TypeVar("R_co", covariant=True)

CancelOutcome = Literal["canceled", "requested", "ended"]
UNFINISHED = tuple(state for state in TaskRowState if state in TASK_ROW.unfinished)
MAX_LISTED = 100  # tasks in the answer of an operation on a filter


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """The stored task: its state, options, input and outcome."""

    id: UUID
    namespace: str
    type: str
    state: TaskRowState
    event: str | None
    reason: str | None
    held_by: str | None
    priority: int
    run_at: datetime
    attempt: int
    tries: int
    crashes: int
    max_tries: int
    worker_id: str | None
    lease_expires_at: datetime | None
    job_id: UUID | None
    step: str | None
    limit_keys: list[str] | None
    unique_key: str | None
    request_id: str | None
    tags: list[str] | None
    correlation_id: UUID | None
    input: dict[str, Any]
    output: Any
    error: dict[str, Any] | None
    cost: float | None
    progress: dict[str, Any] | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    updated_at: datetime

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", TaskRowState(self.state))  # the row has a string

    @property
    def has_ended(self) -> bool:
        """Whether the task is in a final state, which only a requeue leaves."""
        return self.state in TASK_ROW.final


_TIMES = ("run_at", "lease_expires_at", "created_at", "started_at", "finished_at", "updated_at")
_FIELDS = tuple(each.name for each in fields(TaskStatus))


def task_status(row: Mapping[str, Any]) -> TaskStatus:
    """Make the status of a task from its row as JSON."""
    times = {name: datetime.fromisoformat(row[name]) for name in _TIMES if row[name] is not None}
    return TaskStatus(**{name: row[name] for name in _FIELDS} | times)


class TaskHandle(Generic[R_co]):
    """An enqueued task. `created` is False when a task with its id, unique key or request id existed already."""

    __slots__ = ("_app", "_task", "created", "id")

    def __init__(
        self,
        app: Interlock,
        id_: UUID,
        task: Task[..., R_co] | None = None,
        created: bool = False,  # noqa: FBT001, FBT002 - by position: a keyword costs time when a million handles are made
    ) -> None:
        self._app = app
        self._task = task
        self.id = id_
        self.created = created

    def __repr__(self) -> str:
        name = f"{self._task.name} " if self._task is not None else ""
        return f"<TaskHandle {name}{self.id}>"

    async def status(self) -> TaskStatus:
        """Read the current task."""
        async with self._app.connection() as connection:
            rows = await read_tasks(connection, [self.id])
        if not rows:
            raise unknown_task_error(self.id)
        return TaskStatus(**rows[0])

    async def history(self, *, at: datetime | None = None) -> list[HistoryRecord]:
        """Read all transitions of the task, oldest first, checked by its lifecycle; with `at`, those until then."""
        async with self._app.connection() as connection:
            return await read_history(connection, "task", self.id, at=at)

    async def result(self, timeout: float | None = None) -> R_co:  # noqa: ASYNC109 - part of the public API
        """Wait until the task has ended and return its result.

        TaskFailedError if it ended without one, TimeoutError if it has not ended within `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                status = await self._wait_until_ended()
        except TimeoutError:
            raise TimeoutError(f"task {self.id} has not ended within {timeout:g} s") from None
        if status.state is not TaskRowState.DONE:
            raise _failure(status)
        task = self._task or self._app.tasks.get(status.type)
        value: R_co = status.output if task is None else task.decode_result(status.output)
        return value

    async def cancel(self, reason: str | None = None, *, force: bool = False) -> CancelOutcome:
        """Cancel the task: at once if it does no work now or with `force`, else by a request to stop that work.

        Returns "canceled", "requested" or "ended" if the task had ended before. A worker is asked to stop a running
        task; the parts of a map and the child job of a step are canceled, and the step ends with them.
        """
        app = self._app
        async with app.connection() as connection:
            while True:
                found = await cancel_tasks(
                    connection, [self.id], actor=app.actor, reason=reason, force=force, now=app.now()
                )
                if found.canceled:
                    return "canceled"
                if found.requested:
                    return "requested"
                if (await self.status()).has_ended:
                    return "ended"

    async def requeue(self, reason: str | None = None) -> bool:
        """Make a task that is in error or canceled pending again, with new tries; False if it is in another state.

        InputError if it is a step: its outcome is part of a job, which can be retried instead.
        """
        refuse_step(await self.status())
        app = self._app
        async with app.connection() as connection:
            ids = [self.id]
            return bool(await requeue_unless_duplicate(connection, ids, actor=app.actor, reason=reason, now=app.now()))

    async def _wait_until_ended(self) -> TaskStatus:
        while not (status := await self.status()).has_ended:
            await self._app.completions.wait(self.id)
        return status


def refuse_step(status: TaskStatus) -> None:
    """Raise InputError if the task is a step: a step is not requeued, its job is retried."""
    if status.job_id is not None:
        raise InputError(
            f"task {status.id} is step {status.step!r} of job {status.job_id} and cannot be requeued by itself; "
            f"when the job has ended, `interlock jobs retry {status.job_id} STEP` submits it again from a step on"
        )


def _failure(status: TaskStatus) -> TaskFailedError:
    error = status.error or {}
    cause = ": ".join(str(error[part]) for part in ("type", "message") if error.get(part)) or status.reason
    outcome = "ended in error" if status.state is TaskRowState.ERROR else f"was {status.state}"
    message = f"task {status.type} {status.id} {outcome}{f': {cause}' if cause else ''}"
    return TaskFailedError(message, state=status.state, error=status.error)


def not_open_error(*, in_other_loop: bool = False) -> StoreError:
    """Make the error for the use of an app that is not open in this event loop."""
    if in_other_loop:
        return StoreError(
            "the app is open in another event loop, whose connections this one cannot use: open the app here too "
            "(`async with app:`), or call it from code that is not async (`task.enqueue_sync(...)`, `app.sync`)"
        )
    return StoreError(
        "the app is not open: enqueue and wait inside `async with app:`, or after `await app.open()`; "
        "code that is not async uses `task.enqueue_sync(...)` and `app.sync`"
    )


class TaskConditions(TypedDict, total=False):
    """Further conditions on tasks; None means any."""

    job: UUID | str | None
    worker: str | None  # that holds or held it: its id, or the name with which the ids of its processes begin
    correlation_id: UUID | str | None
    request_id: str | None
    unique_key: str | None
    created_after: datetime | None  # at this time or later
    created_before: datetime | None


CONDITION_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "job": check_id,
    "worker": check_text,
    "correlation_id": check_id,
    "request_id": check_text,
    "unique_key": check_text,
    "created_after": check_time,
    "created_before": check_time,
}


@dataclass(frozen=True, slots=True)
class Affected:
    """The tasks that an operation on a filter changed, or with `preview` would change: their number, and the first 100.

    `steps_left_out` counts the steps that match the filter, when the operation is not for steps. The operation leaves
    out tasks that were enqueued or have ended after `horizon`: give it that of a preview, and it changes what the
    preview counted.
    """

    count: int
    tasks: tuple[TaskSummary, ...]
    preview: bool
    horizon: datetime
    steps_left_out: int = 0


def unknown_task_error(id_: UUID) -> UnknownTaskError:
    """Return the error of a task that is not stored."""
    return UnknownTaskError(f"there is no task {id_}: it was never stored, is not committed yet, or was pruned")


def task_filter(
    states: Sequence[str] | None,
    namespace: str | None,
    type_: str | None,
    tag: str | None,
    **conditions: Unpack[TaskConditions],
) -> TaskFilter:
    """Make a filter; InputError names an unknown state or a value that cannot be one."""
    unknown = sorted(set(states or ()) - {str(state) for state in TaskRowState})
    if isinstance(states, str) or unknown:
        wrong = states if isinstance(states, str) else unknown[0]
        raise InputError(f"states must be a list of {', '.join(TaskRowState)}, got {wrong!r}")
    try:
        checked = {name: CONDITION_CHECKS[name](name, value) for name, value in conditions.items() if value is not None}
    except ValueError as error:
        raise InputError(str(error)) from None
    job, request_id = checked.pop("job", None), checked.pop("request_id", None)
    return TaskFilter(
        None if states is None else tuple(states),
        namespace,
        type_,
        tag,
        job_id=job,
        request_ids=None if request_id is None else (request_id,),
        **checked,
    )


async def apply_to_tasks(
    app: Interlock,
    apply: Callable[[Connection, list[UUID]], Awaitable[list[UUID]]],
    matching: TaskFilter,
    limit: int | None,
    *,
    preview: bool,
    horizon: datetime | None,
) -> Affected:
    """Apply an operation to all tasks that match a filter, page by page; `apply` returns the ids that it changed."""
    count = 0
    listed: list[TaskSummary] = []
    async with app.connection() as connection:
        until = horizon or await read_horizon(connection, now=app.now())
        async for tasks in iterate_task_pages(connection, matching, limit, horizon=until, now=app.now()):
            ids = [task.id for task in tasks]
            changed = set(ids if preview else await apply(connection, ids))
            count += len(changed)
            listed += [task for task in tasks if task.id in changed][: MAX_LISTED - len(listed)]
    return Affected(count, tuple(listed), preview, until)
