"""Entry point of `interlock-sort`: starts the sort workers before the command line is parsed, and exits without delay.

Parsing and importing take longer than sorting a small input, so the worker processes load meanwhile.
"""

from __future__ import annotations

import gc
import os
import sys

GC_THRESHOLD = 50_000  # allocations between garbage collections: what is loaded stays, and collecting takes time
INTERRUPTED = 130  # the exit code that shells give a program ended by SIGINT


def main() -> None:
    """Run `interlock-sort` and exit with its code."""
    try:
        _run()
    except KeyboardInterrupt:
        code: str | int | None = INTERRUPTED
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    if code == INTERRUPTED:
        sys.stderr.write("interrupted\n")
    if code == 0 and "interlock.store" not in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nothing is left to clean up, and the interpreter's own shutdown takes a quarter of a second
    sys.exit(code)


def _run() -> None:
    if sys.argv[1:2] != ["run"]:
        from interlock.cli.sort import run  # noqa: PLC0415 - imported late, so that Ctrl-C finds `main` running

        run()
        return
    from interlock.sort.engines.prefork import dismiss, foresee  # noqa: PLC0415

    gc.set_threshold(GC_THRESHOLD)
    foresee(sys.argv[2:])
    try:
        from interlock.cli.sort import run  # noqa: PLC0415

        run()
    finally:
        dismiss()
