"""The event system between the worker and its handlers: executions go out, completions come back, matched by id.

Invariant: a completion counts only if it answers an execution that is still open; any other is a mismatch, counted
and dropped, so that a late answer can never become somebody else's outcome.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.client.task import Task
    from interlock.worker.attempt import TaskStateMachine


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
