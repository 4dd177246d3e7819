"""Carries jobs on: takes the ends of steps from the queue, and does what only time brings about.

Invariant: a batch is one transaction: what it leads to, and the deletion of its messages. A message that comes twice,
late or out of order changes nothing; one that fails again and again is put aside, and holds up no other. Nor does a
job that somebody has locked, and does not let go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from interlock.errors import DisconnectedError, InputError, StatementError
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, run, run_in_order, run_prepared
from interlock.store.jobs import ORCHESTRATION
from interlock.telemetry import log
from interlock.workflow.activate import carry_out, ended_steps, follow, start_jobs, take_ended_steps
from interlock.workflow.batch import PATIENCE, Batch, apart, is_held, lock_jobs, said, together_or_apart
from interlock.workflow.cancel import cancel_locked_job
from interlock.workflow.resolve import Waiting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.workflow.resolve import Ended


NOT_UNDERSTOOD = 'it is not {"job_id": …, "task_id": …}'
MOST_READS = 5  # of a message, before it is put aside
JOBS_PER_TRANSACTION = 100  # jobs that one transaction starts or cancels
LESS_PATIENCE = "200ms"  # with others who have locked a job, when the whole batch has waited for them before


class Advanced(NamedTuple):
    """What one call of `advance` did."""

    received: int = 0  # messages
    advanced: int = 0  # messages that led to something
    duplicates: int = 0  # messages that told nothing new
    released: int = 0  # steps that became claimable
    skipped: int = 0
    created: int = 0  # parts, compensations and child jobs
    finalized: int = 0  # jobs that ended
    failed: int = 0  # messages that could not be acted on


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the queue, as it was understood."""

    id: int
    job_id: UUID
    task_id: UUID | None
    cancel: str | None
    failure: int | None  # under which it was set aside before
    admit: bool = False  # there may be room for a step of a job that runs only so many at once


async def advance(
    connection: Connection, *, actor: str, limit: int = 100, visibility: float = 30.0, now: datetime | None = None
) -> Advanced:
    """Take up to `limit` messages and carry their jobs on; when that fails, one message at a time."""
    parameters = {"limit": limit, "visibility": math.ceil(visibility), "actor": actor, "now": now, "patience": PATIENCE}
    try:
        plain = await _advance_plainly(connection, parameters)
        if plain is not None:
            return plain
        async with transaction(connection):
            rows = await run(connection, ORCHESTRATION["take_messages"], parameters)
            return await _advance(connection, rows, actor=actor, now=now) if rows else Advanced()
    except DisconnectedError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever is wrong with one message must not hold up the others
        log.warning("orchestration_batch_failed", error=said(error))
    held: set[UUID] = set()  # jobs that somebody does not let go
    done = [Advanced()]
    # each is taken when its turn has come, so that others can take all the rest if this process dies
    while len(done) <= limit and (rows := await run(connection, ORCHESTRATION["read_message"], parameters)):
        done.append(await _advance_one(connection, rows[0], held, actor=actor, now=now))
    return Advanced(*(sum(counts) for counts in zip(*done, strict=True)))


async def _advance_plainly(connection: Connection, parameters: dict[str, Any]) -> Advanced | None:
    """Have the database carry a batch on; None if there is something to judge in it, and nothing was done."""
    (row,) = await run_prepared(connection, ORCHESTRATION["advance_plainly"], parameters, tuple)
    received, released, finalized = row
    return None if received is None else Advanced(received, received, released=released, finalized=finalized)


async def _advance_one(
    connection: Connection, row: dict[str, Any], held: set[UUID], *, actor: str, now: datetime | None
) -> Advanced:
    """Do one message by itself; what is wrong with it is written down with it."""
    try:
        message = _understood(row)
        if message.job_id in held or not (done := await _advance_alone(connection, row, message, actor=actor, now=now)):
            held.add(message.job_id)
            await run(connection, ORCHESTRATION["defer_message"], {"msg_id": message.id, "reads": row["read_ct"]})
            return Advanced()
    except DisconnectedError:
        raise
    except Exception as error:  # noqa: BLE001 - the same
        await _put_aside(connection, row, said(error), now)
        return Advanced(received=1, failed=1)
    return done


