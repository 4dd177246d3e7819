"""Enqueueing: one task, many tasks, in the caller's transaction, or as a statement for any driver.

Invariant: arguments and options are checked before a statement is sent, and every way stores the same row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, overload

from interlock.client.task_handle import TaskHandle
from interlock.errors import DefinitionError, InputError
from interlock.model.json_values import check_input_size
from interlock.model.options import (
    EnqueueOptions,
    NewTask,
    as_columns,
    check_options,
    placeholders,
    render_limit_key,
    render_limit_weight,
)
from interlock.postgres.connection import is_blocking, transaction, translated
from interlock.postgres.ids import as_id, new_numbers
from interlock.store.enqueue import (
    begin_copy,
    copy_row,
    copy_row_parts,
    copy_tasks,
    enqueue_as_text,
    enqueue_task_blocking,
    enqueue_task_on,
    enqueue_tasks,
    enqueue_tasks_blocking,
    is_copyable,
)
from interlock.tracing import ProducerSpan, current_traceparent

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.client.sync import SyncHandle
    from interlock.client.task import Task
    from interlock.postgres.connection import AsyncConnection, SyncConnection
    from interlock.postgres.query import PortableStatement
    from interlock.store.enqueue import Enqueued

P = ParamSpec("P")
R = TypeVar("R")
Made = TypeVar("Made")

MIN_COPY_SIZE = 50  # tasks; for fewer a COPY has more round trips than it saves
BATCH_SIZE = 1000  # tasks in one statement

BulkItem = tuple[NewTask, dict[str, Any]]  # the row that several tasks share, and the input of one of them


class Enqueuer(Generic[P, R]):
    """A task together with the options of its calls."""

    _app: Interlock
    _task: Task[P, R]
    # the options of NewTask, by column; the same for every call
    _columns: Mapping[str, Any]

    def options(self, **options: Unpack[EnqueueOptions]) -> Configured[P, R]:
        """Return the same task with these options in addition to those that it has."""
        try:
            values = check_options(options)
        except (ValueError, DefinitionError) as error:
            raise InputError(f"task {self._task.name}: {error}") from None
        self._task.check_limit_templates(values)
        if "run_at" in values or "delay" in values:
            values = {"run_at": None, "delay": None, **values}
        return Configured(self._app, self._task, {**self._columns, **as_columns(values)})

    def prepare(self, /, *args: P.args, **kwargs: P.kwargs) -> NewTask:
        """Check the arguments and return the task to be stored, for `app.enqueue_many`."""
        stored_input = self._task.encode(*args, **kwargs)
        check_input_size(f"task {self._task.name}", stored_input, self._app.config.largest_input)
        return self._with_limits(self._new_task(stored_input))

    async def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Store one task and commit; concurrent calls share a transaction, and each gets its own outcome."""
        task = self.prepare(*args, **kwargs)
        with self._span(task) as span:
            stored = await self._app.group_commit.store(_traced(task, span), actor=self._app.actor)
            return self._handle(stored, span)

    def enqueue_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> SyncHandle[R]:
        """Store one task and return a blocking handle: for code that is not async, from any thread."""
        return self._app.sync.enqueue(self, *args, **kwargs)

    @overload
    def enqueue_with(self, connection: SyncConnection, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]: ...

    @overload
    def enqueue_with(
        self, connection: AsyncConnection, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, TaskHandle[R]]: ...

    def enqueue_with(
        self, connection: SyncConnection | AsyncConnection, /, *args: P.args, **kwargs: P.kwargs
    ) -> TaskHandle[R] | Coroutine[Any, Any, TaskHandle[R]]:
        """Store one task in the caller's transaction; await the call when the psycopg connection is async."""
        task = self.prepare(*args, **kwargs)
        if is_blocking(connection):
            with self._span(task) as span:
                stored = enqueue_task_blocking(connection, _traced(task, span), actor=self._app.actor)
                return self._handle(stored, span)
        return self._enqueue_on(connection, task)

    def enqueue_statement(self, /, *args: P.args, **kwargs: P.kwargs) -> PortableStatement:
        """Return a statement that stores one task, for a transaction of any other driver.

        The task continues the trace of the active span.
        """
        task = self.prepare(*args, **kwargs)
        if task.traceparent is None and self._app.tracer is not None:
            task = replace(task, traceparent=current_traceparent())
        return enqueue_as_text(task, actor=self._app.actor)

    async def enqueue_many(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        connection: AsyncConnection | SyncConnection | None = None,
    ) -> Sequence[TaskHandle[R]]:
        """Store one task per mapping of arguments, all or none; in the caller's transaction if one is given."""
        app, task, shared = self._app, self._task, self._new_task({})
        mappings = _require_list("mappings of arguments", inputs)
        subject, largest = f"task {task.name}", app.config.largest_input

        def encode(arguments: Mapping[str, Any]) -> dict[str, Any]:
            stored_input = task.encode_named(arguments)
            check_input_size(subject, stored_input, largest)
            return stored_input

        def handle(_: str, id_: UUID, created: bool) -> TaskHandle[R]:  # noqa: FBT001 - a column, not a flag
            return TaskHandle(app, id_, task, created)

        return await BulkEnqueue(app, handle).enqueue(
            (self._bulk_item(shared, encode(arguments)) for arguments in mappings),
            type_=task.name,
            count=len(mappings) if isinstance(mappings, Sized) else None,
            copy_to=[shared.namespace] if is_copyable(shared) else None,
            connection=connection,
        )

    async def _enqueue_on(self, connection: AsyncConnection, task: NewTask) -> TaskHandle[R]:
        with self._span(task) as span:
            stored = await enqueue_task_on(connection, _traced(task, span), actor=self._app.actor)
            return self._handle(stored, span)

    def _span(self, task: NewTask) -> ProducerSpan:
        tracer = self._app.tracer if task.traceparent is None else None
        return ProducerSpan(tracer, "enqueue", task.type, namespace=task.namespace)

    def _handle(self, stored: Enqueued, span: ProducerSpan) -> TaskHandle[R]:
        span.stored(stored.id, created=stored.created)
        return TaskHandle(self._app, stored.id, self._task, stored.created)

    def _bulk_item(self, shared: NewTask, stored_input: dict[str, Any]) -> BulkItem:
        if shared.limit_keys is None and shared.limit_weight is None:
            return shared, stored_input
        rendered = self._with_limits(replace(shared, input=stored_input))
        return replace(rendered, input={}), stored_input

    def _with_limits(self, task: NewTask) -> NewTask:
        """Render the templates of the limit keys and of the weight from the arguments."""
        keys, weight = task.limit_keys, task.limit_weight
        if (keys is None and weight is None) or not placeholders((*(keys or ()), weight or "")):
            return task
        arguments = {**self._task.default_arguments, **task.input}
        try:
            return replace(
                task,
                limit_keys=None if keys is None else tuple(render_limit_key(key, arguments) for key in keys),
                limit_weight=None if weight is None else render_limit_weight(weight, arguments),
            )
        except ValueError as error:
            raise InputError(f"task {self._task.name}: {error}") from None

    def _new_task(self, stored_input: dict[str, Any]) -> NewTask:
        app = self._app
        columns = dict(self._columns)
        if columns["callback_url"] is None:
            columns["callback_url"] = app.config.callback_url
        now = app.now()
        if now is not None and columns["run_at"] is None:  # the clock of a test replaces the server's
            delay = columns["delay"]
            columns["run_at"], columns["delay"] = now if delay is None else now + delay, None
        return NewTask(self._task.name, stored_input, **columns)


