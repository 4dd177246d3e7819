"""Endpoints of tasks: enqueue, read, wait for the result, cancel, requeue.

Invariant: the arguments of a task that the supervisor's own app declares are checked against its signature. Any other
type is accepted by name, and the worker that runs it checks the arguments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from interlock.client import task_handle as handle
from interlock.client.app import Interlock
from interlock.client.task import unchecked_task
from interlock.client.task_handle import TaskStatus, refuse_step, task_filter, task_status
from interlock.errors import InputError, TaskFailedError
from interlock.lifecycle import TASK_ROW, TaskRowState
from interlock.model.options import NewTask
from interlock.supervisor.http.auth import limits_namespaces
from interlock.supervisor.http.idempotency import MutationResult, OperateMutation, ReadApp, RequestApp, json_response
from interlock.supervisor.http.pagination import (
    DEFAULT_LIMIT,
    Cursor,
    Limit,
    bounded_page,
    decode_id,
    history_page,
)
from interlock.supervisor.http.problems import Problem, illegal_transition_problem, problems
from interlock.supervisor.http.requests import (
    ApiRoute,
    CancelTaskRequest,
    Moment,
    Name,
    NewTaskRequest,
    ReasonedRequest,
    TaskId,
    either_name,
)
from interlock.supervisor.http.responses import (
    LOCATION,
    CanceledTaskResponse,
    EnqueuedTaskResponse,
    Page,
    TaskMoveResponse,
    TaskResponse,
    TaskResultResponse,
    TaskSummaryResponse,
    document_of,
    with_location,
)

router = APIRouter(tags=["tasks"], route_class=ApiRoute)

MAX_WAIT_S = 20.0


@router.post(
    "/api/tasks",
    status_code=201,
    response_model=EnqueuedTaskResponse,
    responses={**LOCATION, 200: {"model": EnqueuedTaskResponse, "description": "It existed already."}},
)
@limits_namespaces
@problems("invalid_input", "not_possible", "namespace_not_allowed")
async def enqueue_task(mutation: OperateMutation, body: NewTaskRequest) -> Response:
    """Enqueue a task."""
    request_id = mutation.request_id(body)

    def prepare() -> NewTask:
        return prepare_task(mutation.request.app.state.app, body, request_id)

    made = await mutation.enqueue(body, prepare, _show_new_task)
    if made is not None:
        return with_location(made, "/api/tasks/{id}")

    async def work(app: RequestApp) -> MutationResult:
        (made,) = await app.enqueue_many([prepare_task(app, body, request_id)])
        document = {**document_of(await made.status()), "created": made.created}
        return MutationResult(document, 201 if made.created else 200)

    return with_location(await mutation.execute(body, work, status=201), "/api/tasks/{id}")


@router.post("/api/tasks/{task_id}/cancel", response_model=CanceledTaskResponse)
@problems("unknown_task", "illegal_transition")
async def cancel_task(mutation: OperateMutation, task_id: TaskId, body: CancelTaskRequest | None = None) -> Response:
    """Cancel a task: at once if it is not running, or with `force`; otherwise its worker is asked to stop it."""
    command = body or CancelTaskRequest()

    async def work(app: RequestApp) -> Any:
        task = app.handle(task_id)
        outcome = await task.cancel(command.reason, force=command.force)
        status = await task.status()
        if outcome == "ended":
            raise illegal_transition_problem(TASK_ROW, task_id, status.state, TaskRowState.CANCELED, "Task has ended")
        return {"outcome": outcome, "task": document_of(status)}

    return await mutation.execute(command, work)


@router.post("/api/tasks/{task_id}/requeue", response_model=TaskResponse)
@problems("unknown_task", "illegal_transition", "not_possible")
async def requeue_task(mutation: OperateMutation, task_id: TaskId, body: ReasonedRequest | None = None) -> Response:
    """Requeue a task that is in error or canceled, with all its tries."""
    command = body or ReasonedRequest()

    async def work(app: RequestApp) -> Any:
        task = app.handle(task_id)
        _refuse_step(await task.status())
        requeued = await task.requeue(command.reason)
        status = await task.status()
        if not requeued:
            otherwise = f"Another task has the unique key {status.unique_key!r} now"
            raise illegal_transition_problem(TASK_ROW, task_id, status.state, TaskRowState.PENDING, otherwise)
        return document_of(status)

    return await mutation.execute(command, work)


@router.get("/api/tasks", response_model=Page[TaskSummaryResponse])
@limits_namespaces
async def list_tasks(
    app: ReadApp,
    state: Annotated[list[TaskRowState] | None, Query(description="In one of these states.")] = None,
    status: Annotated[list[TaskRowState] | None, Query(description="The same as `state`.")] = None,
    namespace: Annotated[Name | None, Query(description="Of this namespace.")] = None,
    type: Annotated[Name | None, Query(description="Of this type.")] = None,  # noqa: A002 - the name of the column
    tag: Annotated[Name | None, Query(description="With this tag.")] = None,
    job: Annotated[UUID | None, Query(description="Steps of this job.")] = None,
    worker: Annotated[
        Name | None,
        Query(description="Held now, or held last, by this worker: its id, or that of one of its processes."),
    ] = None,
    correlation_id: Annotated[UUID | None, Query(description="With this correlation id.")] = None,
    request_id: Annotated[
        Name | None, Query(description="Enqueued with this request id, or by the caller with this key.")
    ] = None,
    unique_key: Annotated[Name | None, Query(description="With this unique key.")] = None,
    created_after: Annotated[Moment | None, Query(description="Enqueued at this time or later.")] = None,
    created_before: Annotated[Moment | None, Query(description="Enqueued before this time.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List tasks that meet all conditions, the newest first."""
    wanted = task_filter(
        either_name(state, status),
        namespace,
        type,
        tag,
        job=job,
        worker=worker,
        correlation_id=correlation_id,
        unique_key=unique_key,
        created_after=created_after,
        created_before=created_before,
    )
    wanted = replace(wanted, request_ids=app.caller.request_ids(request_id))
    return json_response(bounded_page(await app.find_page(wanted, limit=limit, before=decode_id(cursor))))


