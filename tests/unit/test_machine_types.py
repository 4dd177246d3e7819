"""The types of the machine kernel: mypy keeps the events and states of one machine away from another."""

from __future__ import annotations

from pathlib import Path

import mypy.api
import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
HEAD = (
    "from interlock.lifecycle import TASK, WORKER, TaskEvent, TaskState, WorkerEvent, WorkerState\n"
    "from interlock.machine import StateMachine\n"
    "machine = StateMachine(WORKER)\n"
)


def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[str]:
    monkeypatch.chdir(ROOT)
    snippet = tmp_path / "snippet.py"
    snippet.write_text(HEAD + "\n".join(lines) + "\n")
    report, trouble, _ = mypy.api.run(["--strict", "--no-error-summary", "--hide-error-context", str(snippet)])
    assert not trouble
    return [line for line in report.splitlines() if ": error:" in line]


def test_mypy_accepts_a_machine_s_own_events_and_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not check(
        tmp_path,
        monkeypatch,
        "state: WorkerState = machine.transition(WorkerEvent.INITIALIZED)",
        "machine.require_state(WorkerState.CONNECTING)",
        "task: TaskState = StateMachine(TASK).transition(TaskEvent.CLAIM_REQUESTED)",
    )


def test_mypy_rejects_another_machine_s_events_and_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = check(
        tmp_path,
        monkeypatch,
        "machine.transition(TaskEvent.CLAIM_REQUESTED)",
        "machine.can_transition(TaskEvent.SHUTDOWN_REQUESTED)",
        "machine.require_state(TaskState.PENDING)",
        "WORKER.next(WorkerState.RUNNING, TaskEvent.LEASE_EXPIRED)",
        'machine.transition("initialized")',
    )
    assert [line.split(":")[1] for line in errors] == ["4", "5", "6", "7", "8"]
    assert all("[arg-type]" in line for line in errors)
