"""Starts processes, each in a group of its own, and sees to it that none is left behind.

Invariant: when the first process of a group has ended, the rest of the group is killed before its id can be given to
anybody else; when the worker dies, its warden kills all groups.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WARDEN = str(Path(__file__).with_name("reaper.py"))
# After SIGKILL only the kernel can keep a process; nobody waits for it longer than this.
UNKILLABLE = 5.0


class ProcessGroup:
    """A running process and whatever it started; `ended` becomes its exit status, negative for a signal."""

    def __init__(self, process: subprocess.Popen[bytes], strike_off: Callable[[int], None]) -> None:
        self.pid = process.pid
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        self._process = process
        self._strike_off = strike_off
        self._lock = threading.Lock()
        self._reaped = False
        name = f"interlock-wait-{self.pid}"
        threading.Thread(target=self._await_end, args=(loop,), name=name, daemon=True).start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, unless it is gone."""
        with self._lock:
            if not self._reaped:
                self._deliver(number)

    async def wait(self, patience: float) -> bool:
        """Wait for the end, at most this long; tell whether it came."""
        if not self.ended.done():
            await asyncio.wait([self.ended], timeout=patience)
        return self.ended.done()

    async def stop(self, grace: float) -> None:
        """Ask with SIGTERM, and after the grace end it with SIGKILL; at once when this is cancelled too."""
        try:
            self.send(signal.SIGTERM)
            await self.wait(grace)
        finally:
            self.send(signal.SIGKILL)
        await self.wait(UNKILLABLE)

    def _deliver(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _await_end(self, loop: asyncio.AbstractEventLoop) -> None:
        if hasattr(os, "waitid"):
            # Not reaped yet: until it is, the kernel gives the group's id to nobody else.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        with self._lock:
            self._deliver(signal.SIGKILL)
            self._strike_off(self.pid)
            status = self._process.wait()
            self._reaped = True
        with suppress(RuntimeError):  # the loop has been closed: nobody waits
            loop.call_soon_threadsafe(self._conclude, status)

    def _conclude(self, status: int) -> None:
        if not self.ended.done():
            self.ended.set_result(status)


class ProcessGroups:
    """Starts groups, and keeps a warden that knows of each as long as it lives."""

    def __init__(self) -> None:
        self._alive: set[int] = set()
        self._lock = threading.Lock()
        self._warden: subprocess.Popen[bytes] | None = None

    @property
    def warden_pid(self) -> int | None:
        """The process that kills all groups when this one is killed; there is none before the first group."""
        return None if self._warden is None else self._warden.pid

    def start(
        self,
        command: Sequence[str],
        *,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> tuple[ProcessGroup, subprocess.Popen[bytes]]:
        """Start a program in a new session; it hears no signal that a terminal sends to the worker."""
        process = subprocess.Popen(  # noqa: S603 - to run what a task's definition names is the purpose
            command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds, start_new_session=True
        )
        with self._lock:
            self._alive.add(process.pid)
            self._note(f"+{process.pid}\n")
        return ProcessGroup(process, self._strike_off), process

    async def close(self) -> None:
        """Let the warden go; it kills what is still noted."""
        with self._lock:
            warden, self._warden = self._warden, None
        if warden is not None:
            _let_go(warden)
            await asyncio.to_thread(_reap, warden)

    def _strike_off(self, pid: int) -> None:
        with self._lock:
            self._alive.discard(pid)
            if self._warden is not None:
                self._note(f"-{pid}\n")

    def _note(self, line: str) -> None:
        """Tell the warden; one that is missing, or was killed, is replaced and told of all groups."""
        if self._warden is None or not _told(self._warden, line):
            if self._warden is not None:
                _let_go(self._warden)
                _reap(self._warden)
            self._warden = subprocess.Popen(  # noqa: S603 - our own script
                [sys.executable, "-I", "-S", WARDEN],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
            _told(self._warden, "".join(f"+{pid}\n" for pid in self._alive))


def _told(warden: subprocess.Popen[bytes], line: str) -> bool:
    stream: Any = warden.stdin
    try:
        stream.write(line.encode())
    except BrokenPipeError:
        return False
    return True


def _let_go(warden: subprocess.Popen[bytes]) -> None:
    stream: Any = warden.stdin
    with suppress(BrokenPipeError):
        stream.close()


def _reap(warden: subprocess.Popen[bytes]) -> None:
    try:
        warden.wait(UNKILLABLE)
    except subprocess.TimeoutExpired:
        warden.kill()
        warden.wait()
