"""Every list of states in the SQL files equals a set that is derived from its machine; Python uses the enums.

State literals stay in the SQL, because a parameter cannot use a partial index under a generic plan. A change of a
machine changes the sets below, and this test names every list that has to follow.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
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
from interlock.store.retention import Retention
from sql_text import HAND_WRITTEN, SQL

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        "final but not done": TASK_ROW.final - {TaskRowState.DONE},
    },
    JOB: {
        "final": JOB.final,
        "unfinished": JOB.unfinished,
        "not started": JOB.unfinished - targets(JOB, JobEvent.ALLOCATE_RESOURCES),
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


SOURCE = Path(str(files("interlock")))
# modules that may write state names as strings
LITERALS_ALLOWED = {
    Path("lifecycle.py"): "declares them",
    Path("workflow/dry_run.py"): "the oracle of the engine is written independently of it",
}


def state_literals(tree: ast.AST) -> Iterator[ast.expr]:
    """Find collections of state names, and comparisons of a state or status with a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Set | ast.List | ast.Tuple | ast.Dict):
            members = node.keys if isinstance(node, ast.Dict) else node.elts
            if len(members) > 1 and all(isinstance(each, ast.Constant) and each.value in STATES for each in members):
                yield node
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(names_a_state, sides)) and any(isinstance(e, ast.Constant) and e.value in STATES for e in sides):
                yield node


def names_a_state(node: ast.expr) -> bool:
    """Tell whether an expression is `….state`, `…["state"]` or the same with `status`."""
    if isinstance(node, ast.Attribute):
        return node.attr in {"state", "status"}
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value in {"state", "status"}
    )


def test_python_takes_states_from_the_machines() -> None:
    found = {
        path.relative_to(SOURCE): [node.lineno for node in state_literals(ast.parse(path.read_text(encoding="utf-8")))]
        for path in SOURCE.rglob("*.py")
    }
    assert not {path: lines for path, lines in found.items() if lines and path not in LITERALS_ALLOWED}
    assert found[Path("workflow/dry_run.py")], "the search still finds them"


def test_retention_has_an_age_for_each_final_state_of_a_task() -> None:
    assert {field.name for field in fields(Retention)} >= TASK_ROW.final
