"""A worker process of a local sort: its orders are one line on standard input, which closes when its master is gone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import orjson

from interlock.errors import InterlockError
from interlock.sort.data.records import Source
from interlock.sort.logging import log_from
from interlock.sort.settings import FAILED, UNTOLD, Settings
from interlock.sort.worker.worker import Untold, run_worker, untold

PIPE, ANSWERS = 0, 1


def main() -> int:
    """Do what the orders say."""
    line = b""
    while not line.endswith(b"\n") and (read := os.read(PIPE, 1 << 20)):
        line += read
    if not line.endswith(b"\n"):
        return 0
    orders = orjson.loads(line)
    threading.Thread(target=_end_with_the_pipe, daemon=True).start()
    log_from(**orders["log"])
    try:
        with untold():
            settings = Settings(**orders["settings"])
        run_worker(
            orders["master"],
            Source.of(orders["source"]),
            Path(orders["output"]),
            settings=settings,
            temp=Path(orders["temp"]),
            index=orders["index"],
        )
    except Untold as error:
        os.write(ANSWERS, str(error).encode(errors="replace"))
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
