"""A worker process of a local sort: its orders are one line on standard input, which closes when its master is gone."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import orjson

from interlock.errors import InterlockError
from interlock.sort.job import FAILED, Settings
from interlock.sort.records import Source
from interlock.sort.worker import Untold, run_worker

PIPE = 0
UNTOLD = 4  # the exit code of a worker whose master does not know why it failed


def main() -> int:
    """Do what the orders say."""
    line = b""
    while not line.endswith(b"\n") and (read := os.read(PIPE, 1 << 20)):
        line += read
    if not line.endswith(b"\n"):
        return 0
    orders = orjson.loads(line)
    threading.Thread(target=_end_with_the_pipe, daemon=True).start()
    try:
        run_worker(
            orders["master"],
            Source.of(orders["source"]),
            Path(orders["output"]),
            settings=Settings(**orders["settings"]),
            temp=Path(orders["temp"]),
            index=orders["index"],
        )
    except Untold as error:
        sys.stderr.write(f"sort worker {orders['index']}: {error}\n")
        return UNTOLD
    except (InterlockError, OSError):
        return FAILED
    return 0


def _end_with_the_pipe() -> None:
    while os.read(PIPE, 1):
        continue
    os._exit(FAILED)


if __name__ == "__main__":
    os._exit(main())  # nothing is left to do, and the interpreter's own way out takes a tenth of a second
