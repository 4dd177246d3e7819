"""The executor protocol, the error of a handler that failed outside the worker's event loop, and that of the engine."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextlib
import inspect
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from interlock.errors import InterlockError, PermanentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from interlock.client.context import TaskContext

MAX_TRACEBACK_LENGTH = 20_000  # characters; the end is kept
# The code between the worker and the user's: this package, and the modules of the standard library through which it
# calls providers, lifespans and handlers in threads.
_CALLING_PACKAGES = tuple(f"{path}{os.sep}" for path in (Path(__file__).parents[2], Path(asyncio.__file__).parent))
_CALLING_FILES = frozenset({contextlib.__file__, concurrent.futures.thread.__file__})


class Runnable(Protocol):
    """The part of a task's definition that an executor needs."""

    @property
    def name(self) -> str:
        """The type of the task."""

    @property
    def function(self) -> Callable[..., Any]:
        """The handler."""

    @property
    def executor(self) -> str:
        """The kind of executor: coroutine, thread, process or command."""

    @property
    def command(self) -> tuple[str, ...] | None:
        """The program and its arguments, when the kind is command."""

    @property
    def context_parameter(self) -> str | None:
        """The parameter that takes the context, if the handler has one."""

    @property
    def transactional(self) -> bool:
        """Whether the handler shares the connection that settles its task."""


class Executor(Protocol):
    """One way to run handlers. Cancelling `run` stops the handler as far as the kind allows."""

    async def run(self, task: Runnable, context: TaskContext, arguments: dict[str, Any]) -> Any:
        """Run the handler to its end; the executor adds the context to the arguments."""

    def cancel(self, context: TaskContext) -> None:
        """Pass a cancel request and its reason to a handler in another process. The handler may ignore it."""

    async def close(self) -> None:
        """Stop all running handlers within bounded time. Safe to call twice, and before the first run."""


def user_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of the user's code on; the whole one if there is none."""
    frames = error.__traceback__
    while frames is not None and _is_calling(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames or error.__traceback__


def _is_calling(file: str) -> bool:
    return file.startswith(_CALLING_PACKAGES) or file in _CALLING_FILES


def format_traceback(error: BaseException) -> list[str]:
    """Format an exception like `traceback.format_exception`, without the frames that called the user's code."""
    return traceback.format_exception(type(error), error, user_frames(error))


class HandlerError(InterlockError):
    """The failure of a handler whose exception object is not available in the worker's event loop.

    Invariant: a failure that crossed a process boundary keeps its type, message, traceback, whether it is retryable and
    its `retry_after`.
    """

    def __init__(
        self,
        error_type: str,
        message: str,
        *,
        trace: str | None = None,
        retryable: bool = True,
        retry_after: float | None = None,
    ) -> None:
        self.error_type = error_type
        self.message = message
        self.trace = trace
        self.retryable = retryable
        self.retry_after = retry_after
        super().__init__(message)

    @classmethod
    def from_exception(cls, error: BaseException) -> HandlerError:
        """Convert any exception that a handler raised."""
        if isinstance(error, cls):
            return error
        return cls(
            type(error).__qualname__,
            str(error),
            trace="".join(format_traceback(error))[-MAX_TRACEBACK_LENGTH:],
            retryable=not isinstance(error, PermanentError),
            retry_after=getattr(error, "retry_after", None),
        )

    @property
    def document(self) -> dict[str, Any]:
        """The error as a task row stores it."""
        return {
            "type": self.error_type,
            "message": self.message,
            "traceback": self.trace,
            "retryable": self.retryable,
        }


class EngineError(InterlockError):
    """The worker could not run a handler: it has no connection, thread or process for it, or is closing.

    That is no failure of the handler: its task is returned to the queue and uses up no try.
    """


def add_context(task: Runnable, context: TaskContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Add the context to the arguments, if the handler has a parameter for it."""
    if task.context_parameter is None:
        return arguments
    return {**arguments, task.context_parameter: context}


def call_handler(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a handler outside the worker's event loop; a coroutine runs in an event loop of its own."""
    value = function(**arguments)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def refuse_transactional(task: Runnable) -> None:
    """Raise if the task is transactional: its connection is usable in the worker's event loop only."""
    if task.transactional:
        raise PermanentError(
            f"task {task.name!r} is transactional and must run as a coroutine, not as a {task.executor}: "
            "the connection belongs to the worker's event loop"
        )


def mark_cancelled(context: TaskContext) -> None:
    """Mark the context as cancelled; a reason that is already set stays."""
    context.cancelled = True
    context.cancel_reason = context.cancel_reason or "stopped by the worker"
