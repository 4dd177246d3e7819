"""Prefork of the worker processes of a local sort, before the command line is parsed.

The command imports the libraries that it and its workers need, once, and forks the workers. A worker that is needed
later, when this process has threads and cannot fork safely, is a new interpreter that imports them again.

Invariant: a worker that gets no instructions exits when its pipe from this process closes.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORKER_MODULE = "interlock.sort.__main__"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # numpy's own threads would compete with ours
MAX_PREFORKED = 16  # workers
STDIN, STDOUT = 0, 1  # file descriptors of a worker
CRASHED = 1  # exit code of a worker whose main function raised


class ForkedProcess:
    """A forked child process with the interface of `subprocess.Popen`.

    `process_groups.ProcessGroup` needs an event loop and a thread for each child; a fork must come before any thread.
    """

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")
        self.stdout = os.fdopen(stdout, "rb")
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._reap_lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit; return the exit code, or the negative number of the signal that ended it."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(WORKER_MODULE, timeout or 0.0)
        with self._reap_lock:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self.returncode

    def kill(self) -> None:
        """Kill it, unless it has exited."""
        with self._reap_lock:
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


Process = subprocess.Popen[bytes] | ForkedProcess
idle_workers: list[Process] = []


def start_workers(arguments: list[str]) -> None:
    """Start the workers that the arguments of `run` will most likely need."""
    count = predict_worker_count(arguments)
    if hasattr(os, "pidfd_open"):
        _fork_workers(count)
    else:
        idle_workers.extend(_spawn_worker() for _ in range(count))


def predict_worker_count(arguments: list[str]) -> int:
    """Return how many local workers the arguments of `run` will most likely need."""
    if any(argument.startswith(("-h", "--help")) for argument in arguments):
        return 0
    if _value_of(arguments, "--engine") not in {None, "local"}:
        return 0
    given = _value_of(arguments, "--workers", "-w")
    if given is None:
        return min(default_worker_count(), MAX_PREFORKED)
    count = int(given) if given.isdecimal() else 0
    return min(count, MAX_PREFORKED)


def _value_of(arguments: list[str], name: str, short: str = "") -> str | None:
    """Return the value of an option in any of the forms that a command line has; None if it is not given."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument in {name, short}:
            return following
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
        if short and argument.startswith(short):
            return argument.removeprefix(short)
    return None


def default_worker_count() -> int:
    """Return the number of workers without `--workers`: the threads of one worker keep two cores busy."""
    return max(1, (os.cpu_count() or 1) // 2)


def take_worker() -> Process:
    """Return a worker process that waits for its instructions: a preforked one, or a new one."""
    return idle_workers.pop() if idle_workers else _spawn_worker()


def discard_workers() -> None:
    """Kill the preforked workers that were not taken; they have done nothing yet."""
    while idle_workers:
        process = idle_workers.pop()
        process.kill()
        process.wait()
        close_pipes(process)


def close_pipes(process: Process) -> None:
    """Close the pipes to and from a worker; one that still runs exits."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # one that was killed has not read all that was written; it is closed
                pipe.close()


def _fork_workers(count: int) -> None:
    """Import the worker module and fork; this process must have only one thread."""
    if not count:
        return
    os.environ.update(ONE_THREAD)
    try:
        main = import_module(WORKER_MODULE).main
    except ModuleNotFoundError:
        return  # the command reports the missing library
    gc.freeze()  # a collection would write to, and so copy, the pages that all processes share
    for _ in range(count):
        worker_stdin, stdin = os.pipe()
        stdout, worker_stdout = os.pipe()
        with _sigint_blocked():
            pid = os.fork()
            if not pid:
                inherited = [pipe for other in idle_workers for pipe in (other.stdin, other.stdout) if pipe is not None]
                to_close = [stdin, stdout, *(pipe.fileno() for pipe in inherited)]
                _run_forked_worker(main, worker_stdin, worker_stdout, to_close)
        os.close(worker_stdin)
        os.close(worker_stdout)
        idle_workers.append(ForkedProcess(pid, stdin, stdout))


def _run_forked_worker(main: Callable[[], int], stdin: int, stdout: int, to_close: list[int]) -> NoReturn:
    """Run the worker's main function in the forked child, and exit."""
    code = CRASHED
    try:
        for descriptor in to_close:  # an inherited copy would keep another worker's pipe open
            os.close(descriptor)
        for pipe, target in ((stdin, STDIN), (stdout, STDOUT)):
            if pipe != target:  # the command may have been started without standard input
                os.dup2(pipe, target)
                os.close(pipe)
        code = main()
    except BaseException:  # noqa: BLE001 - the child must never return into the parent's code
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _spawn_worker() -> subprocess.Popen[bytes]:
    with _sigint_blocked():
        return subprocess.Popen(
            [sys.executable, "-m", "interlock.sort"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD},
        )


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Start processes that ignore Ctrl-C in the terminal: this process handles it and closes their pipes."""
    # The signal mask is inherited. A SIGINT to this process meanwhile stays pending and is delivered afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
