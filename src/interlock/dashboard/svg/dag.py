"""Draws the steps of a job from left to right: a column per distance from the first steps, boxes with live states.

The layout depends on the definition alone and is kept, so that states never move a box. Above `MAX_NODES` steps, chains
and steps with the same neighbours become one box.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.dashboard.states import state_style
from interlock.lifecycle import TaskRowState
from interlock.machine.svg import solve_positions
from interlock.model.graph import AFTER, ALWAYS, ON_FAILURE, RECOVERS, RECOVERY, edges

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_NODES = 150
BOX_WIDTH, BOX_HEIGHT = 158, 58
COLUMN_GAP, ROW_GAP, BEND_GAP = 40, 26, 16
MARGIN = 14
SWEEPS = 6
HEAD = 8  # length of an arrowhead
MAX_NAME = 15  # characters of a name in its box
LABELS = {AFTER: "", ON_FAILURE: "on failure", ALWAYS: "always", RECOVERS: "recovered by"}
BRANCH_LABEL = "if chosen"
# of several steps in one box, the first of these states that one of them has
MOST_TELLING = (
    TaskRowState.ERROR,
    TaskRowState.RUNNING,
    TaskRowState.PENDING,
    TaskRowState.WAITING,
    TaskRowState.CANCELED,
    TaskRowState.DONE,
    TaskRowState.SKIPPED,
)
NOT_BEGUN = frozenset({TaskRowState.WAITING, TaskRowState.SKIPPED, TaskRowState.CANCELED})


class StepView(NamedTuple):
    """The text of a step's box: its state, and the line below its name."""

    state: str
    note: str


class GraphEdge(NamedTuple):
    """A dependency between two boxes."""

    source: str
    target: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """The boxes in the order of the definition, and the dependencies between them."""

    boxes: tuple[str, ...]
    edges: tuple[GraphEdge, ...]
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of boxes with several steps


class StepBox(NamedTuple):
    """A box."""

    x: float
    y: float
    name: str
    text: str
    state: str
    tone: str
    icon: str
    note: str
    waits: bool
    step: str  # that the box leads to


class DrawnLine(NamedTuple):
    """An arrow; `taken` when the step at its source is done."""

    path: str
    head: tuple[float, float]
    taken: bool
    dashed: bool


class DrawnText(NamedTuple):
    """The label of arrows to a box."""

    x: float
    y: float
    text: str


class DrawnGraph(NamedTuple):
    """A drawing: its size and its parts, from the back to the front."""

    width: int
    height: int
    lines: list[DrawnLine]
    steps: list[StepBox]
    labels: list[DrawnText]
    taken: int
    open: int


class Point(NamedTuple):
    """A place on the way of an arrow: the left edge of a column, and the height."""

    column: int
    y: float


class Placement(NamedTuple):
    """Columns and heights of the boxes, and the bends of the arrows between them."""

    columns: dict[str, int]
    heights: dict[str, float]  # of the middle of a box
    bends: dict[GraphEdge, tuple[Point, ...]]
    height: float


def workflow_graph(document: Mapping[str, Any]) -> Graph:
    """Return the graph of a definition; a large one with collapsed chains and siblings."""
    names = tuple(step["name"] for step in document["steps"])
    found = tuple(
        GraphEdge(edge.upstream, edge.downstream, BRANCH_LABEL if edge.branch else LABELS[edge.condition])
        for edge in edges(document)
        if edge.condition != RECOVERY
    )
    graph = Graph(names, tuple(dict.fromkeys(found)))
    if len(graph.boxes) > MAX_NODES:
        graph = _collapse(graph, _chains(graph))
    if len(graph.boxes) > MAX_NODES:
        graph = _collapse(graph, _siblings(graph))
    return graph


def _chains(graph: Graph) -> list[list[str]]:
    """Find runs of steps of which each has one successor, which has one predecessor."""
    after, before = _neighbours(graph)
    linked = {
        edge.source: edge.target
        for edge in graph.edges
        if not edge.label and len(after[edge.source]) == 1 and len(before[edge.target]) == 1
    }
    inner = set(linked.values())
    chains = []
    for start in graph.boxes:
        if start in inner or start not in linked:
            continue
        chain = [start]
        while chain[-1] in linked:
            chain.append(linked[chain[-1]])
        chains.append(chain)
    return chains


def _siblings(graph: Graph) -> list[list[str]]:
    """Find steps with the same predecessors and the same successors."""
    after, before = _neighbours(graph)
    groups: dict[tuple[frozenset[str], frozenset[str]], list[str]] = defaultdict(list)
    for name in graph.boxes:
        groups[frozenset(before[name]), frozenset(after[name])].append(name)
    return [group for group in groups.values() if len(group) > 1]


