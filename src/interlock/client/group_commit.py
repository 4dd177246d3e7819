"""Stores the tasks of concurrent calls together: calls that arrive while a statement is in flight share the next one.

A call that arrives while no statement is in flight runs its own at once, so a lone caller pays nothing and there is no
timer. Tasks with a key have a lane of their own, because their insert may have to wait for another transaction.

Invariant: a call gets the outcome of its own task. A statement that is refused as a whole has stored nothing; each of
its calls then runs alone, and so does each whose key is taken. A canceled call that is still queued stores nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import DisconnectedError, StatementError, StoreError
from interlock.postgres.connection import LOCK_NOT_AVAILABLE
from interlock.store.enqueue import Enqueued, enqueue_task, insert_task, insert_tasks

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from uuid import UUID

    from interlock.model.options import NewTask
    from interlock.postgres.connection import Connection
    from interlock.store.enqueue import InsertedTask

MAX_BATCH_SIZE = 500  # tasks in one statement
# A key that another transaction has inserted and not committed must not hold up the calls behind it. Less than
# PostgreSQL's deadlock_timeout, so that in a deadlock this statement gives way.
KEY_LOCK_TIMEOUT = "100ms"


class GroupCommit:
    """The queued enqueues of an app in one event loop."""

    def __init__(self, connection: Callable[[], AbstractAsyncContextManager[Connection]]) -> None:
        self._connection = connection
        self._plain = _Lane(connection, lock_timeout=None)
        self._keyed = _Lane(connection, lock_timeout=KEY_LOCK_TIMEOUT)

    async def store(self, task: NewTask, *, actor: str) -> Enqueued:
        """Store one task in a transaction that it may share with concurrent calls."""
        inserted = await self._lane(task).insert(task, actor, whole=False)
        if inserted is not None:
            return Enqueued(inserted.id, created=True)
        async with self._connection() as connection:
            return await enqueue_task(connection, task, actor=actor)

    async def insert(self, task: NewTask, *, actor: str) -> dict[str, Any] | None:
        """Store one task in the same way and return its row; None, and nothing is stored, if it needs a closer look."""
        inserted = await self._lane(task).insert(task, actor, whole=True)
        return None if inserted is None else inserted.document

    def _lane(self, task: NewTask) -> _Lane:
        has_key = task.unique_key is not None or task.request_id is not None or task.task_id is not None
        return self._keyed if has_key else self._plain

    async def close(self) -> None:
        """Store what is queued; the owner accepts no further calls."""
        await self._plain.drain()
        await self._keyed.drain()


class _QueuedTask(NamedTuple):
    """A queued call; the answer is None if the task has to be stored alone."""

    task: NewTask
    actor: str
    whole: bool  # whether the caller needs the row
    answer: asyncio.Future[InsertedTask | None]


class _Lane:
    """One queue with at most one statement in flight, so that tasks are stored in the order of the calls."""

    def __init__(
        self, connection: Callable[[], AbstractAsyncContextManager[Connection]], *, lock_timeout: str | None
    ) -> None:
        self._connection = connection
        self._lock_timeout = lock_timeout
        self._queue: deque[_QueuedTask] = deque()
        self._is_busy = False
        self._flushing: asyncio.Task[None] | None = None

    async def insert(self, task: NewTask, actor: str, *, whole: bool) -> InsertedTask | None:
        if self._is_busy:
            answer: asyncio.Future[InsertedTask | None] = asyncio.get_running_loop().create_future()
            self._queue.append(_QueuedTask(task, actor, whole, answer))
            return await answer
        self._is_busy = True
        try:
            return await self._insert_first(task, actor, whole=whole)
        finally:
            self._is_busy = False
            self._flush_queue()

    async def drain(self) -> None:
        if self._flushing is None:
            self._flush_queue()
        if self._flushing is not None:
            await asyncio.wait([self._flushing])

    async def _insert_first(self, task: NewTask, actor: str, *, whole: bool) -> InsertedTask | None:
        limit = self._lock_timeout
        try:
            async with self._connection() as connection:
                return await insert_task(connection, task, actor=actor, lock_timeout=limit, whole=whole)
        except StatementError as error:
            if error.sqlstate != LOCK_NOT_AVAILABLE:
                raise
            return None

    def _flush_queue(self) -> None:
        if self._queue:
            self._is_busy = True
            # without the context variables of the call that happens to be here
            self._flushing = asyncio.create_task(self._flush(), name="interlock-enqueue", context=Context())

    async def _flush(self) -> None:
        try:
            while self._queue:
                await self._store_batch(self._next_batch())
                # The callers that have their answer run first: their next calls belong to the next batch.
                await asyncio.sleep(0)
        finally:
            self._is_busy = False
            self._flushing = None
            _refuse(self._queue, "it was not stored")  # empty, unless the event loop ends
            self._queue.clear()

    def _next_batch(self) -> list[_QueuedTask]:
        """Take queued calls of one actor, without canceled ones; no id twice, because it tells what was stored."""
        batch: list[_QueuedTask] = []
        ids: set[UUID] = set()
        while self._queue and len(batch) < MAX_BATCH_SIZE:
            task_id = self._queue[0].task.task_id
            if batch and (self._queue[0].actor != batch[0].actor or task_id in ids):
                break
            queued = self._queue.popleft()
            if not queued.answer.done():
                batch.append(queued)
                if task_id is not None:
                    ids.add(task_id)
        return batch

    async def _store_batch(self, batch: list[_QueuedTask]) -> None:
        if not batch:
            return
        stored: list[InsertedTask | None] = [None] * len(batch)
        tasks, whole = [queued.task for queued in batch], any(queued.whole for queued in batch)
        actor, limit = batch[0].actor, self._lock_timeout
        try:
            async with self._connection() as connection:
                stored = await insert_tasks(connection, tasks, actor=actor, lock_timeout=limit, whole=whole)
        except DisconnectedError as error:
            for queued in batch:
                if not queued.answer.done():
                    queued.answer.set_exception(DisconnectedError(str(error)))
            return
        except asyncio.CancelledError:
            _refuse(batch, "it is not known whether it was stored")
            raise
        except Exception:  # noqa: BLE001 - refused by the database or an encoder: each call gets the error of its own task
            stored = [None] * len(batch)
        for queued, outcome in zip(batch, stored, strict=True):
            if not queued.answer.done():
                queued.answer.set_result(outcome)


def _refuse(calls: list[_QueuedTask] | deque[_QueuedTask], consequence: str) -> None:
    for queued in calls:
        if not queued.answer.done():
            error = StoreError(f"task {queued.task.type}: the event loop ended before the answer; {consequence}")
            queued.answer.set_exception(error)
