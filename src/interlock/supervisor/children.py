"""The processes of workers: started here, or found alive after the supervisor that had started them was gone.

Invariant: a signal goes to a process only after it was seen that the process is still the one that was meant.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlock.supervisor.system import birth_of, memory_of
from interlock.worker.assignment import LONGEST_WORD, UNRECOVERABLE, Assignment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.config import Config
    from interlock.store.supervision import HeldWorker

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
                said = os.read(self.heard, LONGEST_WORD)
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
