"""The worker: claims tasks, runs their handlers and settles what came of it.

Names are imported when they are first used: the children that run handlers need next to nothing of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.worker.attempt import TaskResult, TaskStateMachine
    from interlock.worker.process import WorkerStateMachine
    from interlock.worker.run import run_worker, serving
    from interlock.worker.running import WorkerContext
    from interlock.worker.settings import WakeMode, WorkerSettings, get_instance_name

_HOMES = {
    "TaskResult": "attempt",
    "TaskStateMachine": "attempt",
    "WakeMode": "settings",
    "WorkerContext": "running",
    "WorkerSettings": "settings",
    "WorkerStateMachine": "process",
    "get_instance_name": "settings",
    "run_worker": "run",
    "serving": "run",
}

__all__ = [
    "TaskResult",
    "TaskStateMachine",
    "WakeMode",
    "WorkerContext",
    "WorkerSettings",
    "WorkerStateMachine",
    "get_instance_name",
    "run_worker",
    "serving",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'interlock.worker' has no attribute {name!r}")
    return getattr(import_module(f"interlock.worker.{_HOMES[name]}"), name)
