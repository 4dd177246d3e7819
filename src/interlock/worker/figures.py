"""Sums of one worker process for charts and metrics: how long tasks waited and ran, and moves of machines in memory.

Invariant: the hot path adds to plain numbers; the heartbeat's thread takes the difference to the last time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from interlock.model.histogram import middle_of, position_of
from interlock.store.figures import Figure
from interlock.telemetry import DURATION_BUCKETS, attempt_moves, metrics_registry, worker_moves

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from interlock.worker.attempt import TaskStateMachine


class Durations:
    """A histogram: the number of durations by position, and their sum."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[position_of(seconds)] += 1
        if seconds > 0:
            self.seconds += seconds


class ProcessFigures:
    """The sums since the process started, and those that were taken last."""

    def __init__(self) -> None:
        self.waits: dict[tuple[str, str], Durations] = {}
        self.runs: dict[tuple[str, str], Durations] = {}
        self._taken: dict[tuple[str, ...], Counter[int]] = {}
        self._taken_moves: dict[str, Counter[tuple[str, str, str]]] = {}
        _all_figures.append(self)

    def record(self, attempt: TaskStateMachine) -> None:
        """Count an attempt whose handler has ended: the time from due to start, and that of the handler."""
        claimed = attempt.claimed
        if claimed is None:
            return
        key = (claimed.namespace, claimed.type)
        waits = self.waits.get(key)
        if waits is None:
            waits = self.waits[key] = Durations()
            self.runs[key] = Durations()
        moves = attempt.history
        if len(moves) >= 3:  # noqa: PLR2004 - claim requested, claimed, handler ended
            waits.add(moves[0].lasted + moves[1].lasted)
            self.runs[key].add(moves[2].lasted)

    def take(self) -> list[Figure]:
        """Return the sums since they were taken last."""
        found = []
        for kind, sums in (("wait", self.waits), ("run", self.runs)):
            for (namespace, type_), durations in list(sums.items()):
                counts = Counter(durations.counts)
                new = counts - self._taken.get((kind, namespace, type_), Counter())
                self._taken[kind, namespace, type_] = counts
                if new:
                    positions = sorted(new)
                    found.append(
                        Figure(
                            kind,
                            "task",
                            new.total(),
                            namespace,
                            type_,
                            positions=positions,
                            counts=[new[position] for position in positions],
                        )
                    )
        for machine, moves in (("worker", worker_moves()), ("task-attempt", attempt_moves())):
            for (source, event, target), count in (moves - self._taken_moves.get(machine, Counter())).items():
                found.append(Figure("move", machine, count, from_state=source, event=event, to_state=target))
            self._taken_moves[machine] = moves
        return found


_all_figures: list[ProcessFigures] = []


class _WaitMetrics(Collector):
    """Exports the waits of all workers of this process as task_wait_seconds."""

    def describe(self) -> list[Metric]:
        return [self._histogram()]

    def collect(self) -> Iterator[Metric]:
        family = self._histogram()
        bounds = [*map(str, DURATION_BUCKETS), "+Inf"]
        for key in {key for figures in _all_figures for key in list(figures.waits)}:
            buckets = [0] * len(bounds)
            total = 0.0
            for figures in _all_figures:
                if (durations := figures.waits.get(key)) is not None:
                    total += durations.seconds
                    for position, count in list(durations.counts.items()):
                        buckets[bisect_left(DURATION_BUCKETS, middle_of(position))] += count
            family.add_metric(list(key), list(zip(bounds, accumulate(buckets), strict=True)), total)
        yield family

    @staticmethod
    def _histogram() -> HistogramMetricFamily:
        return HistogramMetricFamily(
            "task_wait_seconds", "Time from due to the start of the handler", labels=["namespace", "task_type"]
        )


metrics_registry.register(_WaitMetrics())
