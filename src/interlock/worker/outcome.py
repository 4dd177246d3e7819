"""Outcomes: what an attempt settles after its handler returned, raised or was stopped, or the engine failed around it.

Invariant: a failure of the engine uses up no try. The output of a step is a StepExecutionResult document, both in
success and in failure; the output of a standalone task is its result. Any exception can be described and stored, also
one whose `str()` raises.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from interlock.client.step_context import StepContext, step_result
from interlock.errors import PermanentError, RetryableError
from interlock.lifecycle import TaskRowEvent
from interlock.model.backoff import DEFAULT_BACKOFF, MAX_BACKOFF_S, Backoff
from interlock.model.json_values import storable_text
from interlock.postgres.connection import IN_FAILED_TRANSACTION, is_fault_of_values
from interlock.store.tasks import Outcome
from interlock.telemetry import log
from interlock.worker.executors.base import MAX_TRACEBACK_LENGTH, EngineError, HandlerError, format_traceback

if TYPE_CHECKING:
    from interlock.client.step_context import StepExecutionResult
    from interlock.worker.attempt import TaskStateMachine

MAX_TRACEBACK_LINES = 50
MAX_MESSAGE_LENGTH = 10_000  # characters: the message is stored with the task, its job, and in both audit tables
ENGINE_BACKOFF = Backoff.exponential(1.0, cap=60.0, jitter=0.2)  # after failures of the engine


class Interruption(StrEnum):
    """Why a handler is stopped before it returns."""

    LEASE_LOST = "lease lost"
    CANCELED = "canceled"
    SHUTDOWN = "shutdown"


def succeeded(attempt: TaskStateMachine) -> Outcome:
    """Return the outcome of a handler that returned its result."""
    output = attempt.output if attempt.job is None else _step_document(attempt, None)
    if not attempt.has_context:  # so there is neither cost nor progress
        id_, number = attempt.key
        # tuple.__new__ takes a third of the time of the named constructor
        return tuple.__new__(Outcome, (id_, number, TaskRowEvent.SUCCEED, output, None, None, None, None, None, None))
    context = attempt.context
    progress, weight = context.latest_progress, context.weight
    return Outcome(*attempt.key, TaskRowEvent.SUCCEED, output, cost=context.cost, progress=progress, weight=weight)


def unsuccessful(attempt: TaskStateMachine, error: BaseException) -> Outcome:
    """Return the outcome of a handler that raised or was stopped: cancel, return, retry or fail."""
    context = attempt.context
    if attempt.interruption is Interruption.CANCELED:
        return Outcome(*attempt.key, TaskRowEvent.CANCEL, reason=context.cancel_reason)
    if attempt.interruption is Interruption.SHUTDOWN:
        return returned(attempt)
    if isinstance(error, EngineError):
        return engine_failed(attempt, error)
    document = error_document(error)
    is_retried = document["retryable"] and not context.is_last_try
    return Outcome(
        *attempt.key,
        TaskRowEvent.RETRY if is_retried else TaskRowEvent.FAIL,
        None if is_retried or attempt.job is None else _step_document(attempt, document),
        error=document,
        reason=context.error,
        cost=context.cost,
        delay=retry_delay(attempt, error) if is_retried else None,
        progress=context.latest_progress,
        weight=context.weight,
    )


def engine_failed(attempt: TaskStateMachine, error: BaseException) -> Outcome:
    """Return the outcome of a failure of the engine: back into the queue after a delay; it uses up no try.

    The delay grows with the attempts that used up no try, because they were returned or their worker died.
    """
    context = attempt.context
    reason = context.error = f"returned by {attempt.worker_id}, which could not run it: {describe_error(error)}"
    delay = ENGINE_BACKOFF.delay(context.attempt - context.tries + 1)
    return Outcome(*attempt.key, TaskRowEvent.RETURN, reason=reason, delay=delay, progress=attempt.latest_progress)


def rolled_back(attempt: TaskStateMachine, error: Exception) -> Outcome:
    """Return the outcome of a transactional attempt whose settle or commit was refused, so that its writes are undone.

    The handler's own fault, as a violated constraint or a transaction that it left aborted, is a failed try.
    """
    is_aborted = getattr(error, "sqlstate", "") == IN_FAILED_TRANSACTION
    if not is_aborted and not is_fault_of_values(error):
        return engine_failed(attempt, error)
    context = attempt.context
    reason = context.error = describe_error(error)
    document = {"type": type(error).__qualname__, "message": reason, "traceback": None, "retryable": True}
    if not context.is_last_try:
        delay = DEFAULT_BACKOFF.delay(context.tries)
        return Outcome(*attempt.key, TaskRowEvent.RETRY, error=document, reason=reason, delay=delay)
    output = None if attempt.job is None else _step_document(attempt, document)
    return Outcome(*attempt.key, TaskRowEvent.FAIL, output, error=document, reason=reason)


def refused(attempt: TaskStateMachine, refusal: Exception) -> Outcome:
    """Return the outcome of an attempt whose own outcome the database or the encoder refused.

    It carries nothing that the handler returned or reported, because some of that cannot be stored.
    """
    reason = f"the outcome could not be stored: {refusal}"
    document = {"type": "StatementError", "message": reason, "traceback": None, "retryable": False}
    output = None if attempt.job is None else _bare_step_document(attempt, document)
    return Outcome(*attempt.key, TaskRowEvent.FAIL, output, error=document, reason=reason)


def returned(attempt: TaskStateMachine, why: str = "which shuts down") -> Outcome:
    """Return the outcome of an attempt that its worker puts back into the queue; it uses up no try."""
    reason = f"returned by {attempt.worker_id}, {why}"
    return Outcome(*attempt.key, TaskRowEvent.RETURN, reason=reason, progress=attempt.latest_progress)


def retry_delay(attempt: TaskStateMachine, error: BaseException) -> float:
    """Return the seconds until the next try: the error's `retry_after`, else by the task's backoff."""
    retry_after = getattr(error, "retry_after", None)
    if isinstance(retry_after, int | float) and 0 <= retry_after <= MAX_BACKOFF_S:
        return float(retry_after)
    if attempt.claimed is None or attempt.definition is None:
        raise RuntimeError("an attempt that was never claimed has no backoff")
    tries = attempt.context.tries
    try:
        stored = attempt.claimed.own("backoff")
        backoff = attempt.definition.backoff if stored is None else Backoff.from_json(stored)
        return backoff.delay(tries)
    except Exception as broken:  # noqa: BLE001 - a broken backoff function must not replace the handler's own error
        log.error("backoff_failed", task_id=attempt.task_id, error=describe_error(broken))
        return DEFAULT_BACKOFF.delay(tries)


def error_document(error: BaseException) -> dict[str, Any]:
    """Describe an exception for the task row; a HandlerError, from another process, brings its own document."""
    if isinstance(error, HandlerError):
        known = error.document
        trace = None if known["traceback"] is None else storable_text(known["traceback"])
        return {**known, "type": _truncate(known["type"]), "message": _truncate(known["message"]), "traceback": trace}
    lines = format_traceback(error)
    return {
        "type": type(error).__qualname__,
        "message": _message(error),
        "traceback": storable_text("".join(lines[-MAX_TRACEBACK_LINES:])[-MAX_TRACEBACK_LENGTH:]),
        "retryable": isinstance(error, RetryableError) or not isinstance(error, PermanentError),
    }


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line, as type and message."""
    if isinstance(error, HandlerError):
        return _truncate(f"{error.document['type']}: {error.document['message']}")
    return f"{type(error).__qualname__}: {_message(error)}"


