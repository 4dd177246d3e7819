"""Logs and metrics: a transition is observed once, and both are made from it here.

Invariant: label values are bounded (states, events, task types, worker ids), and each metric child is resolved once,
not on every transition.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections import defaultdict
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

import orjson
import structlog
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric
    from structlog.typing import FilteringBoundLogger, Processor

worker_state = Gauge("worker_state", "Current worker state", ["worker_id", "state"])
worker_state_transitions_total = Counter(
    "worker_state_transitions_total",
    "Worker state transitions",
    ["worker_id", "from_state", "to_state", "event"],
)
claim_batch_size = Histogram("claim_batch_size", "Tasks claimed by one statement", buckets=(0, 1, 5, 20, 50, 100, 200))
settle_batch_size = Histogram(
    "settle_batch_size", "Outcomes written by one statement", buckets=(1, 5, 20, 50, 100, 200)
)
leases_lost_total = Counter("leases_lost_total", "Attempts that lost their task while they ran or when they reported")
shutdown_duration_seconds = Histogram(
    "worker_shutdown_duration_seconds",
    "Time from the request to shut a worker down to its end",
    buckets=(0.1, 0.5, 1, 2, 5, 10, 20, 25, 30),
)
shutdown_tasks_total = Counter(
    "worker_shutdown_tasks_total", "Tasks that a worker held when its shutdown was requested, by their end", ["outcome"]
)
for _outcome in ("finished", "returned", "abandoned"):
    shutdown_tasks_total.labels(_outcome)
handlers_leaked_total = Counter(
    "handlers_leaked_total", "Handlers that ran on although their attempt was settled", ["task_type"]
)
queue_depth = Gauge("queue_depth", "Tasks that have not ended", ["namespace", "state"])
oldest_pending_age_seconds = Gauge("oldest_pending_age_seconds", "Age of the oldest due task", ["namespace"])

DURATION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# Whether a level is enabled; asking the logger costs too much per task. Until logging is configured, the library logs
# warnings and errors only.
_levels = {"debug": False, "info": False}


class _Log:
    """The log of the engine: warnings and errors only until logging is configured."""

    __slots__ = ("_logger",)

    def __init__(self) -> None:
        self._logger: FilteringBoundLogger = structlog.get_logger("interlock")

    def debug(self, event: str, **fields: Any) -> None:
        if _levels["debug"]:
            self._logger.debug(event, **fields)

    def info(self, event: str, **fields: Any) -> None:
        if _levels["info"]:
            self._logger.info(event, **fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._logger.warning(event, **fields)

    def error(self, event: str, **fields: Any) -> None:
        self._logger.error(event, **fields)

    def bind(self, **fields: Any) -> FilteringBoundLogger:
        return self._logger.bind(**fields)


log = _Log()


def configure_logging(
    level: str = "info", form: Literal["console", "json"] = "console", stream: TextIO | None = None
) -> None:
    """Send structured logs to a stream (standard error by default), as console lines or as JSON."""
    out = stream or sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    _levels.update(debug=number <= logging.DEBUG, info=number <= logging.INFO)
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
            # The event of a transition is logged under `event`; structlog's own field of that name becomes `message`.
            structlog.processors.EventRenamer("message", "_event"),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=True,
    )


class MoveSeen(Protocol):
    """The attributes of a transition that telemetry reads."""

    @property
    def from_state(self) -> str:
        """The state that was left."""

    @property
    def to_state(self) -> str:
        """The state that was entered."""

    @property
    def event(self) -> str:
        """The event that caused the transition."""

    @property
    def reason(self) -> str | None:
        """The reason as text."""

    @property
    def lasted(self) -> float:
        """Seconds spent in the state that was left."""


class RefusalSeen(Protocol):
    """The attributes of a refused transition that telemetry reads."""

    machine: str
    state: str
    event: str


class _Telemetry:
    """Base of the observers: logs every refused transition under one event name."""

    __slots__ = ()

    def refused(self, error: RefusalSeen, reason: str | None) -> None:
        """Log a refused transition."""
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
        """Count the transition, set the state gauge and log it."""
        before, after, event = move.from_state, move.to_state, move.event
        count = self._count.get((before, after, event))
        if count is None:
            count = worker_state_transitions_total.labels(self._worker_id, before, after, event).inc
            self._count[before, after, event] = count
        count()
        self._show(before, 0)
        self._show(after, 1)
        failed = event == "connection_failed"
        if not failed and not _levels["info"]:
            return
        (log.warning if failed else log.info)(
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


class _Cell:
    """Counters of one transition of one task type, and a histogram of the time in the state before it."""

    __slots__ = ("buckets", "count", "seconds", "to_state")

    def __init__(self, to_state: str = "") -> None:
        self.to_state = to_state
        self.count = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(DURATION_BUCKETS) + 1)


class TaskTypeSeries:
    """The metrics of one task type, shared by all its attempts.

    They are plain numbers that become metrics on a scrape: at a hundred thousand transitions a second the locks of the
    metric library cost too much.
    """

    __slots__ = ("cells", "task_type")

    def __init__(self, task_type: str) -> None:
        self.task_type = task_type
        self.cells: dict[tuple[str, str], _Cell] = {}
        _every_series.append(self)

    def record(self, move: MoveSeen) -> None:
        """Count the transition and the time spent in the state that it leaves."""
        key, lasted = (move.from_state, move.event), move.lasted
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = _Cell(move.to_state)
        cell.count += 1
        if lasted > 0.0:  # the wall clock may have been set back
            cell.seconds += lasted
        cell.buckets[bisect_left(DURATION_BUCKETS, lasted)] += 1


_every_series: list[TaskTypeSeries] = []


@cache
def series_of(task_type: str) -> TaskTypeSeries:
    """Return the one series of a task type."""
    return TaskTypeSeries(task_type)


class _TaskMetrics(Collector):
    """Exports all series as task_state_transitions_total and task_state_duration_seconds."""

    def describe(self) -> list[Metric]:
        return [self._counter(), self._histogram()]

    def collect(self) -> Iterator[Metric]:
        counter, histogram = self._counter(), self._histogram()
        moves: defaultdict[tuple[str, ...], int] = defaultdict(int)
        times: defaultdict[tuple[str, str], _Cell] = defaultdict(_Cell)
        for series in _every_series:
            for (before, event), cell in list(series.cells.items()):
                moves[series.task_type, before, cell.to_state, event] += cell.count
                total = times[series.task_type, before]
                total.seconds += cell.seconds
                total.buckets = [mine + more for mine, more in zip(total.buckets, cell.buckets, strict=True)]
        for labels, count in moves.items():
            counter.add_metric([str(label) for label in labels], count)
        for labels, cell in times.items():
            bounds = [*map(str, DURATION_BUCKETS), "+Inf"]
            histogram.add_metric(
                [str(label) for label in labels],
                list(zip(bounds, accumulate(cell.buckets), strict=True)),
                cell.seconds,
            )
        yield counter
        yield histogram

    @staticmethod
    def _counter() -> CounterMetricFamily:
        labels = ["task_type", "from_state", "to_state", "event"]
        return CounterMetricFamily("task_state_transitions_total", "Task state transitions", labels=labels)

    @staticmethod
    def _histogram() -> HistogramMetricFamily:
        labels = ["task_type", "state"]
        return HistogramMetricFamily("task_state_duration_seconds", "Time spent in each task state", labels=labels)


REGISTRY.register(_TaskMetrics())


class TaskTelemetry(_Telemetry):
    """Observes one attempt at a task."""

    __slots__ = ("_series", "_task_id")

    def __init__(self, task_id: object, series: TaskTypeSeries) -> None:
        self._task_id = task_id
        self._series = series

    def moved(self, move: MoveSeen) -> None:
        """Count the transition, record the time in the state that it leaves, and log it."""
        self._series.record(move)
        if not _levels["info"]:
            return
        log.info(
            "task_state_transition",
            task_id=str(self._task_id),
            task_type=self._series.task_type,
            from_state=move.from_state,
            to_state=move.to_state,
            _event=move.event,
            reason=move.reason,
        )
