"""Metrics of a pool: its processes by what they do, and how often one had to be started again.

Invariant: label values are a few words of our own, never the name of a worker.
"""

from __future__ import annotations

from collections import Counter as Count
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

from interlock.lifecycle import SupervisedWorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from interlock.store.supervision import HeldWorker
    from interlock.supervisor.reconcile import Sight

STATES = ("starting", "running", "paused", "stopping", "waiting", "resting")

supervised_processes = Gauge("supervised_processes", "Workers of this supervisor by what their process does", ["state"])
supervised_process_memory_bytes = Gauge("supervised_process_memory_bytes", "Memory of this supervisor's processes")
supervised_process_starts_total = Counter("supervised_process_starts_total", "Processes that were started")
supervised_process_restarts_total = Counter(
    "supervised_process_restarts_total", "Processes that ended unasked and are started again"
)
supervised_process_adoptions_total = Counter(
    "supervised_process_adoptions_total", "Processes of an earlier supervisor that were found alive"
)
supervised_process_kills_total = Counter("supervised_process_kills_total", "Processes that had to be killed")


def describe(worker: HeldWorker, sight: Sight) -> str:
    """Say in one word what the process of a worker does; without one it is awaited, or it rests."""
    if not sight.alive:
        return "waiting" if worker.status == SupervisedWorkerState.RUNNING else "resting"
    if sight.asked_for is not None:
        return "stopping"
    if worker.status == SupervisedWorkerState.PAUSED:
        return "paused"
    began, heard = worker.process_started_at, worker.heartbeat_at
    return "running" if heard is not None and (began is None or heard >= began) else "starting"


def show(seen: Iterable[tuple[HeldWorker, Sight]]) -> None:
    """Set the gauges to what was just seen."""
    states: Count[str] = Count()
    memory = 0
    for worker, sight in seen:
        states[describe(worker, sight)] += 1
        memory += sight.memory or 0
    for state in STATES:
        supervised_processes.labels(state).set(states[state])
    supervised_process_memory_bytes.set(memory)
