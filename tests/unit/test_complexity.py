"""Limits of cyclomatic complexity: 15 for every function of the package, and stricter ones for those of seed 000."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from radon.complexity import cc_visit  # type: ignore[import-untyped]
from radon.visitors import Class  # type: ignore[import-untyped]

import interlock
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.process import WorkerStateMachine
from interlock.worker.run import run_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.unit

SOURCE = Path(interlock.__file__).parent
MAX_COMPLEXITY = 15

# NFR1 of seed 000, and its criterion for run_worker: complexity below the limit. `serve` is the body of `run`.
SEED_LIMITS: list[tuple[Callable[..., Any], int]] = [
    (WorkerStateMachine.transition, 5),
    (TaskStateMachine.transition, 5),
    (WorkerStateMachine.run, 10),
    (WorkerStateMachine.serve, 10),
    (TaskStateMachine.execute, 10),
    (run_worker, 3),
]


def functions(blocks: list[Any]) -> Iterator[Any]:
    """Yield functions and methods, nested ones too; the figure of a class is only the sum of its methods."""
    for block in blocks:
        if isinstance(block, Class):
            yield from functions([*block.methods, *block.inner_classes])
        else:
            yield block
            yield from functions(block.closures)


def complexities(path: Path) -> dict[tuple[str, int], int]:
    """Return the complexity of every function of a file by name and line."""
    found = functions(cc_visit(path.read_text(encoding="utf-8")))
    return {(function.name, function.lineno): function.complexity for function in found}


def violations(root: Path) -> dict[str, int]:
    """Return the functions under a directory that exceed the limit."""
    return {
        f"{path.relative_to(root)}:{line} {name}": value
        for path in sorted(root.rglob("*.py"))
        for (name, line), value in complexities(path).items()
        if value > MAX_COMPLEXITY
    }


def test_no_function_exceeds_the_limit() -> None:
    assert complexities(SOURCE / "worker" / "process.py"), "the source is where the test looks"
    assert violations(SOURCE) == {}


def test_a_function_above_the_limit_is_found(tmp_path: Path) -> None:
    def branches(count: int) -> str:
        return "def {}(x):\n" + "".join(f"    if x == {n}:\n        return {n}\n" for n in range(count))

    deep = "class Outer:\n    def method(self):\n        " + branches(15).format("inner").replace("\n", "\n        ")
    (tmp_path / "good.py").write_text(branches(14).format("good"), encoding="utf-8")
    (tmp_path / "bad.py").write_text(branches(15).format("bad"), encoding="utf-8")
    (tmp_path / "nested.py").write_text(deep, encoding="utf-8")
    found = violations(tmp_path)
    assert found["bad.py:1 bad"] == MAX_COMPLEXITY + 1
    assert found["nested.py:3 inner"] == MAX_COMPLEXITY + 1
    assert not any(place.startswith("good") for place in found)


@pytest.mark.parametrize(("function", "limit"), SEED_LIMITS, ids=lambda value: getattr(value, "__qualname__", None))
def test_the_functions_of_the_seed_stay_below_its_limits(function: Callable[..., Any], limit: int) -> None:
    code = inspect.unwrap(function).__code__
    found = complexities(Path(code.co_filename))
    assert found[code.co_name, code.co_firstlineno] < limit
