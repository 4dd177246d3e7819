"""Diagrams of lifecycles with live numbers: boxes with counts, arrows as wide as their rate, refused moves in red.

The layout is that of `machine/svg.py`, from left to right on wide screens and from top to bottom on narrow ones, unless
`placements.py` has one. It depends on the lifecycle alone, so that it is made once, and numbers never move a box.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from interlock.dashboard.counts import Transition
from interlock.dashboard.format import rate, whole
from interlock.dashboard.states import state_style, state_word
from interlock.dashboard.svg.placements import PLACEMENTS
from interlock.lifecycle import MACHINES
from interlock.machine.svg import EVENT_SEPARATOR, Box, Canvas, Node, layered_layout, place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from interlock.dashboard.svg.placements import HandPlacement, PlacedMoves
    from interlock.machine.svg import Link

Direction = Literal["wide", "tall"]

MIN_BOX_WIDTH, BOX_HEIGHT = 138, 84
BADGE_MARGIN = 12  # between a badge and the edge of its box
CHARACTER = 6.4  # mean width at 12 px
RATE_WIDTH = 44  # room for the rate beside an event
LINE_HEIGHT = 17
PILL_HEIGHT = 24
HEAD_ROOM = 12  # room for an arrowhead before and after a label
DOT_SIZE = 12
DOT_TEXT_WIDTH = 46
LOOP_SIZE = 30
MIN_LINE, MAX_LINE = 1.6, 8.0
FLOW_RATE, FAST_RATE = 10.0, 100.0  # moves per second from which dots move, and move fast
PILL_PLACES = (0.5, 0.4, 0.6, 0.3, 0.7, 0.22, 0.78, 0.15, 0.85)  # on a curve, the best first
ROW_GAP = 6  # between two rows, besides room for arrows to turn
SPARK_LEFT = 84  # where the sparkline begins, at the earliest
COUNT_CHARACTER = 13.2  # mean width at 22 px


@dataclass(frozen=True, slots=True)
class MachineNumbers:
    """The numbers to draw."""

    counts: Mapping[str, int]
    rates: Mapping[Transition, float]
    facts: Mapping[str, str] = field(default_factory=dict)
    sparks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)


class DrawnState(NamedTuple):
    """A box: its left upper corner, what it says, and where it leads."""

    x: float
    y: float
    name: str
    word: str
    tone: str
    icon: str
    number: str
    fact: str
    spark: str
    final: bool
    url: str
    width: float
    badge_width: float


class DrawnEdge(NamedTuple):
    """A part of an arrow."""

    path: str
    width: float
    tone: str  # empty: nothing moves
    flow: str  # the class of its moving dots, or empty
    head: tuple[float, float, int, float] | None  # x, y, angle, size


class DrawnPill(NamedTuple):
    """The label of an arrow: one or more events with their rates."""

    x: float
    y: float
    width: float
    height: float
    lines: tuple[tuple[str, str], ...]


class DrawnDot(NamedTuple):
    """The dot of an initial state, with the rate of new entities."""

    x: float
    y: float
    text_x: float
    text_y: float
    anchor: str
    text: str


class DrawnRefusal(NamedTuple):
    """A dotted line from the state of an entity to the state that was refused, with the number of times."""

    path: str
    stop: tuple[float, float, int]
    x: float
    y: float
    width: float
    text: str


class Diagram(NamedTuple):
    """A diagram: its size and its parts, from the back to the front."""

    direction: str
    width: int
    height: int
    edges: list[DrawnEdge]
    dots: list[DrawnDot]
    refusals: list[DrawnRefusal]
    pills: list[DrawnPill]
    states: list[DrawnState]


class _Plan(NamedTuple):
    """The layout of one lifecycle in one direction."""

    canvas: Canvas
    boxes: dict[str, Box]
    box_width: float
    width: float
    height: float
    targets: dict[int, str]  # of the rail that a label or bend lies on, by id of the node
    sources: dict[int, list[str]]  # states that join a rail at a label, by id of the node


def _pill_size(text: str) -> tuple[float, float]:
    """Measure a label: one event above its rate, or several events beside theirs."""
    lines = text.split(EVENT_SEPARATOR)
    longest = max(len(line) for line in lines) * CHARACTER
    if len(lines) == 1:
        return max(longest, RATE_WIDTH) + 18, PILL_HEIGHT + LINE_HEIGHT - 3
    return longest + RATE_WIDTH + 20, PILL_HEIGHT + LINE_HEIGHT * (len(lines) - 1)


def _badge_width(state: str) -> float:
    """Estimate the width of a state's icon and word."""
    return round(sum(8.9 if letter.isupper() else 6.9 for letter in _shorten(state_word(state))) + 34, 1)


