"""Writes outcomes in batches that form by themselves: while one flush is under way, the next outcomes gather.

Invariant: an outcome is either acknowledged by the database, or known to be lost, or still here; a lost connection
drops none. A row that the database refuses does not hold up the others.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from interlock.client.step_context import step_result
from interlock.errors import DisconnectedError, StatementError
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import transaction
from interlock.store.tasks import (
    DEFAULT_MAX_RESULT_BYTES,
    Outcome,
    insert_callbacks,
    notify_ended,
    notify_tasks,
    read_tasks,
    settle_running_tasks,
)
from interlock.telemetry import log, settle_batch_size
from interlock.worker.leases import count_lost

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.worker.attempt import TaskStateMachine

SMALLEST_LIMIT, LARGEST_LIMIT = 100, 500


def largest_batch(concurrency: int) -> int:
    """Tell how many outcomes go into one statement at most.

    A third of the slots: while the outcomes of one third are written, another third is claimed, and one runs. Larger
    batches than of some hundred cost the database no less per task.
    """
    return max(SMALLEST_LIMIT, min(LARGEST_LIMIT, concurrency // 3))


class Settler:
    """The way of all outcomes into the database."""

    def __init__(
        self,
        worker_id: str,
        reported: Callable[[TaskStateMachine, bool], None],
        largest: int,
        largest_result: int = DEFAULT_MAX_RESULT_BYTES,
    ) -> None:
        self._worker_id = worker_id
        self._largest = largest
        self._largest_result = largest_result
        self._reported = reported
        self._waiting: list[TaskStateMachine] = []
        self._uncertain: set[UUID] = set()
        self._wake = asyncio.Event()

    def report(self, attempt: TaskStateMachine, outcome: Outcome) -> None:
        """Take an outcome to be written along with whatever else there is; `reported` hears what came of it."""
        attempt.outcome = outcome
        self._waiting.append(attempt)
        self._wake.set()

    async def settle(self, attempt: TaskStateMachine, outcome: Outcome) -> bool:
        """Write an outcome along with whatever else there is; False when the attempt is lost."""
        attempt.answer = asyncio.get_running_loop().create_future()
        self.report(attempt, outcome)
        return await attempt.answer

    @property
    def is_empty(self) -> bool:
        """Whether everything was acknowledged."""
        return not self._waiting

    async def run(self, connection: Connection) -> None:
        """Flush over this connection until it is lost or this task is canceled."""
        while True:
            # Reports first: those of the connection before may be waiting, and nobody rings for them again.
            while self._waiting:
                await self._flush(connection, self._next_batch())
            await self._wake.wait()
            self._wake.clear()

    def _next_batch(self) -> list[TaskStateMachine]:
        """Take what waits, but of no task two attempts: the answer to a batch is by task."""
        batch = self._waiting[: self._largest]
        tasks = {attempt.number for attempt in batch}
        if len(tasks) == len(batch):
            return batch
        return list({attempt.number: attempt for attempt in reversed(batch)}.values())[::-1]

    async def _flush(self, connection: Connection, batch: list[TaskStateMachine]) -> None:
        settle_batch_size.observe(len(batch))
        try:
            try:
                await self._write(connection, batch)
            except (StatementError, TypeError, ValueError) as error:  # the database's refusal, or the encoder's
                await self._write_singly(connection, batch, error)
        except (DisconnectedError, asyncio.CancelledError):
            # Whether the server committed is not known; the fence makes it safe to ask again.
            waiting = {attempt.key[0] for attempt in self._waiting}
            self._uncertain.update(waiting & {attempt.key[0] for attempt in batch})
            raise

    async def _write(self, connection: Connection, batch: list[TaskStateMachine]) -> None:
        outcomes = [_outcome_of(attempt) for attempt in batch]
        extras = _extras_of(batch)
        if any(extra["callback_url"] for extra in extras):
            async with transaction(connection):
                awaited, missing = await self._settle(connection, outcomes)
                await insert_callbacks(connection, [o.id for o in outcomes if o.id not in missing])
        else:
            awaited, missing = await self._settle(connection, outcomes)
        if missing & self._uncertain:
            missing -= await self._written_before(connection, outcomes)
        self._answer(batch, missing)
        with suppress(StatementError):  # hints: what they are about is written
            await notify_ended(connection, awaited=awaited, limited=any(extra["limit_key"] for extra in extras))
            await _notify_of_returned(connection, batch)

    async def _settle(self, connection: Connection, outcomes: list[Outcome]) -> tuple[list[UUID], set[UUID]]:
        awaited, lost = await settle_running_tasks(
            connection, outcomes, actor=self._worker_id, largest=self._largest_result
        )
        return awaited, {row.id for row in lost}

    async def _written_before(self, connection: Connection, outcomes: list[Outcome]) -> set[UUID]:
        """Find the outcomes that a lost connection had written all the same."""
        said = {outcome.id: (outcome.attempt, outcome.event) for outcome in outcomes}
        rows = await read_tasks(connection, list(self._uncertain & said.keys()))
        return {row["id"] for row in rows if (row["attempt"], row["event"]) == said[row["id"]]}

    def _answer(self, batch: list[TaskStateMachine], missing: set[UUID]) -> None:
        """Let go of a batch; who waits for it is told as soon as the next one is under way."""
        self._forget(batch)
        asyncio.get_running_loop().call_soon(self._tell, batch, missing)

    def _tell(self, batch: list[TaskStateMachine], missing: set[UUID]) -> None:
        for attempt in batch:
            written = not missing or attempt.key[0] not in missing
            if not written:
                count_lost(attempt)
            answer = attempt.answer
            if answer is None:
                self._reported(attempt, written)
            elif not answer.done():
                answer.set_result(written)

    def _forget(self, batch: list[TaskStateMachine]) -> None:
        if self._waiting[: len(batch)] == batch:  # as always, unless something went wrong half-way
            del self._waiting[: len(batch)]
        else:
            answered = {id(attempt) for attempt in batch}
            self._waiting = [attempt for attempt in self._waiting if id(attempt) not in answered]
        if self._uncertain:
            self._uncertain.difference_update(attempt.key[0] for attempt in batch)

    async def _write_singly(self, connection: Connection, batch: list[TaskStateMachine], error: Exception) -> None:
        """Find the row that the database refuses: it fails, the others are settled as they are."""
        for attempt in batch:
            try:
                await self._write(connection, [attempt])
            except (StatementError, TypeError, ValueError) as refused:
                log.error("outcome_refused", task_id=attempt.task_id, error=str(refused), batch_error=str(error))
                await self._write_refusal(connection, attempt, refused)

    async def _write_refusal(self, connection: Connection, attempt: TaskStateMachine, refused: Exception) -> None:
        reason = f"the outcome could not be stored: {refused}"
        document = {"type": "StatementError", "message": reason, "traceback": None, "retryable": False}
        output = None if attempt.job is None else _step_result(attempt, document)
        attempt.outcome = Outcome(*attempt.key, TaskRowEvent.FAIL, output, error=document, reason=reason)
        try:
            await self._write(connection, [attempt])
        except StatementError:
            # Nothing can be written of it: the lease runs out, and recovery decides.
            self._answer([attempt], {attempt.key[0]})


def _outcome_of(attempt: TaskStateMachine) -> Outcome:
    if attempt.outcome is None:
        raise RuntimeError("an attempt without an outcome cannot be settled")
    return attempt.outcome


def _step_result(attempt: TaskStateMachine, error: dict[str, Any]) -> dict[str, Any]:
    """Make the document of a step without anything that its handler said, as some of that cannot be stored."""
    return step_result(
        attempt.step,
        success=False,
        error=error,
        started_at=attempt.started_at,
        completed_at=attempt.completed_at,
        worker_id=attempt.worker_id,
        attempt=attempt.key[1],
    )


def _extras_of(batch: list[TaskStateMachine]) -> list[dict[str, Any]]:
    return [a.claimed.extras for a in batch if a.claimed is not None and a.claimed.extras is not None]


async def _notify_of_returned(connection: Connection, batch: list[TaskStateMachine]) -> None:
    """Tell idle workers of what this one gives back."""
    returned = {a.claimed.namespace for a in batch if a.claimed and _outcome_of(a).event is TaskRowEvent.RETURN}
    if returned:
        await notify_tasks(connection, returned)
