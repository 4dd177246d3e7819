"""What is to be done about one worker, from what its row asks for and what its process does. No I/O in here.

Invariant: a process is started only for a row that is RUNNING and has none; whatever a row says, a process that was
asked to stop and does not is killed in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import SupervisedWorkerState
from interlock.supervisor.pool.settings import FAREWELL

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from interlock.store.supervision import HeldWorker
    from interlock.supervisor.pool.processes import Ended
    from interlock.supervisor.pool.settings import PoolSettings

MEGABYTE = 1_000_000
WITH_A_PROCESS = (SupervisedWorkerState.RUNNING, SupervisedWorkerState.PAUSED)


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known of a process. Neither alive nor ended: there is none."""

    alive: bool = False
    ended: Ended | None = None
    memory: int | None = None
    asked_for: float | None = None  # seconds since it was asked to stop
    draining: bool = False  # it was paused for its memory, which goes with it


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the process to finish and end."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process that does not end."""


@dataclass(frozen=True, slots=True)
class Note:
    """Write that the process is gone; start another after `delay`, or give the worker up if `failed` says why."""

    text: str | None
    crashes: int = 0
    delay: float | None = None
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Have the worker take nothing new."""

    reason: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """End the worker, and free what it holds."""

    reason: str


@dataclass(frozen=True, slots=True)
class Forgive:
    """Forget earlier crashes."""


@dataclass(frozen=True, slots=True)
class LetGo:
    """Keep the row no longer: there is nothing left to do about it."""


Instruction = Start | Stop | Kill | Note | Pause | Terminate | Forgive | LetGo


def decide(
    worker: HeldWorker, sight: Sight, settings: PoolSettings, *, watched_since: datetime | None = None
) -> Instruction | None:
    """Say what is to be done next; None when all is as it should be."""
    if sight.ended is not None:
        return _after_end(worker, sight.ended, settings, was_asked=sight.asked_for is not None)
    if sight.asked_for is not None:
        return Kill() if sight.asked_for > stop_limit(worker.spec, settings) else None
    if SupervisedWorkerState(worker.status) not in WITH_A_PROCESS:
        return Stop() if sight.alive else LetGo()
    if not sight.alive:
        return Start() if _is_due(worker) else None
    return _about_living(worker, sight, settings, watched_since)


def _about_living(
    worker: HeldWorker, sight: Sight, settings: PoolSettings, watched_since: datetime | None
) -> Instruction | None:
    silence = _silence(worker, settings, watched_since)
    if silence is not None:
        return Terminate(silence)
    excess = _excess(worker, sight)
    if worker.status == SupervisedWorkerState.PAUSED:
        # once what it holds is done, the memory goes with the process, and a resume starts another
        return Stop() if worker.holds == 0 and (sight.draining or excess is not None) else None
    if excess is not None:
        return Pause(excess)
    return Forgive() if worker.crashes and _lived(worker) >= settings.steady else None


def _after_end(worker: HeldWorker, ended: Ended, settings: PoolSettings, *, was_asked: bool) -> Note:
    if worker.status != SupervisedWorkerState.RUNNING or was_asked:
        return Note(str(ended))
    crashes = 1 if _lived(worker) >= settings.steady else worker.crashes + 1
    return after_crash(str(ended), crashes, settings, is_unrecoverable=ended.is_unrecoverable)


def after_crash(what: str, crashes: int, settings: PoolSettings, *, is_unrecoverable: bool = False) -> Note:
    """Say what follows from a process that has ended, or could not be started, although its row asks for one."""
    if is_unrecoverable:
        return Note(what, crashes, failed=what)
    if crashes > settings.retries:
        reason = f"the process has ended quickly {crashes} times in a row; the last time, {what}"
        return Note(reason, crashes, failed=reason)
    delay = settings.pause_before(crashes)
    return Note(f"{what}; try {crashes} of {settings.retries} to start it again after {delay:g} s", crashes, delay)


def stop_limit(spec: Mapping[str, Any], settings: PoolSettings) -> float:
    """Seconds from SIGTERM to SIGKILL: never less than what the grace of the worker itself takes."""
    grace = spec.get("grace")
    return max(settings.stop_limit, grace + FAREWELL if isinstance(grace, int | float) else 0.0)


def _is_due(worker: HeldWorker) -> bool:
    is_time = worker.restart_at is None or worker.restart_at <= worker.moment
    return is_time and worker.status == SupervisedWorkerState.RUNNING


def _lived(worker: HeldWorker) -> float:
    began = worker.process_started_at
    return 0.0 if began is None else (worker.moment - began).total_seconds()


def _silence(worker: HeldWorker, settings: PoolSettings, watched_since: datetime | None) -> str | None:
    """Say that a process was not heard of for too long, if so; only while somebody has listened."""
    began, heard = worker.process_started_at, worker.heartbeat_at
    has_spoken = heard is not None and (began is None or heard >= began)
    limit = settings.silence if has_spoken else settings.start_limit
    times = [time for time in (began, heard, watched_since) if time is not None]
    if not times:
        return None
    silent = (worker.moment - max(times)).total_seconds()
    return f"no heartbeat for {silent:.0f} s" if silent > limit else None


def _excess(worker: HeldWorker, sight: Sight) -> str | None:
    """Say that a process uses more memory than it may, if so."""
    limit = worker.spec.get("memory_limit_mb")
    if not isinstance(limit, int | float) or sight.memory is None or sight.memory <= limit * MEGABYTE:
        return None
    return f"its process uses {sight.memory / MEGABYTE:.0f} MB of memory, and its limit is {limit:g} MB"
