"""The coordinates of a layout: how wide and high everything is, and where it stands on the canvas.

Invariant: two neighbours in a row never come closer than the gap between them, and everything is inside the canvas.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from interlock.machine.layout import JOINED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from interlock.machine.layout import Layout, Link, Spot

CHARACTER = 0.61  # the width of a monospaced character, as a part of the font's size
STATE_FONT = 14
LABEL_FONT = 12
STATE_HEIGHT = 38
LABEL_HEIGHT = 18
LINE = 15
DOT = 6
LOOP = 26
MARGIN = 28
HEADING = 34
GAP = 20
PORT = 18
ROUNDS = 200
RAIL = 30.0
FIXED = 1e9


@dataclass(slots=True)
class Box:
    """Where a spot is: its middle, how far its own shape reaches, and how far things beside the shape reach."""

    x: float
    y: float
    width: float
    height: float
    beside: float = 0

    @property
    def top(self) -> float:
        """The upper edge of the shape."""
        return self.y - self.height / 2

    @property
    def bottom(self) -> float:
        """The lower edge of the shape."""
        return self.y + self.height / 2

    @property
    def left(self) -> float:
        """The left edge of the shape."""
        return self.x - self.width / 2

    @property
    def right(self) -> float:
        """The right edge of the shape."""
        return self.x + self.width / 2


class Piece(NamedTuple):
    """One piece of an arrow: from the lower edge of the upper spot to the upper edge of the lower one."""

    link: Link
    start: float
    end: float


class Canvas(NamedTuple):
    """A layout with coordinates."""

    boxes: dict[Spot, Box]
    pieces: list[Piece]
    width: float
    height: float


def place(layout: Layout, heading: str) -> Canvas:
    """Give every spot of the layout its coordinates."""
    boxes = {spot: _sized(spot) for row in layout.rows for spot in row}
    _spread(layout, boxes)
    shift = MARGIN - min(box.left for box in boxes.values())
    for box in boxes.values():
        box.x += shift
    pieces = _pieces(layout.links, boxes)
    height = _stack(layout, boxes, pieces)
    width = max(
        *(box.right + box.beside for box in boxes.values()), MARGIN + len(heading) * CHARACTER * (STATE_FONT + 2)
    )
    return Canvas(boxes, pieces, width + MARGIN, height)


def text_width(text: str, font: int) -> float:
    """Tell how wide a monospaced text is."""
    return len(text) * CHARACTER * font


def _sized(spot: Spot) -> Box:
    if spot.kind == "state":
        ports = max(len(spot.above), len(spot.below))
        width = max(text_width(spot.text, STATE_FONT) + 32, 84, (ports + 1) * PORT)
        beside = LOOP + 4 + text_width(spot.loop, LABEL_FONT) if spot.loop else 0
        return Box(0, 0, width, STATE_HEIGHT, beside)
    if spot.kind == "label":
        lines = spot.text.split(JOINED)
        return Box(
            0, 0, max(text_width(line, LABEL_FONT) for line in lines) + 8, LABEL_HEIGHT + LINE * (len(lines) - 1)
        )
    if spot.kind == "dot":
        return Box(0, 0, 2 * DOT, 2 * DOT)
    return Box(0, 0, 4, 0)


def _spread(layout: Layout, boxes: dict[Spot, Box]) -> None:
    """Choose the middles: first as near to what each spot is linked to as the gaps allow, then in straight lines."""
    for row in layout.rows:
        _set(row, [0.0] * len(row), [1.0] * len(row), boxes)
    _relax(layout, boxes)
    lines = _lines(layout.links)
    _straighten(layout, boxes, lines)
    _relax(layout, boxes, {spot for line in lines for spot in line})


def _relax(layout: Layout, boxes: dict[Spot, Box], fixed: Collection[Spot] = ()) -> None:
    """Let every spot that is not fixed be drawn towards the spots it is linked to, until all are at rest."""
    pulls = _pulls(layout.links) | {spot: [(spot, FIXED)] for spot in fixed}
    for turn in range(ROUNDS):
        for row in layout.rows if turn % 2 else layout.rows[::-1]:
            weights = [sum(strength for _, strength in pulls[spot]) for spot in row]
            wishes = [
                sum(boxes[other].x * strength for other, strength in pulls[spot]) / weight
                for spot, weight in zip(row, weights, strict=True)
            ]
            _set(row, wishes, weights, boxes)


def _pulls(links: Iterable[Link]) -> dict[Spot, list[tuple[Spot, float]]]:
    pulls: dict[Spot, list[tuple[Spot, float]]] = defaultdict(list)
    for link in links:
        strength = RAIL if _on_rail(link) else 1.0
        pulls[link.upper].append((link.lower, strength))
        pulls[link.lower].append((link.upper, strength))
    return pulls


def _on_rail(link: Link) -> bool:
    return "state" not in {link.upper.kind, link.lower.kind}


def _lines(links: Sequence[Link]) -> list[list[Spot]]:
    """List what should stand in straight lines: the main way through the states, and then the rails."""
    after: dict[Spot, Spot] = {}
    before: dict[Spot, Spot] = {}
    # The table names the usual way on from a state first, so the first link from each to each makes the main way.
    for link in sorted((link for link in links if _aligned(link)), key=_on_rail):
        if link.upper not in after and link.lower not in before:
            after[link.upper], before[link.lower] = link.lower, link.upper
    return [_line(spot, after) for spot in after if spot not in before]


def _line(first: Spot, after: Mapping[Spot, Spot]) -> list[Spot]:
    line = [first]
    while line[-1] in after:
        line.append(after[line[-1]])
    return line


def _aligned(link: Link) -> bool:
    return _on_rail(link) or not (link.back or link.upper.kind == "dot")


def _straighten(layout: Layout, boxes: dict[Spot, Box], lines: Sequence[Sequence[Spot]]) -> None:
    """Make the lines upright and keep the gaps, in turns: that ends where both hold, if there is such a place."""
    for _ in range(ROUNDS):
        for line in lines:
            mean = sum(boxes[spot].x for spot in line) / len(line)
            for spot in line:
                boxes[spot].x = mean
        for row in layout.rows:
            _set(row, [boxes[spot].x for spot in row], [1.0] * len(row), boxes)


def _apart(left: Spot, right: Spot, boxes: dict[Spot, Box]) -> float:
    return boxes[left].width / 2 + boxes[left].beside + GAP + boxes[right].width / 2


def _set(row: Sequence[Spot], wishes: Sequence[float], weights: Sequence[float], boxes: dict[Spot, Box]) -> None:
    gaps = [_apart(left, right, boxes) for left, right in pairwise(row)]
    for spot, x in zip(row, settle(wishes, weights, gaps), strict=True):
        boxes[spot].x = x


def settle(wishes: Sequence[float], weights: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Find the places nearest to the wishes (by weighted squares) that keep their order and the gaps."""
    offsets = list(accumulate(gaps, initial=0.0))
    # Neighbours that would come too close are pooled, and the pool stands at its weighted mean.
    pools: list[tuple[float, float, int]] = []
    for wish, weight, offset in zip(wishes, weights, offsets, strict=False):
        pool = (wish - offset, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, mass, count = pools.pop()
            total = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / total, total, count + pool[2])
        pools.append(pool)
    means = (mean for mean, _, count in pools for _ in range(count))
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]


