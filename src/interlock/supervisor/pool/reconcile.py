"""Decides the next action for one worker from its row and the state of its process. No I/O.

Invariant: a process is started only for a row that is RUNNING and has none. A process that got SIGTERM and does not
exit within its stop timeout is killed, whatever its row says. A worker of a pool is restarted for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import SUPERVISED_WORKER, SupervisedWorkerState
from interlock.process_groups import describe_exit
from interlock.worker.run import UNRECOVERABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from interlock.store.supervision import HeldTask, HeldWorker
    from interlock.supervisor.pool.settings import PoolSettings

MEGABYTE = 1_000_000
STATES_WITH_PROCESS = SUPERVISED_WORKER.unfinished - {SupervisedWorkerState.IDLE}


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The exit of a worker process. The code is unknown for a process that is not this supervisor's own child."""

    code: int | None = None
    message: str = ""  # the reason that the process itself gave

    @property
    def is_unrecoverable(self) -> bool:
        """Whether a restart would fail again: a wrong setting, an old schema."""
        return self.code == UNRECOVERABLE

    def __str__(self) -> str:
        how = "the process exited" if self.code is None else f"the process {describe_exit(self.code)}"
        return f"{how}: {self.message}" if self.message else how


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a worker's process. Neither alive nor exited: there is none."""

    alive: bool = False
    exit: ProcessExit | None = None
    memory: int | None = None  # bytes
    stopping_for: float | None = None  # seconds since SIGTERM
    draining: bool = False  # paused because of its memory: it stops once it holds no task


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Send SIGTERM: the process finishes its tasks within its grace and exits."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to a process that did not stop in time, or gets no time."""


@dataclass(frozen=True, slots=True)
class RecordExit:
    """Record that the process is gone; restart it after `delay` seconds, or fail the worker.

    With `resumed`, the worker was paused to free its memory and is resumed for that reason.
    """

    note: str | None
    crashes: int = 0
    delay: float | None = None
    failed: bool = False
    resumed: str | None = None

    @property
    def is_crash(self) -> bool:
        """Whether the process ended without a request."""
        return self.failed or self.delay is not None


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause the worker: it claims no more tasks."""

    reason: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Terminate the worker and return the tasks that it holds."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResetCrashes:
    """Forget earlier crashes of a process that has run long enough."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give up the lease on the row: it needs no process any more."""


Action = Start | Stop | Kill | RecordExit | Pause | Terminate | ResetCrashes | Release


def decide(
    worker: HeldWorker, observed: Observation, settings: PoolSettings, *, watched_since: datetime | None = None
) -> Action | None:
    """Return the next action; None if the process is as the row asks.

    `watched_since` is the start of the time that the pool has watched without a gap: only missed heartbeats after it
    count.
    """
    if observed.exit is not None:
        return _after_exit(worker, observed, observed.exit, settings)
    if observed.alive and worker.kill_requested:
        return Kill()
    if observed.stopping_for is not None:
        return Kill() if observed.stopping_for > stop_timeout(worker.spec, settings) else None
    if SupervisedWorkerState(worker.status) not in STATES_WITH_PROCESS:
        return Stop() if observed.alive else Release()
    if not observed.alive:
        is_due = worker.restart_at is None or worker.restart_at <= worker.moment
        return Start() if is_due and worker.status == SupervisedWorkerState.RUNNING else None
    return _while_alive(worker, observed, settings, watched_since)


def after_crash(
    worker: HeldWorker, reason: str, crashes: int, settings: PoolSettings, *, is_unrecoverable: bool = False
) -> RecordExit:
    """Return the action after a process exited without a stop request, or could not be started."""
    delay = settings.restart_delay(crashes)
    if worker.pool is not None:
        return RecordExit(f"{reason}; restart {crashes} in {delay:g} s", crashes, delay)
    if is_unrecoverable:
        return RecordExit(reason, crashes, failed=True)
    if crashes > settings.max_restarts:
        return RecordExit(f"{crashes} quick crashes in a row; last: {reason}", crashes, failed=True)
    return RecordExit(f"{reason}; restart {crashes} of {settings.max_restarts} in {delay:g} s", crashes, delay)


def describe_suspects(found: Sequence[HeldTask]) -> str:
    """Name the tasks that a crashed process held, as the end of a note: one of them may have crashed it."""
    if not found:
        return ""
    named = ", ".join(f"{task.id} ({task.type})" for task in found)
    total = found[0].held
    if total == 1:
        return f"; suspected: task {named}, which it ran alone"
    return f"; suspected: one of the {total} tasks that it ran: {named}{', …' if total > len(found) else ''}"


def stop_timeout(spec: Mapping[str, Any], settings: PoolSettings) -> float:
    """Return the seconds from SIGTERM to SIGKILL: the worker's own grace and a margin."""
    grace = spec.get("grace")
    return (grace if isinstance(grace, int | float) else settings.grace) + settings.stop_margin


def _after_exit(
    worker: HeldWorker, observed: Observation, process_exit: ProcessExit, settings: PoolSettings
) -> RecordExit:
    if worker.status == SupervisedWorkerState.PAUSED and observed.draining and worker.pool is not None:
        return RecordExit(str(process_exit), resumed="its process has ended and freed its memory")
    if worker.status != SupervisedWorkerState.RUNNING or observed.stopping_for is not None:
        return RecordExit(str(process_exit))
    crashes = 1 if _uptime(worker) >= settings.stable_after else worker.crashes + 1
    return after_crash(worker, str(process_exit), crashes, settings, is_unrecoverable=process_exit.is_unrecoverable)


def _while_alive(
    worker: HeldWorker, observed: Observation, settings: PoolSettings, watched_since: datetime | None
) -> Action | None:
    missed_heartbeat = _missed_heartbeat(worker, settings, watched_since)
    if missed_heartbeat is not None:
        return Terminate(missed_heartbeat)
    excess = _memory_excess(worker, observed)
    if worker.status == SupervisedWorkerState.PAUSED:
        # The memory is freed by ending the process once it holds no task; a resume starts another one.
        return Stop() if worker.holds == 0 and (observed.draining or excess is not None) else None
    if excess is not None:
        return Pause(excess)
    return ResetCrashes() if worker.crashes and _uptime(worker) >= settings.stable_after else None


def _uptime(worker: HeldWorker) -> float:
    started = worker.process_started_at
    return 0.0 if started is None else (worker.moment - started).total_seconds()


def _missed_heartbeat(worker: HeldWorker, settings: PoolSettings, watched_since: datetime | None) -> str | None:
    """Return the reason to terminate a worker without heartbeats; None if it is in time."""
    started, heartbeat = worker.process_started_at, worker.heartbeat_at
    has_sent = heartbeat is not None and (started is None or heartbeat >= started)
    limit = settings.heartbeat_timeout if has_sent else settings.start_timeout
    times = [time for time in (started, heartbeat, watched_since) if time is not None]
    if not times:
        return None
    elapsed = (worker.moment - max(times)).total_seconds()
    return f"no heartbeat for {elapsed:.0f} s" if elapsed > limit else None


def _memory_excess(worker: HeldWorker, observed: Observation) -> str | None:
    """Return the reason to pause a worker that uses more memory than its limit; None if it does not."""
    limit = worker.spec.get("memory_limit_mb")
    if not isinstance(limit, int | float) or observed.memory is None or observed.memory <= limit * MEGABYTE:
        return None
    return f"the process uses {observed.memory / MEGABYTE:.0f} MB of memory; its limit is {limit:g} MB"
