"""Every list of states in the SQL files equals a set that is derived from its machine in lifecycle.py.

State literals stay in the SQL, because a parameter cannot use a partial index under a generic plan. A change of a
machine changes the sets below, and this test names every list that has to follow.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from interlock.lifecycle import (
    JOB,
    SUPERVISED_WORKER,
    TASK_ROW,
    JobEvent,
    JobState,
    TaskRowEvent,
    TaskRowState,
)
from sql_text import HAND_WRITTEN, SQL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from interlock.machine import Machine

pytestmark = pytest.mark.unit


def targets(machine: Machine[Any, Any], *events: str) -> frozenset[str]:
    return frozenset(target for _, event, target in machine.rows if event in events)


def sources(machine: Machine[Any, Any], *events: str) -> frozenset[str]:
    return frozenset(source for source, event, _ in machine.rows if event in events)


# Sets of states by machine and meaning.
SETS: dict[Machine[Any, Any], dict[str, frozenset[str]]] = {
    TASK_ROW: {
        "final": TASK_ROW.final,
        "unfinished": TASK_ROW.unfinished,
        # counts against limits and worker_count
        "admitted": TASK_ROW.unfinished - {TaskRowState.WAITING},
        "not started": TASK_ROW.unfinished - {TaskRowState.RUNNING},
        # its end is sent to the orchestrator and to webhooks; the orchestrator itself skips steps
        "reported": TASK_ROW.final - targets(TASK_ROW, TaskRowEvent.SKIP),
        "settled": targets(TASK_ROW, TaskRowEvent.SUCCEED, TaskRowEvent.FAIL),
        "unsuccessful": sources(TASK_ROW, TaskRowEvent.REQUEUE),
        "not run to its end": targets(TASK_ROW, TaskRowEvent.SKIP, TaskRowEvent.CANCEL),
    },
    JOB: {
        "final": JOB.final,
        "unfinished": JOB.unfinished,
        "accepted": JOB.unfinished - {JobState.SUBMITTED},
        "started": targets(JOB, JobEvent.ALLOCATE_RESOURCES) | JOB.final,
        "unsuccessful": JOB.final - targets(JOB, JobEvent.SUCCESS),
    },
    SUPERVISED_WORKER: {
        "final": SUPERVISED_WORKER.final,
        "unfinished": SUPERVISED_WORKER.unfinished,
    },
}
STATES = {str(state) for machine in SETS for state in machine.states}

_COMMENT = re.compile(r"--[^\n]*")
_LIST = re.compile(r"\b(?:\w+\.)?(?:state|status|ending)\s+(?:not\s+)?in\s*\(\s*('[^()]*')\s*\)")
_SINGLE = re.compile(r"\b(?:\w+\.)?(?:state|status)\s*(?:=|<>)\s*'(\w+)'")


def texts() -> Iterator[tuple[Path, str]]:
    for path in HAND_WRITTEN:
        yield path.relative_to(SQL), _COMMENT.sub("", path.read_text(encoding="utf-8"))


def test_every_list_of_states_is_a_set_of_its_machine() -> None:
    known = {
        tuple(str(state) for state in machine.states if state in chosen)
        for machine, sets in SETS.items()
        for chosen in sets.values()
    }
    lists = [(path, tuple(re.findall(r"'(\w+)'", found))) for path, text in texts() for found in _LIST.findall(text)]
    assert len(lists) > 50, "the pattern still finds them"
    wrong = [f"{path}: {states}" for path, states in lists if states not in known]
    assert wrong == [], "write a set of SETS in the order of the machine, or give the new set a name there"
    used = {states for _, states in lists}
    assert known <= used, "a set that no SQL uses"


def test_every_state_literal_is_a_state() -> None:
    wrong = [f"{path}: {state}" for path, text in texts() for state in _SINGLE.findall(text) if state not in STATES]
    assert wrong == []
