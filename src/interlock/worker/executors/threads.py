"""Executor for blocking handlers: daemon threads.

Invariant: a thread cannot be killed, so a thread whose task was cancelled is abandoned: it holds no slot, its result is
dropped, it ends when its handler returns, and it does not keep the process alive. If that takes long, its handler is
reported as leaked.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.worker.executors.base import (
    EngineError,
    HandlerError,
    add_context,
    call_handler,
    mark_cancelled,
    refuse_transactional,
)
from interlock.worker.leaks import LEAK_GRACE_S, thread_position

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.client.context import TaskContext
    from interlock.worker.executors.base import Runnable
    from interlock.worker.leaks import LeakedHandlers


class ThreadExecutor:
    """At most `size` handlers at a time, each in a daemon thread; threads are started on demand and reused."""

    def __init__(self, size: int, leaks: LeakedHandlers | None = None, *, leak_grace: float = LEAK_GRACE_S) -> None:
        if size < 1:
            raise ValueError(f"a thread executor needs at least one thread, got {size}")
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Thread] = []
        self._abandoned: set[_Thread] = set()
        self._started = 0
        self._closed = False
        self._leaks = leaks
        self._leak_grace = leak_grace

    @property
    def abandoned(self) -> int:
        """How many threads still run a handler whose task was cancelled."""
        return len(self._abandoned)

    async def run(self, task: Runnable, context: TaskContext, arguments: dict[str, Any]) -> Any:
        """Run the handler in a thread, with a copy of this task's context variables."""
        refuse_transactional(task)
        async with self._slots:
            if self._closed:
                raise EngineError("the worker is closing: its threads take no more handlers")
            thread = self._idle.pop() if self._idle else self._start()
            future = asyncio.get_running_loop().create_future()
            arguments = add_context(task, context, arguments)
            thread.inbox.put(_Call(future, contextvars.copy_context(), task.function, arguments))
            try:
                return await future
            except asyncio.CancelledError:
                if future.cancelled():
                    self._abandoned.add(thread)
                    mark_cancelled(context)
                    future.get_loop().call_later(self._leak_grace, self._report_leak, thread, context, task.function)
                raise

    def cancel(self, context: TaskContext) -> None:
        """Do nothing: the handler has the same context object."""

    async def close(self) -> None:
        """Let idle threads end at once, and the others when their handlers return."""
        self._closed = True
        while self._idle:
            self._idle.pop().inbox.put(None)

    def _report_leak(self, thread: _Thread, context: TaskContext, function: Callable[..., Any]) -> None:
        if thread in self._abandoned and self._leaks is not None:
            self._leaks.add(thread, context, thread_position(thread.thread, function))

    def _start(self) -> _Thread:
        self._started += 1
        try:
            return _Thread(self._started, self._finish)
        except RuntimeError as error:
            raise EngineError(f"no thread for the handler: {error}") from error

    def _finish(self, thread: _Thread, call: _Call, value: Any, error: BaseException | None) -> None:
        was_cancelled = call.future.cancelled()
        if was_cancelled or self._closed:
            self._abandoned.discard(thread)
            if self._leaks is not None:
                self._leaks.remove(thread)
            thread.inbox.put(None)
        else:
            self._idle.append(thread)
        if was_cancelled:
            return
        if error is None:
            call.future.set_result(value)
        else:
            call.future.set_exception(error)


class _Call(NamedTuple):
    future: asyncio.Future[Any]
    variables: contextvars.Context
    function: Callable[..., Any]
    arguments: dict[str, Any]


class _Thread:
    """One thread that runs the calls in its inbox until it gets None."""

    __slots__ = ("_report", "inbox", "thread")

    def __init__(self, number: int, report: Callable[[_Thread, _Call, Any, BaseException | None], None]) -> None:
        self.inbox: SimpleQueue[_Call | None] = SimpleQueue()
        self._report = report
        self.thread = threading.Thread(target=self._work, name=f"interlock-handler-{number}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (call := self.inbox.get()) is not None:
            loop = call.future.get_loop()
            value, error = None, None
            try:
                value = call.variables.run(call_handler, call.function, call.arguments)
            except BaseException as raised:  # noqa: BLE001 - every exception of a handler is an outcome
                error = _to_future_exception(raised)
            try:
                loop.call_soon_threadsafe(self._report, self, call, value, error)
            except RuntimeError:  # the loop was closed while an abandoned handler ran
                return
            # An idle thread must not keep the arguments, result or traceback of its last task alive.
            del call, loop, value, error


def _to_future_exception(error: BaseException) -> BaseException:
    """Convert what an asyncio future cannot carry: SystemExit would end the worker, StopIteration its coroutine."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return HandlerError.from_exception(error)
