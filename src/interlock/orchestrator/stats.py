"""Statistics of an orchestrator: the figures that `status` shows and the metrics that Prometheus scrapes.

Invariant: each event is counted once, here, so that both show the same figures.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram

from interlock.telemetry import metrics_registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.workflow.advance import Advanced

orchestration_events_total = Counter(
    "orchestration_events_total",
    "Step results by what became of them: received, dispatched, completed, failed, mismatched, fallback_hits",
    ["kind"],
    registry=metrics_registry,
)
orchestration_jobs_ended_total = Counter(
    "orchestration_jobs_ended_total", "Jobs that this orchestrator finalized", registry=metrics_registry
)
orchestration_batch_size = Histogram(
    "orchestration_batch_size",
    "Messages advanced by one transaction",
    buckets=(1, 5, 20, 50, 100, 200),
    registry=metrics_registry,
)
orchestration_batch_seconds = Histogram(
    "orchestration_batch_seconds",
    "Time of one transaction that advances jobs",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0),
    registry=metrics_registry,
)
orchestration_queue_depth = Gauge(
    "orchestration_queue_depth", "Step results that wait for an orchestrator", registry=metrics_registry
)
orchestration_queue_age_seconds = Gauge(
    "orchestration_queue_age_seconds", "Age of the oldest step result that waits", registry=metrics_registry
)
orchestration_archived = Gauge(
    "orchestration_archived",
    "Dead letters: step results that were archived because they kept failing",
    registry=metrics_registry,
)


@dataclass(slots=True)
class EventStatistics:
    """Counts of one orchestrator since its start."""

    received: int = 0  # messages read from the queue
    dispatched: int = 0  # steps activated or created
    completed: int = 0  # messages processed
    failed: int = 0  # messages whose processing failed
    mismatched: int = 0  # duplicates and replays, which change nothing
    fallback_hits: int = 0  # messages found by polling, without a notification
    finalized: int = 0  # jobs that reached a final state

    def count(self, done: Advanced, *, seconds: float, by_polling: bool) -> None:
        """Count one batch."""
        if done.received:
            orchestration_batch_size.observe(done.received)
            orchestration_batch_seconds.observe(seconds)
            orchestration_jobs_ended_total.inc(done.finalized)
            self.finalized += done.finalized
        for kind, count in (
            ("received", done.received),
            ("dispatched", done.released + done.created),
            ("completed", done.advanced),
            ("failed", done.failed),
            ("mismatched", done.duplicates),
            ("fallback_hits", done.received if by_polling else 0),
        ):
            if count:
                setattr(self, kind, getattr(self, kind) + count)
                orchestration_events_total.labels(kind).inc(count)

    def document(self) -> dict[str, Any]:
        """Return the counts under the name of their event system."""
        return {"orchestration": asdict(self)}


def show_queue(state: Mapping[str, Any]) -> None:
    """Set the gauges of the queue."""
    orchestration_queue_depth.set(state["waiting"])
    orchestration_queue_age_seconds.set(state["oldest_age"] or 0)
    orchestration_archived.set(state["archived"])