def _neighbours(graph: Graph) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    after: dict[str, set[str]] = defaultdict(set)
    before: dict[str, set[str]] = defaultdict(set)
    for edge in graph.edges:
        after[edge.source].add(edge.target)
        before[edge.target].add(edge.source)
    return after, before


def _collapse(graph: Graph, groups: Sequence[Sequence[str]]) -> Graph:
    """Replace each group by its first box."""
    home = {name: group[0] for group in groups for name in group}
    members: dict[str, tuple[str, ...]] = {}
    for name in graph.boxes:
        of_box = graph.members.get(name, (name,))
        box = home.get(name, name)
        members[box] = (*members.get(box, ()), *of_box)
    moved = (GraphEdge(home.get(a, a), home.get(b, b), label) for a, b, label in graph.edges)
    kept = tuple(dict.fromkeys(edge for edge in moved if edge.source != edge.target))
    boxes = tuple(dict.fromkeys(home.get(name, name) for name in graph.boxes))
    return Graph(boxes, kept, {box: steps for box, steps in members.items() if len(steps) > 1})


# --- layout


@lru_cache(maxsize=64)
def place_graph(boxes: tuple[str, ...], graph_edges: tuple[GraphEdge, ...]) -> Placement:
    """Choose a column for every box, its order in it, and its height, with few crossings."""
    columns = _columns(boxes, graph_edges)
    rows: list[list[Any]] = [[] for _ in range(max(columns.values(), default=0) + 1)]
    for name in boxes:
        rows[columns[name]].append(name)
    links: list[tuple[Any, Any]] = []
    ways: dict[GraphEdge, list[tuple[GraphEdge, int]]] = {}
    for edge in graph_edges:
        bends = [(edge, column) for column in range(columns[edge.source] + 1, columns[edge.target])]
        for bend in bends:
            rows[bend[1]].append(bend)
        ways[edge] = bends
        links += pairwise([edge.source, *bends, edge.target])
    above, below = defaultdict(list), defaultdict(list)
    for here, there in links:
        below[here].append(there)
        above[there].append(here)
    _order(rows, above, below)
    heights = _heights(rows, above, below)
    lowest = min(heights.values(), default=0.0)
    middle = {key: height - lowest + MARGIN + BOX_HEIGHT / 2 for key, height in heights.items()}
    return Placement(
        columns,
        {name: middle[name] for name in boxes},
        {
            edge: tuple(Point(column, middle[bend]) for bend in way for column in [bend[1]])
            for edge, way in ways.items()
        },
        max(middle.values(), default=0.0) + BOX_HEIGHT / 2 + MARGIN,
    )


def _columns(boxes: Sequence[str], graph_edges: Sequence[GraphEdge]) -> dict[str, int]:
    """Return the length of the longest path to each box."""
    waiting = Counter(edge.target for edge in graph_edges)
    after = defaultdict(list)
    for edge in graph_edges:
        after[edge.source].append(edge.target)
    columns = dict.fromkeys(boxes, 0)
    ready = [name for name in boxes if not waiting[name]]
    for name in ready:  # grows while it is walked
        for target in after[name]:
            columns[target] = max(columns[target], columns[name] + 1)
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    return columns


def _order(rows: list[list[Any]], above: Mapping[Any, list[Any]], below: Mapping[Any, list[Any]]) -> None:
    """Order each column by the mean place of the neighbours, from the left and from the right in turn."""
    for sweep in range(SWEEPS):
        forth = sweep % 2 == 0
        neighbours = above if forth else below
        for fixed, row in pairwise(rows if forth else rows[::-1]):
            places = {key: place for place, key in enumerate(fixed)}
            _sort_by_mean(row, neighbours, places)


def _sort_by_mean(row: list[Any], neighbours: Mapping[Any, list[Any]], places: Mapping[Any, int]) -> None:
    means = {}
    for place, key in enumerate(row):
        found = [places[other] for other in neighbours.get(key, ())]
        means[key] = sum(found) / len(found) if found else float(place)
    row.sort(key=means.__getitem__)


def _heights(rows: list[list[Any]], above: Mapping[Any, list[Any]], below: Mapping[Any, list[Any]]) -> dict[Any, float]:
    """Choose heights near those of the neighbours, with room between boxes."""
    gaps = [
        [
            (_size(one) + _size(two)) / 2 + (ROW_GAP if isinstance(one, str) and isinstance(two, str) else BEND_GAP)
            for one, two in pairwise(row)
        ]
        for row in rows
    ]
    heights: dict[Any, float] = {}
    for row, gap in zip(rows, gaps, strict=True):
        heights.update(zip(row, solve_positions([0.0] * len(row), [1.0] * len(row), gap), strict=True))
    both = {key: (*above.get(key, ()), *below.get(key, ())) for row in rows for key in row}
    order = list(zip(rows, gaps, strict=True))
    for sweep in range(2 * SWEEPS):
        for row, gap in order if sweep % 2 == 0 else order[::-1]:
            _pull(row, gap, heights, both)
    for row, gap in order:  # arrows that are nearly straight become straight
        _pull(row, gap, heights, above)
    return heights


