"""Layered graph layout for diagrams: assigns rows, orders them to reduce crossings, and sets coordinates.

Invariant: every label and every bend of an arrow occupies a node of its own in its row, like a state, so that nothing
overlaps; neighbours in a row never come closer than the gap, and everything is inside the canvas. Arrows that carry
the same event to the same state share one rail.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from interlock.machine.definition import Machine


EVENT_SEPARATOR = " / "
FULL_EFFORT_NODES = 100  # a larger graph gets fewer starts and rounds, so that the time grows less than its size
ORDERING_STARTS = 40  # random initial orders to try
SWEEPS_PER_START = 8
CHARACTER_WIDTH = 0.61  # of a monospaced character, as a fraction of the font size
STATE_FONT = 14
LABEL_FONT = 12
STATE_HEIGHT = 38
LABEL_HEIGHT = 18
LINE_HEIGHT = 15
DOT_RADIUS = 6
LOOP_WIDTH = 26
MARGIN = 28
HEADING_HEIGHT = 34
GAP = 20
PORT_DISTANCE = 18
ROW_GAP = 16
RELAXATION_ROUNDS = 200
RAIL_STRENGTH = 30.0
FIXED_STRENGTH = 1e9


class Arrow(NamedTuple):
    """An arrow with one label: all events that lead from one state to another, or a dependency between two steps."""

    source: str
    target: str
    label: str
    dashed: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """A node of the layered graph: a box, a label, a bend of an arrow, or the dot of an initial state.

    The text of a box, a state or a step, is unique in the graph; `details` are written below it.
    """

    kind: Literal["box", "label", "bend", "dot"]
    row: int
    text: str = ""
    back: bool = False
    dashed: bool = False
    loop: str = ""
    details: tuple[str, ...] = ()
    above: list[Node] = field(default_factory=list)
    below: list[Node] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Link:
    """A part of an arrow between two adjacent rows; `back` links run upward, and a `tip` has an arrowhead."""

    upper: Node
    lower: Node
    back: bool = False
    tip: bool = False
    dashed: bool = False


class Layout(NamedTuple):
    """The rows of a diagram, each ordered from left to right, and the links between them."""

    rows: list[list[Node]]
    links: list[Link]


def arrows(machine: Machine[Any, Any]) -> list[Arrow]:
    """List the arrows to draw: one for each pair of states with a transition between them."""
    pairs = dict.fromkeys((source, target) for source, _, target in machine.rows)
    return [Arrow(str(a), str(b), EVENT_SEPARATOR.join(machine.events_between(a, b))) for a, b in pairs]


def layered_layout(machine: Machine[Any, Any]) -> Layout:
    """Lay out a machine; arrows that lead back to an earlier state run upward."""
    drawn = arrows(machine)
    forward, backward = _directions(machine, [arrow for arrow in drawn if arrow.source != arrow.target])
    loops = {arrow.source: arrow.label for arrow in drawn if arrow.source == arrow.target}
    states = [Node("box", 0, str(state), loop=loops.get(state, "")) for state in machine.states]
    return lay_out(states, forward, backward, _initial(machine))


def lay_out(
    boxes: Sequence[Node], forward: Sequence[Arrow], backward: Sequence[Arrow] = (), initial: Sequence[str] = ()
) -> Layout:
    """Assign every box, label and bend a row and an order in it, with few crossings; `forward` has no cycle."""
    by_text = {box.text: box for box in boxes}
    for text, rank in _ranks(by_text, forward).items():
        # Boxes take every other row, so that between two of them there is always one for labels.
        by_text[text].row = 2 * rank + 1
    links = [
        *_rails(by_text, forward, back=False),
        *_rails(by_text, backward, back=True),
        *(Link(Node("dot", by_text[text].row - 1), by_text[text], tip=True) for text in initial),
    ]
    rows = _rows(boxes, links)
    _reduce_crossings(rows)
    return Layout(rows, links)


def _directions(machine: Machine[Any, Any], drawn: Sequence[Arrow]) -> tuple[list[Arrow], list[Arrow]]:
    """Split the arrows into forward ones and ones that lead back to a state on the path to them."""
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


def _ranks(texts: Iterable[str], forward: Sequence[Arrow]) -> dict[str, int]:
    """Rank every box below all boxes that lead to it: its rank is the length of the longest path."""
    ranks = dict.fromkeys(texts, 0)
    for _ in ranks:
        before = dict(ranks)
        for arrow in forward:
            ranks[arrow.target] = max(ranks[arrow.target], ranks[arrow.source] + 1)
        if ranks == before:
            break
    return ranks


def _initial(machine: Machine[Any, Any]) -> list[str]:
    return [str(state) for state in machine.states if state in machine.initial]


def _rails(boxes: Mapping[str, Node], drawn: Iterable[Arrow], *, back: bool) -> Iterator[Link]:
    sources: dict[tuple[str, str, bool], list[Node]] = defaultdict(list)
    for arrow in drawn:
        sources[arrow.target, arrow.label, arrow.dashed].append(boxes[arrow.source])
    for (target, label, dashed), joining in sources.items():
        for link in _rail(boxes[target], Node("label", 0, label, back, dashed), joining):
            link.dashed = dashed
            yield link


def _rail(target: Node, label: Node, sources: Sequence[Node]) -> Iterator[Link]:
    """Route one rail to the target; every source joins it at a copy of the label, so that arrows are labelled there."""
    back = label.back
    step = -1 if back else 1
    joins = {source.row + step for source in sources}
    first = max(joins) if back else min(joins)
    way = {
        row: replace(label, row=row, above=[], below=[])
        if label.text and row in joins
        else Node("bend", row, back=back, dashed=label.dashed)
        for row in range(first, target.row, step)
    }
    for source in sources:
        yield _link(source, way[source.row + step], back=back)
    for here, there in pairwise(way.values()):
        yield _link(here, there, back=back)
    yield _link(way[target.row - step], target, back=back, tip=True)


def _link(here: Node, there: Node, *, back: bool, tip: bool = False) -> Link:
    return Link(there, here, back, tip) if back else Link(here, there, back, tip)


def _rows(boxes: Iterable[Node], links: Iterable[Link]) -> list[list[Node]]:
    nodes = dict.fromkeys(boxes)
    for link in links:
        nodes |= dict.fromkeys((link.upper, link.lower))
        link.upper.below.append(link.lower)
        link.lower.above.append(link.upper)
    rows: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        rows[node.row].append(node)
    return [rows[number] for number in sorted(rows)]


def _reduce_crossings(rows: list[list[Node]]) -> None:
    """Order the rows to reduce crossings: the best of several starts, with a fixed seed for a stable diagram."""
    best, order = _crossings(rows), [list(row) for row in rows]
    chance = Random(ORDERING_STARTS)  # noqa: S311 - chance finds orders to try; a fixed seed draws the same picture every time
    for start in range(_scaled(ORDERING_STARTS, rows)):
        if start:
            for row in rows:
                chance.shuffle(row)
        for sweep in range(SWEEPS_PER_START):
            _sweep(rows, down=sweep % 2 == 0)
            _swap(rows)
            crossings = _crossings(rows)
            if crossings < best:
                best, order = crossings, [list(row) for row in rows]
    rows[:] = order


def _scaled(repetitions: int, rows: Sequence[Sequence[Node]]) -> int:
    """Reduce a number of repetitions for a large graph."""
    return max(repetitions * FULL_EFFORT_NODES // max(sum(map(len, rows)), FULL_EFFORT_NODES), 4)


def _sweep(rows: Sequence[list[Node]], *, down: bool) -> None:
    """Move each node to the mean position of its neighbours in the previous row (barycenter heuristic)."""
    for fixed, row in pairwise(rows if down else rows[::-1]):
        places = {node: place for place, node in enumerate(fixed)}
        keys = {}
        for place, node in enumerate(row):
            others = node.above if down else node.below
            keys[node] = sum(places[other] for other in others) / len(others) if others else place
        row.sort(key=lambda node: keys[node])


def _swap(rows: Sequence[list[Node]]) -> None:
    """Swap neighbours in a row as long as that removes a crossing."""
    places = {node: place for row in rows for place, node in enumerate(row)}
    improved = True
    while improved:
        improved = False
        for row in rows:
            for place, (left, right) in enumerate(pairwise(list(row))):
                if row[place] is left and _crossings_between(right, left, places) < _crossings_between(
                    left, right, places
                ):
                    row[place : place + 2] = right, left
                    places[left], places[right] = place + 1, place
                    improved = True


def _crossings_between(left: Node, right: Node, places: Mapping[Node, int]) -> int:
    """Count the crossings between the links of two adjacent nodes."""
    return sum(places[a] > places[b] for a in left.above for b in right.above) + sum(
        places[a] > places[b] for a in left.below for b in right.below
    )


def _crossings(rows: Sequence[Sequence[Node]]) -> int:
    places = {node: place for row in rows for place, node in enumerate(row)}
    return sum(
        places[a] > places[b]
        for row in rows
        for left, right in combinations(row, 2)
        for a in left.below
        for b in right.below
    )


@dataclass(slots=True)
class Box:
    """The position of a node: its centre, its size, and the width of what is drawn beside it."""

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


class ArrowSegment(NamedTuple):
    """One segment of an arrow: from the lower edge of the upper node to the upper edge of the lower one."""

    link: Link
    start: float
    end: float


class Canvas(NamedTuple):
    """A layout with coordinates."""

    boxes: dict[Node, Box]
    segments: list[ArrowSegment]
    width: float
    height: float


def place(
    layout: Layout, heading: str, size: Callable[[Node], Box] | None = None, *, row_gap: float = ROW_GAP
) -> Canvas:
    """Assign coordinates to every node of the layout; `size` measures nodes that are drawn in another way."""
    boxes = {node: (size or _sized)(node) for row in layout.rows for node in row}
    _spread(layout, boxes)
    shift = MARGIN - min(box.left for box in boxes.values())
    for box in boxes.values():
        box.x += shift
    segments = _segments(layout.links, boxes)
    height = _stack(layout, boxes, segments, row_gap)
    width = max(
        *(box.right + box.beside for box in boxes.values()), MARGIN + len(heading) * CHARACTER_WIDTH * (STATE_FONT + 2)
    )
    return Canvas(boxes, segments, width + MARGIN, height)


def text_width(text: str, font: int) -> float:
    """Return the width of a monospaced text."""
    return len(text) * CHARACTER_WIDTH * font


def _sized(node: Node) -> Box:
    if node.kind == "box":
        ports = max(len(node.above), len(node.below))
        texts = [text_width(node.text, STATE_FONT), *(text_width(line, LABEL_FONT) for line in node.details)]
        width = max(max(texts) + 32, 84, (ports + 1) * PORT_DISTANCE)
        beside = LOOP_WIDTH + 4 + text_width(node.loop, LABEL_FONT) if node.loop else 0
        return Box(0, 0, width, STATE_HEIGHT + LINE_HEIGHT * len(node.details), beside)
    if node.kind == "label":
        lines = node.text.split(EVENT_SEPARATOR)
        return Box(
            0, 0, max(text_width(line, LABEL_FONT) for line in lines) + 8, LABEL_HEIGHT + LINE_HEIGHT * (len(lines) - 1)
        )
    if node.kind == "dot":
        return Box(0, 0, 2 * DOT_RADIUS, 2 * DOT_RADIUS)
    return Box(0, 0, 4, 0)


def _spread(layout: Layout, boxes: dict[Node, Box]) -> None:
    """Choose the x coordinates: as near to linked nodes as the gaps allow, then aligned to straight lines."""
    for row in layout.rows:
        _set(row, [0.0] * len(row), [1.0] * len(row), boxes)
    _relax(layout, boxes)
    lines = _lines(layout.links)
    _straighten(layout, boxes, lines)
    _relax(layout, boxes, {node for line in lines for node in line})


def _relax(layout: Layout, boxes: dict[Node, Box], fixed: Collection[Node] = ()) -> None:
    """Move every node that is not fixed towards the nodes it is linked to, for a fixed number of rounds."""
    alone = {node: [(node, 1.0)] for row in layout.rows for node in row}  # a box without arrows keeps its place
    pulls = alone | _pulls(layout.links) | {node: [(node, FIXED_STRENGTH)] for node in fixed}
    for turn in range(_scaled(RELAXATION_ROUNDS, layout.rows)):
        for row in layout.rows if turn % 2 else layout.rows[::-1]:
            weights = [sum(strength for _, strength in pulls[node]) for node in row]
            targets = [
                sum(boxes[other].x * strength for other, strength in pulls[node]) / weight
                for node, weight in zip(row, weights, strict=True)
            ]
            _set(row, targets, weights, boxes)


def _pulls(links: Iterable[Link]) -> dict[Node, list[tuple[Node, float]]]:
    pulls: dict[Node, list[tuple[Node, float]]] = defaultdict(list)
    for link in links:
        strength = RAIL_STRENGTH if _on_rail(link) else 1.0
        pulls[link.upper].append((link.lower, strength))
        pulls[link.lower].append((link.upper, strength))
    return pulls


def _on_rail(link: Link) -> bool:
    return "box" not in {link.upper.kind, link.lower.kind}


def _lines(links: Sequence[Link]) -> list[list[Node]]:
    """List the nodes to align in straight lines: the main path through the states first, then the rails."""
    after: dict[Node, Node] = {}
    before: dict[Node, Node] = {}
    # The table lists the usual transition of a state first, so the first link of each state is on the main path.
    for link in sorted((link for link in links if _aligned(link)), key=_on_rail):
        if link.upper not in after and link.lower not in before:
            after[link.upper], before[link.lower] = link.lower, link.upper
    return [_line(node, after) for node in after if node not in before]


def _line(first: Node, after: Mapping[Node, Node]) -> list[Node]:
    line = [first]
    while line[-1] in after:
        line.append(after[line[-1]])
    return line


def _aligned(link: Link) -> bool:
    return _on_rail(link) or not (link.back or link.upper.kind == "dot")


def _straighten(layout: Layout, boxes: dict[Node, Box], lines: Sequence[Sequence[Node]]) -> None:
    """Alternate between aligning the lines and restoring the gaps; this converges where both can hold."""
    for _ in range(_scaled(RELAXATION_ROUNDS, layout.rows)):
        for line in lines:
            mean = sum(boxes[node].x for node in line) / len(line)
            for node in line:
                boxes[node].x = mean
        for row in layout.rows:
            _set(row, [boxes[node].x for node in row], [1.0] * len(row), boxes)


def _distance(left: Node, right: Node, boxes: dict[Node, Box]) -> float:
    return boxes[left].width / 2 + boxes[left].beside + GAP + boxes[right].width / 2


def _set(row: Sequence[Node], targets: Sequence[float], weights: Sequence[float], boxes: dict[Node, Box]) -> None:
    gaps = [_distance(left, right, boxes) for left, right in pairwise(row)]
    for node, x in zip(row, solve_positions(targets, weights, gaps), strict=True):
        boxes[node].x = x


def solve_positions(targets: Sequence[float], weights: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Return the positions nearest to the targets (weighted least squares) that keep order and gaps."""
    offsets = list(accumulate(gaps, initial=0.0))
    # Pool adjacent violators: neighbours that would come too close share the weighted mean of their pool.
    pools: list[tuple[float, float, int]] = []
    for target, weight, offset in zip(targets, weights, offsets, strict=False):
        pool = (target - offset, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, mass, count = pools.pop()
            total = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / total, total, count + pool[2])
        pools.append(pool)
    means = (mean for mean, _, count in pools for _ in range(count))
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]


