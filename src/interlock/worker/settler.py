"""Settles attempts: one function writes outcomes with everything that follows from them; the Settler batches it.

Invariant: an outcome is acknowledged by the database, or known to be lost, or kept; neither a lost connection nor a
refusal drops one. Only a refusal that the outcome's own values cause replaces it. A row that the database refuses does
not hold up the others of its batch.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from interlock.errors import DisconnectedError, FenceError, StatementError, StoreError
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import is_fault_of_session, is_fault_of_values, is_in_transaction, transaction
from interlock.postgres.retry import RetryState
from interlock.service import wait_for_event
from interlock.store.limits import record_reported_usage
from interlock.store.task_admin import cancel_unfinished_tasks
from interlock.store.tasks import (
    DEFAULT_MAX_RESULT_BYTES,
    insert_webhooks,
    notify_ended_tasks,
    notify_tasks,
    read_tasks,
    settle_running_tasks,
)
from interlock.telemetry import log, settle_batch_size
from interlock.tracing import BatchSpan
from interlock.worker.outcome import refused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import Outcome
    from interlock.worker.attempt import TaskStateMachine

MIN_BATCH_LIMIT, MAX_BATCH_LIMIT = 100, 500
# When this many outcomes of a refused batch were refused one by one, the rest waits with them: each may take a timeout.
MAX_SINGLE_REFUSALS = 5
REFUSALS = (StoreError, TypeError, ValueError)  # by the database, or by the encoder
# Events that only the holder of an attempt writes
SETTLE_EVENTS = frozenset({TaskRowEvent.SUCCEED, TaskRowEvent.FAIL, TaskRowEvent.RETRY, TaskRowEvent.RETURN})


async def settle(
    connection: Connection,
    attempts: Sequence[TaskStateMachine],
    *,
    actor: str,
    max_result_size: int = DEFAULT_MAX_RESULT_BYTES,
    unconfirmed: AbstractSet[UUID] = frozenset(),
    advance: bool = False,
    now: datetime | None = None,
) -> set[UUID]:
    """Write the outcomes of attempts at different tasks, and return the ids of those whose attempt is lost.

    The settle statement is fenced by task id, state and attempt number: a lost attempt writes nothing and is counted
    once. Webhooks are stored in the same transaction. Notifications are sent last; they are hints, so after the commit
    an error in sending one is ignored. A result of more than `max_result_size` bytes raises StatementError before
    anything is sent. `unconfirmed` are tasks whose earlier settle got no reply: the server may have committed it.
    With `advance`, the job of a single successful step is advanced in the same transaction, if that is simple.
    """
    advance = advance and _is_advanced_at_once(attempts)
    spans = [attempt.span for attempt in attempts if attempt.span is not None]
    if not spans:
        return await _write_outcomes(connection, attempts, actor, max_result_size, unconfirmed, advance, now)
    related, details = [span.span_context for span in spans], {"messaging.client.id": actor}
    with BatchSpan(spans[0].tracer, "settle", "settle", related, count=len(attempts), attributes=details):
        return await _write_outcomes(connection, attempts, actor, max_result_size, unconfirmed, advance, now)


async def _write_outcomes(
    connection: Connection,
    attempts: Sequence[TaskStateMachine],
    actor: str,
    max_result_size: int,
    unconfirmed: AbstractSet[UUID],
    advance: bool,  # noqa: FBT001 - as in the function that calls it
    now: datetime | None,
) -> set[UUID]:
    outcomes = [_outcome_of(attempt) for attempt in attempts]
    extras = _extras_of(attempts)
    limited = any(extra["limit_keys"] for extra in extras)
    usage = _reported_usage(outcomes) if limited else []
    if usage or any(extra["callback_url"] for extra in extras) or _has_cancellations(outcomes):
        async with transaction(connection):
            awaited, lost = await _write_with_webhooks(connection, outcomes, actor, max_result_size, now)
            if usage:
                await record_reported_usage(connection, usage, except_for=lost, now=now)
    else:
        awaited, rows = await settle_running_tasks(
            connection, outcomes, actor=actor, largest=max_result_size, advance=advance, now=now
        )
        lost = {row.id for row in rows}
    if not lost.isdisjoint(unconfirmed):
        lost -= await _committed_before(connection, outcomes, unconfirmed)
    _record_lost(attempts, lost)
    await _notify(connection, attempts, awaited=awaited, limited=limited)
    return lost


async def return_attempts(connection: Connection | None, attempts: Sequence[TaskStateMachine], *, actor: str) -> None:
    """Put tasks back into the queue at a shutdown; they use up no try.

    A refusal that may pass is tried again for as long as the caller waits. If a return cannot be written, the lease
    expires and recovery puts the task back.
    """
    if connection is None:
        return
    retries = RetryState()
    left = list(attempts)
    while left:
        try:
            left = await _return_singly(connection, left, actor)
        except DisconnectedError:
            return
        if left:
            await asyncio.sleep(retries.next_delay_s())


async def _return_singly(
    connection: Connection, attempts: list[TaskStateMachine], actor: str
) -> list[TaskStateMachine]:
    """Return attempts in one batch, one by one if that is refused; return those to try again."""
    try:
        await settle(connection, attempts, actor=actor)
    except DisconnectedError:
        raise
    except REFUSALS as error:
        if len(attempts) == 1:
            return [] if is_fault_of_values(error) else attempts
        return [attempt for each in attempts for attempt in await _return_singly(connection, [each], actor)]
    return []


def max_batch_size(concurrency: int) -> int:
    """Return the most outcomes that one statement settles.

    A third of the slots, so that handlers run and tasks are claimed while the outcomes of others are written. Batches
    of more than a few hundred cost the database no less per task.
    """
    return max(MIN_BATCH_LIMIT, min(MAX_BATCH_LIMIT, concurrency // 3))


class AttemptOwner(Protocol):
    """Holds the attempts: the worker's Runner."""

    @property
    def is_idle(self) -> bool:
        """Tell whether one attempt is held and no other, and it was claimed after a rest: no backlog is waiting."""

    def finish(self, attempt: TaskStateMachine, /, *, written: bool) -> None:
        """Let go of an attempt whose settle was acknowledged (`written`), or that is lost."""