@cache
def _box_width(name: str) -> float:
    """Return the width of all boxes of a lifecycle: its longest word fits."""
    return max(MIN_BOX_WIDTH, *(_badge_width(str(state)) + 2 * BADGE_MARGIN for state in MACHINES[name].states))


def _size(name: str, node: Node, direction: Direction) -> Box:
    """Measure a node; from left to right, the layout's width is our height."""
    beside = 0.0
    if node.kind == "box":
        width, height = _box_width(name), float(BOX_HEIGHT)
        if node.loop:
            pill_width, pill_height = _pill_size(node.loop)
            beside = pill_height + LOOP_SIZE if direction == "wide" else pill_width + LOOP_SIZE / 2
    elif node.kind == "label":
        width, height = _pill_size(node.text)
        width, height = (
            (width + HEAD_ROOM, height + HEAD_ROOM) if direction == "wide" else (width - 6, height + HEAD_ROOM)
        )
    elif node.kind == "dot":
        width, height = (DOT_TEXT_WIDTH, DOT_SIZE + 26) if direction == "wide" else (2 * DOT_TEXT_WIDTH, DOT_SIZE)
    else:
        width, height = 4.0, 4.0
    return Box(0, 0, height, width, beside) if direction == "wide" else Box(0, 0, width, height, beside)


@cache
def _plan(name: str, direction: Direction) -> _Plan:
    layout = layered_layout(MACHINES[name])
    canvas = place(layout, "", lambda node: _size(name, node, direction), row_gap=ROW_GAP)
    every = list(canvas.boxes.values())
    # the margins of the layout are made for a heading
    left = min(box.left for box in every) - 6
    top = min(box.top for box in every) - 6
    for box in every:
        box.x -= left
        box.y -= top
    canvas = canvas._replace(
        segments=[part._replace(start=part.start - left, end=part.end - left) for part in canvas.segments]
    )
    across = max(box.right + box.beside for box in every) + 6
    along = max(box.bottom for box in every) + 6
    targets, sources = _rails([part.link for part in canvas.segments])
    boxes = {node.text: box for node, box in canvas.boxes.items() if node.kind == "box"}
    width, height = (along, across) if direction == "wide" else (across, along)
    return _Plan(canvas, boxes, _box_width(name), width, height, targets, sources)


def _rails(links: list[Link]) -> tuple[dict[int, str], dict[int, list[str]]]:
    """Find the state that each rail leads to, and the states that join it at each of its labels."""
    following: dict[int, Node] = {}
    sources: dict[int, list[str]] = defaultdict(list)
    nodes: dict[int, Node] = {}
    for link in links:
        here, there = (link.lower, link.upper) if link.back else (link.upper, link.lower)
        nodes[id(here)], nodes[id(there)] = here, there
        if here.kind == "box":
            sources[id(there)].append(here.text)
        else:
            following[id(here)] = there
    targets = {}
    for key, node in nodes.items():
        end = node
        while end.kind != "box":
            end = following[id(end)]
        targets[key] = end.text
    return targets, dict(sources)


