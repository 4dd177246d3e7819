"""Processes of the sort, forked from one that has all imports done: each saves half a second of CPU time.

They are real processes, each in a session of its own. Tests of how a command starts run the command itself instead.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from cli_forkserver import leave

MAX_REQUEST_BYTES = 1 << 16
LOCK = threading.Lock()  # of the socket to the fork server
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot fork safely
PRELOADED = (
    "interlock.cli.main", "interlock.cli.sort.command", "interlock.cli.sort.implementation", "interlock.sort.__main__",
    "interlock.sort.data.generate", "interlock.sort.data.validate", "interlock.sort.engines.interlock",
    "interlock.sort.engines.local", "interlock.sort.master.master", "interlock.sort.worker.worker",
    "interlock.worker", "interlock.orchestrator", "rich.progress", "rich.live", "rich.table", "sort_process",
)  # fmt: skip


class ForkedProcess(subprocess.Popen[str]):
    """A process that the fork server of the sort makes; `args` starts with "module:function", its main function."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        cwd, env = others[4:6]
        pipes: tuple[int, ...] = others[9:15]  # two each of stdin, stdout and stderr; -1 is none
        request = {"arguments": list(args), "directory": cwd or str(Path.cwd()), "environment": dict(env or os.environ)}
        read, write = os.pipe()
        try:
            fds = [write, max(pipes[0], 0), pipes[3], pipes[5]]
            with LOCK:
                socket.send_fds(fork_server().line, [json.dumps(request).encode() + b"\n"], fds)
        finally:
            os.close(write)
        self._answers = os.fdopen(read, "rb", buffering=0)
        self.pid = int(self._answers.readline())
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._answers], [], [], 0)[0]:
            return 0, 0
        with self._answers:
            return self.pid, int(self._answers.readline())

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


class ForkServer:
    """The process that forks, and the socket to it; it ends when the socket is closed."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=inherited | ONE_THREAD | {"PYTHONPATH": str(Path(__file__).parent)},
                start_new_session=True,
            )


@cache
def fork_server() -> ForkServer:
    """Return the fork server of this test process."""
    return ForkServer()


def serve(line: socket.socket) -> None:
    """Fork a process for every request and report each exit, until the socket is closed."""
    answers: dict[int, int] = {}
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        for ready in select.select([line.fileno(), woken], [], [])[0]:
            if ready == woken:
                os.read(woken, 4096)
                report_exits(answers)
                continue
            request, fds, *_ = socket.recv_fds(line, MAX_REQUEST_BYTES, 4)
            if not request:
                return
            while not request.endswith(b"\n"):
                request += line.recv(MAX_REQUEST_BYTES)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                line.close()
                for fd in (woken, wake, fds[0], *answers.values()):
                    os.close(fd)
                become(json.loads(request), fds[1:])
            for fd in fds[1:]:
                os.close(fd)
            answers[pid] = fds[0]
            os.write(fds[0], f"{pid}\n".encode())


def report_exits(answers: dict[int, int]) -> None:
    """Write the status of each process that has ended to its pipe."""
    while answers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        answer = answers.pop(pid)
        try:
            os.write(answer, f"{status}\n".encode())
        except BrokenPipeError:
            pass  # the test did not wait for it
        finally:
            os.close(answer)


def become(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Run the main function of a request in this forked process."""
    os.setsid()
    for standard, fd in enumerate(fds):
        os.dup2(fd, standard)
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    random.seed()
    main, *sys.argv = request["arguments"]
    module, _, function = main.partition(":")
    try:
        code = getattr(import_module(module), function)()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) or end.code is None else 1
    except BaseException:  # noqa: BLE001 - shown like an uncaught exception
        sys.excepthook(*sys.exc_info())
        code = 1
    leave(code or 0)


def run_command() -> None:
    """Run `interlock`; a sort on this machine takes workers that are forked at once, like those of `interlock-sort`."""
    from interlock.__main__ import main  # noqa: PLC0415 - only the fork server needs it
    from interlock.sort.engines import prefork  # noqa: PLC0415 - only the fork server needs it

    limits = json.loads(os.environ.pop("SORT_TEST_LIMITS", "{}"))
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    if "run" in sys.argv:
        prefork.start_workers(sys.argv)
    try:
        main()
    finally:
        prefork.discard_workers()


def load() -> None:
    """Import everything that the processes need, and exempt it from garbage collection."""
    import gc  # noqa: PLC0415 - only the fork server needs it

    for module in PRELOADED:
        import_module(module)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    load()
    serve(socket.socket(fileno=int(sys.argv[1])))