@dataclass(slots=True)
class KeptOutcome:
    """An attempt whose settle was refused for a moment, and the time of its next try, which it has alone."""

    attempt: TaskStateMachine
    retries: RetryState = field(default_factory=RetryState)
    due: float = 0.0


class Settler:
    """Settles queued attempts in batches that form by themselves: outcomes gather while a flush is in flight."""

    def __init__(
        self, owner: AttemptOwner, worker_id: str, *, max_batch: int, max_result_size: int = DEFAULT_MAX_RESULT_BYTES
    ) -> None:
        self._owner = owner
        self._worker_id = worker_id
        self._max_batch = max_batch
        self._max_result_size = max_result_size
        self._queue: list[TaskStateMachine] = []
        self._kept: dict[int, KeptOutcome] = {}  # by the identity of the attempt
        self._unconfirmed: set[UUID] = set()
        self._added = asyncio.Event()
        self._new_sessions = RetryState()
        self.refusals = 0  # that may pass: the outcome was kept

    def add(self, attempt: TaskStateMachine, *, is_unconfirmed: bool = False) -> None:
        """Queue an attempt that has its outcome; the owner's `finish` is called when the database has answered.

        With `is_unconfirmed`, an outcome may have been committed before, without a reply.
        """
        if is_unconfirmed:
            self._unconfirmed.add(attempt.key[0])
        self._queue.append(attempt)
        self._added.set()

    async def run(self, connection: Connection) -> None:
        """Flush over this connection until it is lost or of no use, or this task is cancelled."""
        while True:
            kept = self._next_kept()
            if kept is not None:
                await self._flush(connection, [kept])
            # The queue first: attempts kept from the connection before this one set no event.
            if self._queue:
                await self._flush(connection, self._next_batch())
            elif kept is None:
                if self._kept:
                    await wait_for_event(self._added, self._seconds_until_retry())
                else:
                    await self._added.wait()
                self._added.clear()

    def _next_kept(self) -> TaskStateMachine | None:
        """Return the attempt whose retry has been due for longest."""
        if not self._kept:
            return None
        first = min(self._kept.values(), key=lambda kept: kept.due)
        return first.attempt if first.due <= time.monotonic() else None

    def _seconds_until_retry(self) -> float:
        return max(min(kept.due for kept in self._kept.values()) - time.monotonic(), 0.001)

    def _next_batch(self) -> list[TaskStateMachine]:
        """Return the head of the queue with at most one attempt per task: a batch is answered by task id."""
        batch = self._queue[: self._max_batch]
        tasks = {attempt.slot_key for attempt in batch}
        if len(tasks) == len(batch):
            return batch
        return list({attempt.slot_key: attempt for attempt in reversed(batch)}.values())[::-1]

    async def _flush(self, connection: Connection, batch: list[TaskStateMachine]) -> None:
        settle_batch_size.observe(len(batch))
        try:
            try:
                await self._settle(connection, batch)
            except DisconnectedError:
                raise
            except REFUSALS as error:
                await self._settle_singly(connection, batch, error)
        except (DisconnectedError, asyncio.CancelledError):
            # The server may have committed; the fence makes it safe to send the batch again.
            unanswered = {attempt.key[0] for attempt in self._queue}
            unanswered.update(kept.attempt.key[0] for kept in self._kept.values())
            self._unconfirmed.update(unanswered & {attempt.key[0] for attempt in batch})
            raise

    async def _settle(self, connection: Connection, batch: list[TaskStateMachine]) -> None:
        lost = await settle(
            connection,
            batch,
            actor=self._worker_id,
            max_result_size=self._max_result_size,
            unconfirmed=self._unconfirmed,
            advance=self._owner.is_idle,
        )
        self._acknowledge(batch, lost)
        self._new_sessions.reset()

    async def _settle_singly(self, connection: Connection, batch: list[TaskStateMachine], error: Exception) -> None:
        """Settle a refused batch one by one, so that only the refused rows wait or fail.

        Raises a refusal against which a new session may help, after a pause; the worker reconnects then.
        """
        passing: list[Exception] = []
        for attempt in batch:
            if len(passing) >= MAX_SINGLE_REFUSALS:
                self._keep(attempt, passing[-1])
                continue
            refusal = error if len(batch) == 1 else await self._try_settle(connection, attempt)
            if isinstance(refusal, FenceError):
                attempt.record_lost_lease()
                self._acknowledge([attempt], {attempt.key[0]})
                refusal = None
            elif refusal is not None and is_fault_of_values(refusal):
                log.error("outcome_refused", task_id=attempt.task_id, error=str(refusal), batch_error=str(error))
                refusal = await self._settle_refused(connection, attempt, refusal)
            if refusal is not None:
                passing.append(refusal)
                self._keep(attempt, refusal)
        for refusal in passing:
            if is_fault_of_session(refusal):
                await asyncio.sleep(self._new_sessions.next_delay_s())
                raise refusal

    async def _try_settle(self, connection: Connection, attempt: TaskStateMachine) -> Exception | None:
        """Settle one attempt; return the refusal, if any."""
        try:
            await self._settle(connection, [attempt])
        except DisconnectedError:
            raise
        except REFUSALS as refusal:
            return refusal
        return None

    async def _settle_refused(
        self, connection: Connection, attempt: TaskStateMachine, refusal: Exception
    ) -> Exception | None:
        """Settle an attempt whose outcome cannot be stored as failed; return a refusal of that which may pass."""
        if _outcome_of(attempt).event is TaskRowEvent.CANCEL:
            # The request stays in the row: recovery cancels the task after the lease has expired.
            self._acknowledge([attempt], {attempt.key[0]})
            return None
        attempt.outcome = refused(attempt, refusal)
        again = await self._try_settle(connection, attempt)
        if again is None or not is_fault_of_values(again):
            return again
        self._acknowledge([attempt], {attempt.key[0]})  # recovery decides after the lease has expired
        return None

    def _keep(self, attempt: TaskStateMachine, refusal: Exception) -> None:
        """Keep an outcome that was refused for a moment, and try it again after a delay that grows."""
        self.refusals += 1
        self._queue = [queued for queued in self._queue if queued is not attempt]
        kept = self._kept.setdefault(id(attempt), KeptOutcome(attempt))
        delay_s = kept.retries.next_delay_s()
        kept.due = time.monotonic() + delay_s
        level = log.warning if kept.retries.failures == 1 else log.debug
        level("settle_postponed", task_id=attempt.task_id, error=str(refusal), retry_in=round(delay_s, 1))

    def _acknowledge(self, batch: list[TaskStateMachine], lost: set[UUID]) -> None:
        """Remove a batch from the queue; its attempts are let go while the next flush is in flight."""
        if self._queue[: len(batch)] == batch:  # always, unless the batch was settled singly
            del self._queue[: len(batch)]
        else:
            acknowledged = {id(attempt) for attempt in batch}
            self._queue = [attempt for attempt in self._queue if id(attempt) not in acknowledged]
            for attempt in batch:
                self._kept.pop(id(attempt), None)
        if self._unconfirmed:
            self._unconfirmed.difference_update(attempt.key[0] for attempt in batch)
        asyncio.get_running_loop().call_soon(self._finish, batch, lost)

    def _finish(self, batch: list[TaskStateMachine], lost: set[UUID]) -> None:
        for attempt in batch:
            self._owner.finish(attempt, written=not lost or attempt.key[0] not in lost)


