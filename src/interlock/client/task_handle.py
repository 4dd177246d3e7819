"""What a caller holds of a task that was enqueued: its id, and everything that can be asked of it or done to it.

Invariant: a handle keeps no state of the task; every answer comes from the database.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from interlock.errors import InputError, StoreError, TaskFailedError, UnknownTaskError
from interlock.lifecycle import TaskRowState
from interlock.store.task_admin import (
    TaskFilter,
    TaskSummary,
    cancel_unfinished_tasks,
    iterate_task_pages,
    request_cancel_of_running_tasks,
    requeue_unless_duplicate,
)
from interlock.store.tasks import read_task_history, read_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.client.task import Task
    from interlock.postgres.connection import Connection
    from interlock.store.tasks import TaskRecord


R_co = TypeVar("R_co", covariant=True)

ENDED = frozenset({"done", "error", "canceled", "skipped"})
Canceled = Literal["canceled", "requested", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """All that is stored of a task."""

    id: UUID
    namespace: str
    type: str
    state: str
    event: str | None
    reason: str | None
    held_by: str | None
    priority: int
    run_at: datetime
    attempt: int
    tries: int
    max_tries: int
    worker_id: str | None
    lease_expires_at: datetime | None
    job_id: UUID | None
    step: str | None
    limit_key: str | None
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

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to the task by itself."""
        return self.state in ENDED


class TaskHandle(Generic[R_co]):
    """A task that was enqueued. `created` is False when it was there already."""

    __slots__ = ("_app", "_task", "created", "id")

    def __init__(
        self,
        app: Interlock,
        id_: UUID,
        task: Task[..., R_co] | None = None,
        created: bool = False,  # noqa: FBT001, FBT002 - by position, because a keyword is dear a million times
    ) -> None:
        self._app = app
        self._task = task
        self.id = id_
        self.created = created

    def __repr__(self) -> str:
        name = f"{self._task.name} " if self._task is not None else ""
        return f"<TaskHandle {name}{self.id}>"

    async def status(self) -> TaskStatus:
        """Read the task as it is now."""
        async with self._app.connection() as connection:
            rows = await read_tasks(connection, [self.id])
        if not rows:
            raise UnknownTaskError(f"there is no task {self.id}: not stored, not committed yet, or pruned")
        return TaskStatus(**rows[0])

    async def history(self) -> list[TaskRecord]:
        """Read every move that the task made, oldest first."""
        async with self._app.connection() as connection:
            return await read_task_history(connection, self.id)

    async def result(self, timeout: float | None = None) -> R_co:  # noqa: ASYNC109 - what callers of results expect
        """Wait for the end and give the result; TaskFailedError if there is none, TimeoutError if it takes longer."""
        try:
            async with asyncio.timeout(timeout):
                status = await self._end()
        except TimeoutError:
            raise TimeoutError(f"task {self.id} has not ended within {timeout:g} s") from None
        if status.state != "done":
            raise _failure(status)
        task = self._task or self._app.tasks.get(status.type)
        value: R_co = status.output if task is None else task.decode_result(status.output)
        return value

    async def cancel(self, reason: str | None = None, *, force: bool = False) -> Canceled:
        """Cancel the task: at once if it does not run, else by asking its worker; with `force` at once in any case.

        Gives what came of it: "canceled", "requested" of the worker, or "ended" if there was nothing left to cancel.
        """
        app = self._app
        async with app.connection() as connection:
            while True:
                if await cancel_unfinished_tasks(
                    connection, [self.id], actor=app.actor, reason=reason, running=force, now=app.now()
                ):
                    return "canceled"
                if await request_cancel_of_running_tasks(connection, [self.id], reason=reason, now=app.now()):
                    return "requested"
                if (await self.status()).has_ended:
                    return "ended"

    async def requeue(self, reason: str | None = None) -> bool:
        """Give a task that ended in error or was canceled a new set of tries; False if it is not in such a state.

        InputError when it is a step: what came of its end is part of its job, which can be retried.
        """
        refuse_step(await self.status())
        app = self._app
        async with app.connection() as connection:
            ids = [self.id]
            return bool(await requeue_unless_duplicate(connection, ids, actor=app.actor, reason=reason, now=app.now()))

    async def _end(self) -> TaskStatus:
        while not (status := await self.status()).has_ended:
            await self._app.completions.wait(self.id)
        return status


def refuse_step(status: TaskStatus) -> None:
    """Refuse to requeue a step by itself; InputError says what to do instead."""
    if status.job_id is not None:
        raise InputError(
            f"task {status.id} is the step {status.step!r} of job {status.job_id} and cannot be requeued by itself: "
            f"once the job has ended, `interlock jobs retry {status.job_id} STEP` submits it anew from a step on"
        )


def _failure(status: TaskStatus) -> TaskFailedError:
    error = status.error or {}
    told = ": ".join(str(error[part]) for part in ("type", "message") if error.get(part)) or status.reason
    how = "ended in error" if status.state == "error" else f"was {status.state}"
    return TaskFailedError(
        f"task {status.type} {status.id} {how}{f': {told}' if told else ''}", state=status.state, error=status.error
    )


def not_open() -> StoreError:
    """Say what to do with an app that has no connection yet."""
    return StoreError("the app is not open: enqueue and wait inside `async with app:`, or after `await app.open()`")


# SECTION client/acts
# Acts on all tasks of a filter: which are meant, and what came of it.
#
# Invariant: a preview touches nothing, and finds the same tasks as the act would.

UNFINISHED = ("waiting", "pending", "running")
SHOWN = 100


@dataclass(frozen=True, slots=True)
class Affected:
    """What an act by filter touched, or would touch: how many tasks, and the first hundred of them.

    `steps_left_out` are tasks of the filter that belong to jobs, when the act is not for those.
    """

    count: int
    tasks: tuple[TaskSummary, ...]
    preview: bool
    steps_left_out: int = 0


def wanted_tasks(states: Sequence[str] | None, namespace: str | None, type_: str | None, tag: str | None) -> TaskFilter:
    """Make a filter; InputError names a state that there is not."""
    unknown = sorted(set(states or ()) - {str(state) for state in TaskRowState})
    if isinstance(states, str) or unknown:
        known = ", ".join(TaskRowState)
        raise InputError(f"states must be a list of {known}; not {states if isinstance(states, str) else unknown[0]}")
    return TaskFilter(None if states is None else tuple(states), namespace, type_, tag)


async def act_on(
    app: Interlock,
    act: Callable[[Connection, list[UUID]], Awaitable[list[UUID]]],
    wanted: TaskFilter,
    limit: int | None,
    *,
    preview: bool,
) -> Affected:
    """Do something to all tasks of a filter, a page at a time; `act` gives those that it did it to."""
    count = 0
    shown: list[TaskSummary] = []
    async with app.connection() as connection:
        async for page in iterate_task_pages(connection, wanted, limit):
            ids = [task.id for task in page]
            touched = set(ids if preview else await act(connection, ids))
            count += len(touched)
            shown += [task for task in page if task.id in touched][: SHOWN - len(shown)]
    return Affected(count, tuple(shown), preview)