def _segments(links: Sequence[Link], boxes: dict[Node, Box]) -> list[ArrowSegment]:
    starts = _ports(((link, link.upper, link.lower) for link in links), boxes)
    ends = _ports(((link, link.lower, link.upper) for link in links), boxes)
    return [ArrowSegment(link, starts[link], ends[link]) for link in links]


def _ports(ends: Iterable[tuple[Link, Node, Node]], boxes: dict[Node, Box]) -> dict[Link, float]:
    """Choose where each arrow touches its node: towards its other end, but apart from the other arrows."""
    touching: dict[Node, list[tuple[Link, Node]]] = defaultdict(list)
    for link, node, other in ends:
        touching[node].append((link, other))
    ports: dict[Link, float] = {}
    for node, others in touching.items():
        box = boxes[node]
        if node.kind != "box":
            ports |= {link: box.x for link, _ in others}
            continue
        others.sort(key=lambda end: boxes[end[1]].x)
        reach = (box.width - 2 * PORT_DISTANCE + 8) / 2
        step = min(PORT_DISTANCE, 2 * reach / max(len(others) - 1, 1))
        targets = [min(max(boxes[other].x, box.x - reach), box.x + reach) for _, other in others]
        places = solve_positions(targets, [1.0] * len(others), [step] * (len(others) - 1))
        for index, ((link, _), x) in enumerate(zip(others, places, strict=True)):
            low, high = box.x - reach + index * step, box.x + reach - (len(others) - 1 - index) * step
            ports[link] = min(max(x, low), high)
    return ports


def _stack(layout: Layout, boxes: dict[Node, Box], segments: Sequence[ArrowSegment], row_gap: float) -> float:
    """Choose the y coordinates: more space between rows where an arrow has a long horizontal distance."""
    swing: dict[int, float] = defaultdict(float)
    for segment in segments:
        number = segment.link.upper.row
        swing[number] = max(swing[number], abs(segment.end - segment.start))
    y = float(HEADING_HEIGHT + MARGIN)
    for row in layout.rows:
        height = max(boxes[node].height for node in row)
        for node in row:
            boxes[node].y = y + height / 2
            # Labels and bends are as high as their row, so that an arrow turns only between rows.
            if node.kind in {"label", "bend"}:
                boxes[node].height = height
        y += height + row_gap + min(28.0, swing[row[0].row] * 0.14)
    return y - row_gap + MARGIN
