"""Diagrams that are placed by hand show exactly the moves of their lifecycle, and nothing lies over a box."""

from __future__ import annotations

import pytest

from interlock.dashboard.counts import Transition
from interlock.dashboard.svg.machine import MachineNumbers, draw
from interlock.dashboard.svg.placements import PLACEMENTS
from interlock.lifecycle import MACHINES

pytestmark = pytest.mark.unit
PHONE = 362  # a wider drawing would be too small on a phone


@pytest.mark.parametrize("key", PLACEMENTS)
def test_a_placement_has_the_moves_of_its_lifecycle(key: tuple[str, str]) -> None:
    placement, machine = PLACEMENTS[key], MACHINES[key[0]]
    drawn = [(arrow.source, event, arrow.target) for arrow in placement.arrows for event in arrow.events]
    moves = [(str(source), str(event), str(target)) for source, event, target in machine.rows]
    assert sorted(move for move in drawn if move[0]) == sorted(moves)
    assert {target for source, _, target in drawn if not source} == {str(state) for state in machine.initial}
    assert set(placement.boxes) == {str(state) for state in machine.states}
    counted = [
        (source, event, arrow.target)
        for arrow in placement.arrows
        if arrow.source and arrow.label is not None
        for source in arrow.sources or (arrow.source,)
        for event in arrow.events
    ]
    assert sorted(counted) == sorted(moves), "each move is counted in one label"


@pytest.mark.parametrize("key", PLACEMENTS)
def test_labels_and_boxes_of_a_placement_do_not_overlap(key: tuple[str, str]) -> None:
    assert PLACEMENTS[key].width <= PHONE
    drawn = draw(key[0], MachineNumbers({}, {}, refused={("done", "running"): 3}), "tall")
    shapes = [(state.x, state.y, state.width, 84.0) for state in drawn.states]
    shapes += [(pill.x, pill.y, pill.width, pill.height) for pill in drawn.pills]
    shapes += [(refusal.x, refusal.y, refusal.width, 24.0) for refusal in drawn.refusals]
    for at, (x, y, width, height) in enumerate(shapes):
        assert x >= 0
        assert x + width <= drawn.width
        for left, top, wide, high in shapes[at + 1 :]:
            assert x + width <= left or left + wide <= x or y + height <= top or top + high <= y


def test_a_placed_arrow_has_the_width_of_its_rate() -> None:
    claim = Transition("pending", "claim", "running")
    drawn = draw("task", MachineNumbers({"running": 7}, {claim: 40.0}), "tall")
    (edge,) = [edge for edge in drawn.edges if edge.tone]
    assert edge.tone == "blue"
    assert edge.flow == "flow"
    (pill,) = [pill for pill in drawn.pills if pill.lines[0][0] == "claim"]
    assert pill.lines == (("claim", "40/s"),)
