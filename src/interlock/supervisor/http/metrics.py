"""The figures of the supervisor: refusals, keys of requests, and the requests themselves.

Invariant: labels are states, codes, methods and paths as they are declared; nothing that a caller sends becomes one.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from interlock.store.stats import count_moves, read_complete_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from prometheus_client import Metric

    from interlock.postgres.connection import Connection
    from interlock.store.stats import CountedMove


http_requests_total = Counter("http_requests_total", "Requests answered", ["method", "route", "status"])
http_request_duration_seconds = Histogram(
    "http_request_duration_seconds",
    "Time to answer a request",
    ["method", "route"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
failed_transitions_total = Counter(
    "failed_transitions_total", "Moves that were refused", ["machine", "from_state", "to_state"]
)
idempotency_requests_total = Counter(
    "idempotency_requests_total", "Requests with a key: hit, miss or conflict", ["outcome"]
)
idempotency_hit_ratio = Gauge("idempotency_hit_ratio", "Of the requests with a key, those whose answer was there")

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"})
UNMATCHED = "unmatched"
_counts = {"hit": 0, "miss": 0, "conflict": 0}


def note_key(outcome: str) -> None:
    """Count a request with a key."""
    _counts[outcome] += 1
    idempotency_requests_total.labels(outcome).inc()
    idempotency_hit_ratio.set(_counts["hit"] / sum(_counts.values()))


def note_request(method: str, route: str | None, status: int, seconds: float) -> None:
    """Count a request that was answered, under the path as it is declared."""
    known = method if method in METHODS else "other"
    http_requests_total.labels(known, route or UNMATCHED, str(status)).inc()
    http_request_duration_seconds.labels(known, route or UNMATCHED).observe(seconds)


# SECTION supervisor/moves
# Shows the moves of workers and jobs as metrics: transition counts by pair, and the time in each state.
#
# Invariant: they are made from the records, so that every move counts, whoever made it: this supervisor, another one, a
# worker itself or a person with psql. They begin with the supervisor's start.

LAG = timedelta(seconds=10)  # what a transaction may take from its beginning to its commit
BOUNDS = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 3600.0, 21_600.0, 86_400.0)
NAMES = {"worker": ("supervised_worker", "supervised workers"), "job": ("job", "jobs")}


class _Duration:
    """How long a state lasted, of all that left it."""

    __slots__ = ("buckets", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0


class _Series:
    """The figures of one lifecycle."""

    def __init__(self) -> None:
        self.moves: dict[tuple[str, str], int] = {}
        self.durations: dict[str, _Duration] = {}

    def add(self, counted: CountedMove) -> None:
        pair = counted.from_state, counted.to_state
        self.moves[pair] = self.moves.get(pair, 0) + counted.moves
        duration = self.durations.setdefault(counted.from_state, _Duration())
        duration.buckets[counted.bucket] += counted.moves
        duration.seconds += counted.seconds


class MoveMetrics(Collector):
    """Counts on from where it was each time that somebody asks; the first look only remembers the moment."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Connection]], *, lag: timedelta = LAG) -> None:
        self._connect = connect
        self._lag = lag
        self._since: datetime | None = None
        self._series = {machine: _Series() for machine in NAMES}
        self._looking = asyncio.Lock()

    async def look(self) -> None:
        """Count what was recorded since the last look."""
        async with self._looking, self._connect() as connection:
            until = await read_complete_until(connection, self._lag)
            since, self._since = self._since, until
            if since is None or since >= until:
                self._since = since or until
                return
            for machine, series in self._series.items():
                for counted in await count_moves(connection, machine, since=since, until=until, bounds=BOUNDS):
                    series.add(counted)

    def collect(self) -> Iterator[Metric]:
        """Give the figures to whoever scrapes."""
        for machine, series in self._series.items():
            name, described = NAMES[machine]
            moves = CounterMetricFamily(
                f"{name}_transitions_total", f"Moves of {described}", labels=["from_state", "to_state"]
            )
            for pair, count in series.moves.items():
                moves.add_metric(list(pair), count)
            yield moves
            yield self._histogram(name, described, series)

    def _histogram(self, name: str, described: str, series: _Series) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            f"{name}_state_duration_seconds", f"Time in a state, of {described} that left it", labels=["state"]
        )
        bounds = [*map(str, BOUNDS), "+Inf"]
        for state, duration in series.durations.items():
            family.add_metric([state], list(zip(bounds, accumulate(duration.buckets), strict=True)), duration.seconds)
        return family
