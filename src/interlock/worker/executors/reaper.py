"""Outlives a killed worker for a moment, to kill the process groups that it left behind.

Invariant: a group that was noted and not struck off dies with the worker, however the worker dies, because the kernel
closes the pipe on standard input. Standard library only: it runs as a script, as small as Python can be.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Read `+GROUP` and `-GROUP`, one to a line, until the worker is gone."""
    for wanted in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(wanted, signal.SIG_IGN)  # only the worker's end ends this process
    alive: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            alive.add(group)
        else:
            alive.discard(group)
    for group in alive:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
