"""Endpoints of jobs: submit, read, cancel, retry, signal, approve.

Invariant: an endpoint makes the same calls as the Python API and the command line, on the request's connection.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query
from starlette.responses import Response

from interlock.client.job_handle import InboxItem, JobHandle, JobStatus, StepStatus, known_fields
from interlock.errors import InputError, RequestReusedError
from interlock.lifecycle import JOB, JobState
from interlock.model.options import MAX_ATTRIBUTES, MAX_TAGS, parse_attributes
from interlock.postgres.connection import transaction
from interlock.store import jobs as stored
from interlock.store.signals import InboxFilter, read_inbox_page, read_signals
from interlock.supervisor.http.auth import limits_namespaces
from interlock.supervisor.http.idempotency import MutationResult, OperateMutation, ReadApp, RequestApp, json_response
from interlock.supervisor.http.pagination import (
    DEFAULT_LIMIT,
    Cursor,
    Limit,
    bounded_page,
    decode_id,
    decode_number,
    decode_time_and_uuid,
    history_page,
    make_page,
    time_page,
)
from interlock.supervisor.http.problems import Problem, illegal_transition_problem, problems
from interlock.supervisor.http.requests import (
    ApiRoute,
    ApprovalRequest,
    JobId,
    Moment,
    Name,
    NewJobRequest,
    ReasonedRequest,
    RetryRequest,
    SignalSentRequest,
    either_name,
)
from interlock.supervisor.http.responses import (
    LOCATION,
    InboxItemResponse,
    JobResponse,
    JobSummaryResponse,
    MoveResponse,
    Page,
    SentSignalResponse,
    SignaledResponse,
    StepResponse,
    SubmittedJobResponse,
    document_of,
    with_location,
)
from interlock.workflow.new_job import NewJob
from interlock.workflow.submit import reject_job

router = APIRouter(tags=["jobs"], route_class=ApiRoute)


@router.post(
    "/api/jobs",
    status_code=201,
    response_model=SubmittedJobResponse,
    responses={**LOCATION, 200: {"model": SubmittedJobResponse, "description": "It existed already."}},
)
@limits_namespaces
@problems("invalid_input", "job_conflict", "not_possible", "namespace_not_allowed", "unknown_job")
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

    return with_location(await mutation.execute(body, work, status=201), "/api/jobs/{id}")


@router.post(
    "/api/jobs/{job_id}/retry",
    status_code=201,
    response_model=SubmittedJobResponse,
    responses={**LOCATION, 200: {"model": SubmittedJobResponse, "description": "It existed already."}},
)
@problems("unknown_job", "invalid_input", "job_conflict", "not_possible")
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

    return with_location(await mutation.execute(command, work, status=201), "/api/jobs/{id}")


@router.post("/api/jobs/{job_id}/cancel", response_model=JobResponse)
@problems("unknown_job", "illegal_transition")
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
        return document_of(status)

    return await mutation.execute(command, work)


@router.post("/api/jobs/{job_id}/signal", response_model=SignaledResponse)
@problems("unknown_job", "invalid_input", "not_possible")
async def signal_job(mutation: OperateMutation, job_id: JobId, body: SignalSentRequest) -> Response:
    """Send a signal that a step waits for, or will wait for; each is consumed by one step, in the order of sending."""

    async def work(app: RequestApp) -> Any:
        job = await _unfinished_job(app, job_id)
        return {"outcome": await job.signal(body.name, body.payload, request_id=mutation.request_id(body))}

    return await mutation.execute(body, work)


@router.post("/api/jobs/{job_id}/approve", response_model=SignaledResponse)
@problems("unknown_job", "invalid_input", "not_possible")
async def approve_step(mutation: OperateMutation, job_id: JobId, body: ApprovalRequest) -> Response:
    """Approve or reject an approval step, in the name of the caller; the first answer counts."""

    async def work(app: RequestApp) -> Any:
        job = await _unfinished_job(app, job_id)
        return {"outcome": await job.approve(body.step, body.approved, body.comment)}

    return await mutation.execute(body, work)


@router.get("/api/jobs", response_model=Page[JobSummaryResponse])
@limits_namespaces
@problems("invalid_input")
async def list_jobs(
    app: ReadApp,
    status: Annotated[list[JobState] | None, Query(description="In one of these states.")] = None,
    state: Annotated[list[JobState] | None, Query(description="The same as `status`.")] = None,
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
    request_id: Annotated[
        Name | None, Query(description="Submitted with this request id, or by the caller with this key.")
    ] = None,
    correlation_id: Annotated[UUID | None, Query(description="With this correlation id.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List jobs that meet all conditions, the newest first."""
    try:
        attributes = parse_attributes("query.attribute", attribute or (), ":")
    except ValueError as error:
        raise InputError(str(error)) from None
    if version is not None and workflow is None:
        raise InputError(f"version {version!r} needs a workflow, whose version it is")
    wanted = stored.JobFilter(
        statuses=either_name(status, state),
        workflow=workflow,
        version=version,
        namespace=namespace,
        key=key,
        tags=tag or (),
        attributes=attributes,
        parent=parent,
        created_after=created_after,
        created_before=created_before,
        request_ids=app.caller.request_ids(request_id),
        correlation_id=correlation_id,
    )
    return json_response(bounded_page(await app.find_job_page(wanted, limit=limit, before=decode_id(cursor))))


