"""Logs and metrics: a transition is observed once, and both are made from it here.

Invariant: label values are bounded (states, events, task types, worker ids), and each metric child is resolved once,
not on every transition.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections import Counter as Counts
from collections import defaultdict
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

import orjson
from prometheus_client import REGISTRY as DEFAULT_REGISTRY
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from interlock.log_context import TASK_ID_FIELDS, add_filter_to_root_handlers, add_task_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client import Metric
    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

# A registry of our own: an application may have metrics of the same names in the default registry.
metrics_registry = CollectorRegistry()

worker_state = Gauge(
    "worker_state",
    "Current worker state: 1 for it, 0 for those before",
    ["worker_id", "state"],
    registry=metrics_registry,
)
worker_state_transitions_total = Counter(
    "worker_state_transitions_total",
    "Worker state transitions",
    ["worker_id", "from_state", "to_state", "event"],
    registry=metrics_registry,
)
claim_batch_size = Histogram(
    "claim_batch_size",
    "Tasks claimed by one statement",
    buckets=(0, 1, 5, 20, 50, 100, 200),
    registry=metrics_registry,
)
settle_batch_size = Histogram(
    "settle_batch_size",
    "Outcomes written by one statement",
    buckets=(1, 5, 20, 50, 100, 200),
    registry=metrics_registry,
)
leases_lost_total = Counter(
    "leases_lost_total",
    "Attempts that lost their task while they ran or when they reported",
    registry=metrics_registry,
)
queue_depth = Gauge(
    "queue_depth",
    "Tasks that have not ended; more than 10,000 in a large table are an estimate",
    ["namespace", "state"],
    registry=metrics_registry,
)
oldest_pending_age_seconds = Gauge(
    "oldest_pending_age_seconds", "Age of the oldest due task", ["namespace"], registry=metrics_registry
)
retention_overdue_seconds = Gauge(
    "retention_overdue_seconds",
    "On the leader: how long the rows that retention deletes are past their age; 0 when it keeps up",
    registry=metrics_registry,
)
retention_deleted_total = Counter(
    "retention_deleted_total",
    "Ended tasks and jobs that retention deleted; a job counts without its steps",
    ["table"],
    registry=metrics_registry,
)
shutdown_duration_seconds = Histogram(
    "worker_shutdown_duration_seconds",
    "Time from the request to shut a worker down to its end",
    buckets=(0.1, 0.5, 1, 2, 5, 10, 20, 25, 30),
    registry=metrics_registry,
)
shutdown_tasks_total = Counter(
    "worker_shutdown_tasks_total",
    "Tasks that a worker held when its shutdown was requested: finished, returned, or abandoned to their leases",
    ["outcome"],
    registry=metrics_registry,
)
for _outcome in ("finished", "returned", "abandoned"):
    shutdown_tasks_total.labels(_outcome)
handlers_leaked_total = Counter(
    "handlers_leaked_total",
    "Handlers that ran on although their attempt was settled (leaked handlers)",
    ["task_type"],
    registry=metrics_registry,
)

DURATION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# of every record of `logging`, or of our own: what else a record has was given as `extra`
_RECORD_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "event", "level", "logger"}
STANDARD_LEVELS = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)

# Whether a level is enabled; asking the logger costs too much per task. Until logging is configured, the library logs
# warnings and errors only.
_levels = {"debug": False, "info": False}
_standard: dict[str, Any] = {}  # the logger and the level for records of `logging`, set by `configure_logging`


class _Log:
    """The log of the engine: warnings and errors only until logging is configured."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: FilteringBoundLogger | None = None

    @property
    def _logger(self) -> FilteringBoundLogger:
        if self._found is None:
            import structlog  # noqa: PLC0415 - slow to import, and a program that only enqueues logs nothing

            self._found = structlog.get_logger("interlock")
        return self._found

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
    import structlog  # noqa: PLC0415 - as above

    out = stream or sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    _levels.update(debug=number <= logging.DEBUG, info=number <= logging.INFO)
    options: dict[str, Any] = {
        "processors": _processors(form, out),
        "wrapper_class": structlog.make_filtering_bound_logger(number),
        "cache_logger_on_first_use": True,
    }
    structlog.configure(**options, logger_factory=structlog.WriteLoggerFactory(out))
    # independent of `structlog.configure`, which the app may call again, perhaps to write to `logging`
    _standard["logger"] = structlog.wrap_logger(structlog.WriteLogger(out), **options)
    _standard["level"] = number


def forward_standard_logging() -> None:
    """In a process of our own, after the app was imported: write the records of `logging` to our log, with task ids.

    An app that has configured the root logger keeps its handlers, which get the ids as fields of the records.
    """
    root = logging.getLogger()
    if not root.handlers and "logger" in _standard:
        root.addHandler(_StandardHandler(_standard["logger"]))
        root.setLevel(_standard["level"])
    add_filter_to_root_handlers()


