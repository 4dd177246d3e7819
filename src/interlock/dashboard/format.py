"""Numbers, rates, durations and times as the pages write them."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta

NOTHING = "\N{EN DASH}"  # in place of a number that is not known
MILLION = 1_000_000
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
SHORT_ID_START, SHORT_ID_END = 8, 4  # characters of a UUIDv7 that a list shows: of its time, and of its random part


def whole(number: float) -> str:
    """Write a count in full: 948,112."""
    return f"{round(number):,}"


def compact(number: float) -> str:
    """Write a count in at most seven characters: 128,440, 1.42 M, 3.1 G."""
    size = abs(number)
    if size < MILLION:
        return whole(number)
    for unit, factor in (("M", 1e6), ("G", 1e9)):
        scaled = size / factor
        if scaled < 1000:  # noqa: PLR2004 - the next unit
            return f"{math.copysign(scaled, number):.3g} {unit}"
    return f"{number:.3g}"


def rate(per_second: float) -> str:
    """Write a rate: 412/s, 6.4/s, 0.03/s, 0."""
    if per_second <= 0:
        return "0"
    return f"{rate_number(per_second)}/s"


def rate_number(per_second: float) -> str:
    """Write a rate without its unit."""
    if per_second >= 10:  # noqa: PLR2004 - from here on a fraction says nothing
        return whole(per_second)
    if per_second >= 0.1 or per_second <= 0:  # noqa: PLR2004 - one digit is enough
        return f"{per_second:.1f}".removesuffix(".0")
    return f"{per_second:.2g}"


def seconds(value: float | None) -> str:
    """Write a short duration: 0.4 ms, 58 ms, 0.61 s, 12 s, 2 min 4 s."""
    if value is None:
        return NOTHING
    if value < 0.001:  # noqa: PLR2004 - milliseconds
        return f"{value * 1000:.1f} ms" if value > 0 else "0"
    if value < 0.1:  # noqa: PLR2004 - milliseconds
        return f"{value * 1000:.0f} ms"
    if value < 10:  # noqa: PLR2004 - hundredths of a second
        return f"{value:.2f} s"
    if value < MINUTE_S:
        return f"{value:.0f} s"
    return duration(value)


def axis_seconds(value: float) -> str:
    """Write a duration beside an axis: 40 ms, 0.6 s, 12 s."""
    if value < 0.1:  # noqa: PLR2004 - milliseconds
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 10 * MINUTE_S else duration(value)


def duration(value: float) -> str:
    """Write a duration in its two largest units: 26 min, 2 h 10 min, 3 d 4 h."""
    left = max(0, round(value))
    if left < MINUTE_S:
        return f"{left} s"
    parts: list[str] = []
    for unit, size in (("d", DAY_S), ("h", HOUR_S), ("min", MINUTE_S), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
        if len(parts) == 2:  # noqa: PLR2004 - two units
            break
    return " ".join(part for part in parts if part)


def about(value: float) -> str:
    """Write an estimate of a duration in its largest unit: 26 min, 2 h."""
    return " ".join(duration(value).split(" ")[:2])


def ago(moment: datetime, now: datetime) -> str:
    """Write a time relative to now: "2 min ago", "in 50 min". The script of the page keeps it current."""
    passed = (now - moment).total_seconds()
    if abs(passed) < 1:
        return "now"
    amount = duration(abs(passed)).split(" ")
    text = " ".join(amount[:2])
    return f"{text} ago" if passed > 0 else f"in {text}"


def exact(moment: datetime) -> str:
    """Write a time exactly, in UTC; the script of the page shows it in the viewer's zone."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


_EXACT = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC)")


def time_parts(text: str) -> list[tuple[str, datetime | None]]:
    """Split a sentence at the times in it, which are written as by `exact`; a page shows them in the viewer's zone."""
    return [
        (part, datetime.strptime(part, "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC) if at % 2 else None)
        for at, part in enumerate(_EXACT.split(text))
        if part
    ]


def iso(moment: datetime) -> str:
    """Write a time for the `datetime` attribute."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: str | datetime | None) -> datetime | None:
    """Read a time of a JSON document of the database."""
    if text is None or isinstance(text, datetime):
        return text
    return datetime.fromisoformat(text)


def period(length: timedelta) -> str:
    """Write a range: 1 h, 7 d."""
    return duration(length.total_seconds())


def short_id(value: object) -> str:
    """Shorten an id for a list, in its middle: ids of the same moment differ only in their ends."""
    text = str(value)
    if len(text) == 36 and text[8] == "-":  # noqa: PLR2004 - a UUID
        return f"{text[:SHORT_ID_START]}…{text[-SHORT_ID_END:]}"
    return text if len(text) <= 24 else f"{text[:14]}…{text[-6:]}"  # noqa: PLR2004 - as wide as a short id and half
