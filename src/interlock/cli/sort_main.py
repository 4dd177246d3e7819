"""Entry point of the `interlock-sort` command.

`interlock-sort run` forks its worker processes before it parses the command line: parsing and importing take longer
than sorting a small input, and the workers initialize meanwhile. A successful command exits without the interpreter's
shutdown, which takes a quarter of a second.
"""

from __future__ import annotations

import gc
import os
import sys

GC_THRESHOLD = 50_000  # allocations between collections: almost nothing that an import creates is ever freed
INTERRUPTED = 130  # exit code that shells give a program ended by SIGINT


def main() -> None:
    """Run `interlock-sort` and exit with its code."""
    # Imports are inside the functions, so that Ctrl-C during an import finds `main` running.
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:
        code: str | int | None = INTERRUPTED
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    if code == INTERRUPTED:
        sys.stderr.write("interrupted\n")
    if not code and "interlock.postgres" not in sys.modules:  # a database connection or server may have exit handlers
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.exit(code)


def _run(arguments: list[str]) -> None:
    if arguments[:1] != ["run"]:
        from interlock.cli.sort import run  # noqa: PLC0415

        run()
        return
    from interlock.sort.engines import prefork  # noqa: PLC0415

    gc.set_threshold(GC_THRESHOLD)
    prefork.start_workers(arguments[1:])
    try:
        from interlock.cli.sort import run  # noqa: PLC0415

        run()
    finally:
        prefork.discard_workers()


if __name__ == "__main__":
    main()
