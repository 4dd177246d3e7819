"""Where the states, labels and arrows of a machine go in a picture: a layered layout that reads from top to bottom.

Invariant: every label and every bend of an arrow is given room of its own in its row, like a state, so that nothing
can be drawn over anything else; arrows that carry the same event to the same state share one rail.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
