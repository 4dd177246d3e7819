"""Tasks run here and now, in the test itself.

Invariant: nothing of the queue is read or written; only a transactional task needs the database, for its own writes.
"""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import orjson

from interlock.client.context import TaskContext
from interlock.errors import DefinitionError, StoreError
from interlock.postgres.connection import transaction
from interlock.postgres.ids import new_id
from interlock.worker.executors.threads import ThreadExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.client.context import Line
    from interlock.client.task import Task


P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Recorder:
    """Stands in for a worker: remembers what a handler said."""

    progress: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Any] = field(default_factory=list)

    def save_checkpoint(self, _: TaskContext, value: Any, /) -> Future[bool]:
        """Remember a checkpoint, by way of JSON."""
        self.checkpoints.append(_through_json(value))
        saved: Future[bool] = Future()
        saved.set_result(True)
        return saved

    def progressed(self, context: TaskContext, /) -> None:
        """Remember what was said of the progress."""
        self.progress.append(dict(context.latest_progress or {}))


async def run_inline(task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a task here and now; its exceptions come through as they are, and its timeout is kept.

    No database is needed, but for a transactional task: its app must be open, and what it writes is committed when it
    has given its result.
    """
    return await run_with(make_context(task), task, *args, **kwargs)


async def run_with(context: TaskContext, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Do the same with a context of the test's own making; a connection that it has is left to the test to commit."""
    stored = _through_json(task.encode(*args, **kwargs))
    context.input_data = stored
    async with _connected(task, context):
        output = await _in_time(task, context, task.decode(stored))
        context.output_data = _through_json(task.encode_result(output))
    result: R = task.decode_result(context.output_data)
    return result


def make_context(
    task: Task[..., Any],
    *,
    attempt: int = 1,
    tries: int = 1,
    checkpoint: Any = None,
    line: Line | None = None,
    connection: Any = None,
) -> TaskContext:
    """Make a context as a worker would, with a Recorder in the worker's place unless told otherwise."""
    context = TaskContext(
        new_id(),
        task.name,
        namespace=task.namespace,
        attempt=attempt,
        tries=tries,
        max_tries=task.max_tries,
        checkpoint=checkpoint,
        line=line or Recorder(),
    )
    context.connection = connection
    return context


async def call(task: Task[..., Any], context: TaskContext, arguments: dict[str, Any]) -> Any:
    """Call a handler: a coroutine in this loop, anything else in a thread of its own."""
    if task.command is not None:
        raise DefinitionError(f"task {task.name} is a command, which only a worker runs")
    if not inspect.iscoroutinefunction(task.function):
        thread = ThreadExecutor(1)
        try:
            return await thread.run(task, context, arguments)
        finally:
            await thread.close()
    if task.context_parameter is not None:
        arguments = {**arguments, task.context_parameter: context}
    return await task.function(**arguments)


@asynccontextmanager
async def _connected(task: Task[..., Any], context: TaskContext) -> AsyncIterator[None]:
    """Give a transactional task a connection whose commit is the end of the block."""
    if not task.transactional or context.connection is not None:
        yield
        return
    if not task.app.is_open:
        raise StoreError(
            f"task {task.name} is transactional and needs a connection: open its app before (`async with app:`), "
            "or run it with make_context(task, connection=...)"
        )
    raised: BaseException | None = None
    async with task.app.connection() as connection:
        with suppress(_UndoneError):
            async with transaction(connection):
                context.connection = connection
                try:
                    yield
                except BaseException as error:  # noqa: BLE001 - it is raised again below
                    raised = error
                    raise _UndoneError from None
                finally:
                    context.connection = None  # it is lent to others next
    if raised is not None:
        raise raised  # as it was, even if it is the driver's


class _UndoneError(Exception):
    """The handler failed: its transaction is undone."""


async def _in_time(task: Task[..., Any], context: TaskContext, arguments: dict[str, Any]) -> Any:
    timeout = task.timeout
    if timeout is None:
        return await call(task, context, arguments)
    if context.deadline is None:
        context.deadline = datetime.now(UTC) + timedelta(seconds=timeout)
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            return await call(task, context, arguments)
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"the handler was still running after {timeout:g} s") from None
        raise  # its own


def _through_json(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value))


# SECTION testing/clock
# A clock that tests control.


class Clock:
    """A clock that stands still until a test moves it: `Interlock(clock=clock)`."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime.now(UTC)
        if self._now.tzinfo is None:
            raise ValueError("a clock needs a time zone; e.g. datetime(2030, 1, 1, tzinfo=UTC)")

    def __call__(self) -> datetime:
        """Tell the time."""
        return self._now

    def advance(self, by: timedelta | float) -> datetime:
        """Move the clock forward, by a timedelta or by seconds, and tell the new time."""
        step = by if isinstance(by, timedelta) else timedelta(seconds=by)
        if step < timedelta(0):
            raise ValueError("a clock goes forward only")
        self._now += step
        return self._now
