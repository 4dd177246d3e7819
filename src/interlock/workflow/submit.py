"""Submits jobs: checks them against stored workflows, inserts them with their steps, and starts those that can start.

Invariant: a job and all its steps are inserted in one transaction; a repeated request id returns the existing job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from interlock.errors import InputError, JobConflictError
from interlock.postgres.connection import is_in_transaction, transaction
from interlock.postgres.query import run_in_order
from interlock.store.jobs import JOBS
from interlock.workflow.activate import activate_root_steps
from interlock.workflow.batch import lock_jobs
from interlock.workflow.new_job import (
    InsertedJob,
    NewJob,
    Submitted,
    find_submitted_jobs,
    find_workflows,
    insert_jobs,
    prepare_job,
    reject_statement,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection


async def submit_job(connection: Connection, job: NewJob, *, actor: str, now: datetime | None = None) -> Submitted:
    """Insert one job with its steps, in the connection's transaction if it is in one, and start it if it can start."""
    (submitted,) = await submit_jobs(connection, [job], actor=actor, now=now)
    return submitted


async def submit_jobs(
    connection: Connection, jobs: Sequence[NewJob], *, actor: str, now: datetime | None = None
) -> list[Submitted]:
    """Insert many jobs, all or none, and return one answer for each in the same order.

    A single job is one statement, which commits by itself, if its root steps have nothing to be activated.
    """
    if not jobs:
        return []
    parents = {job.parent_job_id for job in jobs if job.parent_job_id is not None}
    if len(jobs) == 1 and not parents and not is_in_transaction(connection):
        documents = [prepare_job(jobs[0])]
        inserted = await insert_jobs(connection, documents, actor=actor, now=now, may_activate=False)
        if inserted is not None:
            return await _answers(connection, jobs, documents, inserted)
    async with transaction(connection):
        depths = await _lock_parents(connection, parents, actor=actor, now=now)
        documents = [
            prepare_job(job, depth=0 if job.parent_job_id is None else depths[job.parent_job_id] + 1) for job in jobs
        ]
        inserted = await insert_jobs(connection, documents, actor=actor, now=now) or []
        ids = [job.id for job in inserted if job.needs_activation]
        if ids:
            await activate_root_steps(connection, ids, actor=actor, now=now)
        return await _answers(connection, jobs, documents, inserted)


async def _answers(
    connection: Connection,
    jobs: Sequence[NewJob],
    documents: Sequence[Mapping[str, Any]],
    inserted: Sequence[InsertedJob],
) -> list[Submitted]:
    _raise_refusal(jobs, inserted)
    repeated = [document for document, made in zip(documents, inserted, strict=True) if not made.created]
    existing = await find_submitted_jobs(connection, repeated)
    return [
        Submitted(existing.get(document["id"], made.id), made.created)
        for document, made in zip(documents, inserted, strict=True)
    ]


def _raise_refusal(jobs: Sequence[NewJob], inserted: Sequence[InsertedJob]) -> None:
    """Raise the first refusal. A conflict with a job of the same list names its place: the job is not stored either."""
    for place, job in enumerate(inserted):
        if job.refusal is None:
            continue
        if not job.is_conflict:
            raise InputError(job.refusal)
        for earlier, other in enumerate(inserted[:place]):
            if other.created and other.id == job.id:
                raise JobConflictError(
                    f"workflow {jobs[place].workflow}: job {place} of the list has the same key as job {earlier} of it "
                    "(counted from 0); none of them was submitted",
                    job_id=None,
                )
        raise JobConflictError(job.refusal, job_id=job.id)


async def reject_job(
    connection: Connection, job: NewJob, reason: str, *, actor: str, now: datetime | None = None
) -> UUID | None:
    """Insert a job with an invalid input as FAILED, without steps; None if the workflow does not exist."""
    (found,) = await find_workflows(connection, [(job.workflow, job.version)])
    if found.id is None:
        return None
    document = {**prepare_job(job), "workflow_id": found.id}
    common = {"actor": actor, "now": now}
    insert = (JOBS["insert_jobs"], {"jobs": orjson.dumps([document]).decode(), **common})
    id_: UUID = document["id"]
    async with transaction(connection):
        await run_in_order(connection, [insert, reject_statement(id_, reason, common)])
    return id_


async def _lock_parents(
    connection: Connection, parents: set[UUID], *, actor: str, now: datetime | None
) -> dict[UUID, int]:
    """Lock parent jobs and return their depths; InputError if one does not exist or is over.

    The lock makes a concurrent cancellation of the parent see its new children.
    """
    if not parents:
        return {}
    found = (await lock_jobs(connection, parents, actor=actor, now=now)).jobs
    for id_ in parents:
        job = found.get(id_)
        if job is None:
            raise InputError(f"job {id_} cannot be a parent: there is no such job")
        if job.is_over:
            raise InputError(f"job {id_} cannot be a parent: it is {job.ending or job.status}")
    return {id_: job.depth for id_, job in found.items()}
