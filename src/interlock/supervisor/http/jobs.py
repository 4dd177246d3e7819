"""Endpoints of jobs: submit, read, cancel, retry, signal, approve.

Invariant: an endpoint makes the same calls as the Python API and the command line, on the request's connection.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query
from starlette.responses import Response

from interlock.client.job_handle import JobHandle, JobStatus, JobSummary, find_inbox_items, known_fields
from interlock.errors import InputError, RequestReusedError
from interlock.lifecycle import JOB, JobState
from interlock.model.options import MAX_ATTRIBUTES, MAX_TAGS, parse_attributes
from interlock.postgres.connection import transaction
from interlock.store import jobs as stored
from interlock.supervisor.http.idempotency import MutationResult, OperateMutation, ReadApp, RequestApp, json_response
from interlock.supervisor.http.pagination import (
    DEFAULT_LIMIT,
    Cursor,
    Limit,
    decode_id,
    decode_time_and_uuid,
    make_page,
    slice_page,
)
from interlock.supervisor.http.problems import Problem, illegal_transition_problem
from interlock.supervisor.http.requests import (
    ApprovalRequest,
    JobId,
    Moment,
    Name,
    NewJobRequest,
    ReasonedRequest,
    RetryRequest,
    SignalSentRequest,
)
from interlock.supervisor.http.responses import (
    InboxItemResponse,
    JobResponse,
    JobSummaryResponse,
    MoveResponse,
    Page,
    SentSignalResponse,
    SignaledResponse,
    StepResponse,
    SubmittedJobResponse,
)
from interlock.workflow.new_job import NewJob
from interlock.workflow.submit import reject_job

router = APIRouter(tags=["jobs"])


@router.post(
    "/api/jobs", status_code=201, response_model=SubmittedJobResponse, responses={200: {"model": SubmittedJobResponse}}
)
async def submit_job(mutation: OperateMutation, body: NewJobRequest) -> Response:
    """Submit a job of a workflow. Input that does not fit its schema is answered with 422 and recorded as FAILED."""

    async def work(app: RequestApp) -> MutationResult:
        try:
            async with app.connection() as connection, transaction(connection):
                job = await app.submit(
                    body.workflow,
                    body.input,
                    version=body.version,
                    request_id=mutation.request_id(body),
                    parent=body.parent_job_id,
                    worker_count=body.worker_count,
                    timeout=body.timeout,
                    correlation_id=body.correlation_id,
                    tags=body.tags,
                    attributes=body.attributes,
                    callback_url=body.callback_url,
                    key=body.key,
                    on_conflict=body.on_conflict,
                    debounce=body.debounce,
                    debounce_max=body.debounce_max,
                )
        except RequestReusedError:
            raise
        except InputError as error:
            return await _record_rejection(app, body, error, mutation.request.url.path)
        return await _submitted_result(job)

    return await mutation.execute(body, work, status=201)


@router.post(
    "/api/jobs/{job_id}/retry",
    status_code=201,
    response_model=SubmittedJobResponse,
    responses={200: {"model": SubmittedJobResponse}},
)
async def retry_job(mutation: OperateMutation, job_id: JobId, body: RetryRequest | None = None) -> Response:
    """Submit a job that has ended again: from its failed steps, or from a step on; the others keep their results."""
    command = body or RetryRequest()

    async def work(app: RequestApp) -> MutationResult:
        job = app.job(job_id)
        status = await job.status()
        if not status.has_ended:
            raise Problem("not_possible", f"job {job_id} is {status.status}: it can be retried once it has ended")
        key = mutation.request_id(command)
        retried = job.retry(request_id=key) if command.step is None else job.retry_from(command.step, request_id=key)
        return await _submitted_result(await retried)

    return await mutation.execute(command, work, status=201)


@router.post("/api/jobs/{job_id}/cancel", response_model=JobResponse)
async def cancel_job(mutation: OperateMutation, job_id: JobId, body: ReasonedRequest | None = None) -> Response:
    """Cancel a job and its children. Running steps are asked to stop; the job is CANCELED when they have."""
    command = body or ReasonedRequest()

    async def work(app: RequestApp) -> Any:
        job = app.job(job_id)
        canceled = await job.cancel(command.reason)
        status = await job.status()
        if not canceled:
            otherwise = f"Job is about to become {status.ending}: {status.reason}"
            raise illegal_transition_problem(JOB, job_id, status.status, JobState.CANCELED, otherwise)
        return asdict(status)

    return await mutation.execute(command, work)


@router.post("/api/jobs/{job_id}/signal", response_model=SignaledResponse)
async def signal_job(mutation: OperateMutation, job_id: JobId, body: SignalSentRequest) -> Response:
    """Send a signal that a step waits for, or will wait for; each is consumed by one step, in the order of sending."""

    async def work(app: RequestApp) -> Any:
        job = await _unfinished_job(app, job_id)
        return {"outcome": await job.signal(body.name, body.payload, request_id=mutation.request_id(body))}

    return await mutation.execute(body, work)


@router.post("/api/jobs/{job_id}/approve", response_model=SignaledResponse)
async def approve_step(mutation: OperateMutation, job_id: JobId, body: ApprovalRequest) -> Response:
    """Approve or reject an approval step, in the name of the caller; the first answer counts."""

    async def work(app: RequestApp) -> Any:
        job = await _unfinished_job(app, job_id)
        return {"outcome": await job.approve(body.step, body.approved, body.comment)}

    return await mutation.execute(body, work)


@router.get("/api/jobs", response_model=Page[JobSummaryResponse])
async def list_jobs(
    app: ReadApp,
    status: Annotated[list[JobState] | None, Query(description="In one of these states.")] = None,
    workflow: Annotated[Name | None, Query(description="Of this workflow.")] = None,
    version: Annotated[Name | None, Query(description="Of this version of the workflow.")] = None,
    namespace: Annotated[Name | None, Query(description="Of this namespace.")] = None,
    key: Annotated[Name | None, Query(description="With this key.")] = None,
    tag: Annotated[list[Name] | None, Query(max_length=MAX_TAGS, description="With all of these tags.")] = None,
    attribute: Annotated[
        list[Name] | None,
        Query(max_length=MAX_ATTRIBUTES, description="With all of these attributes, such as customer:7."),
    ] = None,
    parent: Annotated[UUID | None, Query(description="Children of this job.")] = None,
    created_after: Annotated[Moment | None, Query(description="Submitted at this time or later.")] = None,
    created_before: Annotated[Moment | None, Query(description="Submitted before this time.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List jobs that meet all conditions, the newest first."""
    try:
        attributes = parse_attributes("query.attribute", attribute or (), ":")
    except ValueError as error:
        raise InputError(str(error)) from None
    found = await app.find_jobs(
        status=status,
        workflow=workflow,
        version=version,
        namespace=namespace,
        key=key,
        tags=tag or (),
        attributes=attributes,
        parent=parent,
        created_after=created_after,
        created_before=created_before,
        limit=limit + 1,
        before=decode_id(cursor),
    )
    return json_response(make_page([asdict(job) for job in found], limit, _cursor_key))


