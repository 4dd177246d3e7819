"""Statistics of a worker's two event systems, their metric, and the gauges of the queue.

Invariant: each event is counted once, as a plain number; `status` and Prometheus show the same figures.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from interlock.errors import StoreError
from interlock.lifecycle import TASK_ROW
from interlock.postgres.connection import connect
from interlock.postgres.retry import raise_if_canceled
from interlock.service import BackgroundService
from interlock.store.stats import count_unfinished_tasks
from interlock.telemetry import log, metrics_registry, oldest_pending_age_seconds, queue_depth

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client import Metric

    from interlock.store.stats import StateCount
    from interlock.worker.executors.events import HandlerEventStatistics
    from interlock.worker.leaks import LeakedHandlers

GAUGE_INTERVAL_S = 15.0
UNFINISHED = tuple(state for state in TASK_ROW.states if state not in TASK_ROW.final)


@dataclass(slots=True)
class TaskStatistics:
    """Event system 1, as one worker sees it: the tasks it claimed."""

    received: int = 0  # claimed tasks
    dispatched: int = 0  # started attempts
    completed: int = 0  # written outcomes
    failed: int = 0  # attempts whose handler failed or was stopped
    mismatched: int = 0  # outcomes refused because the attempt was lost
    fallback_hits: int = 0  # tasks found by polling, without a notification


class WorkerStatistics:
    """The figures of both event systems of one worker."""

    __slots__ = ("handlers", "leaks", "tasks")

    def __init__(self, handlers: HandlerEventStatistics, leaks: LeakedHandlers) -> None:
        self.tasks = TaskStatistics()
        self.handlers = handlers
        self.leaks = leaks
        _all_workers.append(self)

    def document(self) -> dict[str, dict[str, Any]]:
        """Return the figures by event system, and how many leaked handlers of each type run on."""
        return {**self.events(), "leaked": self.leaks.by_type()}

    def events(self) -> dict[str, dict[str, Any]]:
        """Return the figures by event system."""
        return {"orchestration": asdict(self.tasks), "handlers": asdict(self.handlers)}


_all_workers: list[WorkerStatistics] = []


class _EventMetrics(Collector):
    """Exports the sum over all workers of this process."""

    def describe(self) -> list[Metric]:
        return [self._counter()]

    def collect(self) -> Iterator[Metric]:
        counter = self._counter()
        sums: dict[tuple[str, str], int] = {}
        for worker in _all_workers:
            for system, figures in worker.events().items():
                for kind, count in figures.items():
                    sums[system, kind] = sums.get((system, kind), 0) + count
        for labels, count in sums.items():
            counter.add_metric(labels, count)
        yield counter

    @staticmethod
    def _counter() -> CounterMetricFamily:
        help_text = (
            "Events of a worker's two event systems, orchestration and handlers, by kind: received, dispatched, "
            "completed, failed, mismatched and, for the first, fallback_hits"
        )
        return CounterMetricFamily("worker_events_total", help_text, labels=["system", "kind"])


metrics_registry.register(_EventMetrics())


class QueueGauges(BackgroundService):
    """Measures the depth of the queue and the age of its oldest due task, for this process's metrics endpoint."""

    def __init__(self, url: str) -> None:
        super().__init__("queue gauges")
        self._url = url
        self._namespaces: set[str] = set()

    async def run(self) -> None:
        """Measure at an interval, until cancelled."""
        while True:
            try:
                async with connect(self._url) as connection:
                    set_queue_gauges(await count_unfinished_tasks(connection), self._namespaces)
            except (StoreError, OSError) as error:
                raise_if_canceled()
                log.warning("queue_not_measured", error=str(error))
            await asyncio.sleep(GAUGE_INTERVAL_S)


def set_queue_gauges(counts: Sequence[StateCount], namespaces: set[str]) -> None:
    """Set the gauges of all namespaces with unfinished tasks, and of those that had some at an earlier measurement."""
    now = datetime.now(UTC)
    namespaces.update(count.namespace for count in counts)
    for namespace in namespaces:
        for state in UNFINISHED:
            queue_depth.labels(namespace, state.value).set(0)
        oldest_pending_age_seconds.labels(namespace).set(0)
    for count in counts:
        queue_depth.labels(count.namespace, count.state).set(count.tasks)
        if count.oldest_due_at is not None:
            age = (now - count.oldest_due_at).total_seconds()
            oldest_pending_age_seconds.labels(count.namespace).set(max(age, 0.0))
