"""Interlock: durable tasks and workflows for Python on PostgreSQL.

Every lifecycle is a state machine that the database enforces. Names are imported on first use, so that a program pays
only for the modules that it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.client.app import Interlock
    from interlock.client.context import TaskContext
    from interlock.client.dependencies import Depends
    from interlock.client.hooks import FailedAttempt
    from interlock.client.job_handle import JobHandle, JobStatus, StepStatus
    from interlock.client.step_context import StepContext, StepExecutionResult
    from interlock.client.sync import SyncApp, SyncHandle, SyncJob
    from interlock.client.task import Task
    from interlock.client.task_handle import Affected, TaskHandle, TaskStatus
    from interlock.client.workflow import Workflow
    from interlock.config import Config
    from interlock.errors import (
        DefinitionError,
        InputError,
        InterlockError,
        JobConflictError,
        JobFailedError,
        PermanentError,
        RequestReusedError,
        RetryableError,
        TaskFailedError,
        UnknownJobError,
        UnknownTaskError,
    )
    from interlock.lifecycle import (
        TASK_TRANSITIONS,
        WORKER_TRANSITIONS,
        JobState,
        SupervisedWorkerState,
        TaskEvent,
        TaskRowState,
        TaskState,
        WorkerEvent,
        WorkerState,
    )
    from interlock.model.backoff import Backoff
    from interlock.store.step_results import SimpleStepMessage
    from interlock.supervisor.http.requests import StateTransitionRequest
    from interlock.supervisor.http.responses import StateTransitionResult
    from interlock.telemetry import metrics_registry
    from interlock.worker.attempt import TaskResult, TaskStateMachine
    from interlock.worker.executors.base import HandlerError
    from interlock.worker.executors.events import StepExecutionCompletionEvent, StepExecutionEvent
    from interlock.worker.process import WorkerContext, WorkerStateMachine
    from interlock.worker.run import run_worker, serving
    from interlock.worker.settings import WorkerSettings

    __version__: str

_MODULES = {
    "TASK_TRANSITIONS": "interlock.lifecycle",
    "WORKER_TRANSITIONS": "interlock.lifecycle",
    "Affected": "interlock.client.task_handle",
    "Backoff": "interlock.model.backoff",
    "Config": "interlock.config",
    "DefinitionError": "interlock.errors",
    "Depends": "interlock.client.dependencies",
    "FailedAttempt": "interlock.client.hooks",
    "HandlerError": "interlock.worker.executors.base",
    "InputError": "interlock.errors",
    "Interlock": "interlock.client.app",
    "InterlockError": "interlock.errors",
    "JobConflictError": "interlock.errors",
    "JobFailedError": "interlock.errors",
    "JobHandle": "interlock.client.job_handle",
    "JobState": "interlock.lifecycle",
    "JobStatus": "interlock.client.job_handle",
    "PermanentError": "interlock.errors",
    "RequestReusedError": "interlock.errors",
    "RetryableError": "interlock.errors",
    "SimpleStepMessage": "interlock.store.step_results",
    "StateTransitionRequest": "interlock.supervisor.http.requests",
    "StateTransitionResult": "interlock.supervisor.http.responses",
    "StepContext": "interlock.client.step_context",
    "StepExecutionCompletionEvent": "interlock.worker.executors.events",
    "StepExecutionEvent": "interlock.worker.executors.events",
    "StepExecutionResult": "interlock.client.step_context",
    "StepStatus": "interlock.client.job_handle",
    "SupervisedWorkerState": "interlock.lifecycle",
    "SyncApp": "interlock.client.sync",
    "SyncHandle": "interlock.client.sync",
    "SyncJob": "interlock.client.sync",
    "Task": "interlock.client.task",
    "TaskContext": "interlock.client.context",
    "TaskEvent": "interlock.lifecycle",
    "TaskFailedError": "interlock.errors",
    "TaskHandle": "interlock.client.task_handle",
    "TaskResult": "interlock.worker.attempt",
    "TaskRowState": "interlock.lifecycle",
    "TaskState": "interlock.lifecycle",
    "TaskStateMachine": "interlock.worker.attempt",
    "TaskStatus": "interlock.client.task_handle",
    "UnknownJobError": "interlock.errors",
    "UnknownTaskError": "interlock.errors",
    "WorkerContext": "interlock.worker.process",
    "WorkerEvent": "interlock.lifecycle",
    "WorkerSettings": "interlock.worker.settings",
    "WorkerState": "interlock.lifecycle",
    "WorkerStateMachine": "interlock.worker.process",
    "Workflow": "interlock.client.workflow",
    "metrics_registry": "interlock.telemetry",
    "run_worker": "interlock.worker.run",
    "serving": "interlock.worker.run",
}

__all__ = [
    "TASK_TRANSITIONS",
    "WORKER_TRANSITIONS",
    "Affected",
    "Backoff",
    "Config",
    "DefinitionError",
    "Depends",
    "FailedAttempt",
    "HandlerError",
    "InputError",
    "Interlock",
    "InterlockError",
    "JobConflictError",
    "JobFailedError",
    "JobHandle",
    "JobState",
    "JobStatus",
    "PermanentError",
    "RequestReusedError",
    "RetryableError",
    "SimpleStepMessage",
    "StateTransitionRequest",
    "StateTransitionResult",
    "StepContext",
    "StepExecutionCompletionEvent",
    "StepExecutionEvent",
    "StepExecutionResult",
    "StepStatus",
    "SupervisedWorkerState",
    "SyncApp",
    "SyncHandle",
    "SyncJob",
    "Task",
    "TaskContext",
    "TaskEvent",
    "TaskFailedError",
    "TaskHandle",
    "TaskResult",
    "TaskRowState",
    "TaskState",
    "TaskStateMachine",
    "TaskStatus",
    "UnknownJobError",
    "UnknownTaskError",
    "WorkerContext",
    "WorkerEvent",
    "WorkerSettings",
    "WorkerState",
    "WorkerStateMachine",
    "Workflow",
    "__version__",
    "metrics_registry",
    "run_worker",
    "serving",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - reads files, and few programs ask

        return version("interlock")
    if name not in _MODULES:
        raise AttributeError(f"module 'interlock' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
