"""The processes of workers: started here, or found alive after the supervisor that had started them was gone.

Invariant: a signal goes to a process only after it was seen that the process is still the one that was meant.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import SupervisedWorkerState
from interlock.supervisor.pool import settings as metrics
from interlock.supervisor.pool.reconcile import Sight, stop_limit
from interlock.telemetry import log
from interlock.worker.run import MAX_EXIT_REASON_BYTES, UNRECOVERABLE, Assignment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.config import Config
    from interlock.store.supervision import HeldWorker
    from interlock.supervisor.pool.settings import PoolSettings


# SECTION supervisor/system
# What the operating system tells of a process that may be somebody else's child, or nobody's any more.
#
# Invariant: a process is known by its id and its birth together, because ids are used again. One that has ended and
# that
# nobody has reaped counts as ended.

PROC = Path("/proc")
HAS_PROC = sys.platform == "linux"
AFTER_NAME = 2  # the first field of /proc/PID/stat after the name, which may hold anything, is the third
STATE, BORN = 3 - AFTER_NAME - 1, 22 - AFTER_NAME - 1
ENDED = ("Z", "X")
PS_TIMEOUT = 5.0


def name_host() -> str:
    """Name the place in which process ids mean something: this host since its boot, or this container."""
    name = socket.gethostname()
    if not HAS_PROC:
        return name
    with suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
        return f"{name}/{boot}/{(PROC / 'self/ns/pid').stat().st_ino}"
    return name


def birth_of(pid: int) -> str | None:
    """Tell when a process began, in words that another of the same id does not share; None when there is none."""
    if not HAS_PROC:
        return _ps(pid, "lstart=")
    fields = _stat(pid)
    return None if fields is None or fields[STATE] in ENDED else fields[BORN]


def memory_of(pid: int) -> int | None:
    """Give the bytes of memory in which a process resides; None when there is none."""
    if not HAS_PROC:
        kilobytes = _ps(pid, "rss=")
        return int(kilobytes) * 1024 if kilobytes else None
    try:
        pages = int((PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int) -> list[str] | None:
    try:
        said = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return said.rpartition(")")[2].split()


def _ps(pid: int, what: str) -> str | None:
    """Ask ps, where there is no /proc."""
    try:
        said = subprocess.run(  # noqa: S603 - numbers and words of our own
            ["/bin/ps", "-o", f"state=,{what}", "-p", str(pid)],
            capture_output=True,
            text=True,
            timeout=PS_TIMEOUT,
            check=False,
        ).stdout.split(maxsplit=1)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if len(said) < AFTER_NAME or said[0].startswith(ENDED) else said[1].strip()


MODULE = "interlock.worker"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process has ended. Of one that was not this supervisor's own child, the code is not known."""

    code: int | None = None
    said: str = ""

    @property
    def is_unrecoverable(self) -> bool:
        """Whether a restart cannot help."""
        return self.code == UNRECOVERABLE

    def __str__(self) -> str:
        if self.code is None:
            how = "it has ended"
        elif self.code < 0:
            how = f"it was killed by {_signal_name(-self.code)}"
        else:
            how = f"it has ended with exit code {self.code}"
        return f"{how}: {self.said}" if self.said else how