@router.get("/api/tasks/{task_id}", response_model=TaskResponse)
@problems("unknown_task")
async def show_task(app: ReadApp, task_id: TaskId) -> Response:
    """Show a task."""
    return json_response(document_of(await app.handle(task_id).status()))


@router.get("/api/tasks/{task_id}/history", response_model=Page[TaskMoveResponse])
@problems("unknown_task")
async def show_task_history(
    app: ReadApp, task_id: TaskId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
) -> Response:
    """List every transition of a task, oldest first."""
    async with app.connection() as connection:
        page = await history_page(connection, "task", task_id, limit, cursor)
    if not page["items"]:
        await app.handle(task_id).status()
    return json_response(page)


@router.get(
    "/api/tasks/{task_id}/result",
    response_model=TaskResultResponse,
    responses={202: {"model": TaskResultResponse, "description": "It has not ended."}},
)
@problems("unknown_task")
async def show_result(
    request: Request,
    app: ReadApp,
    task_id: TaskId,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for its end.")] = 0,
) -> Response:
    """Show the result of a task: 200 if it has ended, successfully or not; 202 if it has not."""
    task = app.handle(task_id)
    status = await task.status()
    if wait and not status.has_ended:
        await _wait(task, min(wait, request.app.state.config.supervisor_timeout / 2))
        status = await task.status()
    result = {name: getattr(status, name) for name in ("id", "state", "output", "error")}
    return json_response(document_of({**result, "ended": status.has_ended}), 200 if status.has_ended else 202)


def _show_new_task(row: dict[str, Any]) -> dict[str, Any]:
    return {**document_of(task_status(row)), "created": True}


async def _wait(task: handle.TaskHandle[Any], seconds: float) -> None:
    try:
        await task.result(seconds)
    except (TimeoutError, TaskFailedError):
        return


def prepare_task(app: Interlock, body: NewTaskRequest, request_id: str | None) -> NewTask:
    """Check a task of a request: its arguments against the signature if the app declares it, its options always."""
    given = body.model_dump(exclude={"type", "input", "request_id"}, exclude_none=True)
    options: dict[str, Any] = {**given, "request_id": request_id}
    if app.tasks.get(body.type) is None:
        config = app.config
        return unchecked_task(
            body.type, body.input, options, largest_input=config.largest_input, callback_url=config.callback_url
        )
    task = app.tasks[body.type]
    return task.options(**options).prepare(**task.decode(body.input))


def _refuse_step(status: TaskStatus) -> None:
    try:
        refuse_step(status)
    except InputError as error:
        raise Problem("not_possible", str(error)) from None
