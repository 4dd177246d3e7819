"""Advances jobs: takes step results from the queue, activates the next steps, and does what is due at a time.

A batch takes the first of three ways that works: the SQL function `advance_plain_steps`, which handles the common case
in one statement; `_advance_batch`, which handles every case; and one message at a time, so that a bad message does not
hold up the others.

Invariant: a batch is one transaction, with its effects and the deletion of its messages. A message has ids only and
decides nothing: what it leads to follows from the rows. One that comes twice, late or out of order changes nothing. One
that keeps failing is archived (dead letter); one whose job is locked by another transaction is deferred.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.errors import DisconnectedError, InputError, StatementError
from interlock.lifecycle import JobState, TaskRowState
from interlock.model.conditions import parse_condition
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, run, run_in_order, run_prepared
from interlock.store.jobs import ORCHESTRATION, STEPS
from interlock.store.step_results import SimpleStepMessage, parse_ids, send_messages
from interlock.telemetry import log
from interlock.workflow.activate import (
    apply_batch,
    cancel_below_steps,
    cancel_waiting_steps,
    distinct_ended_steps,
    repeat_children,
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
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.resolve import EndedStep


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


async def advance(
    connection: Connection,
    *,
    actor: str,
    limit: int = 100,
    msg_id: int | None = None,
    visibility: float = 30.0,
    now: datetime | None = None,
    traceparents: list[str] | None = None,
) -> Advanced:
    """Take up to `limit` messages, or the one of `msg_id`, and advance their jobs; if that fails, one at a time.

    The list `traceparents` gets those of the messages.
    """
    traces = [] if traceparents is None else traceparents
    parameters = {
        "limit": limit,
        "msg_id": msg_id,
        "visibility": math.ceil(visibility),
        "actor": actor,
        "now": now,
        "lock_timeout": BATCH_LOCK_TIMEOUT,
    }
    try:
        plain = await _advance_plain_steps(connection, parameters, traces)
        if plain is not None:
            return plain
        async with transaction(connection):
            rows = await run(connection, ORCHESTRATION["take_messages"], parameters)
            traces += _traceparents_of(rows)
            return await _advance_batch(connection, rows, actor=actor, now=now) if rows else Advanced()
    except DisconnectedError:
        raise
    except Exception as error:  # noqa: BLE001 - one bad message must not hold up the others
        log.warning("orchestration_batch_failed", error=format_error(error))
    locked: set[UUID] = set()  # jobs that another transaction holds
    counts = [Advanced()]
    # messages are read one by one, so that other orchestrators can take the rest if this process dies
    while len(counts) <= limit and (rows := await run(connection, ORCHESTRATION["read_message"], parameters)):
        traces += _traceparents_of(rows)
        counts.append(await _advance_message(connection, rows[0], locked, actor=actor, now=now))
    return Advanced(*(sum(column) for column in zip(*counts, strict=True)))


def _traceparents_of(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the trace contexts of messages; a malformed message has none."""
    for row in rows:
        if isinstance(row["message"], dict) and isinstance(found := row["message"].get("traceparent"), str):
            yield found


async def _advance_plain_steps(
    connection: Connection, parameters: dict[str, Any], traceparents: list[str]
) -> Advanced | None:
    """Advance a batch inside the database; None if it has a case that the function does not cover, and did nothing."""
    (row,) = await run_prepared(connection, ORCHESTRATION["advance_plain_steps"], parameters, tuple)
    received, released, finalized, found = row
    traceparents += found or ()
    return None if received is None else Advanced(received, received, released=released, finalized=finalized)


async def _advance_batch(
    connection: Connection, rows: Sequence[dict[str, Any]], *, actor: str, now: datetime | None
) -> Advanced:
    """Advance the jobs of these messages. Must run in the transaction that locked them."""
    batch = Batch(actor, now)
    if "id" in rows[0]:
        batch.add_locked_jobs(rows)
    messages: dict[int, SimpleStepMessage] = {}
    for row in rows:
        try:
            messages[row["msg_id"]] = SimpleStepMessage.parse(row["message"])
        except InputError as error:
            await _fail_message(connection, row, str(error), now)
    # cancellations first: steps of a job that is canceled activate no others
    effective = await _look_at_jobs(connection, batch, messages.values())
    ids = [message.task_id for message in messages.values() if message.task_id is not None]
    job_ids = sorted({message.job_id for message in messages.values()})
    taken = await take_ended_steps(connection, ids=ids, job_ids=job_ids)
    ended = distinct_ended_steps(taken)
    await resolve_ended_steps(connection, batch, ended, taken)
    effective += len(ended)
    if effective < len(messages):
        known = {step.id for step in ended}
        known |= await _end_child_steps(connection, batch, messages.values(), known)
        known |= await _stop_steps_to_cancel(connection, batch, messages.values(), known)
        effective += len(known) - len(ended)
    await _cancel_below_canceled_steps(connection, batch, ended)
    await apply_batch(connection, batch, list(messages))
    await _delete_failures(connection, messages.values())
    return Advanced(
        received=len(rows),
        advanced=effective,
        duplicates=len(messages) - effective,
        released=batch.activated_count,
        skipped=batch.skipped_count,
        created=batch.created_count,
        finalized=batch.finalized_count,
        failed=len(rows) - len(messages),
    )


