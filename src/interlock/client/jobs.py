"""What a caller holds of a job: its id, and everything that can be asked of it or done to it.

Invariant: a handle keeps no state of the job; every answer comes from the database.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from interlock.client.options import CHECKS
from interlock.client.values import ValueRefusedError, check_json
from interlock.errors import InputError, JobFailedError, UnknownJobError
from interlock.store.jobs import (
    cancel_job,
    read_job_history,
    read_jobs,
    read_steps,
    retry_job_from,
    send_signal,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from interlock.client.app import Interlock

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
