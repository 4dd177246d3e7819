"""The functions of an app that a worker process calls beside handlers: the lifespan, and `on_error` hooks."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlock.errors import DefinitionError

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt whose handler raised, as `on_error` hooks see it."""

    task_id: UUID
    task_type: str
    namespace: str
    worker_id: str
    attempt: int
    tries: int
    max_tries: int
    will_retry: bool
    next_try_at: datetime | None  # None if the task ended in error
    job_id: UUID | None = None
    step: str | None = None
    correlation_id: UUID | None = None


Lifespan = Callable[["Interlock"], AbstractAsyncContextManager[None]]
ErrorHook = Callable[[BaseException, FailedAttempt], Awaitable[Any] | Any]


def check_lifespan(lifespan: Any) -> Lifespan | None:
    """Return a lifespan as a function that makes an async context manager; DefinitionError if it cannot be one."""
    if lifespan is None:
        return None
    if not callable(lifespan):
        raise DefinitionError(f"lifespan must be a function that makes an async context manager, got {lifespan!r}")
    if inspect.isasyncgenfunction(lifespan):
        return asynccontextmanager(lifespan)
    if inspect.iscoroutinefunction(lifespan) or inspect.isgeneratorfunction(inspect.unwrap(lifespan)):
        raise DefinitionError(
            f"lifespan {getattr(lifespan, '__name__', lifespan)} must be an async function that yields once, under "
            "@asynccontextmanager"
        )
    made: Lifespan = lifespan
    return made


def check_error_hook(function: Any) -> None:
    """Raise DefinitionError if a function cannot be called with an error and a FailedAttempt."""
    if not callable(function):
        raise DefinitionError(f"@app.on_error takes a function of an error and a FailedAttempt, got {function!r}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise DefinitionError(
            f"the hook {name} must take two arguments, the error and the FailedAttempt: {error}"
        ) from None
