"""Deletes what is no longer needed: ended tasks, jobs and workers, expired keys and waiters, old records.

Invariant: each call touches a bounded number of rows in its own transaction; nothing that is unfinished, or that an
unfinished job needs, is deleted; a job and its steps go together.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from interlock.errors import StatementError
from interlock.postgres.connection import INSUFFICIENT_PRIVILEGE, LOCK_NOT_AVAILABLE
from interlock.postgres.query import load_statements, run
from interlock.store.leader import duty_transaction
from interlock.store.workers import WORKERS

if TYPE_CHECKING:
    from datetime import datetime

    from interlock.postgres.connection import Connection

RETENTION = load_statements("retention")
BATCH_SIZE = 1_000
UNSEEN = "not seen any more: the process ended without a word"
# An id tells when its maker thought that it was; clocks may differ by this much.
CLOCK_SLACK = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long what has ended is kept, per state; None keeps it for good, zero deletes it with the next round.

    Jobs go like tasks: COMPLETED ones like `done`, CANCELED like `canceled`, FAILED like `error`; workers like `done`.
    """

    done: timedelta | None = timedelta(days=7)
    canceled: timedelta | None = timedelta(days=7)
    skipped: timedelta | None = timedelta(days=7)
    error: timedelta | None = timedelta(days=30)
    callbacks: timedelta | None = timedelta(days=30)
    records: timedelta | None = timedelta(days=90)

    @property
    def shortest(self) -> timedelta | None:
        """The least age at which any task goes; None when all are kept."""
        ages = [age for age in (self.done, self.canceled, self.skipped, self.error) if age is not None]
        return min(ages, default=None)


class RetentionBatch(NamedTuple):
    """What one step of the walk saw, deleted, and where the next step begins."""

    walked: int
    deleted: int
    last: UUID | None


async def delete_ended_tasks(
    connection: Connection,
    retention: Retention,
    *,
    after: UUID | None = None,
    before: UUID | None = None,
    stretch: int = BATCH_SIZE,
    now: datetime | None = None,
) -> RetentionBatch:
    """Look at the next tasks by id, and delete those that are past their age."""
    async with duty_transaction(connection, "retention", now=now) as moment:
        parameters = {
            "after": after,
            "before": before,
            "stretch": stretch,
            "done": retention.done,
            "canceled": retention.canceled,
            "skipped": retention.skipped,
            "error": retention.error,
            "now": moment,
        }
        (row,) = await run(connection, RETENTION["delete_ended_tasks"], parameters)
    return RetentionBatch(**row)


async def delete_ended_jobs(
    connection: Connection,
    retention: Retention,
    *,
    after: UUID | None = None,
    before: UUID | None = None,
    stretch: int = BATCH_SIZE,
    now: datetime | None = None,
) -> RetentionBatch:
    """Look at the next jobs by id, and delete those that are past their age, with their steps and signals.

    Jobs with more steps than one call deletes are gone on with by the next call, which begins where this one did.
    """
    async with duty_transaction(connection, "retention", now=now) as moment:
        parameters = {
            "after": after,
            "before": before,
            "stretch": stretch,
            "done": retention.done,
            "canceled": retention.canceled,
            "error": retention.error,
            "now": moment,
        }
        (row,) = await run(connection, RETENTION["read_outdated_jobs"], parameters)
        outdated = {"ids": row["ids"], "batch": stretch}
        (gone,) = await run(connection, RETENTION["delete_steps_of_jobs"], outdated)
        if gone["steps"] >= stretch:
            return RetentionBatch(stretch, 0, after)
        deleted = await run(connection, RETENTION["delete_jobs_without_steps"], outdated)
    return RetentionBatch(row["walked"], len(deleted), row["last"])


async def delete_ended_workers(connection: Connection, retention: Retention, *, now: datetime | None = None) -> int:
    """Delete the rows of processes that ended long ago; one that only vanished is said to be terminated first."""
    async with duty_transaction(connection, "retention", now=now) as moment:
        parameters = {"age": retention.done, "batch": BATCH_SIZE, "now": moment}
        for row in await run(connection, RETENTION["read_unseen_workers"], parameters):
            ended = {"id": row["id"], "reason": UNSEEN, "actor": "retention", "now": moment}
            await run(connection, WORKERS["terminate_worker"], ended)
        return len(await run(connection, RETENTION["delete_ended_workers"], parameters))


async def delete_expired(connection: Connection, retention: Retention, *, now: datetime | None = None) -> int:
    """Delete expired idempotency keys and waiters, old notices given up and messages of no job; give how many."""
    async with duty_transaction(connection, "retention", now=now) as moment:
        keys = await run(connection, RETENTION["delete_expired_idempotency_keys"], {"batch": BATCH_SIZE, "now": moment})
        waiters = await run(connection, RETENTION["delete_expired_waiters"], {"now": moment})
        notices = await run(
            connection, RETENTION["delete_given_up_callbacks"], {"age": retention.callbacks, "now": moment}
        )
        failures = await run(
            connection, RETENTION["delete_ownerless_failures"], {"age": retention.error, "now": moment}
        )
    return len(keys) + len(waiters) + len(notices) + len(failures)


async def maintain_record_partitions(
    connection: Connection, retention: Retention, *, now: datetime | None = None
) -> list[str] | None:
    """Make the partitions of the months to come and drop those past their age; give the dropped ones.

    None when this role has no right to, or when their tables are too busy to be locked: nothing is lost by that.
    """
    try:
        async with duty_transaction(connection, "retention", now=now) as moment:
            await run(connection, RETENTION["limit_lock_wait"], {})
            await run(connection, RETENTION["add_record_partitions"], {})
            if retention.records is None:
                return []
            parameters = {"age": retention.records, "now": moment}
            dropped = await run(connection, RETENTION["drop_records_before"], parameters)
    except StatementError as error:
        if error.sqlstate not in {INSUFFICIENT_PRIVILEGE, LOCK_NOT_AVAILABLE}:
            raise
        return None
    return [row["partition"] for row in dropped]


def first_id_at(moment: datetime) -> UUID:
    """Give the least id that a task created at this time can have, as ids that sort by time are made."""
    return UUID(int=max(int(moment.timestamp() * 1000), 0) << 80)
