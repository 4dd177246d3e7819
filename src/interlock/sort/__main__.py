"""Main program of a worker process of a local sort.

Its instructions are one line of JSON on standard input. The pipe stays open as long as the master's process lives.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import orjson

from interlock.errors import InterlockError
from interlock.sort.data.records import Source
from interlock.sort.logging import set_up_logging
from interlock.sort.security import Security
from interlock.sort.settings import EXIT_FAILURE_REPORTED, EXIT_FAILURE_UNREPORTED, Settings
from interlock.sort.worker.worker import UnreportedFailure, run_worker, unreported_failures

STDIN, STDOUT = 0, 1


def main() -> int:
    """Read the instructions, run the worker and return its exit code."""
    line = b""
    while not line.endswith(b"\n") and (read := os.read(STDIN, 1 << 20)):
        line += read
    if not line.endswith(b"\n"):
        return 0  # the pipe closed: this worker is not needed
    instructions = orjson.loads(line)
    threading.Thread(target=_exit_when_stdin_closes, daemon=True).start()
    set_up_logging(**instructions["log"])
    try:
        with unreported_failures():
            settings = Settings(**instructions["settings"])
        run_worker(
            instructions["master"],
            Source.from_json(instructions["source"]),
            Path(instructions["output"]),
            settings=settings,
            work_dir=Path(instructions["work_dir"]),
            index=instructions["index"],
            security=Security(instructions["token"]),
        )
    except UnreportedFailure as error:
        os.write(STDOUT, str(error).encode(errors="replace"))
        return EXIT_FAILURE_UNREPORTED
    except (InterlockError, OSError):
        return EXIT_FAILURE_REPORTED
    return 0


def _exit_when_stdin_closes() -> None:
    while os.read(STDIN, 1):
        continue
    os._exit(EXIT_FAILURE_REPORTED)


if __name__ == "__main__":
    os._exit(main())  # nothing is left to clean up, and the interpreter's shutdown takes a tenth of a second
