"""TODO docstring."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.workflow.advance import Advanced


orchestration_events_total = Counter(
    "orchestration_events_total",
    "Step results by what became of them: received, dispatched, completed, failed, mismatched, fallback_hits",
    ["kind"],
)


orchestration_jobs_ended_total = Counter("orchestration_jobs_ended_total", "Jobs that this orchestrator finalized")


orchestration_batch_size = Histogram(
    "orchestration_batch_size", "Messages advanced by one transaction", buckets=(1, 5, 20, 50, 100, 200)
)


orchestration_batch_seconds = Histogram(
    "orchestration_batch_seconds", "Time of one transaction", buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
)


orchestration_queue_depth = Gauge("orchestration_queue_depth", "Step results that wait for an orchestrator")


orchestration_queue_age_seconds = Gauge("orchestration_queue_age_seconds", "Age of the oldest of them")


orchestration_archived = Gauge("orchestration_archived", "Step results that were set aside because they fail")


@dataclass(slots=True)
class EventStatistics:
    """What one orchestrator has seen since its start."""

    received: int = 0  # messages that it took
    dispatched: int = 0  # steps that it released or created
    completed: int = 0  # messages that it acted on
    failed: int = 0  # messages that it could not act on
    mismatched: int = 0  # messages that told nothing new: duplicates and replays
    fallback_hits: int = 0  # messages that no notification told it of
    finalized: int = 0  # jobs that it ended

    def count(self, done: Advanced, *, seconds: float, by_looking: bool) -> None:
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
            ("fallback_hits", done.received if by_looking else 0),
        ):
            if count:
                setattr(self, kind, getattr(self, kind) + count)
                orchestration_events_total.labels(kind).inc(count)

    def document(self) -> dict[str, Any]:
        """Give the figures by the name of their event system."""
        return {"orchestration": asdict(self)}


def show_queue(state: Mapping[str, Any]) -> None:
    """Set the gauges of the queue."""
    orchestration_queue_depth.set(state["waiting"])
    orchestration_queue_age_seconds.set(state["oldest_age"] or 0)
    orchestration_archived.set(state["archived"])
