"""Output of the commands (tables and fields for people, JSON for programs, notes on standard error), and JSON input.

Invariant: a row of a table is one line, and stored text cannot move the cursor or color the screen: characters that are
not printable are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import typer

from interlock.lifecycle import TaskRowState

STATE_COLORS: dict[str, str] = {
    TaskRowState.WAITING: typer.colors.YELLOW,
    TaskRowState.PENDING: typer.colors.BLUE,
    TaskRowState.RUNNING: typer.colors.CYAN,
    TaskRowState.DONE: typer.colors.GREEN,
    TaskRowState.ERROR: typer.colors.RED,
    TaskRowState.CANCELED: typer.colors.MAGENTA,
    TaskRowState.SKIPPED: typer.colors.BRIGHT_BLACK,
}
DURATION_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))  # seconds of each unit


def print_note(text: str) -> None:
    """Print a note on standard error; standard output has nothing but the answer of a command."""
    typer.echo(text, err=True)


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows in columns under a header; columns of numbers are aligned right."""
    lines = [["" if value is None else escape_control_characters(str(value)) for value in row] for row in rows]
    cells_by_column = zip(*lines, strict=True) if lines else [() for _ in header]
    columns = [_align(name, cells) for name, cells in zip(header, cells_by_column, strict=True)]
    (title, *body) = zip(*columns, strict=True)
    head = typer.style("  ".join(title).rstrip(), bold=True)
    return "\n".join([head, *("  ".join(map(_color, [*row[:-1], row[-1].rstrip()])).rstrip() for row in body)])


def _align(name: str, cells: Sequence[str]) -> list[str]:
    """Pad the cells of a column to one width."""
    width = max(map(len, (name, *cells)))
    is_number = all(not text or text.removeprefix("~").removesuffix("+").isdecimal() for text in cells)
    return [text.rjust(width) if is_number else text.ljust(width) for text in (name, *cells)]


def _color(cell: str) -> str:
    """Color a padded cell that holds the state of a task."""
    color = STATE_COLORS.get(cell.strip())
    return cell if color is None else typer.style(cell, fg=color)


def format_fields(pairs: Iterable[tuple[str, object]]) -> str:
    """Format names and values on lines of their own, without None; further lines of a value are indented."""
    known = [(name, value) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in known), default=0)
    lines = []
    for name, value in known:
        first, *others = (escape_control_characters(line) for line in str(value).split("\n"))
        shown = typer.style(first, fg=STATE_COLORS.get(first)) if name == "state" else first
        lines.append(f"{typer.style(name.ljust(width), bold=True)}  {shown}".rstrip())
        lines += [f"{' ' * width}  {line}".rstrip() for line in others]
    return "\n".join(lines)


def parse_json(text: str) -> Any:
    """Parse JSON, without the constants NaN and Infinity that Python accepts."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid in JSON")


def format_json(value: Any, *, pretty: bool = True) -> str:
    """Format JSON: indented, or on one line for one of many answers."""
    return orjson.dumps(value, default=_json_default, option=orjson.OPT_INDENT_2 if pretty else None).decode()


def _json_default(value: object) -> object:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return str(value)


def format_time(at: datetime | None) -> str | None:
    """Format a time in UTC, to the millisecond."""
    return None if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]


def format_duration(time: timedelta) -> str:
    """Format a duration in its largest unit."""
    seconds = max(time.total_seconds(), 0.0)
    for size, unit in DURATION_UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{seconds:.0f} s"


def format_relative_time(at: datetime, now: datetime) -> str:
    """Format the distance of a time from now: `in 5 s`, `2 h ago`."""
    return f"in {format_duration(at - now)}" if at > now else f"{format_duration(now - at)} ago"


def format_time_and_distance(at: datetime | None, now: datetime) -> str | None:
    """Format a time in UTC with its distance from now."""
    return None if at is None else f"{format_time(at)} UTC, {format_relative_time(at, now)}"


def format_period(period: timedelta) -> str:
    """Format the period of a limit or a schedule in seconds."""
    return f"{period.total_seconds():g} s"


def escape_control_characters(text: str) -> str:
    """Replace characters that are not printable by escapes."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
