"""Limits of cyclomatic complexity: 15 for every function, and the limits of seed 000 for its own functions."""

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
TRANSITION_LIMIT = 5
# By module and function: the complexity must be below this.
SEED_LIMITS = {
    ("worker/process.py", "run"): 10,
    ("worker/process.py", "serve"): 10,
    ("worker/attempt.py", "execute"): 10,
    ("worker/run.py", "run_worker"): 3,
}


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


def test_no_function_exceeds_the_limit() -> None:
    found = measured()
    assert found
    assert {place: value for place, value in found.items() if value > MAX_COMPLEXITY} == {}


@pytest.mark.parametrize(("module", "name"), SEED_LIMITS)
def test_the_functions_of_the_seed_stay_below_its_limits(module: str, name: str) -> None:
    found = [value for place, value in measured().items() if place[::2] == (module, name)]
    assert found
    assert max(found) < SEED_LIMITS[module, name]


def test_every_transition_has_a_complexity_below_five() -> None:
    found = {place: value for place, value in measured().items() if place[2] == "transition"}
    assert found
    assert {place: value for place, value in found.items() if value >= TRANSITION_LIMIT} == {}
