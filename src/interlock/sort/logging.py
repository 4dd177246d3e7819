"""What the processes of a sort log, and from which level on: moves are information, refusals warnings or errors.

The standard library does it, because what the engine logs with takes longer to load than a small sort to run.

Invariant: until somebody asks for more, warnings and errors alone are shown; the display tells of the rest.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


log = logging.getLogger("interlock.sort")
wanted = {"level": "warning", "form": "console"}  # what this process logs, for those that it starts to do likewise


class Console(logging.Formatter):
    """Writes a line for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        return f"{_time(record)} [{record.levelname.lower()}] {record.getMessage()}"


class Json(logging.Formatter):
    """Writes a line for machines."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        document = {"message": record.getMessage(), "level": record.levelname.lower(), "timestamp": _time(record)}
        return orjson.dumps(document).decode()


def log_from(level: str, form: str) -> None:
    """Log to standard error from a level on; safe to call again."""
    wanted.update(level=level, form=form)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else Console())
    log.handlers = [handler]
    log.setLevel(level.upper())
    log.propagate = False


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")


# SECTION sort/interrupts
# Ctrl-C during a sort: it gives the sort up, and everybody who takes part ends in order.
#
# Invariant: the first interrupt raises nothing where it strikes. An exception in the midst of a lock, or in a callback
# that swallows it, would leave threads that wait for ever; so the sort is told, and the exception follows when it has
# ended.


@contextmanager
def heeding_interrupts(stop: threading.Event) -> Iterator[None]:
    """Have Ctrl-C set `stop` while the block runs; what the block then raises becomes KeyboardInterrupt.

    A second Ctrl-C does not wait for that. A block that was done before it heard keeps what it has done.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            before(number, frame)
        interrupted = True
        stop.set()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
