"""What went through the two event systems of a worker, as numbers and as metrics.

Invariant: each thing is counted once, as a plain number; what `status` shows and what Prometheus scrapes are the same
figures.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from interlock.errors import StoreError
from interlock.lifecycle import TaskRowState
from interlock.postgres.retry import raise_if_canceled
from interlock.store.stats import count_unfinished_tasks
from interlock.telemetry import log, oldest_pending_age_seconds, queue_depth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from prometheus_client import Metric

    from interlock.postgres.connection import Connection
    from interlock.store.stats import StateCount
    from interlock.worker.executors.events import HandlerEventStatistics


@dataclass(slots=True)
class TaskStatistics:
    """Event system 1, as one worker sees it: the tasks that came to it."""

    received: int = 0  # tasks that it claimed
    dispatched: int = 0  # attempts that it started
    completed: int = 0  # outcomes that it wrote
    failed: int = 0  # attempts in which something went wrong
    mismatched: int = 0  # outcomes that were refused, because the attempt was lost
    fallback_hits: int = 0  # tasks that no notification told it of


class WorkerStatistics:
    """Both systems of one worker, by name."""

    __slots__ = ("handlers", "tasks")

    def __init__(self, handlers: HandlerEventStatistics) -> None:
        self.tasks = TaskStatistics()
        self.handlers = handlers
        _every_worker.append(self)

    def document(self) -> dict[str, dict[str, Any]]:
        """Give the figures by the name of their event system."""
        return {"orchestration": asdict(self.tasks), "handlers": asdict(self.handlers)}


_every_worker: list[WorkerStatistics] = []


class _EventMetrics(Collector):
    """Shows the sum over all workers of this process."""

    def describe(self) -> list[Metric]:
        return [self._counter()]

    def collect(self) -> Iterator[Metric]:
        counter = self._counter()
        sums: dict[tuple[str, str], int] = {}
        for worker in _every_worker:
            for system, figures in worker.document().items():
                for kind, count in figures.items():
                    sums[system, kind] = sums.get((system, kind), 0) + count
        for labels, count in sums.items():
            counter.add_metric(labels, count)
        yield counter

    @staticmethod
    def _counter() -> CounterMetricFamily:
        about = "What went through a worker's event systems, by system and what became of it"
        return CounterMetricFamily("worker_events_total", about, labels=["system", "kind"])


REGISTRY.register(_EventMetrics())


# SECTION worker/gauges
# Shows how long the queue is, and how old its oldest due task, for whoever scrapes this worker's metrics.

INTERVAL = 15.0
UNFINISHED = (TaskRowState.WAITING, TaskRowState.PENDING, TaskRowState.RUNNING)


async def keep_gauges(connect: Callable[[], AbstractAsyncContextManager[Connection]]) -> None:
    """Measure the queue every now and then, until this task is canceled."""
    seen: set[str] = set()
    while True:
        try:
            async with connect() as connection:
                show(await count_unfinished_tasks(connection), seen)
        except (StoreError, OSError) as error:
            raise_if_canceled()
            log.warning("queue_not_measured", error=str(error))
        await asyncio.sleep(INTERVAL)


def show(counts: Sequence[StateCount], seen: set[str]) -> None:
    """Set the gauges of all namespaces that have tasks, or had some when they were last looked at."""
    now = datetime.now(UTC)
    seen.update(count.namespace for count in counts)
    for namespace in seen:
        for state in UNFINISHED:
            queue_depth.labels(namespace, state.value).set(0)
        oldest_pending_age_seconds.labels(namespace).set(0)
    for count in counts:
        queue_depth.labels(count.namespace, count.state).set(count.tasks)
        if count.oldest_due_at is not None:
            age = (now - count.oldest_due_at).total_seconds()
            oldest_pending_age_seconds.labels(count.namespace).set(max(age, 0.0))
