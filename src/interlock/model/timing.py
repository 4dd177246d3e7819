"""Times until which steps sleep and wait. No I/O.

Invariant: whoever asks, the orchestrator or a dry run, hears the same of the same step.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


FIRST_YEAR, LAST_YEAR = 1970, 9998  # what every clock and calendar on the way can hold
TOO_LATE = f"a time must be in the years {FIRST_YEAR} to {LAST_YEAR}"
LONGEST = 100 * 365.25 * 86_400  # seconds, of whatever takes or waits for some


def is_in_calendar(moment: datetime) -> bool:
    """Tell whether a time, which has a time zone, lies in the years that can be stored."""
    return datetime(FIRST_YEAR, 1, 1, tzinfo=UTC) <= moment < datetime(LAST_YEAR + 1, 1, 1, tzinfo=UTC)


def wake_at(spec: Mapping[str, Any], given: Any, moment: datetime) -> datetime:
    """Tell when a sleep that begins now ends; `given` is what the input has under the name in `until`.

    ValueError says what is wrong with it.
    """
    if spec.get("until") is None:
        return later(moment, spec["seconds"], "sleeps")
    said = given if given is not None else spec["until"]
    try:
        until = datetime.fromisoformat(said)
    except (TypeError, ValueError):
        raise ValueError(f"sleeps until {said!r}, which is no time in ISO 8601") from None
    zoned = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    if not is_in_calendar(zoned):
        raise ValueError(f"sleeps until {said!r}: {TOO_LATE}")
    return zoned


def later(moment: datetime, seconds: float, does: str = "waits") -> datetime:
    """Give the moment so many seconds later; ValueError if no calendar has it."""
    try:
        found = moment + timedelta(seconds=seconds)
    except OverflowError:
        found = None
    if found is None or not is_in_calendar(found):
        raise ValueError(f"{does} for {seconds:g} s: {TOO_LATE}")
    return found


# SECTION store/rhythm
# When a schedule is due: the ticks of a cron expression in its time zone, or of an interval.
#
# Invariant: ticks come in order, each later than the one before, also where a clock is put forward or back; a rhythm
# that exists has a next tick.

FIELDS = 5
_PROBE = datetime(2024, 1, 1, tzinfo=UTC)
# How far a clock may be put back: going backwards over that hour, the library can miss ticks that lie in it.
_PUT_BACK = timedelta(hours=3)


class Rhythm:
    """Either a cron expression of five fields in a time zone, or an interval."""

    __slots__ = ("_cron", "_every", "_zone")

    def __init__(self, *, cron: str | None = None, timezone: str = "UTC", every: timedelta | None = None) -> None:
        if (cron is None) == (every is None):
            raise ConfigError("give either a cron expression or an interval")
        if every is not None and every <= timedelta():
            raise ConfigError(f"the interval must be longer than nothing, not {every}")
        self._cron = cron
        self._every = every
        self._zone = _zone(timezone)
        if cron is not None:
            _check(cron)

    def after(self, tick: datetime) -> datetime:
        """Give the first tick after this one; for an interval, the rhythm goes on from it."""
        if self._every is not None:
            return tick + self._every
        return next(self._ticks(tick))

    def due(self, first: datetime, now: datetime, most: int) -> list[datetime]:
        """Give the ticks from `first`, which is one, until now: the latest ones if they are more than `most`."""
        if first > now:
            return []
        if self._every is not None:
            last = (now - first) // self._every
            return [first + self._every * step for step in range(max(0, last - most + 1), last + 1)]
        found = deque([first], maxlen=most)
        for tick in self._ticks(max(first, self._far_enough_back(now, most))):
            if tick > now:
                break
            found.append(tick)
        return list(found)

    def _ticks(self, after: datetime) -> Iterator[datetime]:
        """Walk forward. An hour that comes twice is walked once by the library, maybe from before `after`."""
        for tick in CronSim(self._cron or "", after.astimezone(self._zone)):
            utc = tick.astimezone(UTC)
            if utc > after:
                yield utc

    def _far_enough_back(self, now: datetime, most: int) -> datetime:
        """Find where to begin for the latest ticks, however many were missed before them."""
        back = islice(CronSim(self._cron or "", now.astimezone(self._zone), reverse=True), most)
        return min((tick.astimezone(UTC) for tick in back), default=now) - _PUT_BACK


def _zone(name: Any) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):
        raise ConfigError(f"{name!r} is not a time zone known here; right would be e.g. Europe/Berlin or UTC") from None


def _check(cron: Any) -> None:
    example = "right would be e.g. '30 4 * * MON-FRI' (minute, hour, day, month, weekday)"
    if not isinstance(cron, str) or len(cron.split()) != FIELDS:
        raise ConfigError(f"{cron!r} is not a cron expression of {FIELDS} fields; {example}")
    try:
        next(CronSim(cron, _PROBE))
    except CronSimError as error:
        raise ConfigError(f"{cron!r} is not a cron expression: {str(error).lower()}; {example}") from None
    except StopIteration:
        raise ConfigError(f"the cron expression {cron!r} never comes due") from None
