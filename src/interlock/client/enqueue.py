"""The ways to enqueue a task: one, many, in somebody else's transaction, or as a statement for any driver.

Invariant: arguments and options are checked before anything is sent; whatever the way, the same row comes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, overload

from interlock.client.bulk import Bulk, is_plain
from interlock.client.handle import TaskHandle
from interlock.client.options import EnqueueOptions, Options, checked
from interlock.errors import DefinitionError, InputError
from interlock.store.enqueue import enqueue_alone, enqueue_as_text, enqueue_blocking_on, enqueue_on, is_blocking
from interlock.store.tasks import NewTask

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.client.task import Task
    from interlock.store.enqueue import AsyncConnection, SyncConnection
    from interlock.store.tasks import Enqueued

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
