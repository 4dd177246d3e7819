"""What a caller holds of a job: its id, and everything that can be asked of it or done to it.

Invariant: a handle keeps no state of the job; every answer comes from the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from interlock.client.workflow import Workflow
from interlock.errors import InputError, JobFailedError, UnknownJobError
from interlock.lifecycle import JobState
from interlock.model.json_values import ValueRefusedError, check_json
from interlock.model.options import CHECKS, check_text, check_worker_count
from interlock.postgres.connection import user_connection
from interlock.store.jobs import find_jobs, read_job_history, read_jobs, read_steps
from interlock.store.workflows import read_workflow
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob
from interlock.workflow.retry import retry_job_from
from interlock.workflow.signals import send_signal
from interlock.workflow.submit import submit_job

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.postgres.connection import AsyncConnection, SyncConnection
    from interlock.workflow.new_job import Submitted


ENDED = frozenset({"COMPLETED", "FAILED", "CANCELED"})

Signaled = Literal["sent", "already sent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """What a list of jobs tells of each."""

    id: UUID
    workflow: str | None
    version: str | None
    namespace: str
    status: str
    event: str | None
    reason: str | None
    # what it will become once its steps have stopped and its compensations are done
    ending: str | None
    open_steps: int | None
    depth: int
    parent_job_id: UUID | None
    retried_from: UUID | None
    request_id: str | None
    correlation_id: UUID | None
    actor: str | None
    deadline_at: datetime | None
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    updated_at: datetime

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to the job."""
        return self.status in ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus(JobSummary):
    """All that is stored of a job."""

    input: dict[str, Any]
    output: dict[str, Any] | None
    error: dict[str, Any] | None
    worker_count: int | None
    parent_task_id: UUID | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatus:
    """What is stored of one step of a job; `output` is its StepExecutionResult."""

    id: UUID
    step: str
    kind: str
    type: str
    namespace: str
    state: str
    reason: str | None
    held_by: str | None
    upstreams: list[str]
    part: int | None
    poisoned: bool
    reused: bool
    attempt: int
    tries: int
    max_tries: int
    worker_id: str | None
    progress: dict[str, Any] | None
    run_at: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    output: dict[str, Any] | None
    error: dict[str, Any] | None

    @property
    def result(self) -> Any:
        """What the step's handler gave; of a map, what its parts gave."""
        return None if self.output is None else self.output.get("result")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One line of a job's history."""

    from_state: str | None
    to_state: str
    event: str
    reason: str | None
    actor: str
    recorded_at: datetime


