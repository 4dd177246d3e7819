"""Cancels jobs, with their steps and their child jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.lifecycle import JobState
from interlock.postgres.connection import transaction
from interlock.postgres.query import run
from interlock.store.jobs import ORCHESTRATION, STEPS
from interlock.store.step_results import SimpleStepMessage
from interlock.workflow.activate import apply_batch, cancel_steps
from interlock.workflow.batch import INTERACTIVE_LOCK_TIMEOUT, lock_jobs, run_interactive

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import Batch, LockedJob


async def cancel_job(
    connection: Connection, job_id: UUID, *, actor: str, reason: str | None = None, now: datetime | None = None
) -> bool:
    """Cancel a job and its children; False if it has ended, is being canceled, or compensates.

    Waiting and pending steps are canceled at once, running ones are asked to stop; the job ends with the last of them.
    A job that has failed and waits for its child jobs still becomes FAILED, once these have been canceled.
    """
    return bool(await cancel_jobs(connection, [job_id], actor=actor, reason=reason, now=now))


async def cancel_jobs(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str | None = None, now: datetime | None = None
) -> list[UUID]:
    """Cancel many jobs and their children in one transaction; return those that were canceled, as `cancel_job` says."""

    async def cancel(own: bool) -> list[UUID]:  # noqa: FBT001 - the signature of `run_interactive`'s work
        canceled = []
        async with transaction(connection):
            batch = await lock_jobs(
                connection, ids, actor=actor, now=now, own=own, lock_timeout=INTERACTIVE_LOCK_TIMEOUT
            )
            for id_ in ids:
                job = batch.jobs.get(id_)
                if job is not None and await cancel_locked_job(connection, batch, job, reason=reason):
                    canceled.append(id_)
            if canceled:
                await apply_batch(connection, batch)
        return canceled

    return await run_interactive(connection, cancel)


async def cancel_locked_job(connection: Connection, batch: Batch, job: LockedJob, *, reason: str | None) -> bool:
    """Cancel a job of a batch; False if it has ended, is being canceled, or compensates."""
    reason = reason or f"canceled by {batch.actor}"
    if job.is_over:
        return await _cancel_children_of_failing_job(connection, batch, job, reason=reason)
    job.ending_reason = reason
    unfinished = await run(connection, STEPS["lock_unfinished_steps"], {"ids": [job.id]})
    if job.has_started:
        job.ending = JobState.CANCELED
    step_reason = f"the job was canceled: {job.ending_reason}"
    ids = [row["id"] for row in unfinished]
    await cancel_steps(connection, batch, ids, reason=step_reason)
    children = await run(connection, ORCHESTRATION["read_unfinished_children"], {"ids": [job.id]})
    if job.has_started or children:
        job.ending = JobState.CANCELED
        job.reason = f"is being canceled: {job.ending_reason}"
        job.changed = True
    else:  # it has not started, so there is nothing to wait for or to compensate
        job.reason = job.ending_reason
        job.status = JobState.CANCELED
        batch.canceled.append(job)
    _ask_children(batch, children)
    return True


async def _cancel_children_of_failing_job(connection: Connection, batch: Batch, job: LockedJob, *, reason: str) -> bool:
    """Cancel the child jobs that a failing job waits for; False if it waits for none, or if they are being canceled."""
    if not job.waits_for_children or job.cancel_reason is not None:
        return False
    job.cancel_reason = reason
    job.changed = True
    children = await run(connection, ORCHESTRATION["read_unfinished_children"], {"ids": [job.id]})
    _ask_children(batch, children)
    return bool(children)


def _ask_children(batch: Batch, children: Iterable[dict[str, Any]]) -> None:
    asked = {message.job_id for message in batch.messages}
    batch.messages += [SimpleStepMessage(child["id"]) for child in children if child["id"] not in asked]