class _StandardHandler(logging.Handler):
    """Writes the records of the standard library's loggers as records of our log."""

    def __init__(self, logger: FilteringBoundLogger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        # a level between two of these counts as the lower one
        level = next((level for level in STANDARD_LEVELS if record.levelno >= level), logging.DEBUG)
        try:
            extra = {name: value for name, value in vars(record).items() if name not in _RECORD_FIELDS}
            ids = {name: value for name, value in extra.items() if name not in TASK_ID_FIELDS or value is not None}
            self._logger.log(level, record.getMessage(), logger=record.name, exc_info=record.exc_info or None, **ids)
        except Exception:  # noqa: BLE001 - as every handler of `logging` does
            self.handleError(record)


def _processors(form: Literal["console", "json"], out: TextIO) -> list[Processor]:
    import structlog  # noqa: PLC0415 - as above

    renderer: Processor
    if form == "json":
        renderer = structlog.processors.JSONRenderer(lambda record, **_: orjson.dumps(record, default=str).decode())
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=out.isatty(),
            pad_event_to=0,
            event_key="message",
            exception_formatter=structlog.dev.plain_traceback,
        )
    return [
        structlog.contextvars.merge_contextvars,
        add_task_ids,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _rename_traceback,
        # The event of a transition is logged under `event`; structlog's own field of that name becomes `message`.
        structlog.processors.EventRenamer("message", "_event"),
        renderer,
    ]


def _rename_traceback(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Put the text of a traceback where the renderers expect it."""
    if (trace := event.pop("traceback", None)) is not None:
        event["exception"] = trace.rstrip("\n") if isinstance(trace, str) else trace
    return event


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


_worker_moves: Counts[tuple[str, str, str]] = Counts()  # of all workers of this process


def worker_moves() -> Counts[tuple[str, str, str]]:
    """Count the transitions of the worker processes in this process, by state, event and next state."""
    return Counts({(str(a), str(b), str(c)): count for (a, b, c), count in list(_worker_moves.items())})


def attempt_moves() -> Counts[tuple[str, str, str]]:
    """Count the transitions of all attempts in this process, by state, event and next state."""
    found: Counts[tuple[str, str, str]] = Counts()
    for series in _every_series:
        for (before, event), cell in list(series.cells.items()):
            found[str(before), str(event), str(cell.to_state)] += cell.count
    return found


# The events of a worker that finds no task, over and over: several times a second.
IDLE_CYCLE = frozenset({"no_tasks_available", "backoff_complete", "recovery_complete"})


class WorkerTelemetry(_Telemetry):
    """Observes one worker process."""

    __slots__ = ("_count", "_idle_events", "_shown", "_worker_id")

    def __init__(self, worker_id: str) -> None:
        self._idle_events: set[str] = set()  # logged at info since the last other event
        self._worker_id = worker_id
        self._count: dict[tuple[str, str, str], Callable[[], None]] = {}
        self._shown: dict[str, Callable[[float], None]] = {}

    def moved(self, move: MoveSeen) -> None:
        """Count the transition, set the state gauge and log it."""
        before, after, event = move.from_state, move.to_state, move.event
        _worker_moves[before, event, after] += 1
        count = self._count.get((before, after, event))
        if count is None:
            count = worker_state_transitions_total.labels(self._worker_id, before, after, event).inc
            self._count[before, after, event] = count
        count()
        self._show(before, 0)
        self._show(after, 1)
        write = self._log_method(event)
        if write is not None:
            self._log(write, move)

    def _log_method(self, event: str) -> Callable[..., None] | None:
        """Choose the level: a failure is a warning; a repeated event of the idle cycle, which says nothing new, debug.

        Any other event begins anew: after a task ran, the next idle cycle is logged at info again.
        """
        if event == "connection_failed":
            return log.warning
        if event not in IDLE_CYCLE:
            self._idle_events.clear()
        elif event in self._idle_events:
            return log.debug if _levels["debug"] else None
        else:
            self._idle_events.add(event)
        return log.info if _levels["info"] else None

    def _log(self, write: Callable[..., None], move: MoveSeen) -> None:
        write(
            "worker_state_transition",
            worker_id=self._worker_id,
            from_state=move.from_state,
            to_state=move.to_state,
            _event=move.event,
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
        return HistogramMetricFamily(
            "task_state_duration_seconds",
            "Time spent in each task state: pending since the task was due, claiming for the claim, processing for "
            "the handler, reporting until the outcome is acknowledged",
            labels=labels,
        )


metrics_registry.register(_TaskMetrics())


class _ServedMetrics(Collector):
    """The metrics of an endpoint: those of some registries, and those of the default registry with other names.

    The default registry has the metrics of the Python process, and those that handlers define.
    """

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        names = set()
        for registry in self._registries:
            for family in registry.collect():
                names.add(_base_name(family))
                yield family
        yield from (family for family in DEFAULT_REGISTRY.collect() if _base_name(family) not in names)


def _base_name(family: Metric) -> str:
    """Return the name of a family without the suffix that the samples of counters have."""
    return family.name.removesuffix("_total")


def served_registry(*registries: CollectorRegistry) -> CollectorRegistry:
    """Return the registry to serve on `/metrics`: our metrics, those of `registries`, and the default registry's."""
    served = CollectorRegistry()
    served.register(_ServedMetrics([metrics_registry, *registries]))
    return served


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
