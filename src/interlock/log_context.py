"""The task whose handler runs, and its ids in the handler's own log records.

Invariant: a handler that logs nothing pays for one context variable; the ids are collected when a record is made.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger

TASK_ID_FIELDS = ("task_id", "task_type", "attempt", "job_id", "step", "correlation_id", "worker_id")


class RunningTask(Protocol):
    """An attempt whose handler runs."""

    def log_ids(self) -> dict[str, Any]:
        """Return the ids for log records; fields without a value are left out."""


running_task: ContextVar[RunningTask | None] = ContextVar("interlock_running_task", default=None)


def task_ids() -> dict[str, Any]:
    """Return the ids of the task whose handler runs here; empty outside of a handler."""
    task = running_task.get()
    return {} if task is None else task.log_ids()


def add_task_ids(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Add the ids of the running task to a record: a processor for `structlog.configure`."""
    for name, value in task_ids().items():
        event.setdefault(name, value)
    return event


class TaskIdFilter(logging.Filter):
    """Adds the ids of the running task to records of `logging`: a filter for handlers, which lets every record pass.

    Every record gets all fields, so that a format can name them; outside of a handler they are None.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Set the fields that the record does not have."""
        ids = task_ids()
        for name in TASK_ID_FIELDS:
            if not hasattr(record, name):
                setattr(record, name, ids.get(name))
        return True


def add_filter_to_root_handlers() -> None:
    """Let the handlers of the root logger, which the app of a worker process configured, show the ids."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(each, TaskIdFilter) for each in handler.filters):
            handler.addFilter(TaskIdFilter())
