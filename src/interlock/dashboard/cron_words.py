"""Cron expressions in words, where few words say exactly the same; otherwise the expression is shown alone."""

from __future__ import annotations

import re

WEEKDAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
MINUTES, HOURS, FIELDS = 60, 24, 5
MAX_TIMES = 4
ANY = "*"
_NUMBERS = re.compile(r"\d+(,\d+)*")
_RANGE = re.compile(r"(\d+)-(\d+)")
_STEP = re.compile(r"\*/(\d+)")


def describe_cron(expression: str) -> str | None:
    """Describe an expression of five fields: "at 02:30, Monday to Friday"; None where words would be longer."""
    fields = expression.upper().split()
    if len(fields) != FIELDS:
        return None
    minute, hour, day, month, weekday = fields
    time = _describe_time(minute, hour)
    days = _describe_days(day, _with_numbers(weekday, WEEKDAYS, 0))
    months = _describe_months(_with_numbers(month, MONTHS, 1))
    if time is None or days is None or months is None:
        return None
    if not days and not months and time.startswith("at ") and "minute" not in time:
        days = "every day"
    return ", ".join(part for part in (time, days, months) if part)


def _with_numbers(field: str, names: tuple[str, ...], first: int) -> str:
    for at, name in enumerate(names):
        field = re.sub(rf"\b{name[:3].upper()}\b", str(at + first), field)
    return field


def _describe_time(minute: str, hour: str) -> str | None:
    if minute == ANY:
        return "every minute" if hour == ANY else None
    if step := _STEP.fullmatch(minute):
        return _describe_steps(int(step[1]), hour)
    if not _NUMBERS.fullmatch(minute):
        return None
    minutes = sorted({int(part) for part in minute.split(",")})
    if _NUMBERS.fullmatch(hour):
        times = [f"{int(part):02}:{at:02}" for part in sorted(set(hour.split(",")), key=int) for at in minutes]
        return f"at {_join(times)}" if len(times) <= MAX_TIMES else None
    if len(minutes) > 1:
        return f"at minutes {_join([str(at) for at in minutes])} of every hour" if hour == ANY else None
    return _describe_hours(minutes[0], hour)


def _describe_steps(step: int, hour: str) -> str | None:
    if not step or MINUTES % step:  # the last interval of an hour would be shorter
        return None
    every = "every minute" if step == 1 else f"every {step} minutes"
    if hour == ANY:
        return every
    if found := _RANGE.fullmatch(hour):
        return f"{every} from {int(found[1]):02}:00 to {int(found[2]):02}:59"
    return None


def _describe_hours(minute: int, hour: str) -> str | None:
    if hour == ANY:
        return "every hour" if not minute else f"at minute {minute} of every hour"
    if found := _RANGE.fullmatch(hour):
        return f"every hour from {int(found[1]):02}:{minute:02} to {int(found[2]):02}:{minute:02}"
    step = _STEP.fullmatch(hour)
    if step is None or not int(step[1]) or HOURS % int(step[1]):
        return None
    every = "every hour" if int(step[1]) == 1 else f"every {int(step[1])} hours"
    return f"{every} from 00:{minute:02}"


def _describe_days(day: str, weekday: str) -> str | None:
    if day == ANY and weekday == ANY:
        return ""
    if day == ANY:
        return _describe_weekdays(weekday)
    if weekday != ANY:  # a day that fits either of them
        return None
    if day == "L":
        return "on the last day of the month"
    if _NUMBERS.fullmatch(day):
        days = day.split(",")
        return f"on {'day' if len(days) == 1 else 'days'} {_join(days)} of the month"
    return None


def _describe_weekdays(weekday: str) -> str | None:
    if found := _RANGE.fullmatch(weekday):
        first, last = int(found[1]), int(found[2])
        return f"{WEEKDAYS[first % 7]} to {WEEKDAYS[last % 7]}" if max(first, last) <= 7 else None  # noqa: PLR2004 - 7 is Sunday, as 0
    if _NUMBERS.fullmatch(weekday):
        days = [int(part) for part in weekday.split(",")]
        return f"on {_join([WEEKDAYS[at % 7] for at in days])}" if max(days) <= 7 else None  # noqa: PLR2004 - the same
    return None


def _describe_months(month: str) -> str | None:
    if month == ANY:
        return ""
    if _NUMBERS.fullmatch(month) and all(1 <= int(part) <= len(MONTHS) for part in month.split(",")):
        return f"in {_join([MONTHS[int(part) - 1] for part in month.split(',')])}"
    return None


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