def _pull(
    row: Sequence[Any], gap: Sequence[float], heights: dict[Any, float], neighbours: Mapping[Any, Sequence[Any]]
) -> None:
    """Move the boxes and bends of a column towards the mean height of their neighbours."""
    targets = []
    for key in row:
        found = [heights[other] for other in neighbours.get(key, ())]
        targets.append(sum(found) / len(found) if found else heights[key])
    weights = [1.0 if isinstance(key, str) else 3.0 for key in row]
    heights.update(zip(row, solve_positions(targets, weights, gap), strict=True))


def _size(key: Any) -> float:
    return float(BOX_HEIGHT) if isinstance(key, str) else 0.0


# --- drawing


def draw_graph(graph: Graph, view: Callable[[str], StepView]) -> DrawnGraph:
    """Draw a graph; `view` tells the state of a step and the line below its name."""
    placed = place_graph(graph.boxes, graph.edges)
    shown = {box: _box_view(graph.members.get(box, (box,)), view) for box in graph.boxes}
    steps = [_draw_box(box, graph, placed, shown[box]) for box in graph.boxes]
    lines = [_draw_line(edge, placed, shown) for edge in graph.edges]
    labels: dict[str, set[str]] = defaultdict(set)
    for edge in graph.edges:
        if edge.label:
            labels[edge.target].add(edge.label)
    texts = [
        DrawnText(_left(placed.columns[box]) + 6, round(placed.heights[box] - BOX_HEIGHT / 2 - 6, 1), " / ".join(found))
        for box, found in ((box, sorted(found)) for box, found in labels.items())
    ]
    width = _left(max(placed.columns.values(), default=0)) + BOX_WIDTH + MARGIN
    taken = sum(line.taken for line in lines)
    lines.sort(key=lambda line: line.taken)
    return DrawnGraph(width, round(placed.height), lines, steps, texts, taken, len(lines) - taken)


def _box_view(steps: Sequence[str], view: Callable[[str], StepView]) -> StepView:
    if len(steps) == 1:
        return view(steps[0])
    states = Counter(view(step).state for step in steps)
    state = next((state for state in MOST_TELLING if states[state]), TaskRowState.WAITING)
    return StepView(state, f"{state} · {states[TaskRowState.DONE]} of {len(steps)} done")


def _left(column: int) -> int:
    return MARGIN + column * (BOX_WIDTH + COLUMN_GAP)


def _draw_box(box: str, graph: Graph, placed: Placement, shown: StepView) -> StepBox:
    steps = graph.members.get(box, (box,))
    style = state_style("task", shown.state)
    name = box if len(steps) == 1 else f"{box} + {len(steps) - 1} more"
    lead = next((step for step in steps if step), box)
    text = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
    if len(steps) > 1:
        text = f"{box[:8]} +{len(steps) - 1}"
    return StepBox(
        _left(placed.columns[box]),
        round(placed.heights[box] - BOX_HEIGHT / 2, 1),
        name,
        text,
        shown.state,
        style.tone,
        style.icon,
        shown.note,
        shown.state == TaskRowState.WAITING,
        lead,
    )


def _draw_line(edge: GraphEdge, placed: Placement, shown: Mapping[str, StepView]) -> DrawnLine:
    start = placed.heights[edge.source]
    x = float(_left(placed.columns[edge.source]) + BOX_WIDTH)
    parts = [f"M{x:g} {start:.1f}"]
    y = start
    for bend in placed.bends[edge]:
        left = float(_left(bend.column))
        parts.append(_curve(x, y, left, bend.y))
        parts.append(f"H{left + BOX_WIDTH:g}")
        x, y = left + BOX_WIDTH, bend.y
    end, tip = placed.heights[edge.target], float(_left(placed.columns[edge.target]))
    parts.append(_curve(x, y, tip - HEAD + 1, end))
    taken = shown[edge.source].state == TaskRowState.DONE and shown[edge.target].state not in NOT_BEGUN
    if edge.label == LABELS[ON_FAILURE]:
        taken = shown[edge.source].state == TaskRowState.ERROR and shown[edge.target].state not in NOT_BEGUN
    return DrawnLine("".join(parts), (tip, round(end, 1)), taken, bool(edge.label))


def _curve(x: float, y: float, to_x: float, to_y: float) -> str:
    if abs(to_y - y) < 0.5:  # noqa: PLR2004 - half a pixel is straight
        return f"H{to_x:g}"
    middle = (x + to_x) / 2
    return f"C{middle:g} {y:.1f} {middle:g} {to_y:.1f} {to_x:g} {to_y:.1f}"
