"""Starts Python processes of Interlock by a fork of one with all imports done, which saves a second of CPU for each.

They are real processes and children of the test process: it can wait for them, signal them and reap them. Inside
`warm_processes()` every `subprocess.Popen` of a known kind is started so, wherever in the product it is called. Tests
of how the interpreter starts use plain processes instead (`@pytest.mark.cold`).
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from contextlib import contextmanager, redirect_stderr, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HELPERS = Path(__file__).parent
MODULES = ("interlock", "interlock.worker", "interlock.worker.executors.child")
# Imported before the first fork, with the modules of the commands: they cost most of the start of a process.
PRELOADED = (
    *("interlock.worker.run", "interlock.worker.executors.child", "interlock.orchestrator.run"),
    *("interlock.supervisor.run", "interlock.dashboard.app", "interlock.cli.run"),
    *("interlock.cli.sort.implementation", "interlock.sort.__main__", "interlock.sort.engines.interlock"),
    *("interlock.sort.data.generate", "interlock.sort.data.validate", "interlock.sort.engines.local"),
    *("rich.live", "rich.progress", "rich.table", "psycopg_binary"),
    *("uvicorn", "uvicorn.protocols.http.h11_impl", "uvicorn.lifespan.on"),
    *("multiprocessing.context", "concurrent.futures.process", "concurrent.futures.thread"),
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot fork safely
READ_AT_START = ("PYTHONHASHSEED", "PYTHONDEVMODE", "PYTHONWARNINGS", "PYTHONMALLOC")
MAX_REQUEST_BYTES, MAX_FDS, FIRST_SPARE_FD = 1 << 18, 64, 512
PR_SET_CHILD_SUBREAPER = 36
MAX_COMMAND_LINE_BYTES = 2000
ARG_START_FIELD, ARG_END_FIELD = 45, 46  # of /proc/PID/stat, counted from the field after the name


# --- in the test process


class ForkServer:
    """The fork server and the socket to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("INTERLOCK_", "PYTHON"))}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), " " * MAX_COMMAND_LINE_BYTES],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=inherited | ONE_THREAD,
                start_new_session=True,
            )

    def start(self, request: dict[str, Any], fds: list[int]) -> int:
        """Start a process with these files; return its id. It is a child of this process."""
        with self._lock:
            # The process that forks it exits at once, and then its parent is the nearest subreaper.
            set_subreaper(True)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], fds)
                pid = int(self._socket.recv(64))
            finally:
                set_subreaper(False)
        if not pid:
            raise RuntimeError(
                f"the fork server could not start {request['command']}; its errors are on standard error"
            )
        return pid


@cache
def fork_server() -> ForkServer:
    """Return the fork server of this test process; it ends when its socket is closed."""
    return ForkServer()


