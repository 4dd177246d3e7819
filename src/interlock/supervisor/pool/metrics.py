"""Prometheus metrics of a pool: processes by state, memory, starts, restarts, adoptions and kills.

Invariant: label values come from a fixed set; worker ids are never labels.
"""

from __future__ import annotations

from collections import Counter as Count
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

from interlock.lifecycle import SupervisedWorkerState
from interlock.telemetry import metrics_registry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from interlock.store.supervision import HeldWorker
    from interlock.supervisor.pool.reconcile import Observation

PROCESS_STATES = ("starting", "running", "paused", "stopping", "waiting", "resting")

supervised_processes = Gauge(
    "supervised_processes",
    "Workers of this supervisor by the state of their process; without one it is waiting for a start, or resting",
    ["state"],
    registry=metrics_registry,
)
supervised_process_memory_bytes = Gauge(
    "supervised_process_memory_bytes", "Memory of this supervisor's processes", registry=metrics_registry
)
supervised_process_starts_total = Counter(
    "supervised_process_starts_total", "Processes started, for the first time or again", registry=metrics_registry
)
supervised_process_restarts_total = Counter(
    "supervised_process_restarts_total",
    "Processes that exited without a stop request and are restarted",
    registry=metrics_registry,
)
supervised_process_adoptions_total = Counter(
    "supervised_process_adoptions_total",
    "Running processes adopted from an earlier supervisor",
    registry=metrics_registry,
)
supervised_process_kills_total = Counter(
    "supervised_process_kills_total", "Processes that needed SIGKILL", registry=metrics_registry
)


def process_state(worker: HeldWorker, observation: Observation) -> str:
    """Return the state of a worker's process; without one it is `waiting` for a (re)start, or `resting`."""
    if not observation.alive:
        return "waiting" if worker.status == SupervisedWorkerState.RUNNING else "resting"
    if observation.stopping_for is not None:
        return "stopping"
    if worker.status == SupervisedWorkerState.PAUSED:
        return "paused"
    started, heartbeat = worker.process_started_at, worker.heartbeat_at
    return "running" if heartbeat is not None and (started is None or heartbeat >= started) else "starting"


def update_gauges(observed: Iterable[tuple[HeldWorker, Observation]]) -> None:
    """Set the gauges from one reconciliation."""
    states: Count[str] = Count()
    memory = 0
    for worker, observation in observed:
        states[process_state(worker, observation)] += 1
        memory += observation.memory or 0
    for state in PROCESS_STATES:
        supervised_processes.labels(state).set(states[state])
    supervised_process_memory_bytes.set(memory)