def draw(name: str, numbers: MachineNumbers, direction: Direction) -> Diagram:
    """Draw a lifecycle with its numbers."""
    if (name, direction) in PLACEMENTS:
        return _draw_placed(name, PLACEMENTS[name, direction], numbers)
    plan = _plan(name, direction)
    machine = MACHINES[name]
    drawing = _Drawing(name, plan, numbers, direction)
    edges: list[DrawnEdge] = []
    dots: list[DrawnDot] = []
    pills: list[DrawnPill] = []
    for part in plan.canvas.segments:
        if _from_dot(part.link):
            edge, dot = drawing.dot(part.link, part.end)
            dots.append(dot)
        else:
            edge = drawing.edge(part.link, part.start, part.end)
        edges.append(edge)
    for node in plan.canvas.boxes:
        if node.kind == "box" and node.loop:
            edge, pill = drawing.loop(node)
            edges.append(edge)
            pills.append(pill)
        elif node.kind in {"label", "bend"}:
            edges.append(drawing.through(node))
            if node.kind == "label":
                pills.append(drawing.pill(node))
    return Diagram(
        direction,
        math.ceil(plan.width),
        math.ceil(plan.height),
        sorted(edges, key=lambda edge: edge.width),
        dots,
        [drawing.refusal(*move, count) for move, count in numbers.refused.items() if set(move) <= set(plan.boxes)],
        pills,
        [drawing.state(str(state), final=state in machine.final) for state in machine.states],
    )


def _draw_placed(name: str, placement: HandPlacement, numbers: MachineNumbers) -> Diagram:
    """Draw a lifecycle that is placed by hand, from top to bottom."""
    width = _box_width(name)
    boxes = {
        Node("box", 0, state): Box(x + width / 2, y + BOX_HEIGHT / 2, width, BOX_HEIGHT)
        for state, (x, y) in placement.boxes.items()
    }
    labels = {}
    for moves in placement.arrows:
        if moves.label is not None:
            text = EVENT_SEPARATOR.join(moves.events)
            labels[Node("label", 0, text)] = Box(*moves.label, *_pill_size(text))
    canvas = Canvas(boxes | labels, [], placement.width, placement.height)
    named = {node.text: box for node, box in boxes.items()}
    drawing = _Drawing(name, _Plan(canvas, named, width, placement.width, placement.height, {}, {}), numbers, "tall")
    machine = MACHINES[name]
    edges = [drawing.placed_edge(moves) for moves in placement.arrows]
    return Diagram(
        "tall placed",
        placement.width,
        placement.height,
        sorted(edges, key=lambda edge: edge.width),
        [drawing.placed_dot(moves) for moves in placement.arrows if not moves.source],
        [drawing.refusal(*move, count) for move, count in numbers.refused.items() if set(move) <= set(named)],
        [drawing.placed_pill(moves) for moves in placement.arrows if moves.source and moves.label is not None],
        [drawing.state(str(state), final=state in machine.final) for state in machine.states],
    )


def _from_dot(link: Link) -> bool:
    return link.upper.kind == "dot"


