"""Where the commands talk: standard output is for the answer, standard error for what goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import typer


def print_note(text: str) -> None:
    """Say on standard error what is going on."""
    typer.echo(text, err=True)


# SECTION cli/tables
# How the commands write what they found: tables and fields for people, JSON for machines.
#
# Invariant: a line of a table is one line, and nothing that is stored can move the cursor or colour the screen: what is
# not printable is written as an escape.

COLOURS = {
    "waiting": typer.colors.YELLOW,
    "pending": typer.colors.BLUE,
    "running": typer.colors.CYAN,
    "done": typer.colors.GREEN,
    "error": typer.colors.RED,
    "canceled": typer.colors.MAGENTA,
    "skipped": typer.colors.BRIGHT_BLACK,
}
UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write rows in columns under a header; numbers stand at the right."""
    lines = [[_cell(value) for value in row] for row in rows]
    columns = [_aligned(name, column) for name, column in zip(header, _columns(header, lines), strict=True)]
    (title, *written) = zip(*columns, strict=True)
    head = typer.style("  ".join(title).rstrip(), bold=True)
    return "\n".join([head, *(_coloured(cells) for cells in written)])


def format_fields(pairs: Iterable[tuple[str, object]]) -> str:
    """Write names and values below each other, without what is None; later lines of a value are indented."""
    known = [(name, value) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in known), default=0)
    lines = []
    for name, value in known:
        first, *others = _lines(value)
        shown = typer.style(first, fg=COLOURS.get(first)) if name == "state" else first
        lines.append(f"{typer.style(name.ljust(width), bold=True)}  {shown}".rstrip())
        lines += [f"{' ' * width}  {line}".rstrip() for line in others]
    return "\n".join(lines)


def format_json(value: Any, *, pretty: bool = True) -> str:
    """Write JSON: indented for one answer, in one line for one of many."""
    return orjson.dumps(value, default=_json_of, option=orjson.OPT_INDENT_2 if pretty else None).decode()


def format_time(at: datetime | None) -> str | None:
    """Write a time, in UTC."""
    return None if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]


def format_duration(time: timedelta) -> str:
    """Write how long something takes or is ago, as exactly as a person wants to know."""
    seconds = max(time.total_seconds(), 0.0)
    for size, unit in UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{seconds:.0f} s"


def format_relative_time(at: datetime, now: datetime) -> str:
    """Write how far a time is away, in either direction."""
    return f"in {format_duration(at - now)}" if at > now else f"{format_duration(now - at)} ago"


def escape_control_characters(text: str) -> str:
    """Write control characters as escapes."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def _cell(value: object) -> str:
    return "" if value is None else escape_control_characters(str(value))


def _lines(value: object) -> list[str]:
    return [escape_control_characters(line) for line in str(value).split("\n")]


def _columns(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterable[Sequence[str]]:
    return zip(*lines, strict=True) if lines else [() for _ in header]


def _aligned(name: str, column: Sequence[str]) -> list[str]:
    """Give a column its width."""
    width = max(map(len, (name, *column)))
    is_number = all(not text or text.isdecimal() for text in column)
    return [text.rjust(width) if is_number else text.ljust(width) for text in (name, *column)]


def _coloured(cells: Sequence[str]) -> str:
    """Colour the cells that name a state, now that they have their width."""
    last = len(cells) - 1
    shown = [cell if place < last else cell.rstrip() for place, cell in enumerate(cells)]
    return "  ".join(_in_colour(cell) for cell in shown).rstrip()


def _in_colour(cell: str) -> str:
    colour = COLOURS.get(cell.strip())
    return cell if colour is None else typer.style(cell, fg=colour)


def _json_of(value: object) -> object:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return str(value)
