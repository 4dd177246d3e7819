"""TODO docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.postgres.connection import transaction
from interlock.postgres.query import run
from interlock.store.jobs import ORCHESTRATION, STEPS
from interlock.store.task_admin import cancel_unfinished_tasks, request_cancel_of_running_tasks
from interlock.workflow.activate import carry_out
from interlock.workflow.batch import A_PERSON_S, ENDED, for_a_person, lock_jobs

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import Batch, LockedJob


async def cancel_job(
    connection: Connection, job_id: UUID, *, actor: str, reason: str | None = None, now: datetime | None = None
) -> bool:
    """Cancel a job and its children; False when it has ended, or is about to.

    What does not run is canceled at once, what runs is asked to stop; the job ends with the last of them.
    """

    async def cancel(own: bool) -> bool:  # noqa: FBT001 - the one thing that it is told
        async with transaction(connection):
            batch = await lock_jobs(connection, [job_id], actor=actor, now=now, own=own, patience=A_PERSON_S)
            job = batch.jobs.get(job_id)
            canceled = job is not None and await cancel_locked_job(connection, batch, job, reason=reason)
            if canceled:
                await carry_out(connection, batch)
        return canceled

    return await for_a_person(connection, cancel)


async def cancel_locked_job(connection: Connection, batch: Batch, job: LockedJob, *, reason: str | None) -> bool:
    """Cancel one of the jobs of a batch; False when it has ended, or is about to."""
    if job.status in ENDED or job.ending is not None:
        return False
    job.ending_reason = reason or f"canceled by {batch.actor}"
    unfinished = await run(connection, STEPS["lock_unfinished_steps"], {"ids": [job.id]})
    ids = [row["id"] for row in unfinished]
    why = f"the job was canceled: {job.ending_reason}"
    await cancel_unfinished_tasks(connection, ids, actor=batch.actor, reason=why, now=batch.now)
    await request_cancel_of_running_tasks(connection, ids, reason=why, now=batch.now)
    if job.status == "RUNNING":
        job.ending = "CANCELED"
        job.reason = f"is being canceled: {job.ending_reason}"
        job.changed = True
    else:  # nothing of it has run
        job.reason = job.ending_reason
        job.status = "CANCELED"
        batch.canceled.append(job)
    # by messages, so that nobody locks a job and then one above or below it
    for child in await run(connection, ORCHESTRATION["read_unfinished_descendants"], {"ids": [job.id]}):
        batch.messages.append({"job_id": child["id"], "cancel": f"job {job.id}, which it belongs to, was canceled"})
    return True
