"""Times: the range that can be stored, when a sleep ends, and the ticks of a schedule.

Invariant: the ticks of a schedule are in ascending order, also across changes to and from daylight saving time, and a
`Rhythm` always has a next tick.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


FIRST_YEAR, LAST_YEAR = 1970, 9998  # the range that Python, psycopg and PostgreSQL all hold
OUT_OF_RANGE = f"a time must be in the years {FIRST_YEAR} to {LAST_YEAR}"
MAX_DURATION_S = 100 * 365.25 * 86_400  # of a timeout, delay or wait: 100 years, as in the constraint tasks_timeout

CRON_FIELDS = 5
_PROBE = datetime(2024, 1, 1, tzinfo=UTC)
# The most that a clock is set back. Walking backwards over such an hour, CronSim can miss ticks in it.
_MAX_SET_BACK = timedelta(hours=3)


def is_in_calendar(moment: datetime) -> bool:
    """Tell whether a time with a zone lies in the years that can be stored."""
    return datetime(FIRST_YEAR, 1, 1, tzinfo=UTC) <= moment < datetime(LAST_YEAR + 1, 1, 1, tzinfo=UTC)


def wake_at(spec: Mapping[str, Any], given: Any, moment: datetime) -> datetime:
    """Compute when a sleep that begins now ends; `given` is the input field that `until` names.

    ValueError if `until` is not a time, or out of range.
    """
    if spec.get("until") is None:
        return later(moment, spec["seconds"], "sleeps")
    text = given if given is not None else spec["until"]
    try:
        until = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise ValueError(f"sleeps until {text!r}, which is not a time in ISO 8601") from None
    zoned = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    if not is_in_calendar(zoned):
        raise ValueError(f"sleeps until {text!r}: {OUT_OF_RANGE}")
    return zoned


def later(moment: datetime, seconds: float, does: str = "waits") -> datetime:
    """Add seconds to a time; ValueError if the sum is out of range."""
    try:
        found = moment + timedelta(seconds=seconds)
    except OverflowError:
        found = None
    if found is None or not is_in_calendar(found):
        raise ValueError(f"{does} for {seconds:g} s: {OUT_OF_RANGE}")
    return found


class Rhythm:
    """The rhythm of a schedule: a cron expression of five fields in a time zone, or an interval."""

    __slots__ = ("_cron", "_every", "_zone")

    def __init__(self, *, cron: str | None = None, timezone: str = "UTC", every: timedelta | None = None) -> None:
        if (cron is None) == (every is None):
            raise ConfigError("give either a cron expression or an interval")
        if every is not None and every <= timedelta():
            raise ConfigError(f"the interval must be greater than 0, got {every}")
        self._cron = cron
        self._every = every
        self._zone = _zone(timezone)
        if cron is not None:
            _check_cron(cron)

    def after(self, tick: datetime) -> datetime:
        """Return the first tick after this one; an interval counts from it."""
        if self._every is not None:
            return tick + self._every
        return next(self._ticks(tick))

    def due(self, first: datetime, now: datetime, most: int) -> list[datetime]:
        """List the ticks from `first`, itself a tick, until now; only the latest `most` of them."""
        if first > now:
            return []
        if self._every is not None:
            last = (now - first) // self._every
            return [first + self._every * step for step in range(max(0, last - most + 1), last + 1)]
        found = self._ticks_until(first, first, now, most)
        if len(found) == most:  # more may be due: visit the latest ones only
            found = self._ticks_until(first, max(first, self._start_for_latest(now, most)), now, None)
        return found[-most:]

    def _ticks_until(self, first: datetime, start: datetime, now: datetime, most: int | None) -> list[datetime]:
        ticks = takewhile(lambda tick: tick <= now, self._ticks(start))
        return [first, *islice(ticks, None if most is None else most - 1)]

    def _ticks(self, after: datetime) -> Iterator[datetime]:
        """Iterate over the ticks after a time. CronSim visits a repeated hour once, possibly from before `after`."""
        for tick in CronSim(self._cron or "", after.astimezone(self._zone)):
            utc = tick.astimezone(UTC)
            if utc > after:
                yield utc

    def _start_for_latest(self, now: datetime, most: int) -> datetime:
        """Find where to start for the latest `most` ticks, so that older missed ones are not visited."""
        latest = islice(CronSim(self._cron or "", now.astimezone(self._zone), reverse=True), most)
        return min((tick.astimezone(UTC) for tick in latest), default=now) - _MAX_SET_BACK


def _zone(name: Any) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):
        raise ConfigError(f"{name!r} is not a known time zone; examples are Europe/Berlin and UTC") from None


def _check_cron(cron: Any) -> None:
    example = "an example is '30 4 * * MON-FRI' (minute, hour, day, month, weekday)"
    if not isinstance(cron, str) or len(cron.split()) != CRON_FIELDS:
        raise ConfigError(f"{cron!r} is not a cron expression of {CRON_FIELDS} fields; {example}")
    try:
        first = _first_tick(cron)
    except CronSimError as error:
        raise ConfigError(f"{cron!r} is not a cron expression: {str(error).lower()}; {example}") from None
    if first is None:
        raise ConfigError(f"the cron expression {cron!r} never comes due")


@lru_cache(maxsize=1024)
def _first_tick(cron: str) -> datetime | None:
    """Parse an expression, once, and return a tick of it; None if it never comes due, CronSimError if it is invalid."""
    return next(CronSim(cron, _PROBE), None)
