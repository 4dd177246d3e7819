"""Cancels jobs, with their steps and their child jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.lifecycle import JobState
from interlock.postgres.connection import transaction
from interlock.postgres.query import run
from interlock.store.jobs import ORCHESTRATION, STEPS
from interlock.store.task_admin import cancel_unfinished_tasks, request_cancel_of_running_tasks
from interlock.workflow.activate import apply_batch
from interlock.workflow.batch import INTERACTIVE_LOCK_TIMEOUT, lock_jobs, run_interactive

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import Batch, LockedJob


async def cancel_job(
    connection: Connection, job_id: UUID, *, actor: str, reason: str | None = None, now: datetime | None = None
) -> bool:
    """Cancel a job and its children; False if it has ended or is about to.

    Waiting and pending steps are canceled at once, running ones are asked to stop; the job ends with the last of them.
    """

    async def cancel(own: bool) -> bool:  # noqa: FBT001 - the signature of `run_interactive`'s work
        async with transaction(connection):
            batch = await lock_jobs(
                connection, [job_id], actor=actor, now=now, own=own, lock_timeout=INTERACTIVE_LOCK_TIMEOUT
            )
            job = batch.jobs.get(job_id)
            canceled = job is not None and await cancel_locked_job(connection, batch, job, reason=reason)
            if canceled:
                await apply_batch(connection, batch)
        return canceled

    return await run_interactive(connection, cancel)


async def cancel_locked_job(connection: Connection, batch: Batch, job: LockedJob, *, reason: str | None) -> bool:
    """Cancel a job of a batch; False if it has ended or is about to."""
    if job.is_over:
        return False
    job.ending_reason = reason or f"canceled by {batch.actor}"
    unfinished = await run(connection, STEPS["lock_unfinished_steps"], {"ids": [job.id]})
    ids = [row["id"] for row in unfinished]
    step_reason = f"the job was canceled: {job.ending_reason}"
    await cancel_unfinished_tasks(connection, ids, actor=batch.actor, reason=step_reason, now=batch.now)
    await request_cancel_of_running_tasks(connection, ids, reason=step_reason, now=batch.now)
    if job.status == JobState.RUNNING:
        job.ending = JobState.CANCELED
        job.reason = f"is being canceled: {job.ending_reason}"
        job.changed = True
    else:  # it has not started, so there is nothing to wait for or to compensate
        job.reason = job.ending_reason
        job.status = JobState.CANCELED
        batch.canceled.append(job)
    # by messages: a transaction that locked a job and then its parent or child could deadlock
    for child in await run(connection, ORCHESTRATION["read_unfinished_descendants"], {"ids": [job.id]}):
        batch.messages.append({"job_id": child["id"], "cancel": f"job {job.id}, which it belongs to, was canceled"})
    return True
