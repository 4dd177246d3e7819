"""Settles attempts: one function writes outcomes with everything that follows from them; the Settler batches it.

Invariant: an outcome is acknowledged by the database, or known to be lost, or still queued; a lost connection drops
none. A row that the database refuses does not hold up the others of its batch.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from interlock.errors import DisconnectedError, StatementError
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import is_in_transaction, transaction
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


async def settle(
    connection: Connection,
    attempts: Sequence[TaskStateMachine],
    *,
    actor: str,
    max_result_size: int = DEFAULT_MAX_RESULT_BYTES,
    unconfirmed: AbstractSet[UUID] = frozenset(),
    now: datetime | None = None,
) -> set[UUID]:
    """Write the outcomes of attempts at different tasks, and return the ids of those whose attempt is lost.

    The settle statement is fenced by task id, state and attempt number: a lost attempt writes nothing and is counted
    once. Webhooks are stored in the same transaction. Notifications are sent last; they are hints, so after the commit
    an error in sending one is ignored. A result of more than `max_result_size` bytes raises StatementError before
    anything is sent. `unconfirmed` are tasks whose earlier settle got no reply: the server may have committed it.
    """
    outcomes = [_outcome_of(attempt) for attempt in attempts]
    extras = [a.claimed.extras for a in attempts if a.claimed is not None and a.claimed.extras is not None]
    limited = any(extra["limit_keys"] for extra in extras)
    if limited or _has_webhooks(extras) or any(outcome.event is TaskRowEvent.CANCEL for outcome in outcomes):
        async with transaction(connection):
            awaited, lost = await _write_with_webhooks(connection, outcomes, actor, max_result_size, now)
            await record_reported_usage(connection, outcomes, except_for=lost, now=now)
    else:
        awaited, rows = await settle_running_tasks(connection, outcomes, actor=actor, largest=max_result_size, now=now)
        lost = {row.id for row in rows}
    if lost:
        if not lost.isdisjoint(unconfirmed):
            lost -= await _committed_before(connection, outcomes, unconfirmed)
        for attempt in attempts:
            if attempt.key[0] in lost:
                attempt.record_lost_lease()
    await _notify(connection, attempts, awaited=awaited, limited=limited)
    return lost


async def return_attempts(connection: Connection | None, attempts: Sequence[TaskStateMachine], *, actor: str) -> None:
    """Put tasks back into the queue at a shutdown; they use up no try.

    If that cannot be written, the leases expire and recovery puts the tasks back.
    """
    if attempts and connection is not None:
        with suppress(DisconnectedError, StatementError):
            await settle(connection, attempts, actor=actor)


def max_batch_size(concurrency: int) -> int:
    """Return the most outcomes that one statement settles.

    A third of the slots: while the outcomes of one third are written, the next third is claimed and the last runs.
    Batches of more than a few hundred cost the database no less per task.
    """
    return max(MIN_BATCH_LIMIT, min(MAX_BATCH_LIMIT, concurrency // 3))


class AttemptOwner(Protocol):
    """Holds the slots of attempts: the worker's Runner."""

    def finish(self, attempt: TaskStateMachine, /, *, written: bool) -> None:
        """Release the slot of an attempt whose settle was acknowledged (`written`), or that is lost."""


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
        self._unconfirmed: set[UUID] = set()
        self._added = asyncio.Event()

    def add(self, attempt: TaskStateMachine) -> None:
        """Queue an attempt that has its outcome; the owner's `finish` is called when the database has answered."""
        self._queue.append(attempt)
        self._added.set()

    async def run(self, connection: Connection) -> None:
        """Flush over this connection until it is lost or this task is cancelled."""
        while True:
            # The queue first: attempts kept from the connection before this one set no event.
            while self._queue:
                await self._flush(connection, self._next_batch())
            await self._added.wait()
            self._added.clear()

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
            except (StatementError, TypeError, ValueError) as error:  # refused by the database, or by the encoder
                await self._settle_singly(connection, batch, error)
        except (DisconnectedError, asyncio.CancelledError):
            # The server may have committed; the fence makes it safe to send the batch again.
            queued = {attempt.key[0] for attempt in self._queue}
            self._unconfirmed.update(queued & {attempt.key[0] for attempt in batch})
            raise

    async def _settle(self, connection: Connection, batch: list[TaskStateMachine]) -> None:
        lost = await settle(
            connection,
            batch,
            actor=self._worker_id,
            max_result_size=self._max_result_size,
            unconfirmed=self._unconfirmed,
        )
        self._acknowledge(batch, lost)

    async def _settle_singly(self, connection: Connection, batch: list[TaskStateMachine], error: Exception) -> None:
        """Settle a refused batch one by one, so that only the refused row fails."""
        for attempt in batch:
            try:
                await self._settle(connection, [attempt])
            except (StatementError, TypeError, ValueError) as refusal:
                log.error("outcome_refused", task_id=attempt.task_id, error=str(refusal), batch_error=str(error))
                await self._settle_refused(connection, attempt, refusal)

    async def _settle_refused(self, connection: Connection, attempt: TaskStateMachine, refusal: Exception) -> None:
        if _outcome_of(attempt).event is TaskRowEvent.CANCEL:
            # The request stays in the row: recovery cancels the task after the lease has expired.
            self._acknowledge([attempt], {attempt.key[0]})
            return
        attempt.outcome = refused(attempt, refusal)
        try:
            await self._settle(connection, [attempt])
        except StatementError:  # recovery decides after the lease has expired
            self._acknowledge([attempt], {attempt.key[0]})

    def _acknowledge(self, batch: list[TaskStateMachine], lost: set[UUID]) -> None:
        """Remove a batch from the queue; its slots are released while the next flush is in flight."""
        if self._queue[: len(batch)] == batch:  # always, unless the batch was settled singly
            del self._queue[: len(batch)]
        else:
            acknowledged = {id(attempt) for attempt in batch}
            self._queue = [attempt for attempt in self._queue if id(attempt) not in acknowledged]
        if self._unconfirmed:
            self._unconfirmed.difference_update(attempt.key[0] for attempt in batch)
        asyncio.get_running_loop().call_soon(self._finish, batch, lost)

    def _finish(self, batch: list[TaskStateMachine], lost: set[UUID]) -> None:
        for attempt in batch:
            self._owner.finish(attempt, written=not lost or attempt.key[0] not in lost)


def _has_webhooks(extras: Sequence[dict[str, Any]]) -> bool:
    return any(extra["callback_url"] for extra in extras)


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
    """Return the tasks whose outcome was committed although the reply was lost with the connection."""
    sent = {outcome.id: (outcome.attempt, outcome.event) for outcome in outcomes if outcome.id in unconfirmed}
    rows = await read_tasks(connection, list(sent))
    return {row["id"] for row in rows if (row["attempt"], row["event"]) == sent[row["id"]]}
