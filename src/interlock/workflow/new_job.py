"""Inserts jobs: looks up the workflow, checks the options, writes the rows of the job and of its steps.

Shared by a submit, a retry and a child step. The steps that need more than an insert are activated by `activate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.errors import InputError, RequestReusedError, StoreError
from interlock.model.options import JOB_CHECKS, MAX_JOB_DEPTH
from interlock.postgres.ids import new_id
from interlock.postgres.query import as_json, run, run_pipeline
from interlock.store.jobs import JOBS, STEPS
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
    tags: list[str] | None
    attributes: dict[str, Any] | None
    callback_url: str | None
    key: str | None
    unserved: list[str]
    queue: bool


class InsertedJob(NamedTuple):
    """The outcome of an insert: a new job, or `created` is false and `id` is that of the existing job, if it is known.

    `refusal` says why a job was refused; `is_conflict` that the reason is another job with its key.
    """

    id: UUID
    created: bool
    needs_activation: bool = False
    refusal: str | None = None
    is_conflict: bool = False


class PreparedJob(NamedTuple):
    """A checked job, ready to be inserted."""

    row: dict[str, Any]
    starts: bool
    reason: str | None
    needs_activation: bool  # root steps exist that `insert_steps` cannot make claimable by itself
    has_new_id: bool = True  # false if the caller chose the id, which another job may have
    may_have_key: bool = False

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
        "iteration": job.iteration,
        "depth": depth,
        "worker_count": job.worker_count,
        "workflow": job.workflow,
        "namespace": found.namespace,
        "input": job.input,
        "workflow_id": found.id,
        "names_version": job.names_version and job.version is not None,
        "request_id": job.request_id,
        "correlation_id": job.correlation_id,
        "traceparent": job.traceparent,
        "root_namespaces": found.root_namespaces,
        "timeout_seconds": found.timeout_seconds if job.timeout is None else job.timeout,
        "tags": found.tags if job.tags is None else job.tags,
        "attributes": found.attributes if job.attributes is None else job.attributes,
        "callback_url": job.callback_url or found.callback_url or job.default_callback_url,
        **columns,
    }
    key_options = {name: getattr(job, name) for name in _KEY_OPTIONS if getattr(job, name) is not None}
    row |= key_options
    starts = not found.unserved
    return PreparedJob(
        row,
        starts=starts,
        reason=describe_unserved(found.unserved),
        needs_activation=starts and (not found.plain_roots or row.get("reused") is not None),
        has_new_id=job.job_id is None,
        may_have_key=bool(key_options) or found.key is not None,
    )


def describe_unserved(namespaces: Sequence[str]) -> str | None:
    """Give the reason of a job that waits for workers; None if every namespace has one."""
    if not namespaces:
        return None
    noun = "namespace" if len(namespaces) == 1 else "namespaces"
    return f"no live worker serves {noun} {', '.join(map(repr, namespaces))}"


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
    connection: Connection, jobs: Sequence[PreparedJob], *, actor: str, now: datetime | None
) -> list[InsertedJob]:
    """Insert jobs and their steps, and start those that can start; return one outcome for each in the same order.

    Must run in a transaction. A job whose id or request id exists is not inserted, and the existing one is unchanged.
    """
    common = {"actor": actor, "now": now}
    parameters = {"jobs": orjson.dumps([job.row for job in jobs]).decode(), **common}
    if any(job.may_have_key for job in jobs):
        return await _insert_keyed_jobs(connection, jobs, parameters, common)
    insert: StatementCall = (JOBS["insert_jobs"], parameters)
    if all(job.has_new_id for job in jobs):
        # the statements that follow find no rows for a job that was not inserted, so all go in one pipeline
        inserted, *_ = await run_pipeline(connection, [insert, *_start_statements(jobs, common)])
        ids = {row["id"] for row in inserted}
    else:
        (inserted,) = await run_pipeline(connection, [insert])
        ids = {row["id"] for row in inserted}
        await run_pipeline(connection, _start_statements([job for job in jobs if job.id in ids], common))
    return [
        InsertedJob(job.id, created=job.id in ids, needs_activation=job.id in ids and job.needs_activation)
        for job in jobs
    ]


async def _insert_keyed_jobs(
    connection: Connection, jobs: Sequence[PreparedJob], parameters: dict[str, Any], common: dict[str, Any]
) -> list[InsertedJob]:
    """Insert jobs of which some have a key; start those that are the first with theirs."""
    inserted = []
    validated = []
    rows = await run(connection, JOBS["insert_keyed_jobs"], parameters)
    for job, row in zip(jobs, rows, strict=True):
        outcome = row["outcome"]
        if outcome == "free":
            inserted.append(InsertedJob(job.id, created=True, needs_activation=job.needs_activation))
            validated.append(job)
        elif outcome in {"queued", "debounced"}:
            inserted.append(InsertedJob(job.id, created=True))
            if outcome == "queued":
                validated.append(job._replace(starts=False, reason=row["reason"]))
        else:
            is_conflict = outcome == "conflict"
            inserted.append(InsertedJob(row["job_id"], created=False, refusal=row["reason"], is_conflict=is_conflict))
    await run_pipeline(connection, _start_statements(validated, common))
    return inserted


def _start_statements(jobs: Sequence[PreparedJob], common: dict[str, Any]) -> list[StatementCall]:
    ids = [job.id for job in jobs]
    starting = [job.id for job in jobs if job.starts]
    return [
        (JOBS["validate_submitted_jobs"], {"ids": ids, "reasons": [job.reason for job in jobs], **common}),
        (JOBS["start_pending_jobs"], {"ids": starting, "reason": None, **common}),
        (STEPS["insert_steps"], {"ids": ids, "now": common["now"]}),
    ]


def reject_statement(job_id: UUID, reason: str, common: Mapping[str, Any]) -> StatementCall:
    """Return the statement that fails a submitted job for its invalid input."""
    error = {"type": "InputError", "message": reason, "traceback": None, "retryable": False}
    return JOBS["reject_submitted_jobs"], {"ids": [job_id], "reason": reason, "error": as_json(error), **common}


async def find_submitted_jobs(connection: Connection, jobs: Sequence[PreparedJob]) -> dict[UUID, UUID]:
    """Map the ids of jobs that were not inserted to the existing jobs with the same request id.

    RequestReusedError if an existing job differs: its result would not be the one that the caller asked for.
    """
    rows = [job.row for job in jobs if job.row["request_id"] is not None]
    if not rows:
        return {}
    existing = await run(connection, JOBS["find_submitted_jobs"], {"jobs": orjson.dumps(rows).decode()})
    for row in existing:
        if row["differing"]:
            raise RequestReusedError(
                f"request_id {row['request_id']!r} was used before, for job {row['id']} with another "
                f"{', '.join(row['differing'])}; a different request needs an id of its own"
            )
    return {row["given_id"]: row["id"] for row in existing}
