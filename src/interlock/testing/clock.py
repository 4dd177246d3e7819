"""A clock that tests control."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class Clock:
    """A clock that stands still until a test moves it: `Interlock(clock=clock)`."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime.now(UTC)
        if self._now.tzinfo is None:
            raise ValueError("a clock needs a time zone; e.g. datetime(2030, 1, 1, tzinfo=UTC)")

    def __call__(self) -> datetime:
        """Tell the time."""
        return self._now

    def advance(self, by: timedelta | float) -> datetime:
        """Move the clock forward, by a timedelta or by seconds, and tell the new time."""
        step = by if isinstance(by, timedelta) else timedelta(seconds=by)
        if step < timedelta(0):
            raise ValueError("a clock goes forward only")
        self._now += step
        return self._now
