"""A fork server for commands: processes forked from one with all imports done, which saves a second for each.

They are real processes. Tests of how a command starts or stops run the command itself instead.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import redirect_stderr, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

MAX_REQUEST_BYTES = 1 << 16

Result = subprocess.CompletedProcess[str]


class Forks:
    """The fork server process and the socket to it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=inherited | {"PYTHONPATH": str(Path(__file__).parent)},
            )
        self._answers = self._line.makefile("r", encoding="utf-8")

    def run(self, arguments: list[str], environment: dict[str, str], seconds: float) -> Result:
        """Run a command to its end with an empty standard input."""
        asked = {"arguments": arguments, "environment": environment, "directory": str(Path.cwd())}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            socket.send_fds(self._line, [json.dumps(asked).encode() + b"\n"], [out.fileno(), err.fileno()])
            self._line.settimeout(seconds)
            process = int(self._answers.readline())
            try:
                code = int(self._answers.readline())
            except TimeoutError:
                os.kill(process, signal.SIGKILL)
                forks.cache_clear()  # its late reply must not be read as that of the next command
                raise
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(["interlock", *arguments], code, *texts)


@cache
def forks() -> Forks:
    """Return the fork server of this test process; it ends when its socket is closed."""
    return Forks()


def serve(line: socket.socket) -> None:
    """Fork a process for every command that arrives, until the socket is closed."""
    while True:
        said, fds, *_ = socket.recv_fds(line, MAX_REQUEST_BYTES, 2)
        if not said:
            return
        while not said.endswith(b"\n"):
            said += line.recv(MAX_REQUEST_BYTES)
        process = os.fork()
        if process == 0:
            line.close()
            become(json.loads(said), fds)
        for fd in fds:
            os.close(fd)
        line.sendall(f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def become(asked: dict[str, Any], fds: list[int]) -> NoReturn:
    """Run the command in this forked process."""
    from interlock.__main__ import main  # noqa: PLC0415 - only the fork server needs it

    for standard, fd in enumerate(fds, start=1):
        os.dup2(fd, standard)
        os.close(fd)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["directory"])
    random.seed()
    sys.argv = ["interlock", *asked["arguments"]]
    try:
        main()
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
    except BaseException:  # noqa: BLE001 - shown like an uncaught exception
        sys.excepthook(*sys.exc_info())
    leave(1)


def leave(code: int) -> NoReturn:
    """Exit like the interpreter, without tearing down the modules shared with the parent."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for threads
    atexit._run_exitfuncs()  # noqa: SLF001 - os._exit skips them
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def load() -> None:
    """Import everything that commands need, lazy imports too, and exempt it from garbage collection."""
    from interlock.cli.main import COMMANDS, GROUPS, create_app  # noqa: PLC0415 - only the fork server needs it

    everything = create_app((*COMMANDS, *GROUPS))
    with redirect_stderr(StringIO()), suppress(SystemExit):
        everything(["tasks", "list", "--limit", "invalid"])
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    load()
    serve(socket.socket(fileno=int(sys.argv[1])))
