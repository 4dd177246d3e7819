"""The door of the `interlock` command, which a person can leave at any moment with Ctrl-C.

Invariant: importing this module costs nothing, so that an interruption finds `main` already there to take it.
"""

from __future__ import annotations

import gc
import os
import sys

SELDOM = 50_000  # new objects after which garbage is looked for: what is loaded stays, and looking takes time
INTERRUPTED = 130  # what shells make of a program that SIGINT ended


def main() -> None:
    """Run the command line and end with its exit code."""
    is_sort = sys.argv[1:3] == ["sort", "run"]
    try:
        _run(is_sort=is_sort)
    except KeyboardInterrupt:
        code: str | int | None = INTERRUPTED
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    if code == INTERRUPTED:
        sys.stderr.write("interrupted\n")
    if code == 0 and is_sort and "interlock.store" not in sys.modules:
        _leave()
    sys.exit(code)


def _run(*, is_sort: bool) -> None:
    # To import the commands takes most of the time, and a sort is measured with it.
    if is_sort:
        _sort()
    elif sys.argv[1:2] == ["sort"]:
        from interlock.cli.sort import run  # noqa: PLC0415

        run()
    else:
        from interlock.cli.commands import run  # noqa: PLC0415

        run()


def _sort() -> None:
    """Have the workers load while the command line is read."""
    from interlock.sort.standby import dismiss, foresee  # noqa: PLC0415

    gc.set_threshold(SELDOM)
    foresee(sys.argv[3:])
    try:
        from interlock.cli.sort import run  # noqa: PLC0415

        run()
    finally:
        dismiss()


def _leave() -> None:
    """End at once: nothing is left to do, and the interpreter's own way out takes a quarter of a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