async def _look_at_jobs(connection: Connection, batch: Batch, messages: Iterable[SimpleStepMessage]) -> int:
    """Handle messages without a step, and return how many: the parent was canceled, a child ended, or steps may run.

    A job whose parent is being canceled, or whose parent step was canceled, is canceled. A job that waits for its
    children may be able to end. In a job with a `worker_count`, another step may fit in again.
    """
    asked = [message.job_id for message in messages if message.task_id is None and message.job_id in batch.jobs]
    ids = [id_ for id_ in asked if batch.jobs[id_].parent_job_id is not None]
    if ids:
        for row in await run(connection, ORCHESTRATION["read_reasons_to_cancel"], {"ids": ids}):
            await cancel_locked_job(connection, batch, batch.jobs[row["id"]], reason=row["reason"])
    for job in batch.jobs.values():
        job.changed = job.changed or job.is_ending or (job.id in asked and job.is_advancing)
    return len(asked)


async def _end_child_steps(
    connection: Connection, batch: Batch, messages: Iterable[SimpleStepMessage], taken: set[UUID]
) -> set[UUID]:
    """End child steps whose child job has ended, or start the next one of a repeat; return these steps.

    A step that is to be canceled starts no further child; it is done only if it needs none.
    """
    wanted = _steps_of(batch, messages) - taken
    if not wanted:
        return set()
    parameters = {"ids": list(wanted), "job_ids": list(batch.jobs)}
    rows = await run(connection, ORCHESTRATION["read_parent_steps"], parameters)
    repeated = [row for row in rows if not row["is_to_be_canceled"] and _is_to_be_repeated(row)]
    ended = await repeat_children(connection, batch, repeated)
    for row in rows:
        if row in repeated:
            continue
        if row["is_to_be_canceled"] and (row["status"] != JobState.COMPLETED or _lacks_repeat_condition(row)):
            await cancel_waiting_steps(connection, batch, [row["id"]], reason=row["cancel_reason"])
        else:
            ended.append(_end_child_step(batch, row))
    await resolve_ended_steps(connection, batch, ended)
    return {row["id"] for row in rows}


def _steps_of(batch: Batch, messages: Iterable[SimpleStepMessage]) -> set[UUID]:
    return {message.task_id for message in messages if message.job_id in batch.jobs and message.task_id is not None}


def _is_to_be_repeated(row: dict[str, Any]) -> bool:
    return _lacks_repeat_condition(row) and bool(row["iteration"] < row["spec"]["max_repeats"])


def _lacks_repeat_condition(row: dict[str, Any]) -> bool:
    """Tell whether the `repeat_until` of a step is not true of the output of its completed child job."""
    condition = row["spec"].get("repeat_until")
    if condition is None or row["status"] != JobState.COMPLETED:
        return False
    output = None if row["output"] is None else orjson.loads(row["output"])
    values = {"output": output, "input": row["input"], "iteration": row["iteration"]}
    return not parse_condition(condition).is_met(values)


def _end_child_step(batch: Batch, row: dict[str, Any]) -> EndedStep:
    """Complete a child step with the output of its child job, or fail it."""
    step = WaitingStep(**{name: row[name] for name in ("id", "job_id", "step", "namespace")}, kind="child")
    if _lacks_repeat_condition(row):
        until = row["spec"]["repeat_until"]
        return batch.fail(step, f"{until!r} is not true after {row['iteration']} runs", "RepeatLimitReached")
    if row["status"] == JobState.COMPLETED:
        return batch.succeed(step, json=row["output"])
    reason = f": {row['reason']}" if row["reason"] else ""
    return batch.fail(step, f"child job {row['child_id']} {row['status'].lower()}{reason}", "ChildFailed")


async def _stop_steps_to_cancel(
    connection: Connection, batch: Batch, messages: Iterable[SimpleStepMessage], known: set[UUID]
) -> set[UUID]:
    """Cancel the parts and child jobs of steps that a client wants to cancel; return these steps."""
    wanted = _steps_of(batch, messages) - known
    rows = await run(connection, STEPS["read_steps_to_cancel"], {"ids": list(wanted)}) if wanted else []
    ids = [row["id"] for row in rows]
    await cancel_below_steps(connection, batch, ids)
    return set(ids)


async def _cancel_below_canceled_steps(connection: Connection, batch: Batch, ended: Iterable[EndedStep]) -> None:
    """Cancel the parts and child jobs of steps that a client canceled by force, or by SQL.

    Those of a canceled job have been canceled with it.
    """
    advancing = [step for step in ended if batch.jobs[step.job_id].is_advancing]
    canceled = [step for step in advancing if step.state == TaskRowState.CANCELED]
    await cancel_below_steps(connection, batch, [step.id for step in canceled])


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
        message = SimpleStepMessage.parse(row["message"])
        done = None
        if message.job_id not in locked:
            done = await _advance_unlocked(connection, row, message, actor=actor, now=now)
        if done is None:
            locked.add(message.job_id)
            await run(connection, ORCHESTRATION["defer_message"], {"msg_id": row["msg_id"], "reads": row["read_ct"]})
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
    parameters = {
        **parse_ids(row["message"]),
        "msg_id": row["msg_id"],
        "message": as_json(row["message"] if row["message"] is not None else {}),
        "error": error,
        "now": now,
    }
    await run(connection, ORCHESTRATION["archive_message"], parameters)


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


async def resend_cancellations(connection: Connection, *, limit: int = 100, now: datetime | None = None) -> int:  # noqa: ARG001 - the signature of a sweep
    """Ask again for the cancellation of child jobs and parts, in case a message was lost."""
    rows = await run(connection, ORCHESTRATION["read_lost_cancellations"], {"limit": limit})
    if rows:
        await run(connection, *send_messages(SimpleStepMessage(row["job_id"], row["task_id"]) for row in rows))
    return len(rows)
