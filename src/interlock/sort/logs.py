"""What the processes of a sort log, and from which level on: moves are information, refusals warnings or errors.

The standard library does it, because what the engine logs with takes longer to load than a small sort to run.

Invariant: until somebody asks for more, warnings and errors alone are shown; the display tells of the rest.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import orjson

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
