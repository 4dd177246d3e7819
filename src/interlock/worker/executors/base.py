"""The ways to run a handler: as a coroutine, in a thread, in a process, or as a program of any language.

Invariant: an executor is made when the first task needs it, and closed with all the others in bounded time. A handler
cannot end the worker, whatever it raises.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from interlock.errors import InterlockError, PermanentError
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from interlock.client.context import TaskContext
    from interlock.client.task import Task
    from interlock.worker.attempt import TaskStateMachine


# SECTION worker/handlers
# The words between a worker and the ways to run a handler: what can be run, what runs it, and how it fails.
#
# Invariant: a failure that crossed a process boundary says as much as one that did not: its type, message and
# traceback,
# whether trying again is of use, and after how long.

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


# SECTION worker/events
# The event system between the worker and its handlers: executions go out, completions come back, matched by id.
#
# Invariant: a completion counts only if it answers an execution that is still open; any other is a mismatch, counted
# and dropped, so that a late answer can never become somebody else's outcome.


class ExecutionEvent(NamedTuple):
    """A handler is wanted: which attempt, which task, with which arguments."""

    correlation_id: int
    attempt: TaskStateMachine
    definition: Task[..., Any]
    arguments: dict[str, Any]


class CompletionEvent(NamedTuple):
    """A handler is done: its output, or what it raised."""

    correlation_id: int
    output: Any = None
    error: BaseException | None = None


@dataclass(slots=True)
class EventStatistics:
    """What went through the event system since the worker started."""

    dispatched: int = 0
    received: int = 0  # answers, whether they fitted or not
    completed: int = 0
    failed: int = 0
    mismatched: int = 0


class HandlerEvents:
    """Publisher of executions and subscriber of completions."""

    __slots__ = ("_numbers", "_observers", "_open", "statistics")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Task[..., Any]] = {}
        self._observers: list[Callable[[ExecutionEvent | CompletionEvent], None]] = []
        self.statistics = EventStatistics()

    def observe(self, observer: Callable[[ExecutionEvent | CompletionEvent], None]) -> None:
        """Let somebody see all events. Observers see; they do not decide."""
        self._observers.append(observer)

    def publish(self, attempt: TaskStateMachine, definition: Task[..., Any], arguments: dict[str, Any]) -> int:
        """Open an execution under a correlation id of its own."""
        number = next(self._numbers)
        self._open[number] = definition
        self.statistics.dispatched += 1
        if self._observers:
            self._show(ExecutionEvent(number, attempt, definition, arguments))
        return number

    def complete(self, correlation_id: int, output: Any = None, error: BaseException | None = None) -> Any:
        """Close an execution: give its output as JSON can hold it, or raise what the handler raised."""
        self.statistics.received += 1
        definition = self._open.pop(correlation_id, None)
        if definition is None:
            self.statistics.mismatched += 1
            log.warning("correlation_mismatch", correlation_id=correlation_id)
            return None
        if self._observers:
            self._show(CompletionEvent(correlation_id, output, error))
        if error is not None:
            self.statistics.failed += 1
            raise error
        try:
            stored = definition.encode_result(output)
        except Exception:
            self.statistics.failed += 1
            raise
        self.statistics.completed += 1
        return stored

    def _show(self, event: ExecutionEvent | CompletionEvent) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception as error:  # noqa: BLE001 - an observer must not decide
                log.error("observer_failed", error=repr(error))
