"""Script that kills registered process groups when the process that started it dies.

Invariant: a group that is registered (`+GROUP`) and not removed (`-GROUP`) is killed when the parent dies, however it
dies, because the kernel closes the pipe on standard input. The script imports the standard library only and runs with
`python -I -S`, which keeps it small.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Read `+GROUP` and `-GROUP` lines until end of file, then send SIGKILL to the groups that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the only way to end this process is to end its parent
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
