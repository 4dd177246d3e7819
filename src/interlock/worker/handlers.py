"""The words between a worker and the ways to run a handler: what can be run, what runs it, and how it fails.

Invariant: a failure that crossed a process boundary says as much as one that did not: its type, message and traceback,
whether trying again is of use, and after how long.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from interlock.errors import InterlockError, PermanentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from interlock.client.context import TaskContext

TRACEBACK_LENGTH = 20_000


class Runnable(Protocol):
    """What an executor has to know of a task's definition."""

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

    # Whether what `run` gives was made ready for JSON where the handler ran, and must not be encoded again.
    gives_json: ClassVar[bool]

    async def run(self, task: Runnable, context: TaskContext, arguments: dict[str, Any]) -> Any:
        """Run the handler to its end; the context is added to the arguments here."""

    def cancel(self, context: TaskContext) -> None:
        """Tell a handler elsewhere what its context says: that it is cancelled, and why. It may go on for all that."""

    async def close(self) -> None:
        """Stop everything that still runs, in bounded time; safe twice, and before anything ran."""


class HandlerError(InterlockError):
    """A handler failed where its exception could not be handed over as it was: this is what is known of it."""

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
    def of(cls, error: BaseException) -> HandlerError:
        """Tell what is known of any exception that a handler raised."""
        if isinstance(error, cls):
            return error
        return cls(
            type(error).__qualname__,
            str(error),
            trace="".join(traceback.format_exception(error))[-TRACEBACK_LENGTH:],
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


def with_context(task: Runnable, context: TaskContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Add the context to the arguments of a handler that takes it."""
    if task.context_parameter is None:
        return dict(arguments)
    return {**arguments, task.context_parameter: context}


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a handler outside the worker's event loop; a coroutine gets a loop of its own."""
    value = function(**arguments)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def refuse_transaction(task: Runnable) -> None:
    """Refuse to run a transactional task where it cannot have the connection."""
    if task.transactional:
        raise PermanentError(
            f"task {task.name!r} is transactional and must run as a coroutine, not as a {task.executor}: "
            "the connection belongs to the worker's event loop"
        )


def mark_cancelled(context: TaskContext) -> None:
    """Say in the context that the handler is to stop, unless somebody said so, with a reason of their own."""
    context.cancelled = True
    context.cancel_reason = context.cancel_reason or "stopped by the worker"
