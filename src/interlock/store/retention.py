"""Retention: deletes ended tasks, jobs and workers, expired access data, dead letters and old records.

Invariant: each call touches a bounded number of rows in its own transaction. Unfinished rows, and rows that an
unfinished job needs, are never deleted. A job and its steps are deleted together.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from interlock.errors import StatementError
from interlock.postgres.connection import INSUFFICIENT_PRIVILEGE, LOCK_NOT_AVAILABLE
from interlock.postgres.query import load_statements, run
from interlock.store.access import delete_expired_sign_ins
from interlock.store.leader import duty_transaction
from interlock.store.workers import WORKERS

if TYPE_CHECKING:
    from datetime import datetime

    from interlock.postgres.connection import Connection

RETENTION = load_statements("retention")
BATCH_SIZE = 5_000  # rows of one transaction: 20 to 50 ms
VANISHED_REASON = "no heartbeat: the process ended without deregistering"
# Ids carry the time of the clock of the process that made them; clocks may differ by this much.
CLOCK_SLACK = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long ended rows are kept, per state; None keeps them forever, zero deletes them in the next round.

    Jobs follow the ages of tasks: COMPLETED `done`, CANCELED `canceled`, FAILED `error`. Workers follow `done`.
    """

    done: timedelta | None = timedelta(days=7)
    canceled: timedelta | None = timedelta(days=7)
    skipped: timedelta | None = timedelta(days=7)
    error: timedelta | None = timedelta(days=30)
    callbacks: timedelta | None = timedelta(days=30)
    records: timedelta | None = timedelta(days=90)

    @property
    def ages(self) -> list[timedelta]:
        """The different ages at which tasks and jobs are deleted; none when all are kept."""
        return sorted({age for age in (self.done, self.canceled, self.skipped, self.error) if age is not None})


class RetentionBatch(NamedTuple):
    """The result of one batch: rows looked at, rows deleted, and the id after which the next batch begins.

    `overdue` is the time since which the oldest deleted row was past its age; None if none was deleted.
    """

    walked: int
    deleted: int
    last: UUID | None
    overdue: timedelta | None


async def delete_ended_tasks(
    connection: Connection,
    retention: Retention,
    *,
    after: UUID | None = None,
    before: UUID | None = None,
    stretch: int = BATCH_SIZE,
    now: datetime | None = None,
) -> RetentionBatch:
    """Look at the next batch of tasks by id, and delete those that are past their age."""
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
    """Look at the next batch of jobs by id, and delete those past their age with their steps and signals.

    When the jobs have more steps than one call deletes, the next call begins at the same id and continues.
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
            return RetentionBatch(stretch, 0, after, row["overdue"])
        deleted = await run(connection, RETENTION["delete_jobs_without_steps"], outdated)
    return RetentionBatch(row["walked"], len(deleted), row["last"], row["overdue"])


async def delete_ended_workers(connection: Connection, retention: Retention, *, now: datetime | None = None) -> int:
    """Delete a batch of rows of processes that ended long ago; rows of vanished processes are terminated first."""
    async with duty_transaction(connection, "retention", now=now) as moment:
        parameters = {"age": retention.done, "batch": BATCH_SIZE, "now": moment}
        for row in await run(connection, RETENTION["read_unseen_workers"], parameters):
            ended = {"id": row["id"], "reason": VANISHED_REASON, "actor": "retention", "now": moment}
            await run(connection, WORKERS["terminate_worker"], ended)
        return len(await run(connection, RETENTION["delete_ended_workers"], parameters))


class ExpiredBatch(NamedTuple):
    """The result of one batch: rows deleted, and whether there may be more."""

    deleted: int
    more: bool


async def delete_expired(
    connection: Connection, retention: Retention, *, batch: int = BATCH_SIZE, now: datetime | None = None
) -> ExpiredBatch:
    """Delete a batch of expired idempotency keys and old reasons, and all that is few.

    These are expired sign-ins and waiters, old dead letters and failed messages of no job.
    """
    async with duty_transaction(connection, "retention", now=now) as moment:
        keys = await run(connection, RETENTION["delete_expired_idempotency_keys"], {"batch": batch, "now": moment})
        sign_ins = await delete_expired_sign_ins(connection, now=moment)
        waiters = await run(connection, RETENTION["delete_expired_waiters"], {"now": moment})
        notices = await run(
            connection, RETENTION["delete_given_up_webhooks"], {"age": retention.callbacks, "now": moment}
        )
        failures = await run(
            connection, RETENTION["delete_ownerless_failures"], {"age": retention.error, "now": moment}
        )
        old = {"age": retention.records, "batch": batch, "now": moment}
        reasons = await run(connection, RETENTION["delete_old_wait_reasons"], old)
    deleted = len(keys) + sign_ins + len(waiters) + len(notices) + len(failures) + len(reasons)
    return ExpiredBatch(deleted, more=max(len(keys), len(reasons)) >= batch)


async def maintain_record_partitions(
    connection: Connection, retention: Retention, *, now: datetime | None = None
) -> list[str] | None:
    """Create the record partitions of the coming months and drop those past their age; return the dropped ones.

    None when the role lacks the privilege or the tables could not be locked in time; the next round tries again.
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
    """Return the lowest id (UUIDv7) that a task created at this time can have."""
    return UUID(int=max(int(moment.timestamp() * 1000), 0) << 80)
