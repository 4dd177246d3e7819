"""Charts over time as SVG paths: sparklines, lines, areas and bars, and the axes beside them.

A chart is stretched to its place (`preserveAspectRatio="none"`), so that its texts are HTML outside the drawing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 600, 132
SPARK_WIDTH, SPARK_HEIGHT = 120, 56
GRID_LINES = 3  # above the zero line
X_LABELS = 6
NICE_STEPS = (1.2, 1.5, 1.8, 2.4, 3, 4.5, 6, 9, 12)  # each divided by three is round
BAR_SHARE = 0.75  # of the width that a bar has


class Line(NamedTuple):
    """One series; None is a gap."""

    label: str
    tone: str
    values: Sequence[float | None]
    shown: str  # the newest value, in the legend
    dashed: bool = False
    area: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """A series as it is drawn."""

    line: Line
    path: str
    area: str
    bars: tuple[tuple[float, float, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: its series, the labels of its axes from top to bottom and from left to right, and its title."""

    title: str
    series: tuple[Drawn, ...]
    y_labels: tuple[str, ...]
    x_times: tuple[datetime, ...]
    as_days: bool
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def grid(self) -> tuple[int, ...]:
        """The y coordinates of the grid lines."""
        return tuple(round(HEIGHT * at / GRID_LINES) for at in range(GRID_LINES + 1))


def line_path(values: Sequence[float | None], top: float, width: int, height: int) -> str:
    """Return the path through the values; a gap begins a new part."""
    parts = []
    step = width / max(len(values) - 1, 1)
    drawing = False
    for at, value in enumerate(values):
        if value is None:
            drawing = False
            continue
        parts.append(f"{'L' if drawing else 'M'}{round(at * step)} {_y(value, top, height)}")
        if not drawing and (at + 1 == len(values) or values[at + 1] is None):
            parts.append("h0")  # a point alone: its round ends are seen
        drawing = True
    return "".join(parts)


def area_path(values: Sequence[float | None], top: float, width: int, height: int) -> str:
    """Return the closed paths below the values; there is nothing below a gap and a point alone."""
    step = width / max(len(values) - 1, 1)
    parts = []
    for is_known, group in groupby(enumerate(values), key=lambda pair: pair[1] is not None):
        points = [(round(at * step), _y(value or 0.0, top, height)) for at, value in group]
        if is_known and len(points) > 1:
            line = "L".join(f"{x} {y}" for x, y in points)
            parts.append(f"M{line}L{points[-1][0]} {height}L{points[0][0]} {height}Z")
    return "".join(parts)


def sparkline(values: Sequence[float | None]) -> tuple[str, str]:
    """Return the line and the area of a sparkline, with some room above and below."""
    known = [value for value in values if value is not None]
    if len(known) < 2:  # noqa: PLR2004 - a line needs two points
        return "", ""
    top = max(*known, 1e-9) * 1.1
    return line_path(values, top, SPARK_WIDTH, SPARK_HEIGHT), area_path(values, top, SPARK_WIDTH, SPARK_HEIGHT)


def nice_top(value: float) -> float:
    """Return a round number that is not below the value, for the top of an axis."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(round(step * unit, 9) for step in NICE_STEPS if step * unit >= value * (1 - 1e-9))


def chart(
    title: str,
    lines: Sequence[Line],
    times: Sequence[datetime],
    label: Callable[[float], str],
    *,
    bars: bool = False,
    whole_numbers: bool = False,
) -> Chart:
    """Draw a chart of series over the same times."""
    known = [value for line in lines for value in line.values if value is not None]
    top = nice_top(max(known, default=0.0) * 1.05)
    if whole_numbers:
        top = max(GRID_LINES, top)
    drawn = tuple(
        Drawn(
            line,
            "" if bars else line_path(line.values, top, WIDTH, HEIGHT),
            area_path(line.values, top, WIDTH, HEIGHT) if line.area else "",
            _bars(line.values, top) if bars else (),
        )
        for line in lines
    )
    labels = tuple(label(top * at / GRID_LINES) if at else "0" for at in range(GRID_LINES, -1, -1))
    span = times[-1] - times[0] if times else timedelta()
    ticks = tuple(times[0] + span * at / X_LABELS for at in range(X_LABELS)) if times else ()
    return Chart(title, drawn, labels, ticks, span > timedelta(days=2))


def _bars(values: Sequence[float | None], top: float) -> tuple[tuple[float, float, float, float], ...]:
    step = WIDTH / max(len(values), 1)
    found = []
    for at, value in enumerate(values):
        if value:
            y = _y(value, top, HEIGHT)
            found.append((round(at * step + step * (1 - BAR_SHARE) / 2, 1), y, round(step * BAR_SHARE, 1), HEIGHT - y))
    return tuple(found)


def _y(value: float, top: float, height: int) -> int:
    return round(height - min(max(value / top, 0.0), 1.0) * height)


def stacked(
    counts: Sequence[tuple[str, float]], *, least: float = 8.8, width: float = 1000.0
) -> list[tuple[str, float, float]]:
    """Return tone, x and width of the parts of a stacked bar; no part that has something is thinner than `least`."""
    shown = [(tone, count) for tone, count in counts if count > 0]
    total = sum(count for _, count in shown)
    if not total:
        return []
    widths = [max(least, count / total * width) for _, count in shown]
    scale = width / sum(widths)
    found = []
    x = 0.0
    for (tone, _), part in zip(shown, widths, strict=True):
        found.append((tone, round(x, 1), round(part * scale, 1)))
        x += part * scale
    return found
