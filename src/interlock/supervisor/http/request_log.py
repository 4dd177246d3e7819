"""The log of the HTTP side: lines limited in number and length, without control characters, with the request's id.

Invariant: clients cannot fill the log. Each kind of line has a limit per second, and the number of suppressed lines is
logged. Text of clients appears without control characters and is cut at `MAX_TEXT_LENGTH`.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from structlog.contextvars import bind_contextvars, bound_contextvars, get_contextvars

from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MAX_TEXT_LENGTH = 500
MAX_KINDS = 200  # of lines; further ones share one limit
REPORT_INTERVAL_S = 5.0
REQUEST_ID_HEADER = "X-Request-ID"
REQUEST_ID_FIELD = "http_request_id"  # `request_id` is the idempotency key of a body
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")
# C0 and C1 control characters, line and paragraph separators, and the characters that change the direction of text
_CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

Level = Literal["info", "warning", "error"]


class LineLimit(NamedTuple):
    """The lines of one kind per second, and how many may come at once."""

    per_second: float
    burst: int


DEFAULT_LIMIT = LineLimit(10, 50)
REQUEST_LIMIT = LineLimit(200, 1000)
LIMITS = {"request": REQUEST_LIMIT}


class _Bucket:
    """The token bucket of one kind of line."""

    __slots__ = ("_limit", "_refilled_at", "_tokens", "reported_at", "suppressed")

    def __init__(self, limit: LineLimit, now: float) -> None:
        self._limit = limit
        self._tokens = float(limit.burst)
        self._refilled_at = self.reported_at = now
        self.suppressed = 0

    def take(self, now: float) -> bool:
        """Return whether a line may be written now."""
        limit = self._limit
        self._tokens = min(limit.burst, self._tokens + (now - self._refilled_at) * limit.per_second)
        self._refilled_at = now
        if self._tokens < 1:
            self.suppressed += 1
            return False
        self._tokens -= 1
        return True


class RequestLog:
    """Writes log lines about requests and connections; `report_suppressed` is called from time to time."""

    def __init__(
        self, limits: Mapping[str, LineLimit] = LIMITS, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def write(self, level: Level, event: str, *, kind: str | None = None, **fields: Any) -> None:
        """Write a line, unless there were too many of its kind; the kind is the event if none is given."""
        if self._bucket(kind or event).take(self._clock()):
            safe = {name: printable(value) if isinstance(value, str) else value for name, value in fields.items()}
            getattr(log, level)(event, **safe)

    def report_suppressed(self, *, at_once: bool = False) -> None:
        """Log how many lines were suppressed, for each kind at most once per `REPORT_INTERVAL_S`."""
        now = self._clock()
        for kind, bucket in self._buckets.items():
            if bucket.suppressed and (at_once or now - bucket.reported_at >= REPORT_INTERVAL_S):
                log.warning("log_lines_suppressed", kind=kind, lines=bucket.suppressed)
                bucket.suppressed, bucket.reported_at = 0, now

    def _bucket(self, kind: str) -> _Bucket:
        bucket = self._buckets.get(kind)
        if bucket is None:
            if len(self._buckets) >= MAX_KINDS:
                kind = "other"
            bucket = self._buckets.setdefault(kind, _Bucket(self._limits.get(kind, DEFAULT_LIMIT), self._clock()))
        return bucket


request_log = RequestLog()


def printable(text: str) -> str:
    """Return a text for a log line: control characters escaped, and cut if it is long."""
    cut = text if len(text) <= MAX_TEXT_LENGTH else f"{text[:MAX_TEXT_LENGTH]}… ({len(text)} characters)"
    return _CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape").decode(), cut)


def choose_request_id(sent: str | None) -> str:
    """Return the id that the client sent if it is fit for a log, else a new one."""
    return sent if sent is not None and _SANE_REQUEST_ID.fullmatch(sent) else secrets.token_hex(12)


@contextmanager
def lines_of_request(request_id: str, client: str) -> Iterator[None]:
    """Give all log lines within the context the id and the client of a request, and the actor once it is bound."""
    with bound_contextvars(**{REQUEST_ID_FIELD: request_id, "client": printable(client), "actor": None}):
        yield


def bind_actor(actor: str) -> None:
    """Give the further log lines of the request its actor."""
    bind_contextvars(actor=printable(actor))


def current_request_id() -> str | None:
    """Return the id of the request that is being handled; None outside of a request."""
    return get_contextvars().get(REQUEST_ID_FIELD)


class _ServerLogHandler(logging.Handler):
    """Writes the records of the HTTP server library as limited lines of our log."""

    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "error" if record.levelno >= logging.ERROR else "warning"
        request_log.write(
            level, "http_server", kind=f"http_server:{level}", detail=record.getMessage(), exc_info=record.exc_info
        )


def make_server_logger() -> logging.Logger:
    """Return the logger for the HTTP server library: warnings and errors as limited lines of our log."""
    logger = logging.getLogger("interlock.http")
    if not logger.handlers:
        logger.addHandler(_ServerLogHandler())
        logger.setLevel(logging.WARNING)
        logger.propagate = False
    return logger
