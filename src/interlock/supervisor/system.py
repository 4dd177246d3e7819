"""What the operating system tells of a process that may be somebody else's child, or nobody's any more.

Invariant: a process is known by its id and its birth together, because ids are used again. One that has ended and that
nobody has reaped counts as ended.
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
AFTER_NAME = 2  # the first field of /proc/PID/stat after the name, which may hold anything, is the third
STATE, BORN = 3 - AFTER_NAME - 1, 22 - AFTER_NAME - 1
ENDED = ("Z", "X")
PS_TIMEOUT = 5.0


def name_host() -> str:
    """Name the place in which process ids mean something: this host since its boot, or this container."""
    name = socket.gethostname()
    if not HAS_PROC:
        return name
    with suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
        return f"{name}/{boot}/{(PROC / 'self/ns/pid').stat().st_ino}"
    return name


def birth_of(pid: int) -> str | None:
    """Tell when a process began, in words that another of the same id does not share; None when there is none."""
    if not HAS_PROC:
        return _ps(pid, "lstart=")
    fields = _stat(pid)
    return None if fields is None or fields[STATE] in ENDED else fields[BORN]


def memory_of(pid: int) -> int | None:
    """Give the bytes of memory in which a process resides; None when there is none."""
    if not HAS_PROC:
        kilobytes = _ps(pid, "rss=")
        return int(kilobytes) * 1024 if kilobytes else None
    try:
        pages = int((PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int) -> list[str] | None:
    try:
        said = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return said.rpartition(")")[2].split()


def _ps(pid: int, what: str) -> str | None:
    """Ask ps, where there is no /proc."""
    try:
        said = subprocess.run(  # noqa: S603 - numbers and words of our own
            ["/bin/ps", "-o", f"state=,{what}", "-p", str(pid)],
            capture_output=True,
            text=True,
            timeout=PS_TIMEOUT,
            check=False,
        ).stdout.split(maxsplit=1)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if len(said) < AFTER_NAME or said[0].startswith(ENDED) else said[1].strip()
