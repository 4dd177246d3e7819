"""Handles of jobs; submits jobs and finds them.

Invariant: a handle keeps no state of the job; every answer comes from the database. The input of a job is checked
against the schema of its workflow before the job is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from interlock.client.workflow import Workflow
from interlock.errors import InputError, JobFailedError, UnknownJobError
from interlock.lifecycle import JOB, JobState, TaskRowState
from interlock.model.json_values import ValueRefusedError, check_json
from interlock.model.options import CHECKS, check_id, check_text, check_worker_count
from interlock.postgres.connection import user_connection
from interlock.store.jobs import find_jobs, read_job_history, read_jobs, read_steps
from interlock.store.workflows import read_workflow
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob
from interlock.workflow.retry_from import retry_job_from
from interlock.workflow.signals import send_signal
from interlock.workflow.submit import submit_job

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.postgres.connection import AsyncConnection, SyncConnection
    from interlock.workflow.new_job import Submitted


SignalOutcome = Literal["sent", "already sent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """A job without its input and output, as in a list."""

    id: UUID
    workflow: str | None
    version: str | None
    namespace: str
    status: JobState
    event: str | None
    reason: str | None
    # the final state that it reaches when its steps have stopped and its compensations have ended
    ending: JobState | None
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", JobState(self.status))  # the row has strings
        object.__setattr__(self, "ending", None if self.ending is None else JobState(self.ending))

    @property
    def has_ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.status in JOB.final


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus(JobSummary):
    """The stored job: its state, input and outcome."""

    input: dict[str, Any]
    output: dict[str, Any] | None
    error: dict[str, Any] | None
    worker_count: int | None
    parent_task_id: UUID | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatus:
    """The stored step of a job; `output` is its StepExecutionResult."""

    id: UUID
    step: str
    kind: str
    type: str
    namespace: str
    state: TaskRowState
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", TaskRowState(self.state))  # the row has a string

    @property
    def result(self) -> Any:
        """The result of the step's handler; of a map, the list of the results of its parts."""
        return None if self.output is None else self.output.get("result")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One transition in the history of a job."""

    from_state: JobState | None
    to_state: JobState
    event: str
    reason: str | None
    actor: str
    recorded_at: datetime

    def __post_init__(self) -> None:
        object.__setattr__(self, "from_state", None if self.from_state is None else JobState(self.from_state))
        object.__setattr__(self, "to_state", JobState(self.to_state))  # the row has strings


class JobHandle:
    """A submitted job. `created` is False when a job with the same request id existed already."""

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
        """Read the current job."""
        async with self._app.connection() as connection:
            rows = await read_jobs(connection, [self.id])
        if not rows:
            raise UnknownJobError(
                f"there is no job {self.id}: it was never submitted, is not committed yet, or was pruned"
            )
        return JobStatus(**known_fields(JobStatus, rows[0]))

    async def steps(self) -> list[StepStatus]:
        """Read all steps in the order of the workflow; the parts of a map follow it."""
        async with self._app.connection() as connection:
            rows = await read_steps(connection, self.id)
        if not rows:
            await self.status()  # a job has steps, so this raises UnknownJobError
        return [StepStatus(**known_fields(StepStatus, row)) for row in rows]

    async def history(self) -> list[JobRecord]:
        """Read all transitions of the job, oldest first."""
        async with self._app.connection() as connection:
            rows = await read_job_history(connection, self.id)
        return [JobRecord(**known_fields(JobRecord, row)) for row in rows]

    async def wait(self, timeout: float | None = None) -> dict[str, Any]:  # noqa: ASYNC109 - part of the public API
        """Wait until the job has ended and return its output: {step: result} of the last steps.

        JobFailedError if it failed or was canceled, TimeoutError if it has not ended within `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                status = await self._wait_until_ended()
        except TimeoutError:
            raise TimeoutError(f"job {self.id} has not ended within {timeout:g} s") from None
        if status.status is not JobState.COMPLETED:
            raise _failure(status)
        return status.output or {}

    result = wait

    async def cancel(self, reason: str | None = None) -> bool:
        """Cancel the job and its children and ask running steps to stop; False if it has ended or is ending."""
        app = self._app
        async with app.connection() as connection:
            canceled = await cancel_job(connection, self.id, actor=app.actor, reason=reason, now=app.now())
        if not canceled:
            await self.status()  # raises UnknownJobError if there is none
        return canceled

    async def signal(self, name: str, payload: Any = None) -> SignalOutcome:
        """Send a signal that a step waits for or will wait for; only the first of a name counts."""
        app = self._app
        _check_json(f"signal {name!r}", payload)
        async with app.connection() as connection:
            sent = await send_signal(connection, self.id, name, payload, actor=app.actor, now=app.now())
        return "sent" if sent else "already sent"

    async def approve(
        self,
        step: str,
        approved: bool = True,  # noqa: FBT001, FBT002 - the answer itself
        comment: str | None = None,
        *,
        by: str | None = None,
    ) -> SignalOutcome:
        """Answer an approval step; `by` names who decides, by default the app's actor."""
        return await self.signal(step, {"approved": bool(approved), "by": by or self._app.actor, "comment": comment})

    async def retry_from(self, step: str, *, request_id: str | None = None) -> JobHandle:
        """Submit the job again from a step on; steps that are done and do not depend on that step are not run again."""
        app = self._app
        try:
            asked = None if request_id is None else CHECKS["request_id"]("request_id", request_id)
        except ValueError as error:
            raise InputError(f"job {self.id}: {error}") from None
        async with app.connection() as connection:
            stored = await retry_job_from(connection, self.id, step, actor=app.actor, request_id=asked, now=app.now())
        return JobHandle(app, stored.id, workflow=self.workflow, created=stored.created)

    async def _wait_until_ended(self) -> JobStatus:
        if self.created:  # most likely a moment ago: save the first read, since wait() also checks for the end
            await self._app.completions.wait(self.id)
        while not (status := await self.status()).has_ended:
            await self._app.completions.wait(self.id)
        return status


def as_job_id(given: UUID | str | JobHandle) -> UUID:
    """Give the id of a job that a caller names by handle, UUID or text."""
    if isinstance(given, JobHandle):
        return given.id
    try:
        return check_id("the id of a job", given)
    except ValueError as error:
        raise InputError(str(error)) from None


def _check_json(place: str, value: Any) -> None:
    try:
        check_json(value)
    except ValueRefusedError as error:
        raise InputError(f"{place}: {error}") from None


def known_fields(kind: type, row: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the columns that a dataclass has fields for; a newer database may have more."""
    return {field.name: row[field.name] for field in fields(kind)}


def _failure(status: JobStatus) -> JobFailedError:
    outcome = "failed" if status.status is JobState.FAILED else "was canceled"
    cause = f": {status.reason}" if status.reason else ""
    message = f"job {status.workflow} {status.id} {outcome}{cause}"
    return JobFailedError(message, status=status.status, error=status.error)


async def find_job_summaries(
    app: Interlock,
    *,
    status: str | None,
    workflow: str | None,
    namespace: str | None,
    limit: int,
    before: UUID | None,
) -> list[JobSummary]:
    """Find jobs, newest first; `before` is the last id of the previous page."""
    if status is not None and status not in JobState.__members__.values():
        raise InputError(f"status must be one of {', '.join(JobState)}, got {status!r}")
    async with app.connection() as connection:
        rows = await find_jobs(
            connection, status=status, workflow=workflow, namespace=namespace, before=before, limit=limit
        )
    return [JobSummary(**known_fields(JobSummary, row)) for row in rows]


async def submit(
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
    """Check the options and the input of a job and store it, in the caller's transaction if a connection is given."""
    name = workflow.name if isinstance(workflow, Workflow) else workflow
    try:
        check_text("the name of a workflow", name)
        given = {key: CHECKS[key](key, value) for key, value in options.items() if value is not None}
        if worker_count is not None:
            check_worker_count("worker_count", worker_count)
    except ValueError as error:
        raise InputError(f"workflow {name}: {error}") from None
    declared = workflow if isinstance(workflow, Workflow) else _find_declared(app, name, version)
    if declared is None:
        stored_input, version = await _check_stored_workflow(app, name, version, input)
    else:
        stored_input, version = declared.encode(input), declared.version
    parent_id = None if parent is None else as_job_id(parent)
    job = NewJob(name, stored_input, version=version, parent_job_id=parent_id, worker_count=worker_count, **given)
    made = await _store(app, job, connection)
    return JobHandle(app, made.id, workflow=name, created=made.created)


def _find_declared(app: Interlock, name: str, version: str | None) -> Workflow | None:
    """Find a workflow that the app declares; without a version, the one declared last."""
    found = [known for known in app.workflows.values() if known.name == name and version in {None, known.version}]
    return found[-1] if found else None


async def _check_stored_workflow(
    app: Interlock, name: str, version: str | None, given: Any
) -> tuple[dict[str, Any], str | None]:
    """Check an input against a workflow in the database; the submit itself refuses one that is not there."""
    from interlock.model.json_schema import check_input  # noqa: PLC0415 - jsonschema is slow to import, and many programs only enqueue tasks

    encoded: Any = {} if given is None else dict(given) if isinstance(given, Mapping) else given
    async with app.connection() as connection:
        found = await read_workflow(connection, name, version)
    check_input({"name": name} if found is None else found.definition, encoded)
    return encoded, version if found is None else found.version


async def _store(app: Interlock, job: NewJob, connection: AsyncConnection | SyncConnection | None) -> Submitted:
    if connection is None:
        async with app.connection() as own:
            return await submit_job(own, job, actor=app.actor, now=app.now())
    async with user_connection(connection) as theirs:
        return await submit_job(theirs, job, actor=app.actor, now=app.now())
