"""Where the states, labels and arrows of a machine go in a picture: a layered layout that reads from top to bottom.

Invariant: every label and every bend of an arrow is given room of its own in its row, like a state, so that nothing
can be drawn over anything else; arrows that carry the same event to the same state share one rail.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from interlock.machine.definition import Machine


JOINED = " / "
STARTS = 40
SWEEPS = 8


class Arrow(NamedTuple):
    """All events that lead from one state to another, as one arrow with one label."""

    source: str
    target: str
    label: str


@dataclass(slots=True, eq=False)
class Spot:
    """A place in a row that something takes up: a state, a label, a bend of an arrow, or the dot of a beginning."""

    kind: Literal["state", "label", "bend", "dot"]
    row: int
    text: str = ""
    back: bool = False
    loop: str = ""
    above: list[Spot] = field(default_factory=list)
    below: list[Spot] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Link:
    """A piece of an arrow between two rows; `back` pieces run upward, and a `tip` ends in an arrowhead."""

    upper: Spot
    lower: Spot
    back: bool = False
    tip: bool = False


class Layout(NamedTuple):
    """The rows of a picture, each in its order from left to right, and the pieces of arrows between them."""

    rows: list[list[Spot]]
    links: list[Link]


def arrows(machine: Machine[Any, Any]) -> list[Arrow]:
    """List what a picture has to draw: one arrow for each pair of states with a move between them."""
    pairs = dict.fromkeys((source, target) for source, _, target in machine.rows)
    return [Arrow(str(a), str(b), JOINED.join(machine.events_between(a, b))) for a, b in pairs]


def arrange(machine: Machine[Any, Any]) -> Layout:
    """Give every state, label and bend its row and its order in the row, with few crossings of arrows."""
    drawn = arrows(machine)
    forward, backward = _directions(machine, [arrow for arrow in drawn if arrow.source != arrow.target])
    ranks = _ranks(machine, forward)
    loops = {arrow.source: arrow.label for arrow in drawn if arrow.source == arrow.target}
    # States take every other row, so that between two of them there is always one for labels.
    states = {name: Spot("state", 2 * rank + 1, name, loop=loops.get(name, "")) for name, rank in ranks.items()}
    links = [
        *_rails(states, forward, back=False),
        *_rails(states, backward, back=True),
        *(Link(Spot("dot", states[name].row - 1), states[name], tip=True) for name in _initial(machine)),
    ]
    rows = _rows(states.values(), links)
    _uncross(rows)
    return Layout(rows, links)


def _directions(machine: Machine[Any, Any], drawn: Sequence[Arrow]) -> tuple[list[Arrow], list[Arrow]]:
    """Tell the arrows that lead onward from those that lead back to a state on the way to them."""
    leaving: dict[str, list[Arrow]] = defaultdict(list)
    for arrow in drawn:
        leaving[arrow.source].append(arrow)
    forward: list[Arrow] = []
    backward: list[Arrow] = []
    seen: set[str] = set()

    def walk(state: str, path: tuple[str, ...]) -> None:
        seen.add(state)
        for arrow in leaving[state]:
            (backward if arrow.target in path else forward).append(arrow)
            if arrow.target not in seen:
                walk(arrow.target, (*path, arrow.target))

    for state in _initial(machine):
        if state not in seen:
            walk(state, (state,))
    return forward, backward


def _ranks(machine: Machine[Any, Any], forward: Sequence[Arrow]) -> dict[str, int]:
    """Put every state below all states that lead to it: its rank is the longest way there."""
    ranks = dict.fromkeys(map(str, machine.states), 0)
    for _ in ranks:
        for arrow in forward:
            ranks[arrow.target] = max(ranks[arrow.target], ranks[arrow.source] + 1)
    return ranks


def _initial(machine: Machine[Any, Any]) -> list[str]:
    return [str(state) for state in machine.states if state in machine.initial]


def _rails(states: Mapping[str, Spot], drawn: Iterable[Arrow], *, back: bool) -> Iterator[Link]:
    sources: dict[tuple[str, str], list[Spot]] = defaultdict(list)
    for arrow in drawn:
        sources[arrow.target, arrow.label].append(states[arrow.source])
    for (target, label), joining in sources.items():
        yield from _rail(states[target], label, joining, back=back)


def _rail(target: Spot, label: str, sources: Sequence[Spot], *, back: bool) -> Iterator[Link]:
    """Lay one rail to the target; every source joins it at a label, so that each arrow is named where it begins."""
    step = -1 if back else 1
    joins = {source.row + step for source in sources}
    first = max(joins) if back else min(joins)
    way = {
        row: Spot("label", row, label, back) if row in joins else Spot("bend", row, back=back)
        for row in range(first, target.row, step)
    }
    for source in sources:
        yield _link(source, way[source.row + step], back=back)
    for here, there in pairwise(way.values()):
        yield _link(here, there, back=back)
    yield _link(way[target.row - step], target, back=back, tip=True)


def _link(here: Spot, there: Spot, *, back: bool, tip: bool = False) -> Link:
    return Link(there, here, back, tip) if back else Link(here, there, back, tip)


def _rows(states: Iterable[Spot], links: Iterable[Link]) -> list[list[Spot]]:
    spots = dict.fromkeys(states)
    for link in links:
        spots |= dict.fromkeys((link.upper, link.lower))
        link.upper.below.append(link.lower)
        link.lower.above.append(link.upper)
    rows: dict[int, list[Spot]] = defaultdict(list)
    for spot in spots:
        rows[spot.row].append(spot)
    return [rows[number] for number in sorted(rows)]


def _uncross(rows: list[list[Spot]]) -> None:
    """Order the rows so that few arrows cross: the best of several starts, the same ones on every run."""
    best, order = _crossings(rows), [list(row) for row in rows]
    chance = Random(STARTS)  # noqa: S311 - chance finds orders to try; a fixed seed draws the same picture every time
    for start in range(STARTS):
        if start:
            for row in rows:
                chance.shuffle(row)
        for sweep in range(SWEEPS):
            _sweep(rows, down=sweep % 2 == 0)
            _swap(rows)
            crossings = _crossings(rows)
            if crossings < best:
                best, order = crossings, [list(row) for row in rows]
    rows[:] = order


def _sweep(rows: Sequence[list[Spot]], *, down: bool) -> None:
    """Put each spot near the middle of its neighbours in the row before."""
    for fixed, row in pairwise(rows if down else rows[::-1]):
        places = {spot: place for place, spot in enumerate(fixed)}
        keys = {}
        for place, spot in enumerate(row):
            others = spot.above if down else spot.below
            keys[spot] = sum(places[other] for other in others) / len(others) if others else place
        row.sort(key=lambda spot: keys[spot])


def _swap(rows: Sequence[list[Spot]]) -> None:
    """Exchange neighbours in a row as long as that saves a crossing."""
    places = {spot: place for row in rows for place, spot in enumerate(row)}
    improved = True
    while improved:
        improved = False
        for row in rows:
            for place, (left, right) in enumerate(pairwise(list(row))):
                if row[place] is left and _tangle(right, left, places) < _tangle(left, right, places):
                    row[place : place + 2] = right, left
                    places[left], places[right] = place + 1, place
                    improved = True


def _tangle(left: Spot, right: Spot, places: Mapping[Spot, int]) -> int:
    """Count the crossings between the arrows of two spots that stand side by side."""
    return sum(places[a] > places[b] for a in left.above for b in right.above) + sum(
        places[a] > places[b] for a in left.below for b in right.below
    )


def _crossings(rows: Sequence[Sequence[Spot]]) -> int:
    places = {spot: place for row in rows for place, spot in enumerate(row)}
    return sum(
        places[a] > places[b]
        for row in rows
        for left, right in combinations(row, 2)
        for a in left.below
        for b in right.below
    )


# SECTION machine/placement
# The coordinates of a layout: how wide and high everything is, and where it stands on the canvas.
#
# Invariant: two neighbours in a row never come closer than the gap between them, and everything is inside the canvas.

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
