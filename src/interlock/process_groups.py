"""Child processes: those that lead a process group of their own, and what a user's code left in this process's session.

Executors, the supervisor's pool, the demo and the sort's local engine start their children through this module. A child
dies with its parent in one of two ways: `ProcessGroups` runs a reaper that kills the groups of a dead parent (for
children that run a user's code), and `terminate_at_stdin_eof` makes one of our own processes shut down gracefully when
the parent's end of the pipe closes. `Descendants` ends the children that a user's code started by itself.

Invariant: after the leader of a group exits, the rest of the group is killed before the leader is reaped, hence before
the kernel can give the group's id to another process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

REAPER = str(Path(__file__).with_name("process_reaper.py"))
# A process can survive SIGKILL only inside the kernel (uninterruptible sleep); waiting longer does not help.
KILL_TIMEOUT_S = 5.0
DESCENDANTS_INTERVAL_S = 0.01
STREAM_LIMIT = 64 * 1024  # bytes of a line
STDIN = 0


class ProcessGroup:
    """A child process that leads its own session and group, with everything that it started in that group."""

    def __init__(self, process: subprocess.Popen[bytes], on_exit: Callable[[int], None] | None = None) -> None:
        """Watch a process that was started as a group leader. `on_exit` gets its pid just before it is reaped."""
        loop = asyncio.get_running_loop()
        self.process = process
        self.pid = process.pid
        self.exit_code: int | None = None  # negative: the number of the signal that killed it
        self.exited: asyncio.Future[int] = loop.create_future()
        self._on_exit = on_exit
        self._lock = threading.Lock()  # held while the group is signalled or reaped
        name = f"interlock-wait-{self.pid}"
        threading.Thread(target=self._wait_and_reap, args=(loop,), name=name, daemon=True).start()

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        on_start: Callable[[int], None] | None = None,
        on_exit: Callable[[int], None] | None = None,
    ) -> ProcessGroup:
        """Start a program in a new session: signals that the terminal sends to the parent do not reach it."""
        process = subprocess.Popen(  # noqa: S603 - the commands are our own, or named by a task's definition
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, pass_fds=pass_fds, start_new_session=True
        )
        if on_start is not None:
            on_start(process.pid)
        return cls(process, on_exit)

    def send_signal(self, number: signal.Signals, *, leader_only: bool = False) -> None:
        """Send a signal to the group, or to its leader only; does nothing after the leader exited."""
        with self._lock:
            if self.exit_code is None:
                self._send(number, leader_only=leader_only)

    def kill(self) -> None:
        """Send SIGKILL to the group."""
        self.send_signal(signal.SIGKILL)

    async def wait(self, timeout: float) -> bool:  # noqa: ASYNC109 - a timeout is an answer here, not an error
        """Wait at most `timeout` seconds for the leader to exit; return whether it did."""
        if not self.exited.done():
            await asyncio.wait([self.exited], timeout=timeout)
        return self.exited.done()

    async def stop(self, grace: float) -> None:
        """Send SIGTERM, and after `grace` seconds SIGKILL; when this is cancelled, SIGKILL at once."""
        try:
            self.send_signal(signal.SIGTERM)
            await self.wait(grace)
        finally:
            self.kill()
        await self.wait(KILL_TIMEOUT_S)

    def _send(self, number: signal.Signals, *, leader_only: bool = False) -> None:
        with suppress(ProcessLookupError, PermissionError):
            (os.kill if leader_only else os.killpg)(self.pid, number)

    def _wait_and_reap(self, loop: asyncio.AbstractEventLoop) -> None:
        if hasattr(os, "waitid"):
            # WNOWAIT leaves the leader a zombie: until it is reaped, its pid and group id are not reused.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self.process.wait()
        with self._lock:
            self._send(signal.SIGKILL)
            if self._on_exit is not None:
                self._on_exit(self.pid)
            self.exit_code = code = self.process.wait()
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(self._resolve, code)

    def _resolve(self, code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(code)


class ProcessGroups:
    """Starts process groups that die with this process, however it dies.

    A reaper process (`process_reaper.py`) knows the ids of all running groups; it starts with the first group.
    """

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._reaper: subprocess.Popen[bytes] | None = None

    @property
    def reaper_pid(self) -> int | None:
        """The process id of the reaper; None before the first group and after `close`."""
        return None if self._reaper is None else self._reaper.pid

    def start(self, command: Sequence[str], **streams: Any) -> ProcessGroup:
        """Start a program as `ProcessGroup.start` does, registered with the reaper."""
        return ProcessGroup.start(command, **streams, on_start=self._register, on_exit=self._unregister)

    async def close(self) -> None:
        """End the reaper, which kills the groups that still run."""
        with self._lock:
            reaper, self._reaper = self._reaper, None
        if reaper is not None:
            _close_stdin(reaper)
            await asyncio.to_thread(wait_or_kill, reaper, KILL_TIMEOUT_S)

    def _register(self, pid: int) -> None:
        with self._lock:
            self._running.add(pid)
            self._tell_reaper(f"+{pid}\n")

    def _unregister(self, pid: int) -> None:
        with self._lock:
            self._running.discard(pid)
            if self._reaper is not None:
                self._tell_reaper(f"-{pid}\n")

    def _tell_reaper(self, line: str) -> None:
        """Write a line to the reaper; start one if there is none or it was killed, and register all groups with it."""
        if self._reaper is not None:
            if _write(self._reaper, line):
                return
            _close_stdin(self._reaper)
            wait_or_kill(self._reaper, KILL_TIMEOUT_S)
        self._reaper = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-I", "-S", REAPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        _write(self._reaper, "".join(f"+{pid}\n" for pid in self._running))


def _write(process: subprocess.Popen[bytes], text: str) -> bool:
    stdin: Any = process.stdin
    try:
        stdin.write(text.encode())
    except BrokenPipeError:
        return False
    return True


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    stdin: Any = process.stdin
    with suppress(BrokenPipeError):
        stdin.close()


class Descendants:
    """The processes that a user's code starts from now on in the session of this process, directly or not.

    A process that was there before, one that leads a session of its own, and one that detached itself from its parent
    are not among them. They are found in /proc: on systems without it there are none.
    """

    def __init__(self) -> None:
        self._session = os.getsid(0)
        self._spared = self._find()

    def end(self, grace: float) -> list[int]:
        """Send SIGTERM, and after `grace` seconds SIGKILL; return the ids of the processes that got one. Blocks."""
        ended: set[int] = set()
        deadline = time.monotonic() + grace
        signalled: set[_Process] = set()
        while left := self._left():
            number = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
            for process in left if number is signal.SIGKILL else left - signalled:
                process.send(number)
            signalled |= left
            ended.update(process.pid for process in left)
            if time.monotonic() > deadline + KILL_TIMEOUT_S:
                break
            time.sleep(DESCENDANTS_INTERVAL_S)
        return sorted(ended)

    def kill(self) -> None:
        """Send SIGKILL."""
        for process in self._left():
            process.send(signal.SIGKILL)

    def _left(self) -> set[_Process]:
        return self._find() - self._spared

    def _find(self) -> set[_Process]:
        children: dict[int, list[_Process]] = {}
        for process in _read_processes(self._session):
            children.setdefault(process.parent, []).append(process)
        found: set[_Process] = set()
        parents = [os.getpid()]
        while parents:
            below = children.get(parents.pop(), [])
            found.update(below)
            parents += [process.pid for process in below]
        return found


class _Process(NamedTuple):
    """A process as /proc shows it; the start time tells it from a later one with its id."""

    pid: int
    start_time: int
    parent: int

    def send(self, number: signal.Signals) -> None:
        now = _read_process(self.pid)
        if now is not None and now[0].start_time == self.start_time:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def _read_processes(session: int) -> Iterator[_Process]:
    """Read the processes of a session that have not exited."""
    for place in Path("/proc").glob("[0-9]*"):
        read = _read_process(int(place.name))
        if read is not None and read[1] == session:
            yield read[0]


def _read_process(pid: int) -> tuple[_Process, int] | None:
    """Read a process and its session; None if it has exited."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, parent, _, session, *more = stat.rpartition(b")")[2].split()  # the name before it may contain anything
    return None if state in {b"Z", b"X"} else (_Process(pid, int(more[15]), int(parent)), int(session))


class Waitable(Protocol):
    """A process that can be waited for and killed, as `subprocess.Popen`."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or raise `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """Send SIGKILL, unless the process has exited."""


def wait_or_kill(process: Waitable, timeout: float) -> int:
    """Wait for a process that was asked to end; kill it after `timeout` seconds. Return its exit code. Blocks."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def describe_exit(code: int) -> str:
    """Describe an exit code: `exited with code 3` or `was killed by SIGKILL`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


async def open_stream_reader(
    pipe: IO[bytes], limit: int = STREAM_LIMIT
) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Read a child's pipe through the event loop, lines of at most `limit` bytes; the caller closes the transport."""
    reader = asyncio.StreamReader(limit=limit)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    return reader, transport


def terminate_at_stdin_eof() -> None:
    """Send SIGTERM to this process when standard input ends, which happens when the parent exits, however it does."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(STDIN, 1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="interlock-parent", daemon=True).start()
