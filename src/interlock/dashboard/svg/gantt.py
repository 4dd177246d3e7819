"""Draws attempts over time: a row per step, a bar per attempt, dashed lines for the waits between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.dashboard.format import seconds
from interlock.lifecycle import TASK_ROW, TaskRowState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

WIDTH = 700
LABEL_WIDTH = 128
ROW_HEIGHT = 28
BAR_HEIGHT = 20
TOP = 24
MIN_BAR = 4.0
RIGHT_MARGIN = 14
MAX_TICKS = 6
CHARACTER = 6.2  # mean width of a text in a bar
TICK_STEPS_S = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400)
MAX_ROWS = 200
# how an attempt ended, by the event of the move that ended it
TONES: dict[str, str] = {
    TaskRowState.DONE: "green",
    TaskRowState.ERROR: "red",
    TaskRowState.CANCELED: "slate",
    TaskRowState.PENDING: "red",
    TaskRowState.WAITING: "violet",
}


class Span(NamedTuple):
    """Something that takes time; `end` is None while it lasts."""

    start: datetime
    end: datetime | None
    tone: str
    text: str
    title: str


@dataclass(slots=True)
class GanttRow:
    """The spans of one step, and the waits between them."""

    name: str
    spans: list[Span] = field(default_factory=list)
    waits: list[tuple[datetime, datetime | None]] = field(default_factory=list)


class DrawnBar(NamedTuple):
    """A bar."""

    x: float
    y: float
    width: float
    tone: str
    text: str
    title: str


class DrawnRow(NamedTuple):
    """A row: the place of its name, its bars and its dashed lines."""

    name: str
    text: str
    y: float
    bars: list[DrawnBar]
    waits: list[str]


class DrawnTick(NamedTuple):
    """A line of the time axis."""

    x: float
    text: str


class Gantt(NamedTuple):
    """A drawing."""

    width: int
    height: int
    rows: list[DrawnRow]
    ticks: list[DrawnTick]
    now: float | None
    length: str
    left_out: int


def attempt_row(name: str, moves: Sequence[Mapping[str, Any]]) -> GanttRow:
    """Make the row of a task from its recorded moves, oldest first."""
    row = GanttRow(name)
    for move, following in zip(moves, [*moves[1:], None], strict=True):
        start = move["recorded_at"]
        end = None if following is None else following["recorded_at"]
        state = move["to_state"]
        if state == TaskRowState.RUNNING:
            row.spans.append(_attempt(name, move, following))
        elif state == TaskRowState.PENDING or (state == TaskRowState.WAITING and move["from_state"] is not None):
            row.waits.append((start, end))
    if moves and moves[-1]["to_state"] in TASK_ROW.final and row.waits and row.waits[-1][1] is None:
        row.waits.pop()
    return row


def _attempt(name: str, move: Mapping[str, Any], following: Mapping[str, Any] | None) -> Span:
    attempt = move["attempt"]
    if following is None:
        return Span(move["recorded_at"], None, "blue", f"{attempt} running", f"{name}, attempt {attempt}, running")
    outcome, event = following["to_state"], following["event"]
    took = seconds((following["recorded_at"] - move["recorded_at"]).total_seconds())
    tone = "orange" if event in {"expire", "exhaust"} else TONES.get(outcome, "slate")
    text = str(attempt) if outcome == TaskRowState.DONE else f"{attempt} {event}"
    return Span(
        move["recorded_at"], following["recorded_at"], tone, text, f"{name}, attempt {attempt}, {event} after {took}"
    )


def wait_span(name: str, start: datetime, end: datetime | None, text: str, *, tone: str = "violet") -> Span:
    """Make the span of a step that waits for something of its own: a signal, a time, parts or a child job."""
    return Span(start, end, tone, text, f"{name}: {text}")


def draw_gantt(rows: Iterable[GanttRow], start: datetime, end: datetime, *, running: bool) -> Gantt:
    """Draw rows between two times; `running`: the end is now, and is marked."""
    given = list(rows)
    shown = given[:MAX_ROWS]
    length = max((end - start).total_seconds(), 0.001)
    room = length * (1.06 if running else 1.0)
    scale = (WIDTH - LABEL_WIDTH - RIGHT_MARGIN) / room

    def place(moment: datetime | None) -> float:
        at = end if moment is None else min(max(moment, start), end)
        return LABEL_WIDTH + (at - start).total_seconds() * scale

    drawn = []
    for number, row in enumerate(shown):
        y = TOP + 4 + number * ROW_HEIGHT
        seen = [span for span in row.spans if span.end is None or span.end >= start]
        bars = [_bar(span, place(span.start), place(span.end), y) for span in seen]
        middle = y + BAR_HEIGHT / 2
        waits = [
            f"M{place(a):.1f} {middle:g}H{place(b):.1f}"
            for a, b in row.waits
            if place(b) - place(a) >= 1 and (b is None or b >= start)
        ]
        text = row.name if len(row.name) <= 18 else f"{row.name[:17]}…"  # noqa: PLR2004 - as wide as the column of names
        drawn.append(DrawnRow(row.name, text, y + 14, bars, waits))
    height = TOP + 8 + len(shown) * ROW_HEIGHT
    now = round(place(end), 1) if running else None
    return Gantt(WIDTH, height, drawn, _ticks(room, scale), now, seconds(length), len(given) - len(shown))


def _bar(span: Span, left: float, right: float, y: float) -> DrawnBar:
    width = max(MIN_BAR, right - left)
    room = int((width - 10) / CHARACTER)
    text = span.text if len(span.text) <= room else span.text.split(" ")[0]
    return DrawnBar(round(left, 1), y, round(width, 1), span.tone, text if len(text) <= room else "", span.title)


def _ticks(room: float, scale: float) -> list[DrawnTick]:
    step = next((step for step in TICK_STEPS_S if room / step <= MAX_TICKS), None)
    if step is None:
        step = timedelta(days=max(1, round(room / 86400 / MAX_TICKS))).total_seconds()
    count = int(room / step)
    return [DrawnTick(round(LABEL_WIDTH + at * step * scale, 1), seconds(at * step)) for at in range(count + 1)]
