"""What an attempt has to report once its handler has ended: the outcome that is written to the task row.

Invariant: what is said of a step is a StepExecutionResult, whether it is done or in error; what is said of any other
task is its result itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.client.backoff import Backoff
from interlock.client.steps import StepContext, step_result
from interlock.lifecycle import TaskRowEvent
from interlock.store.tasks import Outcome
from interlock.worker.failures import described, error_document
from interlock.worker.interruption import Interruption

if TYPE_CHECKING:
    from interlock.worker.attempt import TaskStateMachine

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
