"""Entry point of the `interlock-sort` command.

`interlock-sort run` forks its worker processes before it parses the command line: parsing and importing take longer
than sorting a small input, and the workers initialize meanwhile. A successful command exits without the interpreter's
shutdown, which takes a quarter of a second.
"""

from __future__ import annotations

import gc
import os
import sys

from interlock.cli.exit_code import run_for_exit_code

GC_THRESHOLD = 50_000  # allocations between collections: almost nothing that an import creates is ever freed


def main() -> None:
    """Run `interlock-sort` and exit with its code."""
    code = run_for_exit_code(_run)
    if not code and "interlock.postgres" not in sys.modules:  # a database connection or server may have exit handlers
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.exit(code)


def _run() -> None:
    # Imports are inside this function, so that Ctrl-C during an import finds `main` running.
    arguments = sys.argv[1:]
    if arguments[:1] != ["run"]:
        from interlock.cli.sort.command import run  # noqa: PLC0415 - see the comment above

        run()
        return
    from interlock.sort.engines import prefork  # noqa: PLC0415 - see the comment above

    gc.set_threshold(GC_THRESHOLD)
    prefork.start_workers(arguments[1:])
    try:
        from interlock.cli.sort.command import run  # noqa: PLC0415 - see the comment above

        run()
    finally:
        prefork.discard_workers()


if __name__ == "__main__":
    main()
