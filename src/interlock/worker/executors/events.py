"""Event bus between the worker and its handlers: executions go out, completions come back, matched by correlation id.

Invariant: a completion counts only if its execution is still open. Any other is counted as a mismatch and dropped, so a
late completion cannot become the outcome of another attempt.
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


class StepExecutionEvent(NamedTuple):
    """Request to run a handler: which attempt, which task, with which arguments."""

    correlation_id: int
    attempt: TaskStateMachine
    definition: Task[..., Any]
    arguments: dict[str, Any]


class StepExecutionCompletionEvent(NamedTuple):
    """End of a handler: its output, or the exception that it raised."""

    correlation_id: int
    output: Any = None
    error: BaseException | None = None


HandlerEvent = StepExecutionEvent | StepExecutionCompletionEvent


@dataclass(slots=True)
class HandlerEventStatistics:
    """Counts of events since the worker started."""

    dispatched: int = 0
    received: int = 0  # completions, mismatches included
    completed: int = 0
    failed: int = 0
    mismatched: int = 0


class HandlerEvents:
    """Publishes executions and matches completions to them."""

    __slots__ = ("_numbers", "_observers", "_open", "statistics")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Task[..., Any]] = {}
        self._observers: list[Callable[[HandlerEvent], None]] = []
        self.statistics = HandlerEventStatistics()

    def observe(self, observer: Callable[[HandlerEvent], None]) -> None:
        """Call a function with every event. An observer cannot change the outcome: its errors are logged."""
        self._observers.append(observer)

    def publish(self, attempt: TaskStateMachine, definition: Task[..., Any], arguments: dict[str, Any]) -> int:
        """Open an execution and return its correlation id."""
        number = next(self._numbers)
        self._open[number] = definition
        self.statistics.dispatched += 1
        if self._observers:
            self._notify(StepExecutionEvent(number, attempt, definition, arguments))
        return number

    def complete(self, correlation_id: int, output: Any = None, error: BaseException | None = None) -> Any:
        """Close an execution: return the output encoded for JSON, or raise the handler's error."""
        self.statistics.received += 1
        definition = self._open.pop(correlation_id, None)
        if definition is None:
            self.statistics.mismatched += 1
            log.warning("correlation_mismatch", correlation_id=correlation_id)
            return None
        if self._observers:
            self._notify(StepExecutionCompletionEvent(correlation_id, output, error))
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

    def _notify(self, event: HandlerEvent) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception as error:  # noqa: BLE001 - an observer must not change the outcome
                log.error("observer_failed", error=repr(error))