def _message(error: BaseException) -> str:
    try:
        return _truncate(str(error))
    except Exception as worse:  # noqa: BLE001 - a broken __str__ must not break the report of the error
        return f"(it cannot be shown: {type(worse).__qualname__})"


def _truncate(text: str) -> str:
    """Cut a text to the length that is stored, and replace characters that PostgreSQL cannot store."""
    cut = "" if len(text) <= MAX_MESSAGE_LENGTH else f"… ({len(text):,} characters in all)"
    return storable_text(text[:MAX_MESSAGE_LENGTH] + cut)


def _step_document(attempt: TaskStateMachine, error: dict[str, Any] | None) -> StepExecutionResult:
    """Return the StepExecutionResult that the orchestrator and dependent steps read."""
    context = attempt.context if attempt.has_context else None
    metadata: dict[str, Any] = dict(context.orchestration_metadata) if isinstance(context, StepContext) else {}
    if attempt.chosen is not None:
        metadata["chosen"] = attempt.chosen
    return step_result(
        attempt.step,
        success=error is None,
        result=attempt.output,
        error=error,
        started_at=attempt.started_at,
        completed_at=attempt.completed_at,
        worker_id=attempt.worker_id,
        attempt=attempt.key[1],
        orchestration_metadata=metadata,
    )


def _bare_step_document(attempt: TaskStateMachine, error: dict[str, Any]) -> StepExecutionResult:
    """Return the StepExecutionResult of a failed step without the handler's result and metadata."""
    return step_result(
        attempt.step,
        success=False,
        error=error,
        started_at=attempt.started_at,
        completed_at=attempt.completed_at,
        worker_id=attempt.worker_id,
        attempt=attempt.key[1],
    )
