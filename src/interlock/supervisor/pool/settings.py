"""How a pool of worker processes is kept; the defaults are those of one supervisor on a host."""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter as Count
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

from interlock.lifecycle import SupervisedWorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from interlock.config import Config
    from interlock.store.supervision import HeldWorker
    from interlock.supervisor.pool.reconcile import Sight


FAREWELL = 10.0  # seconds that a worker has beyond its grace, for returning what it could not finish


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What can be chosen about a pool. Times are in seconds."""

    # between two looks that nobody asked for
    tick: float = 0.5
    # how many processes one supervisor keeps
    most: int = 100
    # how long a row stays this supervisor's unless that is renewed, which is done three times in that time
    lease: float = 10.0
    # from SIGTERM to SIGKILL
    stop_limit: float = 30.0
    # without a heartbeat, until a worker is terminated; and until the first one of a process
    silence: float = 45.0
    start_limit: float = 60.0
    # between two looks, after which the pool itself was away, and nobody's silence counts
    gap: float = 10.0
    # a process that lives so long has not crashed quickly: what was before is forgotten
    steady: float = 60.0
    # how often a process that ends quickly is started again, and after which pauses
    retries: int = 3
    restart_base: float = 0.5
    restart_cap: float = 30.0
    # let the processes go on when the supervisor stops in good order; another one may adopt them
    leave: bool = False
    # have the processes end with the supervisor, however it ends
    tied: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("tick", self.tick, 0.01),
            ("most", self.most, 1),
            ("lease", self.lease, 0.1),
            ("stop_limit", self.stop_limit, 0),
            ("silence", self.silence, 0.1),
            ("start_limit", self.start_limit, 0.1),
            ("retries", self.retries, 0),
            ("restart_base", self.restart_base, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.leave and self.tied:
            raise ValueError("processes that are tied to their supervisor cannot be left behind")

    @classmethod
    def of(cls, config: Config, *, leave: bool = False, tied: bool = False) -> PoolSettings:
        """Take what a configuration says about workers."""
        return cls(stop_limit=config.grace + FAREWELL, leave=leave, tied=tied)

    def pause_before(self, crash: int) -> float:
        """Seconds to wait before a process is started again that has crashed so often: twice as long each time."""
        grown: float = self.restart_base * 2 ** min(crash - 1, 20)
        return min(grown, self.restart_cap)


def name_supervisor(name: str | None = None) -> str:
    """Name this process start, so that no two are ever taken for one."""
    return f"{name or socket.gethostname()}-supervisor-{os.getpid()}-{secrets.token_hex(4)}"


# SECTION supervisor/pool_metrics
# Metrics of a pool: its processes by what they do, and how often one had to be started again.
#
# Invariant: label values are a few words of our own, never the name of a worker.

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
