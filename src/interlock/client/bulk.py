"""Many tasks at once: by COPY where nothing can hold or merge them, else in one statement per thousand.

Invariant: all of them are stored, or none; the handles come in the order of what was given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from interlock.store.database import transaction, translated
from interlock.store.enqueue import (
    begin_copy,
    copy_row,
    copy_row_parts,
    copy_rows,
    enqueue_tasks,
    enqueue_tasks_blocking,
    is_blocking,
)
from interlock.store.ids import as_id, new_numbers
from interlock.store.tasks import NewTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.store.enqueue import AsyncConnection, SyncConnection
    from interlock.store.tasks import Enqueued

FEW = 50  # below this a COPY has more round trips than it saves
BATCH = 1000


Item = tuple[NewTask, dict[str, Any]]  # what a task shares with others, and its own input
Made = TypeVar("Made")


def is_plain(task: NewTask) -> bool:
    """Tell whether nothing can hold this task or merge it with another, paused namespaces apart."""
    return task.unique_key is None and task.request_id is None and task.limit_key is None and task.task_id is None


class Copied(Sequence[Made]):
    """What was made of tasks that were copied: each when it is asked for, since few want as many objects as tasks."""

    __slots__ = ("_make", "_starts", "_types", "numbers")

    def __init__(self, make: Callable[[str, UUID, bool], Made]) -> None:
        self.numbers: list[int] = []  # their ids
        self._make = make
        self._starts: list[int] = []
        self._types: list[str] = []

    def begin(self, type_: str) -> None:
        """Note of which type the tasks from the next one on are."""
        if not self._types or self._types[-1] != type_:
            self._starts.append(len(self.numbers))
            self._types.append(type_)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> Made: ...

    @overload
    def __getitem__(self, place: slice) -> list[Made]: ...

    def __getitem__(self, place: int | slice) -> Made | list[Made]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        number = self.numbers[place]
        type_ = self._types[bisect_right(self._starts, place % len(self)) - 1]
        return self._make(type_, as_id(number), True)  # noqa: FBT003 - a column, not a flag

    def __repr__(self) -> str:
        return f"<{len(self)} tasks>"


class Bulk(Generic[Made]):
    """Stores many tasks, and makes something of each: of its type, its id, and whether it is new."""

    def __init__(self, app: Interlock, make: Callable[[str, UUID, bool], Made]) -> None:
        self._actor = app.actor
        self._app = app
        self._make = make

    async def enqueue(
        self,
        items: Iterator[Item],
        *,
        copy_to: Sequence[str] | None,
        connection: AsyncConnection | SyncConnection | None = None,
    ) -> Sequence[Made]:
        """Store all items, in the connection's transaction if one is given, else in one of its own.

        `copy_to` are the namespaces of tasks that are all plain; None if they are not.
        """
        if connection is None:
            async with self._app.connection() as own:
                return await self._stored(own, items, copy_to)
        if is_blocking(connection):
            return self._in_batches_blocking(connection, items)
        return await self._stored(connection, items, copy_to)

    async def _stored(
        self, connection: AsyncConnection, items: Iterator[Item], copy_to: Sequence[str] | None
    ) -> Sequence[Made]:
        first = list(islice(items, FEW))
        async with transaction(connection):
            if copy_to is not None and len(first) == FEW:
                begun = await begin_copy(connection, copy_to, actor=self._actor)
                if not begun.paused:
                    return await self._copied(connection, chain(first, items), begun.now)
            return await self._in_batches(connection, chain(first, items))

    async def _copied(self, connection: AsyncConnection, items: Iterator[Item], now: datetime) -> Copied[Made]:
        copied = Copied(self._make)

        def rows() -> Iterator[bytes]:
            # while the server stores one part, the next is made here
            before: NewTask | None = None
            parts = (b"", b"")
            for (shared, stored), number in zip(items, _numbers(), strict=False):
                if shared is not before:
                    before, parts = shared, copy_row_parts(shared, now)
                    copied.begin(shared.type)
                copied.numbers.append(number)
                yield copy_row(number, parts, stored)

        await copy_rows(connection, rows())
        return copied

    async def _in_batches(self, connection: AsyncConnection, items: Iterator[Item]) -> list[Made]:
        made: list[Made] = []
        while batch := _batch(items):
            made += self._made(batch, await enqueue_tasks(connection, batch, actor=self._actor))
        return made

    def _in_batches_blocking(self, connection: SyncConnection, items: Iterator[Item]) -> list[Made]:
        made: list[Made] = []
        with translated(connection), connection.transaction():
            while batch := _batch(items):
                made += self._made(batch, enqueue_tasks_blocking(connection, batch, actor=self._actor))
        return made

    def _made(self, tasks: list[NewTask], stored: list[Enqueued]) -> list[Made]:
        return [self._make(task.type, id_, created) for task, (id_, created) in zip(tasks, stored, strict=True)]


def _numbers() -> Iterator[int]:
    while True:
        yield from new_numbers(BATCH)


def _batch(items: Iterator[Item]) -> list[NewTask]:
    return [replace(shared, input=stored) for shared, stored in islice(items, BATCH)]
