"""TODO docstring."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from interlock.errors import ConfigError, RetryableError
from interlock.worker.executors.base import Executor, HandlerError, Runnable
from interlock.worker.executors.commands import CommandExecutor
from interlock.worker.executors.json_lines import LONGEST_LINE
from interlock.worker.executors.process_groups import ProcessGroups
from interlock.worker.executors.processes import ProcessExecutor
from interlock.worker.executors.threads import ThreadExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.client.context import TaskContext


def contained(error: BaseException) -> BaseException:
    """Make a failure of what would otherwise end the worker with its handler, or pass for its cancellation."""
    if isinstance(error, asyncio.CancelledError):
        current = asyncio.current_task()
        # If nobody cancelled this task, something that the handler awaited was cancelled, which is a failure.
        return error if current is None or current.cancelling() else HandlerError.of(error)
    return error if isinstance(error, Exception) else HandlerError.of(error)


class CoroutineExecutor:
    """Awaits the handler in the worker's own event loop."""

    gives_json: ClassVar[bool] = False

    async def run(self, task: Runnable, context: TaskContext, arguments: dict[str, Any]) -> Any:
        """Await the handler."""
        if task.context_parameter is not None:
            arguments = {**arguments, task.context_parameter: context}
        try:
            return await task.function(**arguments)
        except BaseException as error:
            failure = contained(error)
            if failure is error:
                raise
            raise failure from error

    def cancel(self, context: TaskContext) -> None:
        """Nothing to do: the handler looks at the same context."""

    async def close(self) -> None:
        """Nothing to do: there is nothing of its own."""


class Executors:
    """All executors of a worker. `grace` is the time in seconds between one way to stop a process and the next."""

    def __init__(
        self,
        *,
        threads: int,
        processes: int,
        app_reference: str | None = None,
        grace: float = 1.0,
        longest_line: int = LONGEST_LINE,
    ) -> None:
        self._groups = ProcessGroups()
        self._made: dict[str, Executor] = {}
        self._threads: ThreadExecutor | None = None
        self._closed = False

        def make_threads() -> Executor:
            self._threads = ThreadExecutor(threads)
            return self._threads

        def make_processes() -> Executor:
            return ProcessExecutor(
                processes, self._groups, app_reference=app_reference, grace=grace, longest_line=longest_line
            )

        def make_commands() -> Executor:
            return CommandExecutor(self._groups, grace=grace, longest_line=longest_line)

        self._make: dict[str, Callable[[], Executor]] = {
            "coroutine": CoroutineExecutor,
            "thread": make_threads,
            "process": make_processes,
            "command": make_commands,
        }

    @property
    def abandoned_threads(self) -> int:
        """How many threads still run a handler whose task was given up."""
        return 0 if self._threads is None else self._threads.abandoned

    def of(self, task: Runnable) -> Executor:
        """Give the executor of the task's kind."""
        executor = self._made.get(task.executor)
        return self._first(task) if executor is None else executor

    async def close(self) -> None:
        """Stop everything that still runs, at most some multiples of the grace; safe twice and before any task."""
        self._closed = True
        try:
            await asyncio.gather(*(executor.close() for executor in self._made.values()))
        finally:
            await self._groups.close()  # and with it whatever there was no time to stop

    def _first(self, task: Runnable) -> Executor:
        make = self._make.get(task.executor)
        if make is None:
            known = ", ".join(self._make)
            raise ConfigError(f"task {task.name!r} names the executor {task.executor!r}; there are {known}")
        if self._closed:
            raise RetryableError(f"the worker is closing: it makes no {task.executor} executor for task {task.name!r}")
        executor = self._made[task.executor] = make()
        return executor
