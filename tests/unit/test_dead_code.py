"""No dead code: every public function, method and class of the package is used by the package itself.

A name counts as used when any module of `src` refers to it by name or attribute, other than by importing it. What only
users, frameworks or the database call is listed below with the reason.
"""

from __future__ import annotations

import ast
from importlib.resources import files
from pathlib import Path

import pytest

import interlock
import interlock.testing
from interlock.cli.main import COMMANDS

pytestmark = pytest.mark.unit

SOURCE = Path(str(files("interlock")))

# names that nothing in the package refers to, by reason
PUBLIC_API = {
    "command_task", "periodic", "enqueue_with", "enqueue_statement", "enqueue_prepared", "approval", "fibonacci",
    "submit_statement", "repeat",
    "exponential", "fence", "restore", "job_input", "get_input", "get_dependency_result", "get_dependency_error",
    "get_config", "transition_to", "require_state", "enqueue_sync", "drain", "run_inline",
}  # fmt: skip
# State of the running engine that tests observe, as with River's test signals: nothing outside the process shows a
# thread that still runs a cancelled handler, or tells the reaper from other child processes.
OBSERVED_BY_TESTS = {"abandoned_threads", "reaper_pid"}
CALLED_BY_NAME = {
    # gRPC servicers and interceptors
    "RegisterWorker", "SendSample", "NotifyPhaseComplete", "ReportCompletion", "SetPartitionBoundaries",
    "StartShuffle", "StartMerge", "GetStatus", "ShuffleData", "intercept_service",
    # overridden methods of frameworks: uvicorn, FastAPI, logging, PyYAML
    "capture_signals", "send_400_response", "_unsupported_upgrade_warning", "openapi", "emit", "compose_document",
    "compose_node", "compose_scalar_node", "compose_sequence_node", "compose_mapping_node",
    # templates of the dashboard
    "may",
    # hooks and fixtures of pytest
    "pytest_addoption", "interlock_clock", "interlock_worker", "interlock_orchestrator",
}  # fmt: skip


def test_every_definition_is_used() -> None:
    defined: dict[str, str] = {}
    used: set[str] = set()
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if not is_registered(node):
                    defined.setdefault(node.name, f"{path.relative_to(SOURCE)}:{node.lineno}")
            elif isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
    known = (
        used
        | set(COMMANDS)
        | PUBLIC_API
        | CALLED_BY_NAME
        | OBSERVED_BY_TESTS
        | set(dir(interlock))
        | set(dir(interlock.testing))
    )
    dead = {name: place for name, place in defined.items() if name not in known and not name.startswith("__")}
    assert dead == {}, "remove these, use them, or list them with the reason"


def test_the_lists_of_exceptions_name_what_exists() -> None:
    names = {
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assert names >= PUBLIC_API | CALLED_BY_NAME | OBSERVED_BY_TESTS


def is_registered(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Return whether a decorator registers the definition with a framework, which then calls it: `@app.command()`."""
    return any(isinstance(decorator, ast.Call) for decorator in node.decorator_list) and not isinstance(
        node, ast.ClassDef
    )
