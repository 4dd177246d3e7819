"""Runs blocking handlers in threads of its own.

Invariant: a thread cannot be killed, so one whose task was given up is abandoned: it keeps no slot, its result is
dropped, it ends when its handler does, and it never keeps the process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from interlock.errors import RetryableError
from interlock.worker.executors.base import HandlerError, call, mark_cancelled, refuse_transaction, with_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.client.context import TaskContext
    from interlock.worker.executors.base import Runnable


class _Job(NamedTuple):
    future: asyncio.Future[Any]
    surroundings: contextvars.Context
    function: Callable[..., Any]
    arguments: dict[str, Any]


class _Thread:
    """One thread that does what comes into its inbox until it is told to end."""

    __slots__ = ("_report", "inbox")

    def __init__(self, number: int, report: Callable[[_Thread, _Job, Any, BaseException | None], None]) -> None:
        self.inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._report = report
        threading.Thread(target=self._work, name=f"interlock-handler-{number}", daemon=True).start()

    def _work(self) -> None:
        while (job := self.inbox.get()) is not None:
            loop = job.future.get_loop()
            value, error = None, None
            try:
                value = job.surroundings.run(call, job.function, job.arguments)
            except BaseException as raised:  # noqa: BLE001 - whatever a handler raises is an outcome
                error = _deliverable(raised)
            try:
                loop.call_soon_threadsafe(self._report, self, job, value, error)
            except RuntimeError:  # the loop was closed while an abandoned handler went on
                return
            # an idle thread must not keep the last task's arguments, result or traceback alive
            del job, loop, value, error


def _deliverable(error: BaseException) -> BaseException:
    """Give what an asyncio future can carry: SystemExit would end the worker, StopIteration its coroutine."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return HandlerError.of(error)


class ThreadExecutor:
    """At most `size` handlers at a time, each in a daemon thread; threads are started when needed and kept."""

    gives_json: ClassVar[bool] = False

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a thread executor needs at least one thread, not {size}")
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Thread] = []
        self._abandoned: set[_Thread] = set()
        self._started = 0
        self._closed = False

    @property
    def abandoned(self) -> int:
        """How many threads still run a handler whose task was given up."""
        return len(self._abandoned)

    async def run(self, task: Runnable, context: TaskContext, arguments: dict[str, Any]) -> Any:
        """Run the handler in a thread, with a copy of this task's context variables."""
        refuse_transaction(task)
        async with self._slots:
            if self._closed:
                raise RetryableError("the worker is closing: its threads take no more handlers")
            thread = self._idle.pop() if self._idle else self._start()
            future = asyncio.get_running_loop().create_future()
            arguments = with_context(task, context, arguments)
            thread.inbox.put(_Job(future, contextvars.copy_context(), task.function, arguments))
            try:
                return await future
            except asyncio.CancelledError:
                if future.cancelled():
                    self._abandoned.add(thread)
                    mark_cancelled(context)
                raise

    def cancel(self, context: TaskContext) -> None:
        """Nothing to do: the handler looks at the same context."""

    async def close(self) -> None:
        """Let idle threads end at once, and the others when their handlers return."""
        self._closed = True
        while self._idle:
            self._idle.pop().inbox.put(None)

    def _start(self) -> _Thread:
        self._started += 1
        return _Thread(self._started, self._finish)

    def _finish(self, thread: _Thread, job: _Job, value: Any, error: BaseException | None) -> None:
        given_up = job.future.cancelled()
        if given_up or self._closed:
            self._abandoned.discard(thread)
            thread.inbox.put(None)
        else:
            self._idle.append(thread)
        if given_up:
            return
        if error is None:
            job.future.set_result(value)
        else:
            job.future.set_exception(error)