class _Drawing:
    """One drawing in progress; `along` is the direction of the arrows, `across` the other one."""

    def __init__(self, name: str, plan: _Plan, numbers: MachineNumbers, direction: Direction) -> None:
        self._name = name
        self._plan = plan
        self._numbers = numbers
        self._wide = direction == "wide"
        self._flow = self._flows()
        self._refused: list[tuple[float, float, float, float]] = []  # pills: centre, width and height

    def _point(self, across: float, along: float) -> tuple[float, float]:
        return (round(along, 1), round(across, 1)) if self._wide else (round(across, 1), round(along, 1))

    def _text(self, across: float, along: float) -> str:
        x, y = self._point(across, along)
        return f"{x:g} {y:g}"

    def _rate(self, source: str, label: str, target: str) -> float:
        rates = self._numbers.rates
        return sum(rates.get(Transition(source, event, target), 0.0) for event in label.split(EVENT_SEPARATOR))

    def _flows(self) -> dict[int, float]:
        """Sum the rates of all moves that pass a label or a bend."""
        found: dict[int, float] = {}
        links = [part.link for part in self._plan.canvas.segments if not _from_dot(part.link)]
        for back in (False, True):
            of_direction = [link for link in links if link.back is back]
            of_direction.sort(key=lambda link: -link.lower.row if back else link.upper.row)
            for link in of_direction:
                here, there = (link.lower, link.upper) if back else (link.upper, link.lower)
                if there.kind == "box":
                    continue
                if here.kind == "box":
                    moved = self._rate(here.text, there.text, self._plan.targets[id(there)])
                else:
                    moved = found.get(id(here), 0.0)
                found[id(there)] = found.get(id(there), 0.0) + moved
        return found

    def _style(self, moved: float, target: str) -> tuple[float, str, str]:
        """Return width, tone and flow of an arrow: one step wider for each doubling of the rate."""
        if moved <= 0:
            return MIN_LINE, "", ""
        width = min(MAX_LINE, MIN_LINE + 0.6 * math.log2(1 + moved))
        flow = "" if moved < FLOW_RATE else "flow" if moved < FAST_RATE else "flow fast"
        return round(width, 1), state_style(self._name, target).tone, flow

    def edge(self, link: Link, start: float, end: float) -> DrawnEdge:
        upper, lower = self._plan.canvas.boxes[link.upper], self._plan.canvas.boxes[link.lower]
        here, there = (link.lower, link.upper) if link.back else (link.upper, link.lower)
        middle = there if there.kind != "box" else here
        target = self._plan.targets[id(middle)]
        if here.kind == "box" and there.kind != "box":
            moved = self._rate(here.text, there.text, target)
        else:
            moved = self._flow.get(id(here), 0.0)
        width, tone, flow = self._style(moved, target)
        first, last = upper.bottom, lower.top
        head = None
        size = 7 + width
        if link.tip:
            if link.back:
                head = (*self._point(start, first), 180 if self._wide else -90, round(size, 1))
                first += size - 2
            else:
                head = (*self._point(end, last), 0 if self._wide else 90, round(size, 1))
                last -= size - 2
        bend = (last - first) * 0.5
        path = (
            f"M{self._text(start, first)}C{self._text(start, first + bend)} {self._text(end, last - bend)} "
            f"{self._text(end, last)}"
        )
        if link.back:  # the dots move with the arrow
            path = (
                f"M{self._text(end, last)}C{self._text(end, last - bend)} {self._text(start, first + bend)} "
                f"{self._text(start, first)}"
            )
        return DrawnEdge(path, width, tone, flow, head)

    def through(self, node: Node) -> DrawnEdge:
        """Draw the straight part of an arrow behind a label or through a bend."""
        box = self._plan.canvas.boxes[node]
        width, tone, flow = self._style(self._flow.get(id(node), 0.0), self._plan.targets[id(node)])
        ends = (box.bottom, box.top) if node.back else (box.top, box.bottom)
        return DrawnEdge(f"M{self._text(box.x, ends[0])}L{self._text(box.x, ends[1])}", width, tone, flow, None)

    def pill(self, node: Node) -> DrawnPill:
        box = self._plan.canvas.boxes[node]
        target = self._plan.targets[id(node)]
        sources = self._plan.sources.get(id(node), [])
        return self._pill_at(*self._point(box.x, box.y), node.text, sources, target)

    def _pill_at(self, x: float, y: float, label: str, sources: Sequence[str], target: str) -> DrawnPill:
        events = label.split(EVENT_SEPARATOR)
        lines = tuple(
            (
                event,
                rate(sum(self._numbers.rates.get(Transition(source, event, target), 0.0) for source in sources)),
            )
            for event in events
        )
        width, height = _pill_size(label)
        return DrawnPill(round(x - width / 2, 1), round(y - height / 2, 1), round(width, 1), height, lines)

    def loop(self, node: Node) -> tuple[DrawnEdge, DrawnPill]:
        """Draw an arrow that returns to its own state: below the box, or beside it."""
        box = self._plan.canvas.boxes[node]
        width, tone, flow = self._style(self._rate(node.text, node.loop, node.text), node.text)
        x, y = self._point(box.x, box.y)
        size = 7 + width
        pill_width, pill_height = _pill_size(node.loop)
        if self._wide:
            edge_y = y + BOX_HEIGHT / 2
            path = (
                f"M{x + 26:g} {edge_y:g}C{x + 34:g} {edge_y + 34:g} {x - 34:g} {edge_y + 34:g} "
                f"{x - 26:g} {edge_y + size - 2:g}"
            )
            head = (x - 26, edge_y, -90, round(size, 1))
            pill = self._pill_at(x, edge_y + 24 + pill_height / 2, node.loop, [node.text], node.text)
        else:
            edge_x = x + self._plan.box_width / 2
            path = (
                f"M{edge_x:g} {y - 18:g}C{edge_x + 34:g} {y - 26:g} {edge_x + 34:g} {y + 26:g} "
                f"{edge_x + size - 2:g} {y + 18:g}"
            )
            head = (edge_x, y + 18, 180, round(size, 1))
            pill = self._pill_at(edge_x + 16 + pill_width / 2, y, node.loop, [node.text], node.text)
        return DrawnEdge(path, width, tone, flow, head), pill

    def dot(self, link: Link, end: float) -> tuple[DrawnEdge, DrawnDot]:
        """Draw how entities begin."""
        target = link.lower.text
        box = self._plan.canvas.boxes[link.lower]
        dot = self._plan.canvas.boxes[link.upper]
        moved = sum(
            value for move, value in self._numbers.rates.items() if move.source is None and move.target == target
        )
        width, tone, flow = self._style(moved, target)
        size = 7 + width
        along = dot.y
        x, y = self._point(dot.x, along)
        last = box.top - size + 2
        bend = (last - along) * 0.5
        path = (
            f"M{self._text(dot.x, along)}C{self._text(dot.x, along + bend)} {self._text(end, last - bend)} "
            f"{self._text(end, last)}"
        )
        head = (*self._point(end, box.top), 0 if self._wide else 90, round(size, 1))
        text = f"{rate(moved)} new"
        if self._wide:
            drawn = DrawnDot(x, y, x, y + 22, "middle", text)
        else:
            drawn = DrawnDot(x, y, x + 14, y + 4, "start", text)
        return DrawnEdge(path, width, tone, flow, head), drawn

    def placed_edge(self, moves: PlacedMoves) -> DrawnEdge:
        """Draw an arrow that is placed by hand."""
        rates = self._numbers.rates
        moved = sum(rates.get(Transition(moves.source or None, event, moves.target), 0.0) for event in moves.events)
        width, tone, flow = self._style(moved, moves.target)
        return DrawnEdge(moves.path, width, tone, flow, (*moves.head, round(8 + width * 0.6, 1)))

    def placed_pill(self, moves: PlacedMoves) -> DrawnPill:
        """Draw the label of an arrow that is placed by hand."""
        x, y = moves.label or (0, 0)
        label = EVENT_SEPARATOR.join(moves.events)
        return self._pill_at(x, y, label, moves.sources or (moves.source,), moves.target)

    def placed_dot(self, moves: PlacedMoves) -> DrawnDot:
        """Draw how entities begin, at the start of the path."""
        rates = self._numbers.rates
        moved = sum(value for move, value in rates.items() if move.source is None and move.target == moves.target)
        x, y = (float(part) for part in moves.path[1:].replace("V", " ").replace("H", " ").split()[:2])
        text_x, text_y = moves.label or (x, y)
        return DrawnDot(x, y, text_x, text_y, "middle", f"{rate(moved)} new")

    def state(self, name: str, *, final: bool) -> DrawnState:
        box = self._plan.boxes[name]
        x, y = self._point(box.x, box.y)
        width = self._plan.box_width
        x, y = round(x - width / 2, 1), round(y - BOX_HEIGHT / 2, 1)
        style = state_style(self._name, name)
        count = whole(self._numbers.counts.get(name, 0))
        return DrawnState(
            x,
            y,
            name,
            _shorten(state_word(name)),
            style.tone,
            style.icon,
            count,
            self._numbers.facts.get(name, ""),
            self._spark(self._numbers.sparks.get(name, ()), x, y, len(count)),
            final,
            self._numbers.links.get(name, ""),
            width,
            _badge_width(name),
        )

    def _spark(self, values: Sequence[float], x: float, y: float, digits: int) -> str:
        left = x + max(SPARK_LEFT, 14 + digits * COUNT_CHARACTER + 6)
        right = x + self._plan.box_width - 14
        if len(values) < 2 or right - left < 20:  # noqa: PLR2004 - a line needs two points
            return ""
        low, high = min(values), max(values)
        span = high - low or 1.0
        step = (right - left) / (len(values) - 1)
        points = (
            f"{left + at * step:.0f} {y + 58 - (value - low) / span * 12 if high > low else y + 52:.1f}"
            for at, value in enumerate(values)
        )
        return "M" + "L".join(points)

    def refusal(self, source: str, target: str, count: int) -> DrawnRefusal:
        """Draw an arc above the boxes, from one to the other."""
        start, end = self._plan.boxes[source], self._plan.boxes[target]
        x1, y1 = self._point(start.x, start.y)
        x2, y2 = self._point(end.x, end.y)
        y1, y2 = y1 - BOX_HEIGHT / 2, y2 - BOX_HEIGHT / 2
        x1, x2 = (x1 + 34, x2 + 44) if x1 >= x2 else (x1 - 34, x2 - 44)
        if source == target:
            x1, x2 = x1 - 70, x1
        rise = max(34.0, min(90.0, abs(x2 - x1) * 0.22))
        peak = max(min(y1, y2) - rise, 8.0)
        points = ((x1, y1), (x1, peak), (x2, peak), (x2, y2 - 10))
        stop = (x2, y2 - 6, 90)
        if not self._wide and end.bottom < start.top:  # from below to the right edge
            x2, y2 = end.right + 6, end.y
            points = ((x1, y1), (x1, (y1 + y2) / 2), (x2 + 40, y2), (x2 + 3, y2))
            stop = (x2, y2, 0)
        path = "M{:g} {:g}C{:g} {:g} {:g} {:g} {:g} {:g}".format(*(value for point in points for value in point))
        text = f"✕ {whole(count)} refused" if self._wide else f"✕ {whole(count)}"
        width = len(text) * 6.8 + 22
        x, y = self._free_place(points, width)
        return DrawnRefusal(
            path,
            (round(stop[0], 1), round(stop[1], 1), stop[2]),
            round(x - width / 2, 1),
            round(y - PILL_HEIGHT / 2, 1),
            width,
            text,
        )

    def _free_place(self, points: Sequence[tuple[float, float]], width: float) -> tuple[float, float]:
        """Find a place on a curve where a pill covers no box, no label and no other pill; else its middle."""
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = points
        taken = [
            (*self._point(box.x, box.y), *((box.height, box.width) if self._wide else (box.width, box.height)))
            for node, box in self._plan.canvas.boxes.items()
            if node.kind in {"box", "label"}
        ]
        place = ((x0 + 3 * x1 + 3 * x2 + x3) / 8, (y0 + 3 * y1 + 3 * y2 + y3) / 8)
        for t in PILL_PLACES:
            u = 1 - t
            x = u**3 * x0 + 3 * u * u * t * x1 + 3 * u * t * t * x2 + t**3 * x3
            y = u**3 * y0 + 3 * u * u * t * y1 + 3 * u * t * t * y2 + t**3 * y3
            if all(
                abs(x - left) > (width + wide) / 2 or abs(y - top) > (PILL_HEIGHT + high) / 2
                for left, top, wide, high in (*taken, *self._refused)
            ):
                place = (x, y)
                break
        self._refused.append((*place, width, float(PILL_HEIGHT)))
        return place


def _shorten(word: str) -> str:
    """Shorten a word that would make all boxes of its lifecycle wide."""
    return re.sub(r"^WaitingFor(\w+?)(?:Config|Signal)$", r"Wait: \1", word)


def summary(name: str) -> dict[str, Any]:
    """Return the numbers of states, moves and refused pairs of a lifecycle."""
    machine = MACHINES[name]
    pairs = len(machine.states) * len(machine.events)
    return {
        "states": len(machine.states),
        "moves": len(machine.rows),
        "pairs": pairs,
        "refused": pairs - len(machine.rows),
    }
