"""Submitting jobs and finding them: what is asked for is checked here, before anything is stored.

Invariant: a job that is stored names a workflow of which the input was checked against the schema, and its version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interlock.client.jobs import JobHandle, JobSummary, job_id, known_fields
from interlock.client.options import CHECKS, text
from interlock.client.workflow import Workflow
from interlock.errors import InputError
from interlock.lifecycle import JobState
from interlock.store.jobs import NewJob, find_jobs, submit_job
from interlock.store.lending import lent
from interlock.store.workflows import read_workflow

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.store.enqueue import AsyncConnection, SyncConnection
    from interlock.store.jobs import Submitted

MOST_WORKERS = 10


async def find_summaries(
    app: Interlock,
    *,
    status: str | None,
    workflow: str | None,
    namespace: str | None,
    limit: int,
    before: UUID | None,
) -> list[JobSummary]:
    """Find jobs, newest first; `before` is the last id of the page before."""
    known = [str(state) for state in JobState]
    if status is not None and status not in known:
        raise InputError(f"status must be one of {', '.join(known)}, not {status!r}")
    async with app.connection() as connection:
        rows = await find_jobs(
            connection, status=status, workflow=workflow, namespace=namespace, before=before, limit=limit
        )
    return [JobSummary(**known_fields(JobSummary, row)) for row in rows]


async def submit_checked(
    app: Interlock,
    workflow: str | Workflow,
    input: Any,  # noqa: A002 - the name of the column
    *,
    version: str | None,
    parent: UUID | str | JobHandle | None,
    worker_count: int | None,
    connection: AsyncConnection | SyncConnection | None,
    **options: Any,
) -> JobHandle:
    """Check what a job is asked for and store it, in the caller's transaction if a connection is given."""
    name = workflow.name if isinstance(workflow, Workflow) else workflow
    try:
        text("the name of a workflow", name)
        given = {key: CHECKS[key](key, value) for key, value in options.items() if value is not None}
        _check_worker_count(worker_count)
    except ValueError as error:
        raise InputError(f"workflow {name}: {error}") from None
    declared = workflow if isinstance(workflow, Workflow) else _declared(app, name, version)
    stored, version = (
        (declared.encode(input), declared.version) if declared else await _of_database(app, name, version, input)
    )
    above = None if parent is None else job_id(parent)
    job = NewJob(name, stored, version=version, parent_job_id=above, worker_count=worker_count, **given)
    made = await _stored(app, job, connection)
    return JobHandle(app, made.id, workflow=name, created=made.created)


def _declared(app: Interlock, name: str, version: str | None) -> Workflow | None:
    """Find a workflow that the app declares; without a version, the one that was declared last."""
    found = [known for known in app.workflows.values() if known.name == name and version in {None, known.version}]
    return found[-1] if found else None


async def _of_database(app: Interlock, name: str, version: str | None, given: Any) -> tuple[dict[str, Any], str | None]:
    """Check an input against a workflow that only the database knows; one that it does not know is refused later."""
    # not at the top: the schema's library is slow to import, and many programs only enqueue tasks
    from interlock.client.schema import check_input  # noqa: PLC0415 - heavy, and seldom needed

    encoded: Any = {} if given is None else dict(given) if isinstance(given, Mapping) else given
    async with app.connection() as connection:
        found = await read_workflow(connection, name, version)
    check_input({"name": name} if found is None else found.definition, encoded)
    return encoded, version if found is None else found.version


async def _stored(app: Interlock, job: NewJob, connection: AsyncConnection | SyncConnection | None) -> Submitted:
    if connection is None:
        async with app.connection() as own:
            return await submit_job(own, job, actor=app.actor, now=app.now())
    async with lent(connection) as theirs:
        return await submit_job(theirs, job, actor=app.actor, now=app.now())


def _check_worker_count(count: Any) -> None:
    is_number = isinstance(count, int) and not isinstance(count, bool)
    if count is not None and not (is_number and 1 <= count <= MOST_WORKERS):
        raise ValueError(f"worker_count must be a whole number from 1 to {MOST_WORKERS}, or None, not {count!r}")