async def _advance_alone(
    connection: Connection, row: dict[str, Any], message: Message, *, actor: str, now: datetime | None
) -> Advanced | None:
    """Do one message in a transaction of its own; None when somebody holds its job, or a step of it."""
    asked = {"ids": [message.job_id], "actor": actor, "now": now, "own": True, "patience": LESS_PATIENCE}
    try:
        async with transaction(connection):
            jobs = await run(connection, ORCHESTRATION["lock_jobs"], asked)
            return await _advance(connection, [{**row, **job} for job in jobs] or [row], actor=actor, now=now)
    except StatementError as error:
        if not is_held(error):
            raise
        log.warning("orchestration_job_held", job_id=str(message.job_id), error=said(error))
        return None


def _understood(row: dict[str, Any]) -> Message:
    content = row["message"]
    if not isinstance(content, dict):
        raise InputError(NOT_UNDERSTOOD)
    job_id, task_id, cancel = _uuid(content.get("job_id")), _uuid(content.get("task_id")), content.get("cancel")
    admit = content.get("admit") is True
    if job_id is None or (task_id is None and cancel is None and not admit):
        raise InputError(NOT_UNDERSTOOD)
    return Message(row["msg_id"], job_id, task_id, None if cancel is None else str(cancel), _failure(content), admit)


def _failure(content: dict[str, Any]) -> int | None:
    failure = content.get("failure")
    return failure if type(failure) is int and 0 <= failure < 1 << 63 else None


async def _put_aside(connection: Connection, row: dict[str, Any], error: str, now: datetime | None) -> None:
    """Archive a message that failed often enough; any other comes back when its time is up."""
    log.warning("orchestration_message_failed", msg_id=row["msg_id"], reads=row["read_ct"], error=error)
    if row["read_ct"] < MOST_READS:
        return
    content = row["message"] if isinstance(row["message"], dict) else {}
    parameters = {
        "msg_id": row["msg_id"],
        "job_id": _uuid(content.get("job_id")),
        "task_id": _uuid(content.get("task_id")),
        "message": as_json(row["message"] if row["message"] is not None else {}),
        "error": error,
        "failure": _failure(content),
        "now": now,
    }
    await run(connection, ORCHESTRATION["archive_message"], parameters)


def _uuid(value: Any) -> UUID | None:
    try:
        return UUID(value)
    except (AttributeError, TypeError, ValueError):
        return None


async def _advance(
    connection: Connection, rows: Sequence[dict[str, Any]], *, actor: str, now: datetime | None
) -> Advanced:
    """Carry on the jobs of messages, which are locked. Must run in a transaction."""
    batch = Batch(actor, now)
    if "id" in rows[0]:
        batch.note_locked(rows)
    messages, failed = [], 0
    for row in rows:
        try:
            messages.append(_understood(row))
        except InputError as error:
            await _put_aside(connection, row, str(error), now)
            failed += 1
    # first, so that what ended leads to nothing more in jobs that are not to go on
    canceled = await _cancel_children(connection, batch, messages)
    ids = [message.task_id for message in messages if message.task_id is not None]
    taken = await take_ended_steps(connection, ids=ids, job_ids=_known(messages))
    ended = ended_steps(taken)
    await follow(connection, batch, ended, taken)
    useful = len(ended) + canceled + _look_for_room(batch, messages)
    if useful < len(messages):
        useful += await _wake_parents(connection, batch, messages, {step.id for step in ended})
    await _disown_children(connection, batch, ended)
    await carry_out(connection, batch, [message.id for message in messages])
    await _forget_failures(connection, messages)
    return Advanced(
        received=len(rows),
        advanced=useful,
        duplicates=len(messages) - useful,
        released=batch.released,
        skipped=batch.skipped,
        created=batch.created,
        finalized=batch.finalized,
        failed=failed,
    )


