"""Times until which steps sleep and wait. No I/O.

Invariant: whoever asks, the orchestrator or a dry run, hears the same of the same step.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

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
