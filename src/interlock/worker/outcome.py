"""What an attempt has to report once its handler has ended: the outcome that is written to the task row.

Invariant: what is said of a step is a StepExecutionResult, whether it is done or in error; what is said of any other
task is its result itself.
"""

from __future__ import annotations

import traceback
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from interlock.client.step_context import StepContext, step_result
from interlock.errors import PermanentError, RetryableError
from interlock.lifecycle import TaskRowEvent
from interlock.model.backoff import Backoff
from interlock.model.json_values import storable_text
from interlock.store.tasks import Outcome
from interlock.worker.executors.base import MAX_TRACEBACK_LENGTH, HandlerError

if TYPE_CHECKING:
    from interlock.worker.attempt import TaskStateMachine


# SECTION worker/failures
# An exception as the task row has it: a document, and a line of words.
#
# Invariant: whatever a handler raises can be described and stored, also what cannot be shown, and what would fill a
# book.

TRACEBACK_LINES = 50
MESSAGE_LENGTH = 10_000  # characters: it is stored with the task, with its job, and in both records


def error_document(error: BaseException) -> dict[str, Any]:
    """Describe an exception for the task row. One that crossed a process boundary brings its own description."""
    if isinstance(error, HandlerError):
        known = error.document
        trace = None if known["traceback"] is None else storable_text(known["traceback"])
        return {**known, "type": _shown(known["type"]), "message": _shown(known["message"]), "traceback": trace}
    lines = traceback.format_exception(error)
    return {
        "type": type(error).__qualname__,
        "message": _words(error),
        "traceback": storable_text("".join(lines[-TRACEBACK_LINES:])[-MAX_TRACEBACK_LENGTH:]),
        "retryable": isinstance(error, RetryableError) or not isinstance(error, PermanentError),
    }


def described(error: BaseException) -> str:
    """Say in a line what was raised."""
    if isinstance(error, HandlerError):
        return _shown(f"{error.document['type']}: {error.document['message']}")
    return f"{type(error).__qualname__}: {_words(error)}"


def _words(error: BaseException) -> str:
    try:
        return _shown(str(error))
    except Exception as worse:  # noqa: BLE001 - an exception that cannot be shown must not break its own report
        return f"(it cannot be shown: {type(worse).__qualname__})"


def _shown(text: str) -> str:
    """Give a text as it is stored: its beginning, if it is very long."""
    cut = "" if len(text) <= MESSAGE_LENGTH else f"… ({len(text):,} characters in all)"
    return storable_text(text[:MESSAGE_LENGTH] + cut)


LONGEST_DELAY = 366 * 86_400.0
DEFAULT_BACKOFF = Backoff()


def succeeded(attempt: TaskStateMachine) -> Outcome:
    """Make the outcome of a handler that gave its result."""
    output = attempt.output if attempt.job is None else _step_result(attempt, None)
    if not attempt.has_context:  # nobody looked at it, so it has nothing to add
        id_, number = attempt.key
        # the tuple's own constructor, which costs a third of the named one
        return tuple.__new__(Outcome, (id_, number, TaskRowEvent.SUCCEED, output, None, None, None, None, None))
    context = attempt.context
    return Outcome(*attempt.key, TaskRowEvent.SUCCEED, output, cost=context.cost, progress=context.latest_progress)


def unsuccessful(attempt: TaskStateMachine, error: BaseException) -> Outcome:
    """Make the outcome of a handler that was stopped, or raised."""
    context = attempt.context
    if attempt.interruption is Interruption.CANCELED:
        return Outcome(*attempt.key, TaskRowEvent.CANCEL, reason=context.cancel_reason)
    if attempt.interruption is Interruption.SHUTDOWN:
        reason = f"returned by {attempt.worker_id}, which shuts down"
        return Outcome(*attempt.key, TaskRowEvent.RETURN, reason=reason, progress=context.latest_progress)
    stored = error_document(error)
    again = stored["retryable"] and not context.is_last_try
    return Outcome(
        *attempt.key,
        TaskRowEvent.RETRY if again else TaskRowEvent.FAIL,
        None if again or attempt.job is None else _step_result(attempt, stored),
        error=stored,
        reason=context.error,
        cost=context.cost,
        delay=_delay(attempt, error) if again else None,
        progress=context.latest_progress,
    )


def failed_around(attempt: TaskStateMachine, error: BaseException) -> Outcome:
    """Make the outcome of an attempt that failed outside its handler; it is tried again if it may be."""
    context = attempt.context
    reason = context.error = described(error)
    document = {"type": type(error).__qualname__, "message": reason, "traceback": None, "retryable": True}
    if not context.is_last_try:
        delay = DEFAULT_BACKOFF.delay(context.tries)
        return Outcome(*attempt.key, TaskRowEvent.RETRY, error=document, reason=reason, delay=delay)
    output = None if attempt.job is None else _step_result(attempt, document)
    return Outcome(*attempt.key, TaskRowEvent.FAIL, output, error=document, reason=reason)


def _step_result(attempt: TaskStateMachine, error: dict[str, Any] | None) -> dict[str, Any]:
    """Make the document that the orchestrator, and the steps after this one, read."""
    context = attempt.context if attempt.has_context else None
    told: dict[str, Any] = dict(context.orchestration_metadata) if isinstance(context, StepContext) else {}
    if attempt.chosen is not None:
        told["chosen"] = attempt.chosen
    return step_result(
        attempt.step,
        success=error is None,
        result=attempt.output,
        error=error,
        started_at=attempt.started_at,
        completed_at=attempt.completed_at,
        worker_id=attempt.worker_id,
        attempt=attempt.key[1],
        orchestration_metadata=told,
    )


def _delay(attempt: TaskStateMachine, error: BaseException) -> float:
    """Seconds until the next try: what the handler asked for, else the task's policy."""
    asked = getattr(error, "retry_after", None)
    if isinstance(asked, int | float) and 0 <= asked <= LONGEST_DELAY:
        return float(asked)
    return min(_backoff(attempt).delay(attempt.context.tries), LONGEST_DELAY)


def _backoff(attempt: TaskStateMachine) -> Backoff:
    if attempt.claimed is None or attempt.definition is None:
        raise RuntimeError("an attempt that was never claimed has no backoff")
    own = attempt.claimed.own("backoff")
    if own is not None:
        return type(attempt.definition.backoff).from_json(own)
    return attempt.definition.backoff


class Interruption(StrEnum):
    """Why a handler is stopped before it is done."""

    LEASE_LOST = "lease lost"
    CANCELED = "canceled"
    SHUTDOWN = "shutdown"
