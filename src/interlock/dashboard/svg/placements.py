"""Diagrams that are placed by hand, because the layout of their lifecycle would be wider than a phone.

A test compares the moves of each placement with its lifecycle.
"""

from __future__ import annotations

from typing import NamedTuple

from interlock.lifecycle import TaskRowState as State


class PlacedMoves(NamedTuple):
    """An arrow: its path, the point and the direction of its head, and the middle of its label, if it has one."""

    source: str  # empty: new entities
    target: str
    events: tuple[str, ...]
    path: str  # ends some pixels before the head
    head: tuple[float, float, int]
    label: tuple[float, float] | None
    sources: tuple[str, ...] = ()  # whose moves the label counts; its source alone unless given


class HandPlacement(NamedTuple):
    """The size, the left upper corners of the boxes, and the arrows of a diagram."""

    width: int
    height: int
    boxes: dict[str, tuple[float, float]]
    arrows: tuple[PlacedMoves, ...]


# Lanes: cancel and fail on the left; requeue, succeed and skip on the right.
TASK = HandPlacement(
    362,
    808,
    {
        State.WAITING: (118, 40),
        State.PENDING: (118, 196),
        State.RUNNING: (118, 356),
        State.ERROR: (30, 556),
        State.DONE: (176, 556),
        State.CANCELED: (30, 716),
        State.SKIPPED: (176, 716),
    },
    (
        PlacedMoves("", State.WAITING, ("create",), "M187 14V31", (187, 40, 90), (230, 18)),
        PlacedMoves("", State.PENDING, ("create",), "M84 212H109", (118, 212, 0), (84, 200)),
        PlacedMoves(State.WAITING, State.PENDING, ("release",), "M166 124V187", (166, 196, 90), (160, 160)),
        PlacedMoves(State.PENDING, State.WAITING, ("hold",), "M226 196V133", (226, 124, -90), (228, 160)),
        PlacedMoves(State.PENDING, State.RUNNING, ("claim",), "M158 280V347", (158, 356, 90), (152, 318)),
        PlacedMoves(
            State.RUNNING, State.PENDING, ("retry", "expire", "return"), "M244 356V289", (244, 280, -90), (248, 318)
        ),
        PlacedMoves(
            State.RUNNING, State.DONE, ("succeed",), "M214 440C214 500 238 490 238 547", (238, 556, 90), (232, 494)
        ),
        PlacedMoves(
            State.RUNNING,
            State.ERROR,
            ("fail", "exhaust"),
            "M156 440C156 500 116 490 116 547",
            (116, 556, 90),
            (132, 494),
        ),
        PlacedMoves(State.WAITING, State.ERROR, ("fail",), "M118 60H58Q44 60 44 74V547", (44, 556, 90), (81, 60)),
        PlacedMoves(
            State.WAITING,
            State.CANCELED,
            ("cancel",),
            "M118 104H30Q16 104 16 118V744Q16 758 21 758",
            (30, 758, 0),
            (81, 104),
        ),
        PlacedMoves(
            State.PENDING,
            State.CANCELED,
            ("cancel",),
            "M118 258H30Q16 258 16 272V744Q16 758 21 758",
            (30, 758, 0),
            (81, 258),
        ),
        PlacedMoves(
            State.RUNNING,
            State.CANCELED,
            ("cancel",),
            "M118 398H30Q16 398 16 412V744Q16 758 21 758",
            (30, 758, 0),
            (81, 398),
        ),
        PlacedMoves(
            State.WAITING,
            State.DONE,
            ("succeed",),
            "M256 104H324Q338 104 338 118V526Q338 540 324 540H304Q292 540 292 547",
            (292, 556, 90),
            (296, 104),
        ),
        PlacedMoves(
            State.WAITING,
            State.SKIPPED,
            ("skip",),
            "M256 60H336Q350 60 350 74V744Q350 758 336 758H323",
            (314, 758, 180),
            (296, 60),
        ),
        PlacedMoves(
            State.ERROR,
            State.PENDING,
            ("requeue",),
            "M100 640V664Q100 678 114 678H312Q326 678 326 664V252Q326 238 312 238H265",
            (256, 238, 180),
            None,
        ),
        PlacedMoves(
            State.CANCELED,
            State.PENDING,
            ("requeue",),
            "M100 716V692Q100 678 114 678H312Q326 678 326 664V252Q326 238 312 238H265",
            (256, 238, 180),
            (214, 678),
            (State.ERROR, State.CANCELED),
        ),
    ),
)
PLACEMENTS = {("task", "tall"): TASK}
