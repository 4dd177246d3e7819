"""Facts about a process that need not be our child: start time, memory, and the host on which its pid is valid.

Invariant: a process is identified by pid and start time together, because pids are reused. A process that exited and
is not reaped yet counts as gone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
HAS_PROC = sys.platform == "linux"
# /proc/PID/stat: the second field is the name, which may hold spaces; these count from the field after it
STATE_FIELD, START_TIME_FIELD = 0, 19
EXITED_STATES = ("Z", "X")  # zombie, dead
PS_TIMEOUT_S = 5.0


def host_id() -> str:
    """Return an id of the scope in which pids are valid: this host since its boot, or this container."""
    name = socket.gethostname()
    if not HAS_PROC:
        return name
    with suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
        return f"{name}/{boot}/{(PROC / 'self/ns/pid').stat().st_ino}"
    return name


def read_start_time(pid: int) -> str | None:
    """Return the start time of a process, in a form to compare with; None if there is no such process."""
    if not HAS_PROC:
        return _run_ps(pid, "lstart=")
    try:
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[STATE_FIELD] in EXITED_STATES else fields[START_TIME_FIELD]


def read_memory(pid: int) -> int | None:
    """Return the resident memory of a process in bytes; None if there is no such process."""
    if not HAS_PROC:
        kilobytes = _run_ps(pid, "rss=")
        return int(kilobytes) * 1024 if kilobytes else None
    try:
        pages = int((PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _run_ps(pid: int, column: str) -> str | None:
    """Read one column from ps, where there is no /proc; None if the process is gone or a zombie."""
    try:
        output = subprocess.run(  # noqa: S603 - a fixed program, a number and a constant
            ["/bin/ps", "-o", f"state=,{column}", "-p", str(pid)],
            capture_output=True,
            text=True,
            timeout=PS_TIMEOUT_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    state, _, value = output.strip().partition(" ")
    return None if not value or state.startswith(EXITED_STATES) else value.strip()
