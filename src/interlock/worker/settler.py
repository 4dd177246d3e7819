"""Writes outcomes in batches that form by themselves: while one flush is under way, the next outcomes gather.

Invariant: an outcome is either acknowledged by the database, or known to be lost, or still here; a lost connection
drops none. A row that the database refuses does not hold up the others.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from interlock.errors import DisconnectedError, StatementError
from interlock.lifecycle import TaskRowEvent
from interlock.store.tasks import Outcome, insert_callbacks, notify_ended, read_tasks, settle_running_tasks
from interlock.telemetry import leases_lost_total, log, settle_batch_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from interlock.store.database import Connection
    from interlock.store.tasks import ClaimedTask
    from interlock.worker.attempt import TaskStateMachine

LARGEST_BATCH = 200


class _Report(NamedTuple):
    outcome: Outcome
    attempt: TaskStateMachine
    answer: asyncio.Future[bool] | None


class Settler:
    """The way of all outcomes into the database."""

    def __init__(self, worker_id: str, reported: Callable[[TaskStateMachine, bool], None]) -> None:
        self._worker_id = worker_id
        self._reported = reported
        self._reports: list[_Report] = []
        self._uncertain: set[UUID] = set()
        self._wake = asyncio.Event()

    def report(self, attempt: TaskStateMachine, outcome: Outcome) -> None:
        """Take an outcome to be written along with whatever else there is; `reported` hears what came of it."""
        self._reports.append(_Report(outcome, attempt, None))
        self._wake.set()

    async def settle(self, attempt: TaskStateMachine, outcome: Outcome) -> bool:
        """Write an outcome along with whatever else there is; False when the attempt is lost."""
        answer = asyncio.get_running_loop().create_future()
        self._reports.append(_Report(outcome, attempt, answer))
        self._wake.set()
        written: bool = await answer
        return written

    @property
    def is_empty(self) -> bool:
        """Whether everything was acknowledged."""
        return not self._reports

    async def run(self, connection: Connection) -> None:
        """Flush over this connection until it is lost or this task is canceled."""
        while True:
            # Reports first: those of the connection before may be waiting, and nobody rings for them again.
            while self._reports:
                await self._flush(connection, self._reports[:LARGEST_BATCH])
            await self._wake.wait()
            self._wake.clear()

    async def _flush(self, connection: Connection, batch: list[_Report]) -> None:
        settle_batch_size.observe(len(batch))
        try:
            try:
                await self._write(connection, batch)
            except (StatementError, TypeError, ValueError) as error:  # the database's refusal, or the encoder's
                await self._write_singly(connection, batch, error)
        except (DisconnectedError, asyncio.CancelledError):
            # Whether the server committed is not known; the fence makes it safe to ask again.
            waiting = {report.outcome.id for report in self._reports}
            self._uncertain.update(waiting & {report.outcome.id for report in batch})
            raise

    async def _write(self, connection: Connection, batch: list[_Report]) -> None:
        outcomes = [report.outcome for report in batch]
        if any(_claim_of(report).callback_url is not None for report in batch):
            async with connection.transaction():
                awaited, lost = await settle_running_tasks(connection, outcomes, actor=self._worker_id)
                missing = {row.id for row in lost}
                await insert_callbacks(connection, [o.id for o in outcomes if o.id not in missing])
        else:
            awaited, lost = await settle_running_tasks(connection, outcomes, actor=self._worker_id)
        missing = {row.id for row in lost}
        if missing & self._uncertain:
            missing -= await self._written_before(connection, batch)
        self._answer(batch, missing)
        await self._notify(connection, batch, awaited)

    async def _written_before(self, connection: Connection, batch: list[_Report]) -> set[UUID]:
        """Find the outcomes that a lost connection had written all the same."""
        attempts = {report.outcome.id: report.outcome.attempt for report in batch}
        rows = await read_tasks(connection, list(self._uncertain & attempts.keys()))
        return {
            row["id"] for row in rows if row["attempt"] == attempts[row["id"]] and row["state"] in ("done", "error")
        }

    def _answer(self, batch: list[_Report], missing: set[UUID]) -> None:
        answered = {id(report.attempt) for report in batch}
        self._reports = [report for report in self._reports if id(report.attempt) not in answered]
        for report in batch:
            self._uncertain.discard(report.outcome.id)
            lost = report.outcome.id in missing
            if lost:
                leases_lost_total.inc()
                log.warning("lease_lost", task_id=str(report.outcome.id), attempt=report.outcome.attempt)
            if report.answer is None:
                self._reported(report.attempt, not lost)
            elif not report.answer.done():
                report.answer.set_result(not lost)

    async def _notify(self, connection: Connection, batch: list[_Report], awaited: list[UUID]) -> None:
        limited = any(_claim_of(report).limit_key is not None for report in batch)
        if awaited or limited:
            with suppress(StatementError):  # a hint: what it is about is written
                await notify_ended(connection, awaited=awaited, limited=limited)

    async def _write_singly(self, connection: Connection, batch: list[_Report], error: Exception) -> None:
        """Find the row that the database refuses: it fails, the others are settled as they are."""
        for report in batch:
            try:
                await self._write(connection, [report])
            except (StatementError, TypeError, ValueError) as refused:
                log.error("outcome_refused", task_id=str(report.outcome.id), error=str(refused), batch_error=str(error))
                await self._write_refusal(connection, report, refused)

    async def _write_refusal(self, connection: Connection, report: _Report, refused: Exception) -> None:
        reason = f"the outcome could not be stored: {refused}"
        document = {"type": "StatementError", "message": reason, "traceback": None, "retryable": False}
        failed = Outcome(report.outcome.id, report.outcome.attempt, TaskRowEvent.FAIL, error=document, reason=reason)
        try:
            await self._write(connection, [report._replace(outcome=failed)])
        except StatementError:
            # Nothing can be written of it: the lease runs out, and recovery decides.
            self._answer([report], {report.outcome.id})


def _claim_of(report: _Report) -> ClaimedTask:
    claimed = report.attempt.claimed
    if claimed is None:
        raise RuntimeError("an attempt that was never claimed cannot be settled")
    return claimed
