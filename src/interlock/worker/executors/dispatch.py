"""The executors of one worker by kind, and the executor for coroutines.

Invariant: an executor is created by the first task that needs it, and all are closed within bounded time. A handler
cannot end the worker, whatever it raises.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from interlock.errors import ConfigError
from interlock.process_groups import ProcessGroups
from interlock.worker.executors.base import EngineError, Executor, HandlerError, Runnable, add_context
from interlock.worker.executors.commands import CommandExecutor
from interlock.worker.executors.json_lines import MAX_LINE_BYTES
from interlock.worker.executors.processes import ProcessExecutor
from interlock.worker.executors.threads import ThreadExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.client.context import TaskContext
    from interlock.worker.leaks import LeakedHandlers


class Executors:
    """All executors of a worker. `grace` is the time in seconds between two steps of stopping a process."""

    def __init__(
        self,
        *,
        threads: int,
        processes: int,
        app_reference: str | None = None,
        database_url: str | None = None,
        grace: float = 1.0,
        max_line_bytes: int = MAX_LINE_BYTES,
        leaks: LeakedHandlers | None = None,
    ) -> None:
        self._groups = ProcessGroups()
        self._executors: dict[str, Executor] = {}
        self._closed = False
        self._factories: dict[str, Callable[[], Executor]] = {
            "coroutine": CoroutineExecutor,
            "thread": lambda: ThreadExecutor(threads, leaks),
            "process": lambda: ProcessExecutor(
                processes,
                self._groups,
                app_reference=app_reference,
                database_url=database_url,
                grace=grace,
                max_line_bytes=max_line_bytes,
            ),
            "command": lambda: CommandExecutor(self._groups, grace=grace, max_line_bytes=max_line_bytes),
        }

    @property
    def abandoned_threads(self) -> int:
        """How many threads still run a handler whose task was cancelled."""
        executor = self._executors.get("thread")
        return executor.abandoned if isinstance(executor, ThreadExecutor) else 0

    def get(self, task: Runnable) -> Executor:
        """Return the executor of the task's kind."""
        executor = self._executors.get(task.executor)
        if executor is not None:
            return executor
        factory = self._factories.get(task.executor)
        if factory is None:
            known = ", ".join(self._factories)
            raise ConfigError(f"task {task.name!r}: unknown executor {task.executor!r}; use one of {known}")
        if self._closed:
            raise EngineError(f"task {task.name!r}: the worker is closing and starts no {task.executor} executor")
        executor = self._executors[task.executor] = factory()
        return executor

    async def close(self) -> None:
        """Stop all running handlers within a few multiples of the grace. Safe to call twice, and before any task."""
        self._closed = True
        try:
            await asyncio.gather(*(executor.close() for executor in self._executors.values()))
        finally:
            await self._groups.close()  # kills the groups that did not stop in time


class CoroutineExecutor:
    """Awaits the handler in the worker's own event loop."""

    async def run(self, task: Runnable, context: TaskContext, arguments: dict[str, Any]) -> Any:
        """Await the handler."""
        try:
            return await task.function(**add_context(task, context, arguments))
        except BaseException as error:
            failure = contain_error(error)
            if failure is error:
                raise
            raise failure from error

    def cancel(self, context: TaskContext) -> None:
        """Do nothing: the handler has the same context object."""

    async def close(self) -> None:
        """Do nothing: there are no resources."""


def contain_error(error: BaseException) -> BaseException:
    """Convert an exception that would end the worker, or be taken for the attempt's cancellation, to HandlerError."""
    if isinstance(error, asyncio.CancelledError):
        current = asyncio.current_task()
        # Without a cancel request on this task, a future that the handler awaited was cancelled: that is a failure.
        return error if current is None or current.cancelling() else HandlerError.from_exception(error)
    return error if isinstance(error, Exception) else HandlerError.from_exception(error)
