"""Reports failed attempts: one log record each, with the traceback, and the `on_error` hooks of the app.

Invariant: a report never changes the outcome of its attempt and never delays its settle. Cancellations, returns at a
shutdown and lost leases are not failures of a handler; they have log events of their own.
"""

from __future__ import annotations

import asyncio
import inspect
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from interlock.client.hooks import FailedAttempt
from interlock.client.task import place_of_function
from interlock.lifecycle import TaskRowEvent
from interlock.log_context import running_task
from interlock.service import cancel_and_wait
from interlock.telemetry import log
from interlock.worker.executors.base import MAX_TRACEBACK_LENGTH, HandlerError, format_traceback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.client.hooks import ErrorHook
    from interlock.worker.attempt import TaskStateMachine

HOOK_CLOSE_TIMEOUT_S = 1.0  # for hooks that still run when the worker stops


class FailureReports:
    """Logs the failed attempts of one worker and calls the hooks of its app."""

    def __init__(self, hooks: Sequence[ErrorHook]) -> None:
        self._hooks = hooks
        self._running: set[asyncio.Task[None]] = set()

    def report(self, attempt: TaskStateMachine) -> None:
        """Report the failure of an attempt once, if its outcome is a retry or a failure."""
        error, attempt.failure = attempt.failure, None
        outcome = attempt.outcome
        if error is None or outcome is None or outcome.event not in {TaskRowEvent.RETRY, TaskRowEvent.FAIL}:
            return
        will_retry = outcome.event is TaskRowEvent.RETRY
        next_try_at = datetime.now(UTC) + timedelta(seconds=outcome.delay or 0.0) if will_retry else None
        context = attempt.context
        log.error(
            "task_retried" if will_retry else "task_failed",
            **attempt.log_ids(),
            error=context.error,
            tries=context.tries,
            max_tries=context.max_tries,
            next_try_at=None if next_try_at is None else next_try_at.isoformat(timespec="milliseconds"),
            next_try_in_s=None if outcome.delay is None else round(outcome.delay, 3),
            traceback=traceback_text(error),
        )
        if self._hooks and context.task_id is not None:
            failed = FailedAttempt(
                task_id=context.task_id,
                task_type=attempt.task_type,
                namespace=context.namespace,
                worker_id=attempt.worker_id,
                attempt=context.attempt,
                tries=context.tries,
                max_tries=context.max_tries,
                will_retry=will_retry,
                next_try_at=next_try_at,
                job_id=context.job_id,
                step=context.step,
                correlation_id=context.correlation_id,
            )
            self._start_hooks(attempt, error, failed)

    def _start_hooks(self, attempt: TaskStateMachine, error: BaseException, failed: FailedAttempt) -> None:
        variables = copy_context()
        variables.run(running_task.set, attempt)
        task = asyncio.get_running_loop().create_task(self._call_hooks(error, failed), context=variables)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _call_hooks(self, error: BaseException, failed: FailedAttempt) -> None:
        for hook in self._hooks:
            try:
                if inspect.iscoroutinefunction(hook):
                    await hook(error, failed)
                else:
                    answer = await asyncio.to_thread(hook, error, failed)
                    if inspect.isawaitable(answer):  # of a callable object, or a lambda
                        await answer
            except Exception as raised:  # noqa: BLE001 - the hook is the user's code
                log.error(
                    "error_hook_failed",
                    hook=place_of_function(hook) or repr(hook),
                    error=f"{type(raised).__qualname__}: {raised}",
                    traceback=traceback_text(raised),
                )

    async def close(self) -> None:
        """Wait a moment for hooks that still run, then cancel them."""
        if self._running:
            await asyncio.wait(self._running, timeout=HOOK_CLOSE_TIMEOUT_S)
            await cancel_and_wait(list(self._running), timeout_s=HOOK_CLOSE_TIMEOUT_S)


def traceback_text(error: BaseException) -> str | None:
    """Return the traceback of an error from the first frame of the user's code on, for a log record.

    A text and no `exc_info`: the default configuration of structlog shows the values of all local variables for the
    latter, which may be secret, and takes seconds for large ones.
    """
    if isinstance(error, HandlerError):
        return error.trace
    return "".join(format_traceback(error))[-MAX_TRACEBACK_LENGTH:]
