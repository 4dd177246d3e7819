"""The worker process: claims tasks, runs their handlers and settles the outcomes.

Exported names are imported on first use: a child process that only runs handlers imports none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.postgres.notifier import WakeMode
    from interlock.worker.attempt import TaskResult, TaskStateMachine
    from interlock.worker.process import WorkerContext, WorkerStateMachine
    from interlock.worker.run import run_worker, serving
    from interlock.worker.settings import WorkerSettings, get_instance_name

_MODULES = {
    "TaskResult": "interlock.worker.attempt",
    "TaskStateMachine": "interlock.worker.attempt",
    "WakeMode": "interlock.postgres.notifier",
    "WorkerContext": "interlock.worker.process",
    "WorkerSettings": "interlock.worker.settings",
    "WorkerStateMachine": "interlock.worker.process",
    "get_instance_name": "interlock.worker.settings",
    "run_worker": "interlock.worker.run",
    "serving": "interlock.worker.run",
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
    if name not in _MODULES:
        raise AttributeError(f"module 'interlock.worker' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
