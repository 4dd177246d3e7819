"""Jobs over REST: submitted, looked at, canceled, retried, signaled and approved.

Invariant: everything is done by the same calls as from Python and the command line, on the connection of the request.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query
from starlette.responses import Response

from interlock.client.job_handle import JobHandle, JobStatus, JobSummary, known_fields
from interlock.errors import InputError
from interlock.lifecycle import JOB, JobState
from interlock.postgres.connection import transaction
from interlock.store import jobs as stored
from interlock.supervisor.http import responses as documents
from interlock.supervisor.http.idempotency import Acting, Operating, Outcome, Reading, shown
from interlock.supervisor.http.problems import Problem, refused_move
from interlock.supervisor.http.requests import (
    USUAL,
    Approval,
    Cursor,
    JobId,
    Limit,
    Name,
    NewJob,
    Reasoned,
    Retry,
    SignalSent,
    page,
    read_id,
    slice_of,
)
from interlock.supervisor.http.responses import Move, Page, Signaled, Step, SubmittedJob
from interlock.workflow.new_job import NewJob as JobRequest
from interlock.workflow.submit import reject_job

router = APIRouter(tags=["jobs"])


@router.post("/api/jobs", status_code=201, response_model=SubmittedJob, responses={200: {"model": SubmittedJob}})
async def submit_job(act: Operating, body: NewJob) -> Response:
    """Submit a job of a workflow; one whose input does not fit the workflow's schema is 422, and recorded as FAILED."""

    async def work(app: Acting) -> Outcome:
        try:
            async with app.connection() as connection, transaction(connection):
                job = await app.submit(
                    body.workflow,
                    body.input,
                    version=body.version,
                    request_id=act.request_id(body),
                    parent=body.parent_job_id,
                    worker_count=body.worker_count,
                    timeout=body.timeout,
                    correlation_id=body.correlation_id,
                )
        except InputError as error:
            return await _rejected(app, body, error, act.request.url.path)
        return await _submitted(job)

    return await act.perform(body, work, status=201)


@router.post(
    "/api/jobs/{job_id}/retry", status_code=201, response_model=SubmittedJob, responses={200: {"model": SubmittedJob}}
)
async def retry_job(act: Operating, job_id: JobId, body: Retry) -> Response:
    """Submit a job that has ended anew from a step on; what was done before it is not done again."""

    async def work(app: Acting) -> Outcome:
        job = app.job(job_id)
        status = await job.status()
        if not status.has_ended:
            raise Problem("not_possible", f"job {job_id} is {status.status}: it can be retried once it has ended")
        return await _submitted(await job.retry_from(body.step, request_id=act.request_id(body)))

    return await act.perform(body, work, status=201)


@router.post("/api/jobs/{job_id}/cancel", response_model=documents.Job)
async def cancel_job(act: Operating, job_id: JobId, body: Reasoned | None = None) -> Response:
    """Cancel a job and its children. What runs is asked to stop; the job is CANCELED when it has."""
    given = body or Reasoned()

    async def work(app: Acting) -> Any:
        job = app.job(job_id)
        canceled = await job.cancel(given.reason)
        status = await job.status()
        if not canceled:
            about = f"Job is about to become {status.ending}: {status.reason}"
            raise refused_move(JOB, job_id, status.status, JobState.CANCELED, about)
        return asdict(status)

    return await act.perform(given, work)


@router.post("/api/jobs/{job_id}/signal", response_model=Signaled)
async def signal_job(act: Operating, job_id: JobId, body: SignalSent) -> Response:
    """Send a signal that a step waits for, or will; the first of a name counts."""

    async def work(app: Acting) -> Any:
        job = await _going_on(app, job_id)
        return {"outcome": await job.signal(body.name, body.payload)}

    return await act.perform(body, work)


@router.post("/api/jobs/{job_id}/approve", response_model=Signaled)
async def approve_step(act: Operating, job_id: JobId, body: Approval) -> Response:
    """Answer a step that waits for a person, in the name of the caller."""

    async def work(app: Acting) -> Any:
        job = await _going_on(app, job_id)
        return {"outcome": await job.approve(body.step, body.approved, body.comment)}

    return await act.perform(body, work)


@router.get("/api/jobs", response_model=Page[documents.JobSummary])
async def list_jobs(
    app: Reading,
    status: Annotated[JobState | None, Query(description="In this state.")] = None,
    workflow: Annotated[Name | None, Query(description="Of this workflow.")] = None,
    namespace: Annotated[Name | None, Query(description="Of this namespace.")] = None,
    limit: Limit = USUAL,
    cursor: Cursor = None,
) -> Response:
    """List jobs, the newest first."""
    found = await app.find_jobs(
        status=status, workflow=workflow, namespace=namespace, limit=limit + 1, before=read_id(cursor)
    )
    return shown(page([asdict(job) for job in found], limit, _place))


@router.get("/api/jobs/{job_id}", response_model=documents.Job)
async def show_job(app: Reading, job_id: JobId) -> Response:
    """Show a job."""
    return shown(asdict(await app.job(job_id).status()))


@router.get("/api/jobs/{job_id}/steps", response_model=Page[Step])
async def list_steps(app: Reading, job_id: JobId, limit: Limit = USUAL, cursor: Cursor = None) -> Response:
    """List the steps of a job as they were declared, each map with its parts behind it."""
    return shown(_documents(slice_of(await app.job(job_id).steps(), limit, cursor)))


@router.get("/api/jobs/{job_id}/history", response_model=Page[Move])
async def show_job_history(app: Reading, job_id: JobId, limit: Limit = USUAL, cursor: Cursor = None) -> Response:
    """List every move that a job made, oldest first."""
    records = await app.job(job_id).history()
    if not records:
        await app.job(job_id).status()
    return shown(_documents(slice_of(records, limit, cursor)))


@router.get("/api/jobs/{job_id}/children", response_model=Page[documents.JobSummary])
async def list_children(app: Reading, job_id: JobId, limit: Limit = USUAL, cursor: Cursor = None) -> Response:
    """List the child jobs of a job, the newest first."""
    async with app.connection() as connection:
        rows = await stored.find_jobs(connection, parent=job_id, before=read_id(cursor), limit=limit + 1)
    if not rows:
        await app.job(job_id).status()
    return shown(page([known_fields(JobSummary, row) for row in rows], limit, _place))


async def _submitted(job: JobHandle) -> Outcome:
    status: JobStatus = await job.status()
    return Outcome({**asdict(status), "created": job.created}, 201 if job.created else 200)


async def _rejected(app: Acting, body: NewJob, error: InputError, path: str) -> Outcome:
    """Record a job that does not fit its workflow as one that failed, and say so."""
    job = JobRequest(body.workflow, body.input, version=body.version)
    async with app.connection() as connection:
        id_ = await reject_job(connection, job, str(error), actor=app.actor, now=app.now())
    problem = Problem("invalid_input", str(error), {} if id_ is None else {"job_id": str(id_)})
    return Outcome(problem.document(path), problem.status)


async def _going_on(app: Acting, job_id: UUID) -> JobHandle:
    """Give a job that a signal can still reach."""
    job = app.job(job_id)
    status = await job.status()
    if status.has_ended or status.ending is not None:
        word = status.ending or status.status
        raise Problem("not_possible", f"job {job_id} is {word}: a signal cannot reach it any more")
    return job


def _place(last: dict[str, Any]) -> list[Any]:
    return [last["id"]]


def _documents(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "items": [asdict(item) for item in found["items"]]}
