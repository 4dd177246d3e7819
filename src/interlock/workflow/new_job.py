"""TODO docstring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.errors import InputError, StoreError
from interlock.model.timing import LONGEST
from interlock.postgres.ids import new_id
from interlock.postgres.query import run, run_together
from interlock.store.jobs import JOBS, STEPS
from interlock.store.workflows import WORKFLOWS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.postgres.query import Asked


MOST_WORKERS = 10


DEEPEST = 5


@dataclass(frozen=True, slots=True)
class NewJob:
    """What is stored when a job is submitted. Without a version, the newest one of the workflow."""

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
    """The job that a submit led to: a new one, or the one that was there already."""

    id: UUID
    created: bool


class FoundWorkflow(NamedTuple):
    """What a submit needs to know of a workflow; `unserved` are first namespaces that no live worker serves."""

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
    """A job that is ready to be written: its row, and how its life begins."""

    row: dict[str, Any]
    starts: bool
    reason: str | None
    needs_opening: bool
    is_fresh: bool = True  # its id was made for it, so that no other job can have it

    @property
    def id(self) -> UUID:
        """The id that it gets if it is new."""
        found: UUID = self.row["id"]
        return found


async def find_workflows(
    connection: Connection, wanted: Sequence[tuple[str, str | None]], *, now: datetime | None
) -> list[FoundWorkflow]:
    """Look up workflows by name and version, in the order in which they were asked for."""
    parameters = {"names": [name for name, _ in wanted], "versions": [version for _, version in wanted], "now": now}
    found = [FoundWorkflow(**row) for row in await run(connection, WORKFLOWS["find_workflows"], parameters)]
    if not all(row.queue for row in found):
        raise StoreError(
            "jobs need PGMQ and its queue, which this database does not have; run `interlock migrate` as a role that "
            "may create the schema pgmq"
        )
    return found


async def unknown_workflow(connection: Connection, name: str, version: str | None) -> str:
    """Say that a workflow is not known, and which ones are."""
    known = {row["name"]: row["versions"] for row in await run(connection, WORKFLOWS["list_known_workflows"], {})}
    if name in known:
        return f"workflow {name!r} has no version {version!r}; it has {', '.join(known[name])}"
    return f"there is no workflow {name!r}; known are {', '.join(known) or 'none'}"


def prepared(job: NewJob, found: FoundWorkflow, *, depth: int = 0, **more: Any) -> PreparedJob:
    """Make the row of a job."""
    _check(job, depth)
    unserved = ", ".join(map(repr, found.unserved))
    words = "namespace" if len(found.unserved) == 1 else "namespaces"
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
        **more,
    }
    starts = not found.unserved
    return PreparedJob(
        row,
        starts=starts,
        reason=None if starts else f"no live worker serves {words} {unserved}",
        needs_opening=starts and (not found.plain_roots or row.get("reused") is not None),
        is_fresh=job.job_id is None,
    )


def _check(job: NewJob, depth: int) -> None:
    if job.worker_count is not None and not 1 <= job.worker_count <= MOST_WORKERS:
        raise InputError(f"worker_count must be from 1 to {MOST_WORKERS}, or None for no limit, not {job.worker_count}")
    if job.timeout is not None and not 0 < job.timeout <= LONGEST:
        raise InputError(
            f"the timeout of a job must be more than 0 and at most {LONGEST:.0f} seconds (100 years), not {job.timeout}"
        )
    if depth > DEEPEST:
        raise InputError(f"jobs nest at most {DEEPEST} deep: this child would be at depth {depth}")


async def insert_jobs(
    connection: Connection, jobs: Sequence[PreparedJob], *, actor: str, now: datetime | None
) -> set[UUID]:
    """Write jobs and their steps, and start those that can; give the ids of those that are new.

    Must run in a transaction. What was there already is left alone by every statement.
    """
    common = {"actor": actor, "now": now}
    insert: Asked = (JOBS["insert_jobs"], {"jobs": orjson.dumps([job.row for job in jobs]).decode(), **common})
    if all(job.is_fresh for job in jobs):
        made, *_ = await run_together(connection, [insert, *_beginnings(jobs, common)])
        return {row["id"] for row in made}
    (made,) = await run_together(connection, [insert])
    ids = {row["id"] for row in made}
    await run_together(connection, _beginnings([job for job in jobs if job.id in ids], common))
    return ids


def _beginnings(jobs: Sequence[PreparedJob], common: dict[str, Any]) -> list[Asked]:
    ids = [job.id for job in jobs]
    starting = [job.id for job in jobs if job.starts]
    return [
        (JOBS["validate_submitted_jobs"], {"ids": ids, "reasons": [job.reason for job in jobs], **common}),
        (JOBS["start_pending_jobs"], {"ids": starting, "reason": None, **common}),
        (STEPS["insert_steps"], {"ids": ids, "now": common["now"]}),
    ]


async def find_submitted_jobs(connection: Connection, jobs: Sequence[PreparedJob]) -> dict[UUID, UUID]:
    """Tell which jobs there are already instead of these; by their would-be ids.

    A request that was for another workflow is refused: its job would answer a question that nobody asked.
    """
    requests = [job.row["request_id"] for job in jobs if job.row["request_id"] is not None]
    if not requests:
        return {}
    rows = await run(connection, JOBS["find_submitted_jobs"], {"request_ids": requests})
    there = {row["request_id"]: row for row in rows}
    known = [(job, there[job.row["request_id"]]) for job in jobs if job.row["request_id"] in there]
    for job, found in known:
        _check_same(job.row["workflow"], found)
    return {job.id: found["id"] for job, found in known}


def _check_same(workflow: str, found: dict[str, Any]) -> None:
    if found["workflow"] != workflow:
        raise InputError(
            f"the request {found['request_id']!r} was made before, for workflow {found['workflow']!r} (job "
            f"{found['id']}); one for {workflow!r} needs an id of its own"
        )
