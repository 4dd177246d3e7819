"""Endpoints for many rows at once: enqueue and submit lists; cancel and requeue by filter, with a preview.

Invariant: a list is stored whole or not at all, and the error names every bad element. An action by filter changes at
most one batch per request, in one transaction, and only rows that its preview could count.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast
from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response

from interlock.client.job_handle import JobSummary, known_fields
from interlock.client.submit import JobRequest
from interlock.errors import InputError, InterlockError
from interlock.model.options import NewTask
from interlock.postgres.connection import transaction
from interlock.store.enqueue import Enqueued
from interlock.store.jobs import JobFilter
from interlock.store.task_actions import (
    ActionBatch,
    ActionPreview,
    TaskAction,
    apply_task_action,
    preview_task_action,
)
from interlock.store.task_admin import TaskFilter
from interlock.supervisor.http.auth import limits_namespaces
from interlock.supervisor.http.idempotency import MutationResult, OperateMutation, RequestApp
from interlock.supervisor.http.pagination import decode_time_and_uuid, encode_cursor
from interlock.supervisor.http.problems import (
    FIRST_SERVER_ERROR_STATUS,
    MAX_ERRORS,
    invalid_elements_problem,
    problem_from_error,
    problems,
)
from interlock.supervisor.http.requests import (
    ApiRoute,
    CancelJobsRequest,
    CancelTasksRequest,
    JobFilterRequest,
    NewJobRequest,
    NewJobsRequest,
    NewTasksRequest,
    RequeueTasksRequest,
    TaskFilterRequest,
    either_name,
)
from interlock.supervisor.http.responses import (
    ActionBatchResponse,
    ActionPreviewResponse,
    BulkResponse,
    JobSummaryResponse,
    TaskSummaryResponse,
    document_of,
)
from interlock.supervisor.http.tasks import prepare_task
from interlock.workflow.cancel_by_filter import (
    JobCancelBatch,
    JobCancelPreview,
    cancel_matching_jobs,
    preview_job_cancel,
)

router = APIRouter(route_class=ApiRoute)

TaskActionResult = ActionPreviewResponse[TaskSummaryResponse] | ActionBatchResponse[TaskSummaryResponse]
JobActionResult = ActionPreviewResponse[JobSummaryResponse] | ActionBatchResponse[JobSummaryResponse]


@router.post(
    "/api/tasks/bulk",
    tags=["tasks"],
    status_code=201,
    response_model=BulkResponse,
    responses={200: {"model": BulkResponse, "description": "All of them existed already."}},
)
@limits_namespaces
@problems("invalid_input", "not_possible", "namespace_not_allowed")
async def enqueue_tasks(mutation: OperateMutation, body: NewTasksRequest) -> Response:
    """Enqueue many tasks, all or none. An error lists every bad task with its index."""

    async def work(app: RequestApp) -> MutationResult:
        tasks: list[NewTask] = []
        errors: list[tuple[int, str]] = []
        for index, item in enumerate(body.tasks):
            try:
                tasks.append(prepare_task(app, item, app.caller.scoped_key(item.request_id)))
            except InputError as error:
                errors.append((index, str(error)))
        if errors:
            raise invalid_elements_problem("tasks", errors)
        return _bulk_result(await _enqueue_all(app, tasks))

    return await mutation.execute(body, work, status=201)


async def _enqueue_all(app: RequestApp, tasks: list[NewTask]) -> list[Enqueued]:
    """Store tasks; if the database refuses some, find out which, and raise the problem that lists them."""
    errors: list[tuple[int, str]] = []
    stored = await _enqueue_part(app, tasks, 0, errors)
    if errors:
        raise invalid_elements_problem("tasks", errors)
    return stored


async def _enqueue_part(
    app: RequestApp, tasks: list[NewTask], start: int, errors: list[tuple[int, str]]
) -> list[Enqueued]:
    """Store a part in a savepoint; a part that is refused is halved until the bad tasks are found.

    Ends when as many are found as the problem lists.
    """
    if len(errors) >= MAX_ERRORS:
        return []
    try:
        async with app.connection() as connection, transaction(connection):
            made = await app.enqueue_many(tasks)
            return [Enqueued(task.id, task.created) for task in made]
    except InterlockError as error:
        problem = problem_from_error(error)
        if problem.status >= FIRST_SERVER_ERROR_STATUS:
            raise
        if len(tasks) == 1:
            errors.append((start, problem.detail))
            return []
    half = len(tasks) // 2
    first = await _enqueue_part(app, tasks[:half], start, errors)
    return first + await _enqueue_part(app, tasks[half:], start + half, errors)


@router.post(
    "/api/jobs/bulk",
    tags=["jobs"],
    status_code=201,
    response_model=BulkResponse,
    responses={200: {"model": BulkResponse, "description": "All of them existed already."}},
)
@limits_namespaces
@problems("invalid_input", "job_conflict", "not_possible", "namespace_not_allowed", "unknown_job")
async def submit_jobs(mutation: OperateMutation, body: NewJobsRequest) -> Response:
    """Submit many jobs in one transaction, all or none. Invalid jobs are listed with their index and not recorded."""

    async def work(app: RequestApp) -> MutationResult:
        async with app.connection() as connection, transaction(connection):
            made = await app.submit_many([_job_request(app, job) for job in body.jobs])
        return _bulk_result([Enqueued(job.id, job.created) for job in made])

    return await mutation.execute(body, work, status=201)


def _job_request(app: RequestApp, job: NewJobRequest) -> JobRequest:
    given = job.model_dump(exclude={"parent_job_id"}, exclude_none=True)  # otherwise the options of submit
    key = app.caller.scoped_key(job.request_id)
    return cast("JobRequest", {**given, "parent": job.parent_job_id, "request_id": key})


def _bulk_result(stored: list[Enqueued]) -> MutationResult:
    created = sum(one.created for one in stored)
    document = {"items": [one._asdict() for one in stored], "created": created}
    return MutationResult(document, 201 if created else 200)


@router.post("/api/tasks/cancel", tags=["tasks"], response_model=TaskActionResult)
@limits_namespaces
async def cancel_tasks(mutation: OperateMutation, body: CancelTasksRequest) -> Response:
    """Cancel all tasks that match a filter, batch by batch; with `preview`, count them.

    Running tasks are asked to stop, or canceled at once with `force`. An empty filter needs `all: true`.
    """
    return await mutation.execute(body, lambda app: _act_on_tasks(app, TaskAction.CANCEL, body, force=body.force))


@router.post("/api/tasks/requeue", tags=["tasks"], response_model=TaskActionResult)
@limits_namespaces
async def requeue_tasks(mutation: OperateMutation, body: RequeueTasksRequest) -> Response:
    """Requeue all tasks that match a filter, with all their tries, batch by batch; with `preview`, count them.

    By default these are the tasks in error. Steps of jobs are left out. An empty filter needs `all: true`.
    """
    return await mutation.execute(body, lambda app: _act_on_tasks(app, TaskAction.REQUEUE, body))


async def _act_on_tasks(
    app: RequestApp, action: TaskAction, body: CancelTasksRequest | RequeueTasksRequest, *, force: bool = False
) -> dict[str, Any]:
    wanted = _task_filter(app, body.filter)
    async with app.connection() as connection:
        if body.preview:
            preview = await preview_task_action(connection, action, wanted, horizon=body.horizon, now=app.now())
            return _preview_document(preview, [document_of(task) for task in preview.sample])
        horizon, before = _decode_position(body)
        batch = await apply_task_action(
            connection,
            action,
            wanted,
            limit=body.limit,
            actor=app.actor,
            horizon=horizon,
            before=before,
            reason=body.reason,
            force=force,
            now=app.now(),
        )
    return _batch_document(batch, [document_of(task) for task in batch.sample], batch.requested)


def _task_filter(app: RequestApp, given: TaskFilterRequest) -> TaskFilter:
    states = either_name(given.state, given.status)
    conditions = given.model_dump(exclude={"state", "status", "job", "request_id", "ids"}, exclude_none=True)
    return TaskFilter(
        states=None if states is None else tuple(str(state) for state in states),
        ids=None if given.ids is None else tuple(given.ids),
        job_id=given.job,
        request_ids=app.caller.request_ids(given.request_id),
        namespaces=app.reachable_namespaces,
        **conditions,
    )


@router.post("/api/jobs/cancel", tags=["jobs"], response_model=JobActionResult)
@limits_namespaces
@problems("invalid_input")
async def cancel_jobs(mutation: OperateMutation, body: CancelJobsRequest) -> Response:
    """Cancel all jobs that match a filter, with their children, batch by batch; with `preview`, count them.

    Running steps are asked to stop; a job is CANCELED when they have. An empty filter needs `all: true`.
    """

    async def work(app: RequestApp) -> dict[str, Any]:
        wanted = _job_filter(app, body.filter)
        async with app.connection() as connection:
            if body.preview:
                preview = await preview_job_cancel(connection, wanted, horizon=body.horizon, now=app.now())
                return _preview_document(
                    preview, [document_of(known_fields(JobSummary, job)) for job in preview.sample]
                )
            horizon, before = _decode_position(body)
            batch = await cancel_matching_jobs(
                connection,
                wanted,
                limit=body.limit,
                actor=app.actor,
                horizon=horizon,
                before=before,
                reason=body.reason,
                now=app.now(),
            )
        sample = [document_of(known_fields(JobSummary, job)) for job in batch.sample]
        return _batch_document(batch, sample, batch.changed)

    return await mutation.execute(body, work)


def _job_filter(app: RequestApp, given: JobFilterRequest) -> JobFilter:
    if given.version is not None and given.workflow is None:
        raise InputError(f"version {given.version!r} needs a workflow, whose version it is")
    statuses = either_name(given.status, given.state)
    conditions = given.model_dump(exclude={"status", "state", "request_id"}, exclude_none=True)
    return JobFilter(
        statuses=None if statuses is None else [str(status) for status in statuses],
        request_ids=app.caller.request_ids(given.request_id),
        namespaces=app.reachable_namespaces,
        **conditions,
    )


def _decode_position(
    body: CancelTasksRequest | RequeueTasksRequest | CancelJobsRequest,
) -> tuple[datetime | None, UUID | None]:
    """Return the horizon and the last row of the batch before: from the cursor, if there is one."""
    position = decode_time_and_uuid(body.cursor, "cursor")
    return (body.horizon, None) if position is None else position


def _preview_document(preview: ActionPreview | JobCancelPreview, sample: list[dict[str, Any]]) -> dict[str, Any]:
    obstacles = [{"reason": reason, "count": count} for reason, count in preview.obstacles.most_common()]
    return {
        "preview": True,
        "horizon": preview.horizon,
        "matched": preview.matched,
        "possible": preview.possible,
        "capped": preview.capped,
        "states": dict(preview.states),
        "obstacles": obstacles,
        "sample": sample,
    }


def _batch_document(
    batch: ActionBatch | JobCancelBatch, sample: list[dict[str, Any]], requested: int
) -> dict[str, Any]:
    at, before = batch.horizon, batch.next_before
    return {
        "preview": False,
        "horizon": at,
        "matched": batch.matched,
        "changed": batch.changed,
        "requested": requested,
        "next": None if before is None else encode_cursor([at.isoformat(), before]),
        "sample": sample,
    }
