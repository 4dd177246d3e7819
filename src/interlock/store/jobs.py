"""Jobs: submitting, reading and canceling them. What carries them on is in `orchestration.py`.

Invariant: whoever changes a job, or moves its steps because of it, has locked its row first; an ended job stays as it
is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from interlock.errors import InputError
from interlock.store.acts import cancel_unfinished_tasks, request_cancel_of_running_tasks
from interlock.store.batches import A_PERSON_S, ENDED, for_a_person, lock_jobs
from interlock.store.database import as_json, run, transaction
from interlock.store.opening import begin_jobs, carry_out
from interlock.store.prepared import read_prepared
from interlock.store.retries import retry_job_from
from interlock.store.signals import send_signal
from interlock.store.submission import (
    JOBS,
    ORCHESTRATION,
    STEPS,
    NewJob,
    Submitted,
    find_submitted_jobs,
    find_workflows,
    insert_jobs,
    prepared,
    unknown_workflow,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.store.batches import Batch, LockedJob
    from interlock.store.database import Connection
    from interlock.store.submission import PreparedJob

__all__ = [
    "NewJob",
    "Submitted",
    "cancel_job",
    "cancel_locked_job",
    "find_jobs",
    "read_job_history",
    "read_jobs",
    "read_steps",
    "reject_job",
    "retry_job_from",
    "send_signal",
    "submit_job",
    "submit_jobs",
]


async def submit_job(connection: Connection, job: NewJob, *, actor: str, now: datetime | None = None) -> Submitted:
    """Store one job with its steps, in the connection's own transaction if it is in one; start it if it can be."""
    (submitted,) = await submit_jobs(connection, [job], actor=actor, now=now)
    return submitted


async def submit_jobs(
    connection: Connection, jobs: Sequence[NewJob], *, actor: str, now: datetime | None = None
) -> list[Submitted]:
    """Store many jobs at once, all or none."""
    async with transaction(connection):
        rows = await _prepare(connection, jobs, actor=actor, now=now)
        made = await insert_jobs(connection, rows, actor=actor, now=now)
        opening = [row.id for row in rows if row.needs_opening and row.id in made]
        if opening:
            await begin_jobs(connection, opening, actor=actor, now=now)
        there = await find_submitted_jobs(connection, [row for row in rows if row.id not in made])
    return [Submitted(there.get(row.id, row.id), row.id in made) for row in rows]


async def reject_job(
    connection: Connection, job: NewJob, reason: str, *, actor: str, now: datetime | None = None
) -> UUID | None:
    """Store a job that does not fit its workflow as FAILED, without steps; None when there is no such workflow."""
    (found,) = await find_workflows(connection, [(job.workflow, job.version)], now=now)
    if found.id is None:
        return None
    row = prepared(job, found)
    error = {"type": "InputError", "message": reason, "traceback": None, "retryable": False}
    common = {"actor": actor, "now": now}
    async with transaction(connection):
        await run(connection, JOBS["insert_jobs"], {"jobs": orjson.dumps([row.row]).decode(), **common})
        rejected = {"ids": [row.id], "reason": reason, "error": as_json(error), **common}
        await run(connection, JOBS["reject_submitted_jobs"], rejected)
    return row.id


async def _prepare(
    connection: Connection, jobs: Sequence[NewJob], *, actor: str, now: datetime | None
) -> list[PreparedJob]:
    found = await find_workflows(connection, [(job.workflow, job.version) for job in jobs], now=now)
    for job, workflow in zip(jobs, found, strict=True):
        if workflow.id is None:
            raise InputError(await unknown_workflow(connection, job.workflow, job.version))
    parents = {job.parent_job_id for job in jobs if job.parent_job_id is not None}
    depths = await _read_depths(connection, parents, actor=actor, now=now)
    return [
        prepared(job, workflow, depth=0 if job.parent_job_id is None else depths[job.parent_job_id] + 1)
        for job, workflow in zip(jobs, found, strict=True)
    ]


async def _read_depths(
    connection: Connection, parents: set[UUID], *, actor: str, now: datetime | None
) -> dict[UUID, int]:
    """Tell how deep jobs are that are to be parents; each must be there, and go on.

    They are locked: whoever cancels one of them finds the children that it is about to get.
    """
    if not parents:
        return {}
    found = (await lock_jobs(connection, parents, actor=actor, now=now)).jobs
    for id_ in parents:
        job = found.get(id_)
        if job is None:
            raise InputError(f"job {id_} cannot be a parent: there is no such job")
        if job.ending is not None or job.status in ENDED:
            raise InputError(f"job {id_} cannot be a parent: it is {job.ending or job.status}")
    return {id_: job.depth for id_, job in found.items()}


async def read_jobs(connection: Connection, ids: Sequence[UUID]) -> list[dict[str, Any]]:
    """Read whole jobs by id."""
    return await read_prepared(connection, JOBS["read_jobs"], {"ids": list(ids)})


async def find_jobs(
    connection: Connection,
    *,
    status: str | None = None,
    workflow: str | None = None,
    namespace: str | None = None,
    parent: UUID | None = None,
    before: UUID | None = None,
    limit: int = 100,
) -> list[dict[str, Any]]:
    """Find jobs, newest first, without their documents; `before` is the last id of the page before."""
    parameters = {
        "status": status,
        "workflow": workflow,
        "namespace": namespace,
        "parent": parent,
        "before": before,
        "limit": limit,
    }
    return await run(connection, JOBS["find_jobs"], parameters)


async def read_steps(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    """Read the steps of a job as they were declared, each map with its parts behind it, compensations last."""
    return await run(connection, STEPS["read_steps"], {"job_id": job_id})


async def read_job_history(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    """Read every move that a job made, oldest first."""
    return await run(connection, JOBS["read_job_history"], {"id": job_id})


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