def set_subreaper(wanted: bool) -> None:  # noqa: FBT001 - the argument of the system call
    """Make orphans below this process its children, or those of init."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def is_known(command: Any, env: Any) -> bool:
    """Return whether a command can be started by a fork."""
    if not isinstance(command, list | tuple) or not command or command[0] != sys.executable:
        return False
    if any(name in (os.environ if env is None else env) for name in READ_AT_START):
        return False
    match [str(argument) for argument in command[1:] if argument != "-P"]:
        case ["-m", module, *_]:
            return module in MODULES
        case ["-c", program, *_]:
            return "interlock" in program
        case [script, *_]:
            return Path(script).parent == HELPERS and script != __file__
    return False


@contextmanager
def warm_processes() -> Iterator[None]:
    """Start processes of known kinds by a fork while the block runs; only on Linux, and as usual elsewhere."""
    if sys.platform != "linux":
        yield
        return
    plain: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # noqa: SLF001

    def execute(process: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                env: Any, startupinfo: Any, creationflags: Any, shell: Any, *rest: Any) -> None:  # fmt: skip
        streams, starts_session = rest[:6], rest[-2]
        if shell or executable is not None or preexec_fn is not None or not is_known(args, env):
            plain(
                *(process, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags),
                *(shell, *rest),
            )
            return
        p2cread, _, _, c2pwrite, _, errwrite = streams
        given = [standard if fd == -1 else fd for standard, fd in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "command": [str(argument) for argument in args[1:]],
            "environment": dict(os.environ if env is None else env),
            "directory": str(Path.cwd() if cwd is None else cwd),
            "targets": [0, 1, 2, *pass_fds],
            "starts_session": bool(starts_session),
        }
        process.pid = fork_server().start(request, [*given, *pass_fds])
        process._child_created = True  # noqa: SLF001 - as the method that this one replaces
        process._close_pipe_fds(*streams)  # noqa: SLF001

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]  # noqa: SLF001
    try:
        yield
    finally:
        subprocess.Popen._execute_child = plain  # type: ignore[attr-defined]  # noqa: SLF001


# --- in the fork server


def serve(line: socket.socket) -> None:
    """Fork a process for every request, until the socket is closed."""
    while True:
        said, fds, *_ = socket.recv_fds(line, MAX_REQUEST_BYTES, MAX_FDS)
        if not said:
            return
        while not said.endswith(b"\n"):
            said += line.recv(MAX_REQUEST_BYTES)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                become(json.loads(said), fds, writer)
            os._exit(0)
        for fd in (*fds, writer):
            os.close(fd)
        os.waitpid(middle, 0)
        line.sendall(os.read(reader, 64) or b"0")
        os.close(reader)


def become(request: dict[str, Any], fds: list[int], ready: int) -> NoReturn:
    """Run the command in this forked process."""
    if request["starts_session"]:
        os.setsid()
    show_command([sys.executable, *request["command"]])
    arrange_files(fds, request["targets"], ready)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    open_standard_streams()
    time.tzset()
    random.seed()
    try:
        run(request["command"])
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        leave(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - shown like an uncaught exception
        sys.excepthook(*sys.exc_info())
        leave(1)
    leave(0)


def show_command(command: list[str]) -> None:
    """Show the command in /proc/PID/cmdline, which tests read, instead of that of the fork server."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[ARG_START_FIELD]), int(fields[ARG_END_FIELD])
    text = b"\0".join(os.fsencode(word) for word in command)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def arrange_files(fds: list[int], targets: list[int], ready: int) -> None:
    """Give the received files their numbers, close all others, and report the id of this process."""
    spare = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_SPARE_FD) for fd in (ready, *fds)]
    os.closerange(3, FIRST_SPARE_FD)
    for fd, target in zip(spare[1:], targets, strict=True):
        os.dup2(fd, target)
    os.write(spare[0], str(os.getpid()).encode())
    os.closerange(spare[0], max(spare) + 1)


def open_standard_streams() -> None:
    """Replace the streams of the fork server, which know whether its files are terminals or can be searched."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = open(fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        stream.reconfigure(
            line_buffering=fd == 2 or stream.isatty(), write_through=bool(os.environ.get("PYTHONUNBUFFERED"))
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(command: list[str]) -> None:
    """Do what the interpreter does with its arguments."""
    path = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    is_safe = command[0] == "-P"
    arguments = command[1:] if is_safe else command
    match arguments:
        case ["-m", module, *rest]:
            sys.path[:0] = path if is_safe else [str(Path.cwd()), *path]
            sys.argv = [module, *rest]
            if module == "interlock" and "sort" in rest and "run" in rest:
                prefork_sort_workers(rest)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", program, *rest]:
            sys.path[:0] = path if is_safe else ["", *path]
            sys.argv = ["-c", *rest]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), main.__dict__)  # noqa: S102 - that is what -c means
        case [script, *rest]:
            sys.path[:0] = path if is_safe else [str(Path(script).parent), *path]
            sys.argv = [script, *rest]
            runpy.run_path(script, run_name="__main__")


def prefork_sort_workers(arguments: list[str]) -> None:
    """Fork the workers of a local sort too, as `interlock-sort` does."""
    from interlock.sort.engines import prefork  # noqa: PLC0415 - only forked processes need it

    prefork.start_workers(arguments)
    atexit.register(prefork.discard_workers)


def leave(code: int) -> NoReturn:
    """Exit like the interpreter, without tearing down the modules shared with the parent."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for threads
    atexit._run_exitfuncs()  # noqa: SLF001 - os._exit skips them
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def load() -> None:
    """Import what processes need and exempt it from garbage collection."""
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    from interlock.cli.main import COMMANDS, GROUPS, create_app  # noqa: PLC0415 - only the fork server needs it

    every_command = create_app((*COMMANDS, *GROUPS))
    with redirect_stderr(StringIO()), suppress(SystemExit):
        every_command(["tasks", "list", "--limit", "invalid"])  # imports what prints errors
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    load()
    serve(socket.socket(fileno=int(sys.argv[1])))
