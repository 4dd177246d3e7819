"""Inserts jobs: looks up the workflow, checks the options, writes the rows of the job and of its steps.

Shared by a submit, a retry and a child step. The steps that need more than an insert are activated by `activate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.errors import InputError, StoreError
from interlock.model.options import MAX_JOB_DEPTH, check_seconds, check_worker_count
from interlock.postgres.ids import new_id
from interlock.postgres.query import run, run_pipeline
from interlock.store.jobs import JOBS, STEPS
from interlock.store.workflows import WORKFLOWS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.postgres.query import StatementCall


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to submit. Without a version, it runs the newest one of the workflow."""

    workflow: str
    input: dict[str, Any]
    version: str | None = None
    request_id: str | None = None
    parent_job_id: UUID | None = None
    parent_task_id: UUID | None = None
    worker_count: int | None = None
    timeout: float | None = None
    correlation_id: UUID | None = None
    job_id: UUID | None = None


class Submitted(NamedTuple):
    """The job that a submit returns: a new one, or an existing one with the same request id."""

    id: UUID
    created: bool


class FoundWorkflow(NamedTuple):
    """A stored workflow, as far as inserting a job needs it.

    `unserved` lists the namespaces of the root steps that no live worker serves; `queue` says whether PGMQ's queue of
    step results exists.
    """

    place: int
    id: UUID | None
    version: str | None
    namespace: str | None
    root_namespaces: list[str] | None
    plain_roots: bool | None
    timeout_seconds: float | None
    unserved: list[str]
    queue: bool


class PreparedJob(NamedTuple):
    """A checked job, ready to be inserted."""

    row: dict[str, Any]
    starts: bool
    reason: str | None
    needs_activation: bool  # root steps exist that `insert_steps` cannot make claimable by itself
    has_new_id: bool = True  # false if the caller chose the id, which another job may have

    @property
    def id(self) -> UUID:
        """The id that the job gets if it is inserted."""
        found: UUID = self.row["id"]
        return found


async def find_workflows(
    connection: Connection, wanted: Sequence[tuple[str, str | None]], *, now: datetime | None
) -> list[FoundWorkflow]:
    """Look up workflows by name and version, in the order of `wanted`; a missing one has the id None."""
    parameters = {"names": [name for name, _ in wanted], "versions": [version for _, version in wanted], "now": now}
    found = [FoundWorkflow(**row) for row in await run(connection, WORKFLOWS["find_workflows"], parameters)]
    if not all(row.queue for row in found):
        raise StoreError(
            "jobs need PGMQ and its queue, which this database does not have; run `interlock migrate` as a role that "
            "may create the schema pgmq"
        )
    return found


async def describe_unknown_workflow(connection: Connection, name: str, version: str | None) -> str:
    """Say that a workflow does not exist, and list the existing ones."""
    known = {row["name"]: row["versions"] for row in await run(connection, WORKFLOWS["list_workflow_versions"], {})}
    if name in known:
        return f"workflow {name!r} has no version {version!r}; it has {', '.join(known[name])}"
    return f"there is no workflow {name!r}; known are {', '.join(known) or 'none'}"


def prepare_job(job: NewJob, found: FoundWorkflow, *, depth: int = 0, **columns: Any) -> PreparedJob:
    """Check a job's options and make its row; InputError says which option is out of bounds."""
    _check_options(job, depth)
    row = {
        "id": job.job_id or new_id(),
        "parent_job_id": job.parent_job_id,
        "parent_task_id": job.parent_task_id,
        "depth": depth,
        "worker_count": job.worker_count,
        "workflow": job.workflow,
        "namespace": found.namespace,
        "input": job.input,
        "workflow_id": found.id,
        "request_id": job.request_id,
        "correlation_id": job.correlation_id,
        "root_namespaces": found.root_namespaces,
        "timeout_seconds": found.timeout_seconds if job.timeout is None else job.timeout,
        **columns,
    }
    starts = not found.unserved
    return PreparedJob(
        row,
        starts=starts,
        reason=None if starts else _describe_unserved(found.unserved),
        needs_activation=starts and (not found.plain_roots or row.get("reused") is not None),
        has_new_id=job.job_id is None,
    )


def _describe_unserved(namespaces: Sequence[str]) -> str:
    noun = "namespace" if len(namespaces) == 1 else "namespaces"
    return f"no live worker serves {noun} {', '.join(map(repr, namespaces))}"


def _check_options(job: NewJob, depth: int) -> None:
    try:
        if job.worker_count is not None:
            check_worker_count("worker_count", job.worker_count)
        if job.timeout is not None:
            check_seconds("timeout", job.timeout)
    except ValueError as error:
        raise InputError(str(error)) from None
    if depth > MAX_JOB_DEPTH:
        raise InputError(job_depth_error(depth))


def job_depth_error(depth: int) -> str:
    """Describe a child job that would be nested too deep."""
    return f"jobs nest at most {MAX_JOB_DEPTH} deep: this child would be at depth {depth}"


async def insert_jobs(
    connection: Connection, jobs: Sequence[PreparedJob], *, actor: str, now: datetime | None
) -> set[UUID]:
    """Insert jobs and their steps, start those whose namespaces are served, and return the ids of the new ones.

    Must run in a transaction. A job whose id or request id exists is not inserted, and the existing one is unchanged.
    """
    common = {"actor": actor, "now": now}
    insert: StatementCall = (JOBS["insert_jobs"], {"jobs": orjson.dumps([job.row for job in jobs]).decode(), **common})
    if all(job.has_new_id for job in jobs):
        # the statements that follow find no rows for a job that was not inserted, so all go in one pipeline
        inserted, *_ = await run_pipeline(connection, [insert, *_start_statements(jobs, common)])
        return {row["id"] for row in inserted}
    (inserted,) = await run_pipeline(connection, [insert])
    ids = {row["id"] for row in inserted}
    await run_pipeline(connection, _start_statements([job for job in jobs if job.id in ids], common))
    return ids


def _start_statements(jobs: Sequence[PreparedJob], common: dict[str, Any]) -> list[StatementCall]:
    ids = [job.id for job in jobs]
    starting = [job.id for job in jobs if job.starts]
    return [
        (JOBS["validate_submitted_jobs"], {"ids": ids, "reasons": [job.reason for job in jobs], **common}),
        (JOBS["start_pending_jobs"], {"ids": starting, "reason": None, **common}),
        (STEPS["insert_steps"], {"ids": ids, "now": common["now"]}),
    ]


async def find_submitted_jobs(connection: Connection, jobs: Sequence[PreparedJob]) -> dict[UUID, UUID]:
    """Map the ids of jobs that were not inserted to the existing jobs with the same request id.

    InputError if an existing job runs another workflow: its result would not be the one that the caller asked for.
    """
    request_ids = [job.row["request_id"] for job in jobs if job.row["request_id"] is not None]
    if not request_ids:
        return {}
    rows = await run(connection, JOBS["find_submitted_jobs"], {"request_ids": request_ids})
    existing = {row["request_id"]: row for row in rows}
    found: dict[UUID, UUID] = {}
    for job in jobs:
        row = existing.get(job.row["request_id"])
        if row is None:
            continue
        workflow = job.row["workflow"]
        if row["workflow"] != workflow:
            raise InputError(
                f"the request {row['request_id']!r} was made before, for workflow {row['workflow']!r} (job "
                f"{row['id']}); one for {workflow!r} needs an id of its own"
            )
        found[job.id] = row["id"]
    return found
