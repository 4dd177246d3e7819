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
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

PROC = Path("/proc")
HAS_PROC = sys.platform == "linux"
# /proc/PID/stat: the second field is the name, which may hold spaces; these count from the field after it
STATE_FIELD, PARENT_FIELD, SESSION_FIELD, START_TIME_FIELD, RESIDENT_FIELD = 0, 1, 3, 19, 21
EXITED_STATES = ("Z", "X")  # zombie, dead
PS_TIMEOUT_S = 5.0
MAX_DEPTH = 100  # of a process below the one that it belongs to


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


def read_memory(pids: Collection[int]) -> dict[int, int]:
    """Return the resident memory in bytes of each process that exists, with all processes that it started.

    These are its descendants and the rest of its session. Pages that several processes share count in each.
    """
    processes = {process.pid: process for process in (_read_processes() if HAS_PROC else _read_processes_of_ps())}
    used = {pid: 0 for pid in pids if pid in processes}
    for process in processes.values():
        owner = _find_owner(process, processes, used)
        if owner is not None:
            used[owner] += process.resident
    return used


class _Process(NamedTuple):
    """A process; `group` is its session, or its process group where there is no /proc."""

    pid: int
    parent: int
    group: int
    resident: int  # bytes


def _find_owner(process: _Process, processes: Mapping[int, _Process], owners: Collection[int]) -> int | None:
    """Return the owner to which a process belongs, by its session or by that of an ancestor."""
    at: _Process | None = process
    for _ in range(MAX_DEPTH):
        if at is None:
            return None
        for candidate in (at.pid, at.group):
            if candidate in owners:
                return candidate
        at = processes.get(at.parent)
    return None


def _read_processes() -> Iterator[_Process]:
    page = os.sysconf("SC_PAGE_SIZE")
    for place in PROC.glob("[0-9]*"):
        try:
            stat = (place / "stat").read_bytes()
        except OSError:  # it has ended
            continue
        fields = stat.rpartition(b")")[2].split()
        if fields[STATE_FIELD].decode() not in EXITED_STATES:
            parent, session, pages = (int(fields[at]) for at in (PARENT_FIELD, SESSION_FIELD, RESIDENT_FIELD))
            yield _Process(int(place.name), parent, session, pages * page)


def _read_processes_of_ps() -> Iterator[_Process]:
    try:
        output = subprocess.run(
            ["/bin/ps", "-axo", "pid=,ppid=,pgid=,rss="],
            capture_output=True,
            text=True,
            timeout=PS_TIMEOUT_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return
    for line in output.splitlines():
        pid, parent, group, kilobytes = map(int, line.split())
        yield _Process(pid, parent, group, kilobytes * 1024)


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
