"""When a schedule is due: the ticks of a cron expression in its time zone, or of an interval.

Invariant: ticks come in order, each later than the one before, also where a clock is put forward or back; a rhythm
that exists has a next tick.
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
    from collections.abc import Iterator

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
