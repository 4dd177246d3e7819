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

    __slots__ = ("_numbers", "_open", "statistics")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, StepExecutionEvent] = {}
        self.statistics = HandlerEventStatistics()

    def publish(
        self, attempt: TaskStateMachine, definition: Task[..., Any], arguments: dict[str, Any]
    ) -> StepExecutionEvent:
        """Open an execution and return its event, with a new correlation id."""
        event = StepExecutionEvent(next(self._numbers), attempt, definition, arguments)
        self._open[event.correlation_id] = event
        self.statistics.dispatched += 1
        return event

    def close(self, attempt: TaskStateMachine) -> None:
        """Count the execution of a leaked handler as failed; its completion, if one comes, is a mismatch."""
        for event in list(self._open.values()):
            if event.attempt is attempt:
                del self._open[event.correlation_id]
                self.statistics.failed += 1

    def complete(self, completion: StepExecutionCompletionEvent) -> Any:
        """Close an execution: return the output encoded for JSON, or raise the handler's error."""
        self.statistics.received += 1
        event = self._open.pop(completion.correlation_id, None)
        if event is None:
            self.statistics.mismatched += 1
            log.warning("correlation_mismatch", correlation_id=completion.correlation_id)
            return None
        if completion.error is not None:
            self.statistics.failed += 1
            raise completion.error
        try:
            stored = event.definition.encode_result(completion.output)
        except Exception:
            self.statistics.failed += 1
            raise
        self.statistics.completed += 1
        return stored
