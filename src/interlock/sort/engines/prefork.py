"""Worker processes that are there before anybody knows what they will do, since loading their libraries takes time.

The command loads what its workers need, which it needs itself, and forks them: the libraries are loaded once for all. A
worker that is started later, when this process has threads of its own, is a new one that loads them again.

Invariant: one that gets no orders ends when the pipe from this process closes.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORKER = "interlock.sort.__main__"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # numpy's own would only be in the way
MOST = 16
ORDERS, ANSWERS = 0, 1  # file descriptors of a worker
BROKEN = 1  # the exit code of a worker that ended in no way of its own


class Forked:
    """A process that was forked, as `subprocess.Popen` gives one."""

    def __init__(self, pid: int, orders: int, answers: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(orders, "wb")
        self.stdout = os.fdopen(answers, "rb")
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)
        self._reaping = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; give its exit code, or the signal that ended it as a negative number."""
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(WORKER, timeout or 0.0)
        with self._reaping:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self.returncode

    def kill(self) -> None:
        """End it, unless it has ended."""
        with self._reaping:
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


Process = subprocess.Popen[bytes] | Forked
waiting: list[Process] = []


def foresee(arguments: list[str]) -> None:
    """Start the workers that the arguments of `sort run` will most likely ask for."""
    wanted = foreseen(arguments)
    if hasattr(os, "pidfd_open"):
        _fork(wanted)
    else:
        waiting.extend(_started() for _ in range(wanted))


def foreseen(arguments: list[str]) -> int:
    """Say how many workers the arguments will most likely ask for."""
    if any(one.startswith(("--engine", "-h", "--help")) for one in arguments):
        return 0
    wanted = usual_workers()
    for name, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if name in {"--workers", "-n"}:
            wanted = int(value) if value.isdecimal() else 0
            break
    return min(wanted, MOST)


def usual_workers() -> int:
    """Say how many workers a sort on this machine has unless told otherwise: the threads of one keep two cores busy."""
    return max(1, (os.cpu_count() or 1) // 2)


def take() -> Process:
    """Give a worker process that waits for orders."""
    return waiting.pop() if waiting else _started()


def dismiss() -> None:
    """End those that nobody took; they have done nothing yet."""
    while waiting:
        process = waiting.pop()
        process.kill()
        process.wait()
        close(process)


def close(process: Process) -> None:
    """Close the pipes to and from a process; one that lives ends with that."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _fork(workers: int) -> None:
    """Load what workers need, once, and fork them; this process must have one thread."""
    if not workers:
        return
    os.environ.update(ONE_THREAD)
    try:
        main = import_module(WORKER).main
    except ModuleNotFoundError:
        return  # whoever needs what is missing says so
    gc.freeze()  # looking for garbage would copy the pages that all share
    for _ in range(workers):
        orders, ours = os.pipe()
        heard, answers = os.pipe()
        with _deaf():
            pid = os.fork()
            if not pid:
                pipes = [pipe for other in waiting for pipe in (other.stdin, other.stdout) if pipe is not None]
                _work(main, orders, answers, [ours, heard, *(pipe.fileno() for pipe in pipes)])
        os.close(orders)
        os.close(answers)
        waiting.append(Forked(pid, ours, heard))


def _work(main: Callable[[], int], orders: int, answers: int, not_mine: list[int]) -> NoReturn:
    """Be a worker, with the orders as standard input and the answers as standard output."""
    code = BROKEN
    try:
        for other in not_mine:  # or the pipe of another worker would stay open as long as this one lives
            os.close(other)
        for pipe, place in ((orders, ORDERS), (answers, ANSWERS)):
            os.dup2(pipe, place)
            os.close(pipe)
        code = main()
    except BaseException:  # noqa: BLE001 - nothing may return to where the parent goes on
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _started() -> subprocess.Popen[bytes]:
    with _deaf():
        return subprocess.Popen(
            [sys.executable, "-m", "interlock.sort"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD},
        )


@contextmanager
def _deaf() -> Iterator[None]:
    """Have processes that are started not hear a terminal's interrupt, which is for this one: it closes the pipe."""
    # A mask is inherited; an interrupt of this process that comes meanwhile is not lost, only late.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