@dataclass(slots=True, eq=False)
class Child:
    """One process of one generation of a row."""

    worker_id: str
    generation: int
    pid: int
    birth: str | None
    # Not asyncio's own, which kills what is still running when it is thrown away. None: another supervisor started it.
    process: subprocess.Popen[bytes] | None = None
    heard: int | None = None  # where its last words arrive
    ended: Ended | None = None
    asked_at: float | None = None  # to stop, by the monotonic clock
    stop_limit: float = 30.0  # seconds that it gets from then on
    killed: bool = False
    draining: bool = False  # it is to end as soon as it holds nothing, unless its worker is resumed before

    def look(self) -> Ended | None:
        """Tell how it has ended; None while it lives."""
        if self.ended is None and self.process is not None:
            code = self.process.poll()
            if code is not None:
                self.ended = Ended(code, self._last_words())
                self.close()
        elif self.ended is None and birth_of(self.pid) != self.birth:
            self.ended = Ended()
        return self.ended

    def memory(self) -> int | None:
        """Give the bytes of memory that it uses; None when that is not known."""
        return memory_of(self.pid) if self.look() is None else None

    def ask_to_stop(self, now: float) -> None:
        """Let it finish what it has, within its grace; asked again, it does not wait."""
        self.asked_at = now if self.asked_at is None else self.asked_at
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it now."""
        self.killed = True
        self._send(signal.SIGKILL)

    def disown(self) -> None:
        """Let it go on by itself."""
        self.close()
        if self.process is not None and self.process.poll() is None:
            self.process.returncode = 0  # else it would be warned of as forgotten

    def close(self) -> None:
        """Close what it was heard over. Safe twice."""
        if self.heard is not None:
            os.close(self.heard)
            self.heard = None
        if self.process is not None and self.process.stdin is not None and self.ended is not None:
            self.process.stdin.close()

    def _last_words(self) -> str:
        said = b""
        if self.heard is not None:
            with suppress(BlockingIOError):  # a program that a handler has started may still have the other end
                said = os.read(self.heard, MAX_EXIT_REASON_BYTES)
        return said.decode(errors="replace").strip()

    def _send(self, number: signal.Signals) -> None:
        if self.look() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def environment_of(config: Config, spec: Mapping[str, Any]) -> dict[str, str]:
    """Give the environment of a process that is set up like this one, and by what its row asks for."""
    namespaces = spec.get("namespaces") or config.namespaces
    wanted = {
        "DATABASE_URL": config.database_url,
        "DATA_DIR": config.data_dir,
        "LOG_LEVEL": config.log_level,
        "LOG_FORMAT": config.log_format,
        "WAKE_MODE": config.wake_mode,
        "APP": spec.get("app") or config.app,
        "NAMESPACES": ",".join(map(str, namespaces)) if isinstance(namespaces, list | tuple) else namespaces,
        "CONCURRENCY": spec.get("concurrency", config.concurrency),
        "LEASE": spec.get("lease", config.lease),
        "GRACE": spec.get("grace", config.grace),
    }
    return os.environ | {f"INTERLOCK_{name}": str(value) for name, value in wanted.items() if value is not None}


def start_child(
    worker: HeldWorker, generation: int, instance: str, *, environment: Mapping[str, str], tied: bool
) -> Child:
    """Start a process for a row. OSError when the system refuses."""
    heard, said = os.pipe()
    os.set_blocking(heard, False)
    assignment = Assignment(worker.id, generation, instance, tied=tied, last_words=said)
    try:
        process = subprocess.Popen(  # noqa: S603 - this interpreter and our own module
            # -P: no file in this directory may take its place
            [sys.executable, "-P", "-m", MODULE, *assignment.arguments],
            stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
            env=dict(environment),
            pass_fds=(said,),
            start_new_session=True,  # Ctrl-C is for the supervisor to hear, which passes on what follows from it
        )
    except BaseException:
        os.close(heard)
        raise
    finally:
        os.close(said)
    return Child(worker.id, generation, process.pid, birth_of(process.pid), process, heard)


def adopt_child(worker: HeldWorker, host: str) -> Child | None:
    """Find the process that a row tells of; None when it is not here any more."""
    if worker.pid is None or worker.birth is None or worker.host != host or birth_of(worker.pid) != worker.birth:
        return None
    return Child(worker.id, worker.generation, worker.pid, worker.birth)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# SECTION supervisor/crew
# All processes of one pool: looked at, asked to stop, and in the end gone or left to others.
#
# Invariant: a process whose row another supervisor has by now is left alone; only its end is still heard, because
# nobody
# but its parent can. When the crew is disbanded, what is not to be left is dead.

HURRY = 8.0  # seconds that processes get once somebody is in a hurry
AGAIN = 0.5  # seconds after which they are told so again
LOOK = 0.05


class Crew:
    """The processes, by the ids of their rows."""

    def __init__(self, supervisor_id: str, host: str, config: Config, settings: PoolSettings) -> None:
        self._supervisor_id = supervisor_id
        self._host = host
        self._config = config
        self._settings = settings
        self._left: list[Child] = []  # started here, and in the hands of another supervisor by now
        self._in_a_hurry = False
        self.children: dict[str, Child] = {}

    def start(self, worker: HeldWorker, generation: int, instance: str) -> Child:
        """Start the process of a row. OSError when the system refuses."""
        environment = environment_of(self._config, worker.spec)
        child = start_child(worker, generation, instance, environment=environment, tied=self._settings.tied)
        self._take_on(worker, child)
        metrics.supervised_process_starts_total.inc()
        self._log("worker_process_started", child)
        return child

    def see(self, worker: HeldWorker) -> Sight:
        """Look at the process of a row, which may be one of an earlier supervisor."""
        child = self.children.get(worker.id)
        if child is None and worker.pid is not None:
            child = adopt_child(worker, self._host)
            if child is None:
                return Sight(ended=Ended())
            self._take_on(worker, child)
            metrics.supervised_process_adoptions_total.inc()
            self._log("worker_process_adopted", child)
        if child is None:
            return Sight()
        ended = child.look()
        asked_for = None if child.asked_at is None else time.monotonic() - child.asked_at
        child.draining &= worker.status == SupervisedWorkerState.PAUSED
        return Sight(ended is None, ended, child.memory(), asked_for, child.draining)

    def keep_only(self, held: Mapping[str, int]) -> None:
        """Leave processes alone whose rows another supervisor has by now, or has given another process."""
        for worker_id, child in list(self.children.items()):
            if held.get(worker_id) != child.generation:
                self._log("worker_process_left", child)
                self._left.append(self.children.pop(worker_id))
        self._left = [child for child in self._left if child.look() is None]

    def kill(self, worker: HeldWorker) -> None:
        """End a process that does not end."""
        child = self.children[worker.id]
        if not child.killed:
            log.warning("worker_process_killed", supervisor_id=self._supervisor_id, worker_id=worker.id, pid=child.pid)
            metrics.supervised_process_kills_total.inc()
        child.kill()

    def hurry(self) -> None:
        """Have processes that stop not wait for running tasks."""
        self._in_a_hurry = True
        for child in self.children.values():
            child.asked_at = None  # the time for it begins anew
            child.ask_to_stop(time.monotonic())

    async def stop(self) -> None:
        """Ask all to stop, and see that they do."""
        for child in self.children.values():
            if child.asked_at is None:
                child.ask_to_stop(time.monotonic())
        repeated_at = time.monotonic()
        while any(child.look() is None for child in self.children.values()):
            now = time.monotonic()
            if self._in_a_hurry and now - repeated_at >= AGAIN:
                # two signals that come at once are one: who has heard but the first would take his time
                repeated_at = now
                for child in self.children.values():
                    child.ask_to_stop(now)
            self._kill_overdue(now)
            await asyncio.sleep(LOOK)

    def _kill_overdue(self, now: float) -> None:
        for child in self.children.values():
            limit = HURRY if self._in_a_hurry else child.stop_limit
            if child.asked_at is not None and now - child.asked_at > limit:
                child.kill()

    def disband(self) -> None:
        """Kill what is still here, whatever went wrong before; what is to be left is left."""
        for child in self.children.values():
            if child.look() is None and not self._settings.leave:
                child.kill()
        for child in (*self.children.values(), *self._left):
            child.disown()

    def _take_on(self, worker: HeldWorker, child: Child) -> None:
        child.stop_limit = stop_limit(worker.spec, self._settings)
        self.children[worker.id] = child

    def _log(self, message: str, child: Child) -> None:
        log.info(message, supervisor_id=self._supervisor_id, worker_id=child.worker_id, pid=child.pid)
