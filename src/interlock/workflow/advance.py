"""Advances jobs: takes step results from the queue, activates the next steps, and starts or cancels jobs by time.

A batch takes the first of three ways that works: the SQL function `advance_plain_steps`, which handles the common case
in one statement; `_advance_batch`, which handles every case; and one message at a time, so that a bad message does not
hold up the others.

Invariant: a batch is one transaction, with its effects and the deletion of its messages. A message that comes twice,
late or out of order changes nothing. A message that keeps failing is archived (dead letter); one whose job is
locked by another transaction is deferred.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from interlock.errors import DisconnectedError, InputError, StatementError
from interlock.lifecycle import TaskRowState
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, run, run_in_order, run_prepared
from interlock.store.jobs import ORCHESTRATION
from interlock.telemetry import log
from interlock.workflow.activate import (
    apply_batch,
    distinct_ended_steps,
    resolve_ended_steps,
    start_pending_jobs,
    take_ended_steps,
)
from interlock.workflow.batch import (
    BATCH_LOCK_TIMEOUT,
    Batch,
    format_error,
    is_lock_timeout,
    lock_jobs,
    run_all_jobs,
    run_each_job,
)
from interlock.workflow.cancel import cancel_locked_job
from interlock.workflow.resolve import WaitingStep

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.workflow.resolve import EndedStep


MALFORMED_MESSAGE = 'it is not {"job_id": …, "task_id": …}'
MAX_MESSAGE_READS = 5  # of a message that fails, before it is archived
MAX_JOBS_PER_TRANSACTION = 100  # that one transaction starts or cancels
SINGLE_MESSAGE_LOCK_TIMEOUT = "200ms"  # shorter: the batch has waited for the same locks before


class Advanced(NamedTuple):
    """The counts of one call of `advance`."""

    received: int = 0  # messages
    advanced: int = 0  # messages that had an effect
    duplicates: int = 0  # messages that had none
    released: int = 0  # steps that became pending
    skipped: int = 0  # steps
    created: int = 0  # parts, compensations and child jobs
    finalized: int = 0  # jobs that ended
    failed: int = 0  # messages that could not be handled


@dataclass(frozen=True, slots=True)
class SimpleStepMessage:
    """One parsed message of the queue of step results: ids only, the result stays in the row of the task."""

    id: int
    job_id: UUID
    task_id: UUID | None  # a step that has ended, or the parent step of a child job that has
    cancel: str | None  # the reason for which the job is to be canceled
    failure: int | None  # the id under which it was archived before
    admit: bool = False  # a step may fit into the job's worker_count again


async def advance(
    connection: Connection, *, actor: str, limit: int = 100, visibility: float = 30.0, now: datetime | None = None
) -> Advanced:
    """Take up to `limit` messages and advance their jobs; if the batch fails, one message at a time."""
    parameters = {
        "limit": limit,
        "visibility": math.ceil(visibility),
        "actor": actor,
        "now": now,
        "lock_timeout": BATCH_LOCK_TIMEOUT,
    }
    try:
        plain = await _advance_plain_steps(connection, parameters)
        if plain is not None:
            return plain
        async with transaction(connection):
            rows = await run(connection, ORCHESTRATION["take_messages"], parameters)
            return await _advance_batch(connection, rows, actor=actor, now=now) if rows else Advanced()
    except DisconnectedError:
        raise
    except Exception as error:  # noqa: BLE001 - one bad message must not hold up the others
        log.warning("orchestration_batch_failed", error=format_error(error))
    locked: set[UUID] = set()  # jobs that another transaction holds
    counts = [Advanced()]
    # messages are read one by one, so that other orchestrators can take the rest if this process dies
    while len(counts) <= limit and (rows := await run(connection, ORCHESTRATION["read_message"], parameters)):
        counts.append(await _advance_message(connection, rows[0], locked, actor=actor, now=now))
    return Advanced(*(sum(column) for column in zip(*counts, strict=True)))


async def _advance_plain_steps(connection: Connection, parameters: dict[str, Any]) -> Advanced | None:
    """Advance a batch inside the database; None if it has a case that the function does not cover, and did nothing."""
    (row,) = await run_prepared(connection, ORCHESTRATION["advance_plain_steps"], parameters, tuple)
    received, released, finalized = row
    return None if received is None else Advanced(received, received, released=released, finalized=finalized)


async def _advance_batch(
    connection: Connection, rows: Sequence[dict[str, Any]], *, actor: str, now: datetime | None
) -> Advanced:
    """Advance the jobs of these messages. Must run in the transaction that locked them."""
    batch = Batch(actor, now)
    if "id" in rows[0]:
        batch.add_locked_jobs(rows)
    messages, failed = [], 0
    for row in rows:
        try:
            messages.append(_parse_message(row))
        except InputError as error:
            await _fail_message(connection, row, str(error), now)
            failed += 1
    # cancellations first: steps of a job that is canceled activate no others
    canceled = await _cancel_jobs(connection, batch, messages)
    ids = [message.task_id for message in messages if message.task_id is not None]
    job_ids = sorted({message.job_id for message in messages})
    taken = await take_ended_steps(connection, ids=ids, job_ids=job_ids)
    ended = distinct_ended_steps(taken)
    await resolve_ended_steps(connection, batch, ended, taken)
    effective = len(ended) + canceled + _recheck_worker_counts(batch, messages)
    if effective < len(messages):
        effective += await _activate_parent_steps(connection, batch, messages, {step.id for step in ended})
    await _cancel_children_of_canceled_steps(connection, batch, ended)
    await apply_batch(connection, batch, [message.id for message in messages])
    await _delete_failures(connection, messages)
    return Advanced(
        received=len(rows),
        advanced=effective,
        duplicates=len(messages) - effective,
        released=batch.activated_count,
        skipped=batch.skipped_count,
        created=batch.created_count,
        finalized=batch.finalized_count,
        failed=failed,
    )


async def _cancel_jobs(connection: Connection, batch: Batch, messages: Iterable[SimpleStepMessage]) -> int:
    """Cancel the jobs of messages that ask for it, such as children of a canceled job."""
    canceled = 0
    for message in messages:
        job = batch.jobs.get(message.job_id)
        if message.cancel is not None and job is not None:
            canceled += await cancel_locked_job(connection, batch, job, reason=message.cancel)
    return canceled


def _recheck_worker_counts(batch: Batch, messages: Iterable[SimpleStepMessage]) -> int:
    """Mark jobs in which a step may fit into `worker_count` again, as after the resumption of a namespace; count them.

    A job that is about to end admits no steps: its compensations run one after the other.
    """
    jobs = [batch.jobs[message.job_id] for message in messages if message.admit and message.job_id in batch.jobs]
    for job in jobs:
        job.changed = job.changed or job.is_advancing
    return len(jobs)


async def _activate_parent_steps(
    connection: Connection, batch: Batch, messages: Iterable[SimpleStepMessage], taken: set[UUID]
) -> int:
    """Activate child steps whose child job has ended; return how many."""
    ids = [message.task_id for message in messages if message.task_id is not None and message.task_id not in taken]
    job_ids = [job.id for job in batch.jobs.values() if job.is_advancing]
    if not ids or not job_ids:
        return 0
    rows = await run(connection, ORCHESTRATION["read_parent_steps"], {"ids": ids, "job_ids": job_ids})
    for row in rows:
        batch.activate(WaitingStep(**row, kind="child"))
    return len(rows)


async def _cancel_children_of_canceled_steps(connection: Connection, batch: Batch, ended: Iterable[EndedStep]) -> None:
    """Send cancellations to the child jobs of canceled steps; those of a canceled job have been sent with it."""
    canceled = [step for step in ended if step.state == TaskRowState.CANCELED]
    ids = [step.id for step in canceled if batch.jobs[step.job_id].is_advancing]
    if ids:
        for child in await run(connection, ORCHESTRATION["read_children_of_steps"], {"ids": ids}):
            batch.messages.append({"job_id": child["id"], "cancel": "the step that waited for it was canceled"})


async def _delete_failures(connection: Connection, messages: Iterable[SimpleStepMessage]) -> None:
    """Delete the failure records of messages that were archived before and have been handled now."""
    ids = [message.failure for message in messages if message.failure is not None]
    if ids:
        await run_in_order(connection, [(ORCHESTRATION["delete_failures"], {"ids": ids})])


# --- One message at a time --------------------------------------------------------------------------------------


async def _advance_message(
    connection: Connection, row: dict[str, Any], locked: set[UUID], *, actor: str, now: datetime | None
) -> Advanced:
    """Handle one message; a failure is recorded with it, and a message whose job is locked is deferred."""
    try:
        message = _parse_message(row)
        done = None
        if message.job_id not in locked:
            done = await _advance_unlocked(connection, row, message, actor=actor, now=now)
        if done is None:
            locked.add(message.job_id)
            await run(connection, ORCHESTRATION["defer_message"], {"msg_id": message.id, "reads": row["read_ct"]})
            return Advanced()
    except DisconnectedError:
        raise
    except Exception as error:  # noqa: BLE001 - one bad message must not hold up the others
        await _fail_message(connection, row, format_error(error), now)
        return Advanced(received=1, failed=1)
    return done


async def _advance_unlocked(
    connection: Connection, row: dict[str, Any], message: SimpleStepMessage, *, actor: str, now: datetime | None
) -> Advanced | None:
    """Handle one message in a transaction of its own; None if its job or a step of it is locked by another one."""
    parameters = {
        "ids": [message.job_id],
        "actor": actor,
        "now": now,
        "own": True,
        "lock_timeout": SINGLE_MESSAGE_LOCK_TIMEOUT,
    }
    try:
        async with transaction(connection):
            jobs = await run(connection, ORCHESTRATION["lock_jobs"], parameters)
            return await _advance_batch(connection, [{**row, **job} for job in jobs] or [row], actor=actor, now=now)
    except StatementError as error:
        if not is_lock_timeout(error):
            raise
        log.warning("orchestration_job_held", job_id=str(message.job_id), error=format_error(error))
        return None


async def _fail_message(connection: Connection, row: dict[str, Any], error: str, now: datetime | None) -> None:
    """Archive a message that has failed too often; any other is read again after its visibility timeout."""
    log.warning("orchestration_message_failed", msg_id=row["msg_id"], reads=row["read_ct"], error=error)
    if row["read_ct"] < MAX_MESSAGE_READS:
        return
    content = row["message"] if isinstance(row["message"], dict) else {}
    parameters = {
        "msg_id": row["msg_id"],
        "job_id": _parse_uuid(content.get("job_id")),
        "task_id": _parse_uuid(content.get("task_id")),
        "message": as_json(row["message"] if row["message"] is not None else {}),
        "error": error,
        "failure": _parse_failure(content),
        "now": now,
    }
    await run(connection, ORCHESTRATION["archive_message"], parameters)


def _parse_message(row: dict[str, Any]) -> SimpleStepMessage:
    content = row["message"]
    if not isinstance(content, dict):
        raise InputError(MALFORMED_MESSAGE)
    job_id, task_id = _parse_uuid(content.get("job_id")), _parse_uuid(content.get("task_id"))
    cancel, admit = content.get("cancel"), content.get("admit") is True
    if job_id is None or (task_id is None and cancel is None and not admit):
        raise InputError(MALFORMED_MESSAGE)
    reason = None if cancel is None else str(cancel)
    return SimpleStepMessage(row["msg_id"], job_id, task_id, reason, _parse_failure(content), admit)


def _parse_failure(content: dict[str, Any]) -> int | None:
    failure = content.get("failure")
    return failure if type(failure) is int and 0 <= failure < 1 << 63 else None


def _parse_uuid(value: Any) -> UUID | None:
    try:
        return UUID(value)
    except (AttributeError, TypeError, ValueError):
        return None


# --- Jobs that are due ------------------------------------------------------------------------------------------


async def start_waiting_jobs(connection: Connection, *, actor: str, now: datetime | None = None) -> int:
    """Start jobs that waited for workers and have some now; return how many."""
    found = await run(connection, ORCHESTRATION["read_startable_jobs"], {"limit": MAX_JOBS_PER_TRANSACTION, "now": now})
    if not found:
        return 0

    async def start(ids: Collection[UUID]) -> int:
        async with transaction(connection):
            batch = await lock_jobs(connection, ids, actor=actor, now=now, own=True)
            return await start_pending_jobs(connection, list(batch.jobs), actor=actor, now=now)

    return await run_all_jobs(connection, [row["id"] for row in found], start, name="started", now=now)


async def cancel_overdue_jobs(connection: Connection, *, actor: str, now: datetime | None = None) -> int:
    """Cancel jobs whose timeout has expired; return how many."""
    found = await run(connection, ORCHESTRATION["read_overdue_jobs"], {"limit": MAX_JOBS_PER_TRANSACTION, "now": now})
    if not found:
        return 0
    seconds = {row["id"]: row["timeout_seconds"] for row in found}

    async def cancel(ids: Collection[UUID]) -> int:
        canceled = 0
        async with transaction(connection):
            batch = await lock_jobs(connection, ids, actor=actor, now=now, own=True)
            for job in batch.jobs.values():
                reason = f"the job's timeout of {seconds[job.id]:g} s is over"
                canceled += await cancel_locked_job(connection, batch, job, reason=reason)
            await apply_batch(connection, batch)
        return canceled

    # one job per transaction: a transaction that requests many cancellations would hold up the workers of those steps
    return await run_each_job(connection, seconds, cancel, name="canceled for its timeout", now=now)
