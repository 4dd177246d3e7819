"""Inserts jobs: looks up the workflow, checks the options, writes the rows of the job and of its steps.

Shared by a submit, a retry and a child step. The steps that need more than an insert are activated by `activate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.errors import InputError, RequestReusedError
from interlock.model.options import JOB_CHECKS, MAX_JOB_DEPTH
from interlock.postgres.ids import new_id
from interlock.postgres.query import as_json, read_prepared, run
from interlock.store.jobs import JOBS
from interlock.store.workflows import WORKFLOWS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.postgres.query import StatementCall


_KEY_OPTIONS = ("key", "on_conflict", "debounce", "debounce_max")


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to submit. Without a version, it runs the newest one of the workflow.

    `names_version` says that the caller chose the version, so that a repeated request must name the same one.
    """

    workflow: str
    input: dict[str, Any]
    version: str | None = None
    request_id: str | None = None
    parent_job_id: UUID | None = None
    parent_task_id: UUID | None = None
    iteration: int = 1  # among the jobs that a child step starts one after another
    worker_count: int | None = None
    timeout: float | None = None
    correlation_id: UUID | None = None
    traceparent: str | None = None
    job_id: UUID | None = None
    names_version: bool = True
    tags: Sequence[str] | None = None
    attributes: Mapping[str, Any] | None = None
    callback_url: str | None = None
    default_callback_url: str | None = None  # if neither the job nor its workflow has one
    key: str | None = None
    on_conflict: str | None = None
    debounce: float | None = None
    debounce_max: float | None = None


class Submitted(NamedTuple):
    """The job that a submit returns: a new one, or an existing one with the same request id or key."""

    id: UUID
    created: bool


class FoundWorkflow(NamedTuple):
    """A stored workflow; without an id, it does not exist."""

    id: UUID | None
    version: str | None


class InsertedJob(NamedTuple):
    """The outcome of an insert: a new job, or `created` is false and `id` is that of the existing job, if it is known.

    `refusal` says why a job was refused; `is_conflict` that the reason is another job with its key.
    """

    id: UUID
    created: bool
    needs_activation: bool = False
    refusal: str | None = None
    is_conflict: bool = False


async def find_workflows(connection: Connection, wanted: Sequence[tuple[str, str | None]]) -> list[FoundWorkflow]:
    """Look up workflows by name and version, in the order of `wanted`; a missing one has the id None."""
    parameters = {"names": [name for name, _ in wanted], "versions": [version for _, version in wanted]}
    return [FoundWorkflow(**row) for row in await run(connection, WORKFLOWS["find_workflows"], parameters)]


async def describe_unknown_workflow(connection: Connection, name: str, version: str | None) -> str:
    """Say that a workflow does not exist, and list the existing ones."""
    known = {row["name"]: row["versions"] for row in await run(connection, WORKFLOWS["list_workflow_versions"], {})}
    if name in known:
        return f"workflow {name!r} has no version {version!r}; it has {', '.join(known[name])}"
    return f"there is no workflow {name!r}; known are {', '.join(known) or 'none'}"


def prepare_job(job: NewJob, *, depth: int = 0, **columns: Any) -> dict[str, Any]:
    """Check a job's options and make the document from which it is inserted; InputError says what is out of bounds.

    What is not given comes from the workflow, in the database.
    """
    _check_options(job, depth)
    document = {
        "id": job.job_id or new_id(),
        "parent_job_id": job.parent_job_id,
        "parent_task_id": job.parent_task_id,
        "iteration": job.iteration,
        "depth": depth,
        "worker_count": job.worker_count,
        "workflow": job.workflow,
        "version": job.version,
        "names_version": job.names_version and job.version is not None,
        "input": job.input,
        "request_id": job.request_id,
        "correlation_id": job.correlation_id,
        "traceparent": job.traceparent,
        "timeout_seconds": job.timeout,
        "tags": job.tags,
        "attributes": job.attributes,
        "callback_url": job.callback_url,
        "default_callback_url": job.default_callback_url,
        "key": job.key,
        "on_conflict": job.on_conflict,
        "debounce": job.debounce,
        "debounce_max": job.debounce_max,
        **columns,
    }
    return {name: value for name, value in document.items() if value is not None}


def _check_options(job: NewJob, depth: int) -> None:
    try:
        for name in ("worker_count", "timeout", "tags", "attributes", "callback_url", *_KEY_OPTIONS):
            value = getattr(job, name)
            if value is not None:
                JOB_CHECKS[name](name, value)
    except ValueError as error:
        raise InputError(str(error)) from None
    if job.debounce_max is not None and job.debounce is None:
        raise InputError("debounce_max needs debounce")
    if depth > MAX_JOB_DEPTH:
        raise InputError(job_depth_error(depth))


def job_depth_error(depth: int) -> str:
    """Describe a child job that would be nested too deep."""
    return f"jobs nest at most {MAX_JOB_DEPTH} deep: this child would be at depth {depth}"


async def insert_jobs(
    connection: Connection,
    jobs: Sequence[Mapping[str, Any]],
    *,
    actor: str,
    now: datetime | None,
    may_activate: bool = True,
) -> list[InsertedJob] | None:
    """Insert jobs and their steps, and start those that can start; return one outcome for each in the same order.

    Must run in a transaction, except for a single job without `may_activate`. In that case nothing is inserted if root
    steps would have to be activated, and the answer is None. A job whose id or request id exists is not inserted, and
    the existing one is unchanged. InputError if a workflow does not exist; nothing is inserted then.
    """
    parameters = {"jobs": orjson.dumps(jobs).decode(), "actor": actor, "now": now, "may_activate": may_activate}
    rows = await read_prepared(connection, JOBS["submit_jobs"], parameters)
    for job, row in zip(jobs, rows, strict=True):
        if row["outcome"] == "unknown":
            raise InputError(await describe_unknown_workflow(connection, job["workflow"], job.get("version")))
    if any(row["outcome"] == "deferred" for row in rows):
        return None
    return [_inserted(row) for row in rows]


def _inserted(row: Mapping[str, Any]) -> InsertedJob:
    outcome = row["outcome"]
    if outcome in {"free", "queued", "debounced"}:
        return InsertedJob(row["given_id"], created=True, needs_activation=bool(row["needs_activation"]))
    return InsertedJob(row["job_id"], created=False, refusal=row["reason"], is_conflict=outcome == "conflict")


def reject_statement(job_id: UUID, reason: str, common: Mapping[str, Any]) -> StatementCall:
    """Return the statement that fails a submitted job for its invalid input."""
    error = {"type": "InputError", "message": reason, "traceback": None, "retryable": False}
    return JOBS["reject_submitted_jobs"], {"ids": [job_id], "reason": reason, "error": as_json(error), **common}


async def find_submitted_jobs(connection: Connection, jobs: Sequence[Mapping[str, Any]]) -> dict[UUID, UUID]:
    """Map the ids of jobs that were not inserted to the existing jobs with the same request id.

    RequestReusedError if an existing job differs: its result would not be the one that the caller asked for.
    """
    given = [job for job in jobs if "request_id" in job]
    if not given:
        return {}
    existing = await run(connection, JOBS["find_submitted_jobs"], {"jobs": orjson.dumps(given).decode()})
    for row in existing:
        if row["differing"]:
            raise RequestReusedError(
                f"request_id {row['request_id']!r} was used before, for job {row['id']} with another "
                f"{', '.join(row['differing'])}; a different request needs an id of its own"
            )
    return {row["given_id"]: row["id"] for row in existing}
