"""Logs and metrics of the lifecycles: a move is observed once, and both are made from it here.

Invariant: label values are bounded (states, events, task types, worker ids), and each series is resolved once, not
on every move.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Literal, Protocol, TextIO

import orjson
import structlog
from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import FilteringBoundLogger, Processor

worker_state = Gauge("worker_state", "Current worker state", ["worker_id", "state"])
worker_state_transitions_total = Counter(
    "worker_state_transitions_total",
    "Worker state transitions",
    ["worker_id", "from_state", "to_state", "event"],
)
task_state_transitions_total = Counter(
    "task_state_transitions_total",
    "Task state transitions",
    ["task_type", "from_state", "to_state", "event"],
)
task_state_duration_seconds = Histogram(
    "task_state_duration_seconds",
    "Time spent in each task state",
    ["task_type", "state"],
)

log: FilteringBoundLogger = structlog.get_logger("interlock")


def configure_logging(
    level: str = "info", form: Literal["console", "json"] = "console", stream: TextIO | None = None
) -> None:
    """Send structured logs to a stream (standard error unless told otherwise), for people or for machines."""
    out = stream or sys.stderr
    renderer: Processor
    if form == "json":
        renderer = structlog.processors.JSONRenderer(lambda record, **_: orjson.dumps(record, default=str).decode())
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=0, event_key="message")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            # A lifecycle's event is logged under `event`; structlog's own use of that name moves to `message`.
            structlog.processors.EventRenamer("message", "_event"),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=True,
    )


class MoveSeen(Protocol):
    """What telemetry needs to know of a move."""

    @property
    def from_state(self) -> str:
        """The state that was left."""

    @property
    def to_state(self) -> str:
        """The state that was entered."""

    @property
    def event(self) -> str:
        """What caused the move."""

    @property
    def reason(self) -> str | None:
        """Why, in words."""

    @property
    def lasted(self) -> float:
        """Seconds spent in the state that was left."""


class RefusalSeen(Protocol):
    """What telemetry needs to know of a refused move."""

    machine: str
    state: str
    event: str


class _Telemetry:
    """What the observers of all machines share: a refusal is logged under one name."""

    __slots__ = ()

    def refused(self, error: RefusalSeen, reason: str | None) -> None:
        """Log a move that was refused."""
        log.warning(
            "invalid_transition_attempted",
            machine=error.machine,
            current_state=error.state,
            _event=error.event,
            reason=reason or str(error),
        )


class WorkerTelemetry(_Telemetry):
    """Observes one worker process."""

    __slots__ = ("_count", "_shown", "_worker_id")

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._count: dict[tuple[str, str, str], Callable[[], None]] = {}
        self._shown: dict[str, Callable[[float], None]] = {}

    def moved(self, move: MoveSeen) -> None:
        """Count the move, show the new state and log it."""
        before, after, event = move.from_state, move.to_state, move.event
        count = self._count.get((before, after, event))
        if count is None:
            count = worker_state_transitions_total.labels(self._worker_id, before, after, event).inc
            self._count[before, after, event] = count
        count()
        self._show(before, 0)
        self._show(after, 1)
        log.info(
            "worker_state_transition",
            worker_id=self._worker_id,
            from_state=before,
            to_state=after,
            _event=event,
            reason=move.reason,
        )

    def _show(self, state: str, value: float) -> None:
        show = self._shown.get(state)
        if show is None:
            show = self._shown[state] = worker_state.labels(self._worker_id, state).set
        show(value)


class TaskTypeSeries:
    """The metric series of one task type, resolved once and shared by all its attempts."""

    __slots__ = ("_series", "task_type")

    def __init__(self, task_type: str) -> None:
        self.task_type = task_type
        self._series: dict[tuple[str, str, str], tuple[Callable[[], None], Callable[[float], None]]] = {}

    def record(self, move: MoveSeen) -> None:
        """Count the move and the time spent in the state that it leaves."""
        key = (move.from_state, move.to_state, move.event)
        series = self._series.get(key)
        if series is None:
            series = (
                task_state_transitions_total.labels(self.task_type, *key).inc,
                task_state_duration_seconds.labels(self.task_type, move.from_state).observe,
            )
            self._series[key] = series
        count, observe = series
        count()
        observe(max(move.lasted, 0.0))  # a clock that was set back must not count backwards


class TaskTelemetry(_Telemetry):
    """Observes one attempt at a task."""

    __slots__ = ("_series", "_task_id")

    def __init__(self, task_id: str, series: TaskTypeSeries) -> None:
        self._task_id = task_id
        self._series = series

    def moved(self, move: MoveSeen) -> None:
        """Count the move, time the state that it leaves, and log it."""
        self._series.record(move)
        log.info(
            "task_state_transition",
            task_id=self._task_id,
            task_type=self._series.task_type,
            from_state=move.from_state,
            to_state=move.to_state,
            _event=move.event,
            reason=move.reason,
        )