class Configured(Enqueuer[P, R]):
    """A task with options of its own: `task.options(...)`."""

    __slots__ = ("_app", "_columns", "_task")

    def __init__(self, app: Interlock, task: Task[P, R], columns: Mapping[str, Any]) -> None:
        self._app = app
        self._task = task
        self._columns = columns


def require_prepared(tasks: Iterable[Any]) -> list[NewTask]:
    """List the tasks given to `app.enqueue_many`; InputError names the first that `task.prepare(...)` did not make."""
    given = list(_require_list("tasks of task.prepare(...)", tasks))
    for place, task in enumerate(given):
        if not isinstance(task, NewTask):
            raise InputError(
                f"app.enqueue_many takes tasks of task.prepare(...), but element {place} is {_kind(task)}; "
                "to call one task many times, use task.enqueue_many([{...}, ...])"
            )
    return given


def _require_list(elements: str, given: Any) -> Iterable[Any]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InputError(f"enqueue_many takes a list of {elements}, got {_kind(given)}")
    return given


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


class BulkEnqueue(Generic[Made]):
    """Stores many tasks, by COPY or in batches, and makes one object of the type, id and `created` of each.

    Invariant: all tasks are stored or none, and the objects are in the order of the tasks.
    """

    def __init__(self, app: Interlock, make: Callable[[str, UUID, bool], Made]) -> None:
        self._actor = app.actor
        self._app = app
        self._make = make

    async def enqueue(
        self,
        items: Iterator[BulkItem],
        *,
        copy_to: Sequence[str] | None,
        connection: AsyncConnection | SyncConnection | None = None,
        type_: str | None = None,
        count: int | None = None,
    ) -> Sequence[Made]:
        """Store all items, in the connection's transaction if one is given, else in a new one.

        `copy_to` lists the namespaces if all tasks can be stored by COPY, and is None otherwise. `type_` and `count`
        describe the tasks in the span, which all of them continue.
        """
        namespace = copy_to[0] if copy_to is not None and len(copy_to) == 1 else None
        with ProducerSpan(self._app.tracer, "enqueue", type_, namespace=namespace, count=count) as span:
            if span.traceparent is not None:
                items = _all_traced(items, span)
            if connection is None:
                async with self._app.connection() as own:
                    return await self._store(own, items, copy_to)
            if is_blocking(connection):
                return self._store_in_batches_blocking(connection, items)
            return await self._store(connection, items, copy_to)

    async def _store(
        self, connection: AsyncConnection, items: Iterator[BulkItem], copy_to: Sequence[str] | None
    ) -> Sequence[Made]:
        first = list(islice(items, MIN_COPY_SIZE))
        async with transaction(connection):
            if copy_to is not None and len(first) == MIN_COPY_SIZE:
                start = await begin_copy(connection, copy_to, actor=self._actor)
                if not start.paused:
                    return await self._copy(connection, chain(first, items), start.now)
            return await self._store_in_batches(connection, chain(first, items))

    async def _copy(self, connection: AsyncConnection, items: Iterator[BulkItem], now: datetime) -> CopiedTasks[Made]:
        copied = CopiedTasks(self._make)

        def rows() -> Iterator[bytes]:
            # encodes the next rows while the server stores the chunk before
            before: NewTask | None = None
            parts = (b"", b"")
            for (shared, stored_input), number in zip(items, _endless_numbers(), strict=False):
                if shared is not before:
                    before, parts = shared, copy_row_parts(shared, now)
                    copied.begin(shared.type)
                copied.numbers.append(number)
                yield copy_row(number, parts, stored_input)

        await copy_tasks(connection, rows())
        return copied

    async def _store_in_batches(self, connection: AsyncConnection, items: Iterator[BulkItem]) -> list[Made]:
        made: list[Made] = []
        while batch := _next_batch(items):
            made += self._make_all(batch, await enqueue_tasks(connection, batch, actor=self._actor))
        return made

    def _store_in_batches_blocking(self, connection: SyncConnection, items: Iterator[BulkItem]) -> list[Made]:
        made: list[Made] = []
        with translated(connection), connection.transaction():
            while batch := _next_batch(items):
                made += self._make_all(batch, enqueue_tasks_blocking(connection, batch, actor=self._actor))
        return made

    def _make_all(self, tasks: list[NewTask], stored: list[Enqueued]) -> list[Made]:
        return [self._make(task.type, id_, created) for task, (id_, created) in zip(tasks, stored, strict=True)]


