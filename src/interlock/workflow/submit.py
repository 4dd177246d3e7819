"""New jobs: from what was asked for to rows of jobs and steps.

Invariant: a job and all its steps are written in one transaction; a request that was made before, or a step that has
its child job, leads to the job that is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from interlock.errors import InputError
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, run
from interlock.store.jobs import JOBS
from interlock.workflow.activate import begin_jobs
from interlock.workflow.batch import ENDED, lock_jobs
from interlock.workflow.new_job import (
    NewJob,
    PreparedJob,
    Submitted,
    describe_unknown_workflow,
    find_submitted_jobs,
    find_workflows,
    insert_jobs,
    prepare_job,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection


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
        opening = [row.id for row in rows if row.needs_activation and row.id in made]
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
    row = prepare_job(job, found)
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
            raise InputError(await describe_unknown_workflow(connection, job.workflow, job.version))
    parents = {job.parent_job_id for job in jobs if job.parent_job_id is not None}
    depths = await _read_depths(connection, parents, actor=actor, now=now)
    return [
        prepare_job(job, workflow, depth=0 if job.parent_job_id is None else depths[job.parent_job_id] + 1)
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