def _known(messages: Iterable[Message]) -> list[UUID]:
    return sorted({message.job_id for message in messages})


def _look_for_room(batch: Batch, messages: Iterable[Message]) -> int:
    """Have jobs looked at whose steps were held by a namespace, or are no more; give how many.

    In one that is about to end there is nothing to let in: its compensations go one after the other.
    """
    jobs = [batch.jobs[message.job_id] for message in messages if message.admit and message.job_id in batch.jobs]
    for job in jobs:
        job.changed = job.changed or job.goes_on
    return len(jobs)


async def _wake_parents(connection: Connection, batch: Batch, messages: Iterable[Message], taken: set[UUID]) -> int:
    """Let steps go whose child job has ended."""
    ids = [message.task_id for message in messages if message.task_id is not None and message.task_id not in taken]
    going = [job.id for job in batch.jobs.values() if job.goes_on]
    if not ids or not going:
        return 0
    rows = await run(connection, ORCHESTRATION["read_woken_steps"], {"ids": ids, "job_ids": going})
    for row in rows:
        batch.release(Waiting(**row, kind="child"))
    return len(rows)


async def _disown_children(connection: Connection, batch: Batch, ended: Iterable[Ended]) -> None:
    """Let the child jobs be canceled of steps that somebody canceled; if it was the whole job, they know already."""
    ids = [step.id for step in ended if step.state == "canceled" and batch.jobs[step.job_id].goes_on]
    if ids:
        for child in await run(connection, ORCHESTRATION["read_children_of_steps"], {"ids": ids}):
            batch.messages.append({"job_id": child["id"], "cancel": "the step that waited for it was canceled"})


async def _forget_failures(connection: Connection, messages: Iterable[Message]) -> None:
    """Strike off what was set aside before, and was acted on now."""
    ids = [message.failure for message in messages if message.failure is not None]
    if ids:
        await run_in_order(connection, [(ORCHESTRATION["forget_failures"], {"ids": ids})])


async def _cancel_children(connection: Connection, batch: Batch, messages: Iterable[Message]) -> int:
    """Cancel jobs whose parent was canceled."""
    canceled = 0
    for message in messages:
        job = batch.jobs.get(message.job_id)
        if message.cancel is not None and job is not None:
            canceled += await cancel_locked_job(connection, batch, job, reason=message.cancel)
    return canceled


async def start_waiting_jobs(connection: Connection, *, actor: str, now: datetime | None = None) -> int:
    """Start jobs that wait for workers, where there are some by now; give how many."""
    found = await run(connection, ORCHESTRATION["read_startable_jobs"], {"limit": JOBS_PER_TRANSACTION, "now": now})
    if not found:
        return 0

    async def start(ids: Collection[UUID]) -> int:
        async with transaction(connection):
            batch = await lock_jobs(connection, ids, actor=actor, now=now, own=True)
            return await start_jobs(connection, list(batch.jobs), actor=actor, now=now)

    return await together_or_apart(connection, [row["id"] for row in found], start, name="started", now=now)


async def cancel_overdue_jobs(connection: Connection, *, actor: str, now: datetime | None = None) -> int:
    """Cancel jobs whose timeout is over; give how many."""
    found = await run(connection, ORCHESTRATION["read_overdue_jobs"], {"limit": JOBS_PER_TRANSACTION, "now": now})
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
            await carry_out(connection, batch)
        return canceled

    # each by itself: a transaction that asks many running steps to stop would hold up their workers
    return await apart(connection, seconds, cancel, name="canceled for its timeout", now=now)


# SECTION store/replays
# Sends again what should have carried a job on and did not: messages that were set aside, and such as were lost.
#
# Invariant: nothing is sent twice while the first message may still be in the queue, and what fails again and again is
# tried less and less often; a message that was not needed changes nothing.
