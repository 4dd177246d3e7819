"""Limits of cyclomatic complexity over the whole source: at most 15; stricter ones for the functions of seed 000."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from radon.complexity import cc_visit  # type: ignore[import-untyped]
from radon.visitors import Class  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.unit

SOURCE = Path(__file__).parents[2] / "src" / "interlock"
MAX_COMPLEXITY = 15
TRANSITION = 5
RUN_WORKER = 3


def functions(blocks: list[Any]) -> Iterator[Any]:
    """List functions and methods, those inside others too; a class is only the sum of its methods."""
    for block in blocks:
        if isinstance(block, Class):
            yield from functions([*block.methods, *block.inner_classes])
        else:
            yield block
            yield from functions(block.closures)


def measured() -> dict[tuple[str, int, str], int]:
    return {
        (str(path.relative_to(SOURCE)), function.lineno, function.name): function.complexity
        for path in sorted(SOURCE.rglob("*.py"))
        for function in functions(cc_visit(path.read_text(encoding="utf-8")))
    }


def test_every_function_has_a_complexity_of_at_most_15() -> None:
    found = measured()
    assert found
    assert {place: value for place, value in found.items() if value > MAX_COMPLEXITY} == {}


def test_run_worker_has_a_complexity_below_three() -> None:
    found = {place: value for place, value in measured().items() if place[::2] == ("worker/run.py", "run_worker")}
    assert found
    assert {place: value for place, value in found.items() if value >= RUN_WORKER} == {}


def test_every_transition_has_a_complexity_below_five() -> None:
    found = {place: value for place, value in measured().items() if place[2] == "transition"}
    assert found
    assert {place: value for place, value in found.items() if value >= TRANSITION} == {}
