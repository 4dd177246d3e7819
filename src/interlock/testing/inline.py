"""Runs single tasks inside a test, and the clock that a test controls.

Invariant: the queue is neither read nor written; only a transactional task needs the database, for its own writes.
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

from interlock.client.context import TaskContext, as_document
from interlock.client.dependencies import Resources
from interlock.errors import StoreError
from interlock.postgres.connection import transaction
from interlock.postgres.ids import new_id
from interlock.process_groups import ProcessGroups
from interlock.worker.executors.commands import CommandExecutor
from interlock.worker.executors.threads import ThreadExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.client.app import Interlock
    from interlock.client.context import WorkerChannel
    from interlock.client.task import Task


P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Recorder:
    """Replaces the worker of a context: records progress and checkpoints."""

    progress: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Any] = field(default_factory=list)

    def save_checkpoint(self, _: TaskContext, value: Any, /) -> Future[bool]:
        """Record a checkpoint after a round trip through JSON."""
        self.checkpoints.append(_through_json(value))
        saved: Future[bool] = Future()
        saved.set_result(True)
        return saved

    def progressed(self, context: TaskContext, /) -> None:
        """Record the progress."""
        self.progress.append(dict(context.latest_progress or {}))


async def run_inline(task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a task in the test, with its timeout; exceptions are raised unchanged.

    Only a transactional task needs a database: its app must be open, and its writes are committed with its result.
    Dependencies are made as in a worker, unless the test gives them as keyword arguments or has replaced them in
    `app.dependency_overrides`.
    """
    return await run_with(make_context(task), task, *args, **kwargs)


async def run_with(context: TaskContext, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a task with a context that the test made; the test commits the connection of that context, if any."""
    given = {name: value for name, value in kwargs.items() if name in task.dependencies}
    arguments: dict[str, Any] = {name: value for name, value in kwargs.items() if name not in given}
    stored = _through_json(task.encode(*args, **arguments))
    context.input_data = stored
    async with _transaction_for(task, context), resources_of(task.app) as resources:
        output = await _with_timeout(task, context, {**task.decode(stored), **given}, resources)
        encoded = _through_json(task.encode_result(output))
        context.output_data = as_document(encoded)
    result: R = task.decode_result(encoded)
    return result


def make_context(
    task: Task[..., Any],
    *,
    attempt: int = 1,
    tries: int = 1,
    checkpoint: Any = None,
    line: WorkerChannel | None = None,
    connection: Any = None,
) -> TaskContext:
    """Make a context as a worker does, connected to a Recorder by default."""
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


@asynccontextmanager
async def resources_of(app: Interlock) -> AsyncIterator[Resources]:
    """Keep the dependencies of scope "worker" for one block of a test."""
    resources = Resources(app.dependency_overrides)
    try:
        yield resources
    finally:
        await resources.close()


async def call(task: Task[..., Any], context: TaskContext, arguments: dict[str, Any], resources: Resources) -> Any:
    """Call a handler with its dependencies, except those that are among the arguments."""
    missing = {name: each for name, each in task.dependencies.items() if name not in arguments}
    async with resources.injected(missing, context) as injected:
        return await _call(task, context, {**arguments, **injected})


async def _call(task: Task[..., Any], context: TaskContext, arguments: dict[str, Any]) -> Any:
    """Call a handler: a coroutine in this event loop, a function in a thread, a command as a program of its own."""
    if task.command is not None:
        groups = ProcessGroups()
        try:
            return await CommandExecutor(groups).run(task, context, arguments)
        finally:
            await groups.close()
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
async def _transaction_for(task: Task[..., Any], context: TaskContext) -> AsyncIterator[None]:
    """Give a transactional task a connection whose transaction commits at the end of the block."""
    if not task.transactional or context.connection is not None:
        yield
        return
    if not task.app.is_open:
        raise StoreError(
            f"task {task.name} is transactional and needs a connection: open its app first (`async with app:`), "
            "or run it with make_context(task, connection=...)"
        )
    raised: BaseException | None = None
    async with task.app.connection() as connection:
        with suppress(_RollbackError):
            async with transaction(connection):
                context.connection = connection
                try:
                    yield
                except BaseException as error:  # noqa: BLE001 - raised again below
                    raised = error
                    raise _RollbackError from None
                finally:
                    context.connection = None  # it goes back to the pool
    if raised is not None:
        raise raised  # unchanged, also if it is an error of the driver


class _RollbackError(Exception):
    """The handler failed: roll its transaction back."""


async def _with_timeout(
    task: Task[..., Any], context: TaskContext, arguments: dict[str, Any], resources: Resources
) -> Any:
    timeout = task.timeout
    if timeout is None:
        return await call(task, context, arguments, resources)
    if context.deadline is None:
        context.deadline = datetime.now(UTC) + timedelta(seconds=timeout)
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            return await call(task, context, arguments, resources)
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"the handler was still running after {timeout:g} s") from None
        raise  # the handler's own


def _through_json(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value))


class Clock:
    """A clock that moves only when a test advances it: `Interlock(clock=clock)`."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime.now(UTC)
        if self._now.tzinfo is None:
            raise ValueError("a clock needs a time zone, as in datetime(2030, 1, 1, tzinfo=UTC)")

    def __call__(self) -> datetime:
        """Return the current time of the clock."""
        return self._now

    def advance(self, by: timedelta | float) -> datetime:
        """Move the clock forward by a timedelta or by seconds, and return the new time."""
        step = by if isinstance(by, timedelta) else timedelta(seconds=by)
        if step < timedelta(0):
            raise ValueError(f"a clock only moves forward, got {by!r}")
        self._now += step
        return self._now
