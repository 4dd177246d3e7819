"""Logging of the processes of a sort, Ctrl-C and SIGTERM.

State transitions are logged at info, refused calls at warning or error. The standard library is used, because
structlog, with which the engine logs, takes longer to import than a small sort to run.

Invariant: unless a lower level is chosen, only warnings and errors are logged; the display shows the rest.
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
log_settings = {"level": "warning", "form": "console"}  # of this process; passed on to the worker processes


class ConsoleFormatter(logging.Formatter):
    """Formats a log record as a line for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        return f"{_timestamp(record)} [{record.levelname.lower()}] {record.getMessage()}"


class JsonFormatter(logging.Formatter):
    """Formats a log record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        document = {"message": record.getMessage(), "level": record.levelname.lower(), "timestamp": _timestamp(record)}
        return orjson.dumps(document).decode()


def set_up_logging(level: str, form: str) -> None:
    """Log to standard error from a level on; safe to call again."""
    log_settings.update(level=level, form=form)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else ConsoleFormatter())
    log.handlers = [handler]
    log.setLevel(level.upper())
    log.propagate = False


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")


@contextmanager
def stop_on_interrupt(stop: threading.Event) -> Iterator[None]:
    """Make Ctrl-C set `stop` while the block runs; the exception that ends the block becomes KeyboardInterrupt.

    The first SIGINT raises nothing where it arrives: an exception while a lock is held, or in a callback that swallows
    it, would leave threads that wait for ever. A second one raises at once. If the block completes before it sees
    `stop`, its result stands.
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


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C while the block runs, where nothing that a kill leaves can be resumed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
