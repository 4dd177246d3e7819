"""Processes that tests start: their environment, their end, and waiting for their effects."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")

HELPERS = Path(__file__).parent
COMMAND = (sys.executable, "-m", "interlock")

Result = subprocess.CompletedProcess[str]


@cache
def data_dir() -> str:
    """Return the data directory of the supervisors that this process starts; it has their local token."""
    place = tempfile.mkdtemp(prefix="interlock-token-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


def run_interlock(*arguments: str, environment: Mapping[str, str], directory: Path | None = None) -> Result:
    """Run a command to its end with an empty standard input."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def clean_environment(url: str, **variables: str) -> dict[str, str]:
    """Return this process's environment without INTERLOCK_ variables, with the database URL and the helper modules."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    own = {"INTERLOCK_DATABASE_URL": url, "INTERLOCK_DATA_DIR": data_dir(), "PYTHONPATH": str(HELPERS)}
    return inherited | own | variables


@contextmanager
def running_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int | None = None,
    stderr: int = subprocess.STDOUT,
) -> Iterator[subprocess.Popen[str]]:
    """Run a command with its output in a pipe until the block ends; kill it if it still runs then."""
    process = subprocess.Popen(command, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def eventually(look: Callable[[], T], within: float = 60) -> T:
    """Poll a condition that another process fulfils until it is true; return its value."""
    deadline = time.monotonic() + within
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {within} s"
        time.sleep(0.01)
    return seen


def is_process_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def has_taken_signal(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Return whether a process has taken the signal sent to it; until then a second one of its kind would be lost."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return not any(mask >> (number - 1) & 1 for mask in pending)