@router.get("/api/jobs/{job_id}", response_model=JobResponse)
async def show_job(app: ReadApp, job_id: JobId) -> Response:
    """Show a job."""
    return json_response(asdict(await app.job(job_id).status()))


@router.get("/api/jobs/{job_id}/steps", response_model=Page[StepResponse])
async def list_steps(app: ReadApp, job_id: JobId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Response:
    """List the steps of a job in the order of their declaration, each map followed by its parts."""
    return json_response(_as_documents(slice_page(await app.job(job_id).steps(), limit, cursor)))


@router.get("/api/jobs/{job_id}/signals", response_model=Page[SentSignalResponse])
async def list_signals(app: ReadApp, job_id: JobId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Response:
    """List the signals that were sent to a job, oldest first, with the steps that consumed them."""
    return json_response(_as_documents(slice_page(await app.job(job_id).signals(), limit, cursor)))


@router.get("/api/inbox", response_model=Page[InboxItemResponse])
async def list_inbox(
    app: ReadApp,
    assignee: Annotated[Name | None, Query(description="For this assignee.")] = None,
    workflow: Annotated[Name | None, Query(description="Of this workflow.")] = None,
    kind: Annotated[Literal["signal", "approval"] | None, Query(description="Of this kind.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List the steps that wait for a signal or an approval and meet all conditions, the longest wait first."""
    found = await find_inbox_items(
        app, assignee=assignee, workflow=workflow, kind=kind, limit=limit + 1, after=decode_time_and_uuid(cursor)
    )
    items = [asdict(item) for item in found]
    return json_response(make_page(items, limit, lambda last: [last["wait_started_at"], last["id"]]))


@router.get("/api/jobs/{job_id}/history", response_model=Page[MoveResponse])
async def show_job_history(
    app: ReadApp, job_id: JobId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
) -> Response:
    """List every transition of a job, oldest first."""
    records = await app.job(job_id).history()
    if not records:
        await app.job(job_id).status()
    return json_response(_as_documents(slice_page(records, limit, cursor)))


@router.get("/api/jobs/{job_id}/children", response_model=Page[JobSummaryResponse])
async def list_children(app: ReadApp, job_id: JobId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Response:
    """List the child jobs of a job, the newest first."""
    async with app.connection() as connection:
        wanted = stored.JobFilter(parent=job_id)
        rows = await stored.find_jobs(connection, wanted, before=decode_id(cursor), limit=limit + 1)
    if not rows:
        await app.job(job_id).status()
    return json_response(make_page([known_fields(JobSummary, row) for row in rows], limit, _cursor_key))


async def _submitted_result(job: JobHandle) -> MutationResult:
    status: JobStatus = await job.status()
    return MutationResult({**asdict(status), "created": job.created}, 201 if job.created else 200)


async def _record_rejection(app: RequestApp, body: NewJobRequest, error: InputError, path: str) -> MutationResult:
    """Record a job with invalid input as FAILED; the result is a 422 with the id of that job."""
    job = NewJob(
        body.workflow,
        body.input,
        version=body.version,
        tags=body.tags,
        attributes=body.attributes,
        callback_url=body.callback_url,
        default_callback_url=app.config.callback_url,
    )
    async with app.connection() as connection:
        id_ = await reject_job(connection, job, str(error), actor=app.actor, now=app.now())
    problem = Problem("invalid_input", str(error), {} if id_ is None else {"job_id": str(id_)})
    return MutationResult(problem.document(path), problem.status)


async def _unfinished_job(app: RequestApp, job_id: UUID) -> JobHandle:
    """Return a job that can still receive a signal; 409 if it has ended."""
    job = app.job(job_id)
    status = await job.status()
    if status.has_ended or status.ending is not None:
        state = status.ending or status.status
        raise Problem("not_possible", f"job {job_id} is {state} and takes no more signals")
    return job


def _cursor_key(last: dict[str, Any]) -> list[Any]:
    return [last["id"]]


def _as_documents(page: dict[str, Any]) -> dict[str, Any]:
    return {**page, "items": [asdict(item) for item in page["items"]]}
