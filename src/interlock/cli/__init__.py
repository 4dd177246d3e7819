"""The door of the `interlock` command, which a person can leave at any moment with Ctrl-C.

Invariant: importing this module costs nothing, so that an interruption finds `main` already there to take it.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130  # what shells make of a program that SIGINT ended


def main() -> None:
    """Run the command line and end with its exit code."""
    try:
        # To import the commands takes most of the time, and a sort is measured with it.
        if sys.argv[1:2] == ["sort"]:
            from interlock.cli.sort import run  # noqa: PLC0415
        else:
            from interlock.cli.commands import run  # noqa: PLC0415
        run()
    except KeyboardInterrupt:
        code: str | int | None = INTERRUPTED
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    if code == INTERRUPTED:
        sys.stderr.write("interrupted\n")
    sys.exit(code)