def _is_advanced_at_once(attempts: Sequence[TaskStateMachine]) -> bool:
    """Tell whether this is one successful step, of a job that is not traced: the orchestrator makes the span."""
    if len(attempts) != 1 or attempts[0].claimed is None or _outcome_of(attempts[0]).event is not TaskRowEvent.SUCCEED:
        return False
    own = attempts[0].claimed.own
    return own("job_id") is not None and own("traceparent") is None


def _extras_of(attempts: Sequence[TaskStateMachine]) -> list[dict[str, Any]]:
    return [a.claimed.extras for a in attempts if a.claimed is not None and a.claimed.extras is not None]


def _reported_usage(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes with a cost or weight, which count against the limits of their tasks."""
    return [outcome for outcome in outcomes if outcome.cost is not None or outcome.weight is not None]


def _has_cancellations(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.event is TaskRowEvent.CANCEL for outcome in outcomes)


def _record_lost(attempts: Sequence[TaskStateMachine], lost: AbstractSet[UUID]) -> None:
    if lost:
        for attempt in attempts:
            if attempt.key[0] in lost:
                attempt.record_lost_lease()


def _outcome_of(attempt: TaskStateMachine) -> Outcome:
    if attempt.outcome is None:
        raise RuntimeError("an attempt without an outcome cannot be settled")
    return attempt.outcome


async def _write_with_webhooks(
    connection: Connection, outcomes: Sequence[Outcome], actor: str, max_result_size: int, now: datetime | None
) -> tuple[Sequence[UUID], set[UUID]]:
    """Write outcomes with their webhooks, and cancellations, which have a statement of their own.

    Return the tasks that clients wait for, and those whose attempt is lost.
    """
    canceled = [outcome for outcome in outcomes if outcome.event is TaskRowEvent.CANCEL]
    others = [outcome for outcome in outcomes if outcome.event is not TaskRowEvent.CANCEL]
    awaited: Sequence[UUID] = ()
    lost: set[UUID] = set()
    if others:
        awaited, rows = await settle_running_tasks(connection, others, actor=actor, largest=max_result_size, now=now)
        lost = {row.id for row in rows}
        await insert_webhooks(connection, [outcome.id for outcome in others if outcome.id not in lost])
    for outcome in canceled:
        written = await cancel_unfinished_tasks(
            connection,
            [outcome.id],
            attempts=[outcome.attempt],
            running=True,
            actor=actor,
            reason=outcome.reason,
            now=now,
        )
        if not written:
            lost.add(outcome.id)
    return awaited, lost


async def _notify(
    connection: Connection, attempts: Sequence[TaskStateMachine], *, awaited: Sequence[UUID], limited: bool
) -> None:
    """Wake clients that wait for these tasks, the admission under limits, and idle workers for returned tasks."""
    returned = {
        attempt.claimed.namespace
        for attempt in attempts
        if _outcome_of(attempt).event is TaskRowEvent.RETURN and attempt.claimed is not None
    }
    in_transaction = is_in_transaction(connection)
    try:
        await notify_ended_tasks(connection, awaited=awaited, limited=limited)
        if returned:
            await notify_tasks(connection, returned, limited=limited)
    except (StatementError, DisconnectedError):
        if in_transaction:  # the caller's transaction is aborted, and the settle with it
            raise


async def _committed_before(
    connection: Connection, outcomes: Sequence[Outcome], unconfirmed: AbstractSet[UUID]
) -> set[UUID]:
    """Return the tasks whose outcome was committed although the reply was lost with the connection.

    The committed outcome may be another one: that of a transactional attempt which is returned now.
    """
    sent = {outcome.id: outcome for outcome in outcomes if outcome.id in unconfirmed}
    rows = await read_tasks(connection, list(sent))
    return {
        row["id"]
        for row in rows
        if row["attempt"] == sent[row["id"]].attempt and row["event"] in SETTLE_EVENTS | {sent[row["id"]].event}
    }
