"""What a task can be asked for: checked once, when it is defined or enqueued, whoever asks.

Invariant: an Options value that exists makes sense. What is None is left to the definition of the task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict
from uuid import UUID

from interlock.config import checked_web_url
from interlock.model.backoff import Backoff
from interlock.model.timing import FIRST_YEAR, LAST_YEAR, LONGEST, is_in_calendar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from interlock.model.backoff import Kind

PRIORITY = 32767  # what a smallint holds
TRIES = 2**31 - 1
MAX_WORKER_COUNT = 10  # steps of one job that may run at once; the least is 1
MAX_JOB_DEPTH = 5  # of child jobs below the first, which has depth 0
LONGEST_TEXT = 2_000  # bytes of a name or a key: more does not fit into an index of the database


class EnqueueOptions(TypedDict, total=False):
    """What can be asked for with `task.options(...)`."""

    priority: int
    run_at: datetime
    delay: float | timedelta
    unique_key: str
    request_id: str
    timeout: float | timedelta
    max_tries: int
    backoff: Backoff | Kind
    namespace: str
    tags: Sequence[str]
    limit_key: str
    callback_url: str
    correlation_id: UUID | str
    task_id: UUID | str


@dataclass(frozen=True, slots=True)
class Options:
    """The same, checked, in the form in which it is stored."""

    priority: int | None = None
    run_at: datetime | None = None
    delay: timedelta | None = None
    unique_key: str | None = None
    request_id: str | None = None
    timeout: float | None = None
    max_tries: int | None = None
    backoff: dict[str, Any] | None = None
    namespace: str | None = None
    tags: tuple[str, ...] | None = None
    limit_key: str | None = None
    callback_url: str | None = None
    correlation_id: UUID | None = None
    task_id: UUID | None = None


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check and convert options by name; what is None is left out. Raises ValueError with the name."""
    unknown = given.keys() - CHECKS.keys()
    if unknown:
        raise ValueError(f"unknown option: {', '.join(sorted(unknown))}; known are {', '.join(CHECKS)}")
    values = {name: CHECKS[name](name, value) for name, value in given.items() if value is not None}
    if "run_at" in values and "delay" in values:
        raise ValueError("run_at and delay exclude each other")
    return values


def seconds(name: str, value: Any) -> float:
    """Check a positive time, in seconds or as a timedelta."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds or a timedelta, not {value!r}")
    if number > LONGEST:
        raise ValueError(f"{name} must be at most {LONGEST:.0f} seconds (100 years), not {value!r}")
    return float(number)


def text(name: str, value: Any) -> str:
    """Check a name or a key."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text that is not empty, not {value!r}")
    if not _is_storable(value):
        raise ValueError(f"{name} must be valid Unicode without the character NUL, not {value!r}")
    return _short(name, value)


def _short(name: str, value: str) -> str:
    size = len(value.encode())
    if size > LONGEST_TEXT:
        raise ValueError(f"{name} must have at most {LONGEST_TEXT:,} bytes in UTF-8, and {value[:20]!r}… has {size:,}")
    return value


def _is_storable(value: str) -> bool:
    """Tell whether the database can hold a text: no NUL, and no half of a surrogate pair."""
    return "\0" not in value and (value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value))


def _delay(name: str, value: Any) -> timedelta:
    if value in (0, timedelta(0)):  # not in a set: what is asked for may be anything
        return timedelta(0)
    return timedelta(seconds=seconds(name, value))


def whole(least: int, most: int) -> Callable[[str, Any], int]:
    """Make a check of a whole number within bounds."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        return value

    return check


def _moment(name: str, value: Any) -> datetime:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError(f"{name} must be a datetime with a time zone, not {value!r}")
    if not is_in_calendar(value):
        raise ValueError(f"{name} must be in the years {FIRST_YEAR} to {LAST_YEAR}, not {value!r}")
    return value


def _tags(name: str, value: Any) -> tuple[str, ...]:
    tags = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
    if not all(isinstance(tag, str) and tag and _is_storable(tag) for tag in tags):
        raise ValueError(f"{name} must be a sequence of texts, not {value!r}")
    return tuple(_short("each of the tags", tag) for tag in tags)


def _url(name: str, value: Any) -> str:
    try:
        return checked_web_url(value)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _id(name: str, value: Any) -> UUID:
    try:
        return value if isinstance(value, UUID) else UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"{name} must be a UUID, not {value!r}") from None


def _backoff(name: str, value: Any) -> dict[str, Any]:
    del name
    return Backoff.of(value).to_json()


check_worker_count = whole(1, MAX_WORKER_COUNT)

CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "priority": whole(-PRIORITY - 1, PRIORITY),
    "run_at": _moment,
    "delay": _delay,
    "unique_key": text,
    "request_id": text,
    "timeout": seconds,
    "max_tries": whole(1, TRIES),
    "backoff": _backoff,
    "namespace": text,
    "tags": _tags,
    "limit_key": text,
    "callback_url": _url,
    "correlation_id": _id,
    "task_id": _id,
}