class JobHandle:
    """A job that was submitted. `created` is False when a job of the same request was there already."""

    __slots__ = ("_app", "created", "id", "workflow")

    def __init__(self, app: Interlock, id_: UUID, *, workflow: str | None = None, created: bool = False) -> None:
        self._app = app
        self.id = id_
        self.workflow = workflow
        self.created = created

    def __repr__(self) -> str:
        name = f"{self.workflow} " if self.workflow else ""
        return f"<JobHandle {name}{self.id}>"

    async def status(self) -> JobStatus:
        """Read the job as it is now."""
        async with self._app.connection() as connection:
            rows = await read_jobs(connection, [self.id])
        if not rows:
            raise self._unknown()
        return JobStatus(**known_fields(JobStatus, rows[0]))

    async def steps(self) -> list[StepStatus]:
        """Read all steps, in the order of the workflow; the parts of a map come after it."""
        async with self._app.connection() as connection:
            rows = await read_steps(connection, self.id)
        if not rows:
            await self.status()  # one without steps is no job
        return [StepStatus(**known_fields(StepStatus, row)) for row in rows]

    async def history(self) -> list[JobRecord]:
        """Read every move that the job made, oldest first."""
        async with self._app.connection() as connection:
            rows = await read_job_history(connection, self.id)
        return [JobRecord(**known_fields(JobRecord, row)) for row in rows]

    async def wait(self, timeout: float | None = None) -> dict[str, Any]:  # noqa: ASYNC109 - what callers expect
        """Wait for the end and give the output, {step: result} of the last steps.

        JobFailedError if the job failed or was canceled, TimeoutError if it takes longer.
        """
        try:
            async with asyncio.timeout(timeout):
                status = await self._end()
        except TimeoutError:
            raise TimeoutError(f"job {self.id} has not ended within {timeout:g} s") from None
        if status.status != "COMPLETED":
            raise _failure(status)
        return status.output or {}

    result = wait

    async def cancel(self, reason: str | None = None) -> bool:
        """Cancel the job, its children too: steps that run are asked to stop. False if it has ended or ends already."""
        app = self._app
        async with app.connection() as connection:
            canceled = await cancel_job(connection, self.id, actor=app.actor, reason=reason, now=app.now())
        if not canceled:
            await self.status()  # to tell one that has ended from one that never was
        return canceled

    async def signal(self, name: str, payload: Any = None) -> Signaled:
        """Send a signal that a step waits for, or will; the first of a name counts."""
        app = self._app
        _check(f"signal {name!r}", payload)
        async with app.connection() as connection:
            sent = await send_signal(connection, self.id, name, payload, actor=app.actor, now=app.now())
        return "sent" if sent else "already sent"

    async def approve(
        self,
        step: str,
        approved: bool = True,  # noqa: FBT001, FBT002 - reads as the answer that it is
        comment: str | None = None,
        *,
        by: str | None = None,
    ) -> Signaled:
        """Answer an approval step, yes or no; `by` is who decides, the app's actor unless given."""
        return await self.signal(step, {"approved": bool(approved), "by": by or self._app.actor, "comment": comment})

    async def retry_from(self, step: str, *, request_id: str | None = None) -> JobHandle:
        """Submit the job anew from a step on: what is not that step or after it, and was done, is not run again."""
        app = self._app
        try:
            asked = None if request_id is None else CHECKS["request_id"]("request_id", request_id)
        except ValueError as error:
            raise InputError(f"job {self.id}: {error}") from None
        async with app.connection() as connection:
            stored = await retry_job_from(connection, self.id, step, actor=app.actor, request_id=asked, now=app.now())
        return JobHandle(app, stored.id, workflow=self.workflow, created=stored.created)

    async def _end(self) -> JobStatus:
        if self.created:  # a moment ago, mostly: to wait is also to look whether it has ended
            await self._app.completions.wait(self.id)
        while not (status := await self.status()).has_ended:
            await self._app.completions.wait(self.id)
        return status

    def _unknown(self) -> UnknownJobError:
        return UnknownJobError(f"there is no job {self.id}: not submitted, not committed yet, or pruned")


def job_id(given: UUID | str | JobHandle) -> UUID:
    """Take a job in any form in which a caller may have it."""
    if isinstance(given, JobHandle):
        return given.id
    try:
        found: UUID = CHECKS["task_id"]("the id of a job", given)
    except ValueError as error:
        raise InputError(str(error)) from None
    return found


def _check(place: str, value: Any) -> None:
    try:
        check_json(value)
    except ValueRefusedError as error:
        raise InputError(f"{place}: {error}") from None


def known_fields(kind: type, row: Mapping[str, Any]) -> dict[str, Any]:
    """Take what a value has fields for; a newer database may tell more."""
    return {field.name: row[field.name] for field in fields(kind)}


def _failure(status: JobStatus) -> JobFailedError:
    how = "failed" if status.status == "FAILED" else "was canceled"
    told = f": {status.reason}" if status.reason else ""
    return JobFailedError(f"job {status.workflow} {status.id} {how}{told}", status=status.status, error=status.error)


# SECTION client/submission
# Submitting jobs and finding them: what is asked for is checked here, before anything is stored.
#
# Invariant: a job that is stored names a workflow of which the input was checked against the schema, and its version.


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
        check_text("the name of a workflow", name)
        given = {key: CHECKS[key](key, value) for key, value in options.items() if value is not None}
        if worker_count is not None:
            check_worker_count("worker_count", worker_count)
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
    from interlock.model.json_schema import check_input  # noqa: PLC0415 - heavy, and seldom needed

    encoded: Any = {} if given is None else dict(given) if isinstance(given, Mapping) else given
    async with app.connection() as connection:
        found = await read_workflow(connection, name, version)
    check_input({"name": name} if found is None else found.definition, encoded)
    return encoded, version if found is None else found.version


async def _stored(app: Interlock, job: NewJob, connection: AsyncConnection | SyncConnection | None) -> Submitted:
    if connection is None:
        async with app.connection() as own:
            return await submit_job(own, job, actor=app.actor, now=app.now())
    async with user_connection(connection) as theirs:
        return await submit_job(theirs, job, actor=app.actor, now=app.now())
