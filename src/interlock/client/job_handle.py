"""Handles of jobs; finds jobs.

Invariant: a handle keeps no state of the job; every answer comes from the database.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from interlock.errors import InputError, JobFailedError, UnknownJobError
from interlock.lifecycle import JOB, JobState, TaskRowState
from interlock.model.graph import SIGNAL_KINDS
from interlock.model.json_values import to_json
from interlock.model.options import (
    CHECKS,
    check_attributes,
    check_id,
    check_tags,
    check_time,
)
from interlock.store.history import read_history
from interlock.store.jobs import JobFilter, find_jobs, read_jobs, read_steps
from interlock.store.signals import InboxFilter, read_inbox, read_signals
from interlock.tracing import ProducerSpan
from interlock.workflow.cancel import cancel_job
from interlock.workflow.retry_from import retry_job_from
from interlock.workflow.signals import send_signal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock
    from interlock.store.history import HistoryRecord


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
    tags: list[str] | None
    attributes: dict[str, Any] | None
    key: str | None
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
    output: Any
    error: dict[str, Any] | None
    worker_count: int | None
    parent_task_id: UUID | None
    callback_url: str | None
    callback: dict[str, Any] | None  # its webhook, from the end of the job until it is delivered


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
    skipped_by_failure: bool
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
class SentSignal:
    """A signal that was sent to a job, or the answer to an approval, and the step that consumed it, if one has."""

    id: int
    name: str
    payload: Any
    request_id: str | None
    sent_by: str
    sent_at: datetime
    consumed_by: str | None
    consumed_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxItem:
    """A step that waits for a signal or an approval, at most until `wait_until`.

    `signal` is the name to send; that of an approval is its step. `assignee` is None if it is for anyone.
    """

    id: UUID
    job_id: UUID
    workflow: str
    version: str
    namespace: str
    step: str
    kind: str
    signal: str
    assignee: str | None
    wait_started_at: datetime
    wait_until: datetime | None


class JobHandle:
    """A submitted job. `created` is False when a job with the same request id, or key, existed already."""

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
            raise unknown_job_error(self.id)
        return JobStatus(**known_fields(JobStatus, rows[0]))

    async def steps(self) -> list[StepStatus]:
        """Read all steps in the order of the workflow; the parts of a map follow it."""
        async with self._app.connection() as connection:
            rows = await read_steps(connection, self.id)
        if not rows:
            await self.status()  # a job has steps, so this raises UnknownJobError
        return [StepStatus(**known_fields(StepStatus, row)) for row in rows]

    async def history(self, *, at: datetime | None = None) -> list[HistoryRecord]:
        """Read all transitions of the job, oldest first, checked against the lifecycle; with `at`, those until then."""
        async with self._app.connection() as connection:
            return await read_history(connection, "job", self.id, at=at)

    async def wait(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - part of the public API
        """Wait until the job has ended and return its output: the declared one, else {step: result} of the final steps.

        JobFailedError if it failed or was canceled, TimeoutError if it has not ended within `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                status = await self._wait_until_ended()
        except TimeoutError:
            raise TimeoutError(f"job {self.id} has not ended within {timeout:g} s") from None
        if status.status is not JobState.COMPLETED:
            raise _failure(status)
        return status.output

    result = wait

    async def cancel(self, reason: str | None = None) -> bool:
        """Cancel the job and its children and ask running steps to stop.

        False if it has ended, is being canceled or compensates. A job that has failed and waits for child jobs becomes
        FAILED once these have been canceled.
        """
        app = self._app
        async with app.connection() as connection:
            canceled = await cancel_job(connection, self.id, actor=app.actor, reason=reason, now=app.now())
        if not canceled:
            await self.status()  # raises UnknownJobError if there is none
        return canceled

    async def signal(self, name: str, payload: Any = None, *, request_id: str | None = None) -> SignalOutcome:
        """Send a signal that a step waits for or will wait for; each is consumed by one step, in the order of sending.

        "already sent": the same signal was sent with this request id, or the approval has been answered.
        """
        return await self._send(name, payload, request_id=request_id)

    async def _send(
        self, name: str, payload: Any, *, is_answer: bool = False, request_id: str | None = None
    ) -> SignalOutcome:
        app = self._app
        try:
            stored = to_json(payload)
            asked = None if request_id is None else CHECKS["request_id"]("request_id", request_id)
        except ValueError as error:
            raise InputError(f"signal {name!r}: {error}") from None
        async with app.connection() as connection:
            sent = await send_signal(
                connection,
                self.id,
                name,
                stored,
                actor=app.actor,
                is_answer=is_answer,
                request_id=asked,
                now=app.now(),
            )
        return "sent" if sent else "already sent"

    async def signals(self) -> list[SentSignal]:
        """Read the signals that were sent to the job, oldest first, with the steps that consumed them."""
        async with self._app.connection() as connection:
            rows = await read_signals(connection, self.id)
        if not rows:
            await self.status()  # raises UnknownJobError if there is none
        return [SentSignal(**known_fields(SentSignal, row)) for row in rows]

    async def approve(
        self,
        step: str,
        approved: bool = True,  # noqa: FBT001, FBT002 - the answer itself
        comment: str | None = None,
        *,
        by: str | None = None,
    ) -> SignalOutcome:
        """Answer an approval step, once; `by` names who decides, by default the app's actor."""
        answer = {"approved": bool(approved), "by": by or self._app.actor, "comment": comment}
        return await self._send(step, answer, is_answer=True)

    async def retry(self, *, request_id: str | None = None) -> JobHandle:
        """Submit a failed or canceled job again: its failed steps and the steps after them run, done ones are kept."""
        return await self._retry(None, request_id)

    async def retry_from(self, step: str, *, request_id: str | None = None) -> JobHandle:
        """Submit the job again from a step on; done steps that come after neither it nor a failed step are kept."""
        return await self._retry(step, request_id)

    async def _retry(self, step: str | None, request_id: str | None) -> JobHandle:
        app = self._app
        try:
            asked = None if request_id is None else CHECKS["request_id"]("request_id", request_id)
        except ValueError as error:
            raise InputError(f"job {self.id}: {error}") from None
        with ProducerSpan(app.tracer, "retry", self.workflow, namespace=None) as span:
            async with app.connection() as connection:
                stored = await retry_job_from(
                    connection,
                    self.id,
                    step,
                    actor=app.actor,
                    request_id=asked,
                    traceparent=span.traceparent,
                    now=app.now(),
                )
            span.stored(stored.id, created=stored.created)
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


def known_fields(kind: type, row: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the columns that a dataclass has fields for; a newer database may have more."""
    return {field.name: row[field.name] for field in fields(kind)}


def _failure(status: JobStatus) -> JobFailedError:
    outcome = "failed" if status.status is JobState.FAILED else "was canceled"
    cause = f": {status.reason}" if status.reason else ""
    message = f"job {status.workflow} {status.id} {outcome}{cause}"
    return JobFailedError(message, status=status.status, error=status.error)


def _check_statuses(status: str | Sequence[str] | None) -> tuple[str, ...] | None:
    statuses = None if status is None else (status,) if isinstance(status, str) else tuple(status)
    for each in statuses or ():
        if each not in JobState.__members__.values():
            raise ValueError(f"status must be one of {', '.join(JobState)}, got {each!r}")
    return statuses


def unknown_job_error(id_: UUID) -> UnknownJobError:
    """Return the error of a job that is not stored."""
    return UnknownJobError(f"there is no job {id_}: it was never submitted, is not committed yet, or was pruned")


async def find_job_summaries(
    app: Interlock,
    *,
    status: str | Sequence[str] | None,
    workflow: str | None,
    version: str | None,
    namespace: str | None,
    key: str | None,
    tags: str | Sequence[str],
    attributes: Mapping[str, Any] | None,
    parent: UUID | str | JobHandle | None,
    created_after: datetime | None,
    created_before: datetime | None,
    request_id: str | None,
    correlation_id: UUID | str | None,
    limit: int,
    before: UUID | None,
) -> list[JobSummary]:
    """Check a filter and find jobs, newest first; `before` is the last id of the previous page."""
    if version is not None and workflow is None:
        raise InputError(f"version {version!r} needs a workflow, whose version it is")
    if type(limit) is not int or limit < 0:
        raise InputError(f"limit must be a whole number from 0 on, got {limit!r}")
    try:
        cursor = None if before is None else check_id("before", before)
        wanted = JobFilter(
            statuses=_check_statuses(status),
            workflow=workflow,
            version=version,
            namespace=namespace,
            key=key,
            tags=check_tags("tags", (tags,) if isinstance(tags, str) else tags),
            attributes=check_attributes("attributes", attributes or {}),
            parent=None if parent is None else as_job_id(parent),
            created_after=None if created_after is None else check_time("created_after", created_after),
            created_before=None if created_before is None else check_time("created_before", created_before),
            request_ids=None if request_id is None else (request_id,),
            correlation_id=None if correlation_id is None else check_id("correlation_id", correlation_id),
            namespaces=app.reachable_namespaces,
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    async with app.connection() as connection:
        rows = await find_jobs(connection, wanted, before=cursor, limit=limit, now=app.now())
    return [JobSummary(**known_fields(JobSummary, row)) for row in rows]


async def find_inbox_items(
    app: Interlock,
    *,
    assignee: str | None,
    workflow: str | None,
    kind: str | None,
    limit: int,
    after: tuple[datetime, UUID] | None,
) -> list[InboxItem]:
    """Check a filter and find the steps that wait for a signal or an approval, longest wait first."""
    if kind is not None and kind not in SIGNAL_KINDS:
        raise InputError(f"kind must be one of {', '.join(SIGNAL_KINDS)}, got {kind!r}")
    wanted = InboxFilter(assignee, workflow, kind, app.reachable_namespaces)
    async with app.connection() as connection:
        rows = await read_inbox(connection, wanted, after=after, limit=limit)
    return [InboxItem(**known_fields(InboxItem, row)) for row in rows]
