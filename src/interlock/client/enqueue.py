"""The ways to enqueue a task: one, many, in somebody else's transaction, or as a statement for any driver.

Invariant: arguments and options are checked before anything is sent; whatever the way, the same row comes of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, overload

from interlock.client.task_handle import TaskHandle
from interlock.errors import DefinitionError, InputError
from interlock.model.options import EnqueueOptions, Options, checked
from interlock.postgres.connection import is_blocking, transaction, translated
from interlock.postgres.ids import as_id, new_numbers
from interlock.store.enqueue import (
    begin_copy,
    copy_row,
    copy_row_parts,
    copy_rows,
    enqueue_alone,
    enqueue_as_text,
    enqueue_blocking_on,
    enqueue_on,
    enqueue_tasks,
    enqueue_tasks_blocking,
)
from interlock.store.tasks import NewTask

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.client.task import Task
    from interlock.postgres.connection import AsyncConnection, SyncConnection
    from interlock.store.tasks import Enqueued


# SECTION client/bulk
# Many tasks at once: by COPY where nothing can hold or merge them, else in one statement per thousand.
#
# Invariant: all of them are stored, or none; the handles come in the order of what was given.

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


P = ParamSpec("P")
R = TypeVar("R")

Parameters = dict[str, Any] | tuple[Any, ...]


def prepared(tasks: Iterable[Any]) -> list[NewTask]:
    """Give what `app.enqueue_many` is to store; InputError names the first element that `prepare` did not make."""
    given = list(_several("what task.prepare(...) gives", tasks))
    for place, task in enumerate(given):
        if not isinstance(task, NewTask):
            raise InputError(
                f"enqueue_many takes what task.prepare(...) gives, and element {place} is {_kind(task)}; "
                "for many calls of one task there is task.enqueue_many([{...}, ...])"
            )
    return given


def _several(of: str, given: Any) -> Iterable[Any]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InputError(f"enqueue_many takes a list of {of}, not {_kind(given)}")
    return given


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


class EnqueueStatement:
    """A statement that enqueues one task and gives its `id` and `created`, for any driver of PostgreSQL."""

    __slots__ = ("_actor", "_task", "parameters", "sql")

    def __init__(self, task: NewTask, actor: str) -> None:
        self._task = task
        self._actor = actor
        self.sql, self.parameters = self.styled("pyformat")

    def __iter__(self) -> Iterator[Any]:
        return iter((self.sql, self.parameters))

    def styled(self, paramstyle: str) -> tuple[str, Parameters]:
        """Write it as the driver wants it: pyformat, format, named, qmark, numeric (:1) or dollar ($1)."""
        return enqueue_as_text(self._task, actor=self._actor, paramstyle=paramstyle)


class Enqueuer(Generic[P, R]):
    """A task together with the options under which it is to be enqueued."""

    _app: Interlock
    _task: Task[P, R]
    _options: Options

    def options(self, **options: Unpack[EnqueueOptions]) -> Configured[P, R]:
        """Give the same task with other options, in addition to those that it has."""
        try:
            values = checked(options)
        except (ValueError, DefinitionError) as error:
            raise InputError(f"task {self._task.name}: {error}") from None
        if {"run_at", "delay"} & values.keys():
            values = {"run_at": None, "delay": None, **values}
        return Configured(self._app, self._task, replace(self._options, **values))

    def prepare(self, /, *args: P.args, **kwargs: P.kwargs) -> NewTask:
        """Check the arguments and give what would be stored, for `app.enqueue_many`."""
        return self._new(self._task.encode(*args, **kwargs))

    async def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Store one task in a transaction of its own."""
        task = self.prepare(*args, **kwargs)
        async with self._app.connection() as connection:
            return self._handle(await enqueue_alone(connection, task, actor=self._app.actor))

    @overload
    def enqueue_with(self, connection: SyncConnection, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]: ...

    @overload
    def enqueue_with(
        self, connection: AsyncConnection, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, TaskHandle[R]]: ...

    def enqueue_with(
        self, connection: SyncConnection | AsyncConnection, /, *args: P.args, **kwargs: P.kwargs
    ) -> TaskHandle[R] | Coroutine[Any, Any, TaskHandle[R]]:
        """Store one task in the caller's transaction: await it on an async psycopg connection, else just call it."""
        task = self.prepare(*args, **kwargs)
        if is_blocking(connection):
            return self._handle(enqueue_blocking_on(connection, task, actor=self._app.actor))
        return self._enqueue_on(connection, task)

    def enqueue_statement(self, /, *args: P.args, **kwargs: P.kwargs) -> EnqueueStatement:
        """Give a statement that stores one task, for a transaction of any other driver."""
        return EnqueueStatement(self.prepare(*args, **kwargs), self._app.actor)

    async def enqueue_many(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        connection: AsyncConnection | SyncConnection | None = None,
    ) -> Sequence[TaskHandle[R]]:
        """Store one task for each mapping of arguments, all or none; in the caller's transaction if one is given."""
        app, task, shared = self._app, self._task, self._new({})
        encode, several = task.encode_named, _several("mappings of arguments", inputs)

        def handle(_: str, id_: UUID, created: bool) -> TaskHandle[R]:  # noqa: FBT001 - a column, not a flag
            return TaskHandle(app, id_, task, created)

        return await Bulk(app, handle).enqueue(
            ((shared, encode(arguments)) for arguments in several),
            copy_to=[shared.namespace] if is_plain(shared) else None,
            connection=connection,
        )

    async def _enqueue_on(self, connection: AsyncConnection, task: NewTask) -> TaskHandle[R]:
        return self._handle(await enqueue_on(connection, task, actor=self._app.actor))

    def _handle(self, stored: Enqueued) -> TaskHandle[R]:
        return TaskHandle(self._app, stored.id, self._task, stored.created)

    def _new(self, stored: dict[str, Any]) -> NewTask:
        task, options, now = self._task, self._options, self._app.now()
        run_at, delay = options.run_at, options.delay
        if now is not None and run_at is None:  # a clock that tests control decides, not the server's
            run_at, delay = now if delay is None else now + delay, None
        return NewTask(
            type=task.name,
            input=stored,
            namespace=_either(options.namespace, task.namespace),
            priority=_either(options.priority, task.priority),
            run_at=run_at,
            delay=delay,
            max_tries=_either(options.max_tries, task.max_tries),
            timeout_seconds=_either(options.timeout, task.timeout),
            backoff=options.backoff,
            unique_key=options.unique_key,
            request_id=options.request_id,
            limit_key=_either(options.limit_key, task.limit_key),
            tags=_either(options.tags, task.tags),
            callback_url=_either(_either(options.callback_url, task.callback_url), self._app.config.callback_url),
            correlation_id=options.correlation_id,
            task_id=options.task_id,
        )


class Configured(Enqueuer[P, R]):
    """A task with options of its own."""

    __slots__ = ("_app", "_options", "_task")

    def __init__(self, app: Interlock, task: Task[P, R], options: Options) -> None:
        self._app = app
        self._task = task
        self._options = options


T = TypeVar("T")


def _either(asked: T | None, defined: T) -> T:
    return defined if asked is None else asked