def _traced(task: NewTask, span: ProducerSpan) -> NewTask:
    """Return the task with the trace of the span that stores it, unless it has one."""
    if span.traceparent is None or task.traceparent is not None:
        return task
    return replace(task, traceparent=span.traceparent)


def _all_traced(items: Iterable[BulkItem], span: ProducerSpan) -> Iterator[BulkItem]:
    """Give all items the trace of the span that stores them; consecutive items keep sharing their row."""
    before: NewTask | None = None
    traced: NewTask | None = None
    for shared, stored_input in items:
        if traced is None or shared is not before:
            before, traced = shared, _traced(shared, span)
        yield traced, stored_input


def _endless_numbers() -> Iterator[int]:
    while True:
        yield from new_numbers(BATCH_SIZE)


def _next_batch(items: Iterator[BulkItem]) -> list[NewTask]:
    return [replace(shared, input=stored_input) for shared, stored_input in islice(items, BATCH_SIZE)]


class CopiedTasks(Sequence[Made]):
    """The objects of copied tasks, each made on access: few callers need as many objects as tasks."""

    __slots__ = ("_make", "_starts", "_types", "numbers")

    def __init__(self, make: Callable[[str, UUID, bool], Made]) -> None:
        self.numbers: list[int] = []  # their ids
        self._make = make
        self._starts: list[int] = []
        self._types: list[str] = []

    def begin(self, type_: str) -> None:
        """Note the type of the tasks from the next one on."""
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
