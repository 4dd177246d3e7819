"""Prometheus metrics of the sort that this command runs: states, transitions, durations of phases, and progress.

They are read on a scrape from the last progress and the last saved state, so that they cost nothing otherwise.

Invariant: label values are bounded: states, events, phases, and the numbers of the workers.
"""

from __future__ import annotations

from collections import Counter as Counts
from typing import TYPE_CHECKING, Any

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from interlock.errors import ConfigError
from interlock.lifecycle import SortMasterState, SortWorkerState
from interlock.telemetry import metrics_registry, served_registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from interlock.sort.settings import Progress

MASTER = "master"


class SortMetrics(Collector):
    """The metrics of one process of a sort: a master, which knows its workers too, or a worker."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._saved: dict[str, Any] = {}

    def show(self, progress: Progress) -> None:
        """Take the current progress."""
        self._progress = progress

    def save(self, document: dict[str, Any]) -> None:
        """Take the state of this process, with its history, as it is saved on every transition."""
        self._saved = document

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics for their names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        saved, progress = self._saved, self._progress
        process = str(saved.get("name", "")).removeprefix("sort ")
        state = GaugeMetricFamily(
            "sort_state",
            "Current state of a sort master or sort worker: 1 for it, 0 for the others",
            labels=["process", "state"],
        )
        transitions = CounterMetricFamily(
            "sort_state_transitions_total",
            "State transitions of a sort master or sort worker, with those before a restart",
            labels=["process", "from_state", "to_state", "event"],
        )
        durations = GaugeMetricFamily(
            "sort_phase_duration_seconds",
            "Duration of a phase of a sort master or sort worker, when it has ended",
            labels=["process", "phase"],
        )
        ratio = GaugeMetricFamily(
            "sort_progress_ratio", "Share of its work that a sort worker has done, from 0 to 1", labels=["process"]
        )
        done = GaugeMetricFamily(
            "sort_phase_bytes", "Bytes that a sort worker has processed in its current phase", labels=["process"]
        )
        size = GaugeMetricFamily("sort_input_bytes", "Size of the input of all workers, or of one sort worker")
        if process == MASTER:
            _add_state(state, process, SortMasterState, saved["state"])
        moves = Counts((one["from_state"], one["to_state"], one["event"]) for one in saved.get("history", []))
        for labels, count in moves.items():
            transitions.add_metric([process, *labels], count)
        for phase, took in saved.get("phases", {}).items():
            durations.add_metric([process, phase], took)
        if progress is not None:
            size.add_metric([], progress.bytes_total)
            for worker in progress.workers:
                name = _worker_name(worker.index)
                _add_state(state, name, SortWorkerState, worker.state)
                ratio.add_metric([name], worker.percent / 100)
                done.add_metric([name], worker.bytes_done)
        yield from (state, transitions, durations, ratio, done, size)


def _add_state(
    family: GaugeMetricFamily, process: str, states: type[SortMasterState | SortWorkerState], current: str
) -> None:
    for state in states:
        family.add_metric([process, str(state)], float(state == current))


def _worker_name(index: int) -> str:
    return f"worker {index}" if index >= 0 else "worker"


sort_metrics = SortMetrics()
metrics_registry.register(sort_metrics)


def serve_metrics(host: str, port: int) -> int:
    """Serve the metrics of this process at /metrics; return the port, which the system chooses for 0."""
    try:
        server, _ = start_http_server(port, addr=host, registry=served_registry())
    except OSError as error:
        raise ConfigError(f"metrics cannot be served on {host}:{port}: {error.strerror}") from None
    return int(server.server_port)
