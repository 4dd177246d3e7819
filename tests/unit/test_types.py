"""The types of tasks and machines: mypy accepts right calls, knows their results and rejects wrong ones."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import mypy.api
import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
MACHINE = """
from interlock.lifecycle import TASK, WORKER, TaskEvent, TaskState, WorkerEvent, WorkerState
from interlock.machine import StateMachine
machine = StateMachine(WORKER)

async def main() -> None:
"""
TASKS = """
from interlock import Interlock, TaskContext
app = Interlock()

@app.task
async def send_email(to: str, subject: str = "") -> int: raise NotImplementedError

@app.task(timeout=3)
def resize(ctx: TaskContext, path: str) -> bytes: raise NotImplementedError

async def main() -> None:
"""
SNIPPETS = {
    "right_machine": (
        MACHINE,
        "state: WorkerState = machine.transition(WorkerEvent.INITIALIZED)",
        "machine.require_state(WorkerState.CONNECTING)",
        "task: TaskState = StateMachine(TASK).transition(TaskEvent.CLAIM_REQUESTED)",
    ),
    "wrong_machine": (
        MACHINE,
        "machine.transition(TaskEvent.CLAIM_REQUESTED)",
        "machine.can_transition(TaskEvent.SHUTDOWN_REQUESTED)",
        "machine.require_state(TaskState.PENDING)",
        "WORKER.next(WorkerState.RUNNING, TaskEvent.LEASE_EXPIRED)",
        'machine.transition("initialized")',
    ),
    "right_tasks": (
        TASKS,
        'sent: int = await (await send_email.enqueue("a", subject="b")).result(timeout=3)',
        'image: bytes = await (await resize.options(priority=3, delay=1.5).enqueue(path="x")).result()',
        'direct: int = await send_email(to="a")',
        'also: bytes = resize("x")',
        'send_email.enqueue_statement(to="a").styled("named")',
        'await app.enqueue_many([send_email.prepare("a"), resize.prepare("b")])',
    ),
    "wrong_tasks": (
        TASKS,
        "await send_email.enqueue()",
        "await send_email.enqueue(to=3)",
        'await send_email.enqueue(to="a", cc="b")',
        'await send_email.options(priority="high").enqueue(to="a")',
        'await send_email.options(colour="red").enqueue(to="a")',
        'await resize.enqueue(TaskContext(), "x")',
        'result: str = await (await send_email.enqueue("a")).result()',
        'direct: str = resize("x")',
    ),
}
Errors = dict[str, dict[int, list[str]]]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Check all snippets in one run of mypy; return the errors of each by the position of its line."""
    place = tmp_path_factory.mktemp("snippets")
    for name, (head, *lines) in SNIPPETS.items():
        (place / f"{name}.py").write_text(head + "".join(f"    {line}\n" for line in lines))
    paths = [str(place / f"{name}.py") for name in SNIPPETS]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # for the configuration and the cache of the project
        report, trouble, _ = mypy.api.run(["--no-error-summary", *paths])
    assert not trouble
    found: Errors = {name: defaultdict(list) for name in SNIPPETS}
    for line in report.splitlines():
        if ": error:" in line:
            path, number, *_ = line.split(":")
            name = Path(path).stem
            found[name][int(number) - SNIPPETS[name][0].count("\n") - 1].append(line)
    return found


def test_mypy_accepts_a_machine_s_own_events_and_states(errors: Errors) -> None:
    assert errors["right_machine"] == {}


def test_mypy_rejects_another_machine_s_events_and_states(errors: Errors) -> None:
    found = errors["wrong_machine"]
    assert sorted(found) == [0, 1, 2, 3, 4]
    for lines in found.values():
        (line,) = lines
        assert "[arg-type]" in line


def test_mypy_accepts_right_calls_and_knows_the_results(errors: Errors) -> None:
    assert errors["right_tasks"] == {}


def test_mypy_rejects_wrong_arguments_options_and_results(errors: Errors) -> None:
    assert sorted(errors["wrong_tasks"]) == list(range(8))