def _pieces(links: Sequence[Link], boxes: dict[Spot, Box]) -> list[Piece]:
    starts = _ports(((link, link.upper, link.lower) for link in links), boxes)
    ends = _ports(((link, link.lower, link.upper) for link in links), boxes)
    return [Piece(link, starts[link], ends[link]) for link in links]


def _ports(ends: Iterable[tuple[Link, Spot, Spot]], boxes: dict[Spot, Box]) -> dict[Link, float]:
    """Choose where each arrow touches its spot: straight towards the other end, but apart from one another."""
    touching: dict[Spot, list[tuple[Link, Spot]]] = defaultdict(list)
    for link, spot, other in ends:
        touching[spot].append((link, other))
    ports: dict[Link, float] = {}
    for spot, others in touching.items():
        box = boxes[spot]
        if spot.kind != "state":
            ports |= {link: box.x for link, _ in others}
            continue
        others.sort(key=lambda end: boxes[end[1]].x)
        reach = (box.width - 2 * PORT + 8) / 2
        step = min(PORT, 2 * reach / max(len(others) - 1, 1))
        wishes = [min(max(boxes[other].x, box.x - reach), box.x + reach) for _, other in others]
        places = settle(wishes, [1.0] * len(others), [step] * (len(others) - 1))
        for index, ((link, _), x) in enumerate(zip(others, places, strict=True)):
            low, high = box.x - reach + index * step, box.x + reach - (len(others) - 1 - index) * step
            ports[link] = min(max(x, low), high)
    return ports


def _stack(layout: Layout, boxes: dict[Spot, Box], pieces: Sequence[Piece]) -> float:
    """Choose the heights of the rows: more room between them where an arrow has far to go sideways."""
    swing: dict[int, float] = defaultdict(float)
    for piece in pieces:
        number = piece.link.upper.row
        swing[number] = max(swing[number], abs(piece.end - piece.start))
    y = float(HEADING + MARGIN)
    for row in layout.rows:
        height = max(boxes[spot].height for spot in row)
        for spot in row:
            boxes[spot].y = y + height / 2
            # What an arrow passes through is as high as its row: it turns only between rows, never beside a neighbour.
            if spot.kind in {"label", "bend"}:
                boxes[spot].height = height
        y += height + 16 + min(28.0, swing[row[0].row] * 0.14)
    return y - 16 + MARGIN