@router.get("/api/jobs/{job_id}", response_model=JobResponse)
@problems("unknown_job")
async def show_job(app: ReadApp, job_id: JobId) -> Response:
    """Show a job."""
    return json_response(document_of(await app.job(job_id).status()))


@router.get("/api/jobs/{job_id}/steps", response_model=Page[StepResponse])
@problems("unknown_job")
async def list_steps(app: ReadApp, job_id: JobId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Response:
    """List the steps of a job in the order of their declaration, each map followed by its parts."""
    async with app.connection() as connection:
        rows = await stored.read_step_page(connection, job_id, after=decode_id(cursor), limit=limit + 1)
    if not rows:
        await app.job(job_id).status()
    steps = [document_of(known_fields(StepStatus, row)) for row in rows]
    return json_response(make_page(steps, limit, _cursor_key))


@router.get("/api/jobs/{job_id}/signals", response_model=Page[SentSignalResponse])
@problems("unknown_job")
async def list_signals(app: ReadApp, job_id: JobId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Response:
    """List the signals that were sent to a job, oldest first, with the steps that consumed them."""
    async with app.connection() as connection:
        rows = await read_signals(connection, job_id, after=decode_number(cursor), limit=limit + 1)
    if not rows:
        await app.job(job_id).status()
    return json_response(make_page(rows, limit, _cursor_key))


@router.get("/api/inbox", response_model=Page[InboxItemResponse])
@limits_namespaces
async def list_inbox(
    app: ReadApp,
    assignee: Annotated[Name | None, Query(description="For this assignee.")] = None,
    workflow: Annotated[Name | None, Query(description="Of this workflow.")] = None,
    kind: Annotated[Literal["signal", "approval"] | None, Query(description="Of this kind.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List the steps that wait for a signal or an approval and meet all conditions, the longest wait first."""
    wanted = InboxFilter(assignee, workflow, kind, app.reachable_namespaces)
    async with app.connection() as connection:
        page = await read_inbox_page(connection, wanted, after=decode_time_and_uuid(cursor), limit=limit)
    return json_response(time_page(page, lambda row: document_of(InboxItem(**known_fields(InboxItem, row)))))


@router.get("/api/jobs/{job_id}/history", response_model=Page[MoveResponse])
@problems("unknown_job")
async def show_job_history(
    app: ReadApp, job_id: JobId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
) -> Response:
    """List every transition of a job, oldest first."""
    async with app.connection() as connection:
        page = await history_page(connection, "job", job_id, limit, cursor)
    if not page["items"]:
        await app.job(job_id).status()
    return json_response(page)


@router.get("/api/jobs/{job_id}/children", response_model=Page[JobSummaryResponse])
@problems("unknown_job")
async def list_children(app: ReadApp, job_id: JobId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Response:
    """List the child jobs of a job, the newest first."""
    page = await app.find_job_page(stored.JobFilter(parent=job_id), limit=limit, before=decode_id(cursor))
    if not page.items:
        await app.job(job_id).status()
    return json_response(bounded_page(page))


async def _submitted_result(job: JobHandle) -> MutationResult:
    status: JobStatus = await job.status()
    return MutationResult({**document_of(status), "created": job.created}, 201 if job.created else 200)


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
