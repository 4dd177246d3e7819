"""Retries an ended job: a new job that runs the failed steps again, or a given one, and keeps what need not run again.

Invariant: the old job stays as it ended. `kept_steps.py` decides what the new one takes over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.errors import InputError, UnknownJobError
from interlock.lifecycle import JOB
from interlock.postgres.connection import transaction
from interlock.postgres.query import run
from interlock.store.jobs import JOBS
from interlock.workflow.activate import activate_root_steps
from interlock.workflow.kept_steps import read_kept_steps
from interlock.workflow.new_job import NewJob, Submitted, find_submitted_jobs, insert_jobs, prepare_job

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection


async def retry_job_from(
    connection: Connection,
    job_id: UUID,
    step: str | None = None,
    *,
    actor: str,
    request_id: str | None = None,
    traceparent: str | None = None,
    now: datetime | None = None,
) -> Submitted:
    """Submit an ended job again, in which the failed steps, this step and the steps after them run again.

    Done steps are reused, and so are the done parts of failed maps; a failed child step retries its child job in the
    same way. The given step runs again as a whole. A failed step that the job did without (recovered, or left behind by
    a partial join) and a step that `cancel_rest` canceled are not run again either, unless they come after one that is.
    """
    old = await _read_ended_job(connection, job_id)
    reused = await read_kept_steps(connection, job_id, step, old)
    new = NewJob(
        old["workflow"],
        old["input"],
        version=old["version"],
        request_id=request_id,
        worker_count=old["worker_count"],
        timeout=old["timeout_seconds"],
        correlation_id=old["correlation_id"],
        traceparent=traceparent,
        tags=old["tags"],
        attributes=old["attributes"],
        callback_url=old["callback_url"],
        key=old["key"],
        on_conflict=None if old["key"] is None else "queue",
    )
    job = prepare_job(new, retried_from=job_id, reused=reused)
    async with transaction(connection):
        (inserted,) = await insert_jobs(connection, [job], actor=actor, now=now) or []
        if inserted.needs_activation:
            await activate_root_steps(connection, [inserted.id], actor=actor, now=now)
    if inserted.created:
        return Submitted(inserted.id, created=True)
    existing = await find_submitted_jobs(connection, [job])
    return Submitted(existing.get(job["id"], inserted.id), created=False)


async def _read_ended_job(connection: Connection, job_id: UUID) -> dict[str, Any]:
    rows = await run(connection, JOBS["read_jobs"], {"ids": [job_id]})
    if not rows or rows[0]["workflow"] is None:
        raise UnknownJobError(f"there is no job {job_id} that could be retried")
    if rows[0]["status"] not in JOB.final:
        raise InputError(f"job {job_id} is {rows[0]['status']}: it can be retried once it has ended; cancel it first")
    return rows[0]
