"""Prometheus metrics of the API: requests, idempotency keys, transitions of workers and jobs, workers of pools.

Invariant: labels are states, codes, methods, declared paths and the names of stored pools; no other text of a caller
becomes a label.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Count
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from interlock.store.pools import list_pools
from interlock.store.stats import (
    RefusedMove,
    add_refused_moves,
    count_new_moves,
    read_move_counts,
    read_refused_moves,
)
from interlock.telemetry import metrics_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from prometheus_client import Metric

    from interlock.postgres.connection import Connection
    from interlock.store.stats import CountedMove


http_requests_total = Counter(
    "http_requests_total", "Requests answered", ["method", "route", "status"], registry=metrics_registry
)
http_request_duration_seconds = Histogram(
    "http_request_duration_seconds",
    "Time to answer a request; streams have none",
    ["method", "route"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    registry=metrics_registry,
)
http_connections = Gauge("http_connections", "Open connections of HTTP clients", registry=metrics_registry)
http_connections_closed_total = Counter(
    "http_connections_closed_total",
    "Connections that the server closed: head_timeout, write_timeout, evicted or refused",
    ["reason"],
    registry=metrics_registry,
)
idempotency_requests_total = Counter(
    "idempotency_requests_total",
    "Requests with an idempotency key: hit, miss or conflict",
    ["outcome"],
    registry=metrics_registry,
)
idempotency_hit_ratio = Gauge(
    "idempotency_hit_ratio",
    "Share of requests with an idempotency key that were answered from the stored response",
    registry=metrics_registry,
)

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"})
UNMATCHED = "unmatched"
# Records of a transaction carry times before its commit: only records older than this are counted as complete.
COMMIT_LAG = timedelta(seconds=10)
DURATION_BUCKETS_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 3600.0, 21_600.0, 86_400.0)
# machine -> prefix of the metrics, description
MACHINES = {"worker": ("supervised_worker", "supervised workers"), "job": ("job", "jobs")}
# column of a pool -> metric, description
POOL_GAUGES = {
    "desired": ("pool_workers_desired", "Workers that a pool should have"),
    "live": ("pool_workers_live", "Workers of a pool whose process sent a heartbeat lately"),
    "starting": ("pool_workers_starting", "Workers of a pool without a process yet, or without a heartbeat of it"),
    "backing_off": ("pool_workers_backing_off", "Workers of a pool that wait to be restarted after a crash"),
}
WINDOW = timedelta(hours=1)  # of records that one statement counts
MAX_UPDATE_S = 2.0  # an update that is longer behind goes on with the next scrape
_counts = {"hit": 0, "miss": 0, "conflict": 0}
_refused: Count[tuple[str, str, str]] = Count()  # by the API itself, since the last update


def count_refused_transition(machine: str, from_state: str, to_state: str) -> None:
    """Count a transition that the API refused without asking the database."""
    _refused[machine, from_state, to_state] += 1


def count_keyed_request(outcome: str) -> None:
    """Count a request with an idempotency key: hit, miss or conflict."""
    _counts[outcome] += 1
    idempotency_requests_total.labels(outcome).inc()
    idempotency_hit_ratio.set(_counts["hit"] / sum(_counts.values()))


def observe_request(method: str, route: str | None, status: int, seconds: float | None) -> None:
    """Count an answered request under its declared path; `seconds` is None for a stream."""
    known = method if method in METHODS else "other"
    http_requests_total.labels(known, route or UNMATCHED, str(status)).inc()
    if seconds is not None:
        http_request_duration_seconds.labels(known, route or UNMATCHED).observe(seconds)


class _Duration:
    """The histogram of one state: how long it lasted, for all that left it."""

    __slots__ = ("buckets", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(DURATION_BUCKETS_S) + 1)
        self.seconds = 0.0


class _TransitionCounts:
    """The transition counts and durations of one machine."""

    def __init__(self) -> None:
        self.moves: dict[tuple[str, str], int] = {}
        self.durations: dict[str, _Duration] = {}

    def add(self, counted: CountedMove) -> None:
        pair = counted.from_state, counted.to_state
        self.moves[pair] = self.moves.get(pair, 0) + counted.moves
        duration = self.durations.setdefault(counted.from_state, _Duration())
        duration.buckets[counted.bucket] += counted.moves
        duration.seconds += counted.seconds


class TransitionMetrics(Collector):
    """Transitions of workers and jobs by pair of states, the time in each state, and refused transitions.

    They are counted in the database, so that transitions by any actor count (this supervisor, another one, a worker, or
    a person with psql) and survive a restart.
    """

    def __init__(
        self, connect: Callable[[], AbstractAsyncContextManager[Connection]], *, lag: timedelta = COMMIT_LAG
    ) -> None:
        self._connect = connect
        self._lag = lag
        self._series = {machine: _TransitionCounts() for machine in MACHINES}
        self._failed: list[RefusedMove] = []
        self._updating = asyncio.Lock()

    async def update(self) -> None:
        """Count the transitions recorded since the last count, and read all counts."""
        async with self._updating, self._connect() as connection:
            await self._store_refused(connection)
            deadline = time.monotonic() + MAX_UPDATE_S
            for machine in MACHINES:
                while (
                    await count_new_moves(connection, machine, lag=self._lag, window=WINDOW, bounds=DURATION_BUCKETS_S)
                    and time.monotonic() < deadline
                ):
                    pass
            series = {machine: _TransitionCounts() for machine in MACHINES}
            for counted in await read_move_counts(connection):
                series[counted.machine].add(counted)
            self._series, self._failed = series, await read_refused_moves(connection)

    async def _store_refused(self, connection: Connection) -> None:
        while _refused:
            move, count = _refused.popitem()
            await add_refused_moves(connection, RefusedMove(*move, count))

    def collect(self) -> Iterator[Metric]:
        """Return the metrics for a scrape."""
        for machine, series in self._series.items():
            name, described = MACHINES[machine]
            moves = CounterMetricFamily(
                f"{name}_transitions_total",
                f"Recorded transitions of {described}, by any client, with a delay of ten seconds",
                labels=["from_state", "to_state"],
            )
            for pair, count in series.moves.items():
                moves.add_metric(list(pair), count)
            yield moves
            yield self._histogram(name, described, series)
        failed = CounterMetricFamily(
            "failed_transitions_total",
            "Refused transitions of any client: the API, the command line, a worker that lost its task, psql",
            labels=["machine", "from_state", "to_state"],
        )
        for refused in self._failed:
            failed.add_metric([refused.machine, refused.from_state, refused.to_state], refused.count)
        yield failed

    def _histogram(self, name: str, described: str, series: _TransitionCounts) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            f"{name}_state_duration_seconds", f"Time in a state, of {described} that left it", labels=["state"]
        )
        bounds = [*map(str, DURATION_BUCKETS_S), "+Inf"]
        for state, duration in series.durations.items():
            family.add_metric([state], list(zip(bounds, accumulate(duration.buckets), strict=True)), duration.seconds)
        return family


class PoolMetrics(Collector):
    """The workers of all pools of the database: desired, live, starting and backing off."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Connection]]) -> None:
        self._connect = connect
        self._pools: list[dict[str, Any]] = []

    async def update(self) -> None:
        """Count the workers of the pools."""
        async with self._connect() as connection:
            self._pools = await list_pools(connection)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics for a scrape."""
        for column, (name, described) in POOL_GAUGES.items():
            gauge = GaugeMetricFamily(name, described, labels=["pool"])
            for pool in self._pools:
                gauge.add_metric([pool["name"]], pool[column])
            yield gauge
