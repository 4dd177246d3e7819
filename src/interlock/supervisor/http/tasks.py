"""Endpoints of tasks: enqueue, read, wait for the result, cancel, requeue.

Invariant: the arguments of a task that the supervisor's own app declares are checked against its signature. Any other
type is accepted by name, and the worker that runs it checks the arguments.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from interlock.client import task_handle as handle
from interlock.client.app import Interlock
from interlock.client.task import unchecked_task
from interlock.client.task_handle import TaskStatus, refuse_step
from interlock.errors import InputError, TaskFailedError
from interlock.lifecycle import TASK_ROW, TaskRowState
from interlock.model.options import NewTask
from interlock.supervisor.http.idempotency import MutationResult, OperateMutation, ReadApp, RequestApp, json_response
from interlock.supervisor.http.pagination import DEFAULT_LIMIT, Cursor, Limit, decode_id, make_page, slice_page
from interlock.supervisor.http.problems import Problem, illegal_transition_problem
from interlock.supervisor.http.requests import CancelTaskRequest, Name, NewTaskRequest, ReasonedRequest, TaskId
from interlock.supervisor.http.responses import (
    CanceledTaskResponse,
    EnqueuedTaskResponse,
    Page,
    TaskMoveResponse,
    TaskResponse,
    TaskResultResponse,
    TaskSummaryResponse,
)

router = APIRouter(tags=["tasks"])

MAX_WAIT_S = 20.0


@router.post(
    "/api/tasks", status_code=201, response_model=EnqueuedTaskResponse, responses={200: {"model": EnqueuedTaskResponse}}
)
async def enqueue_task(mutation: OperateMutation, body: NewTaskRequest) -> Response:
    """Enqueue a task."""

    async def work(app: RequestApp) -> MutationResult:
        (made,) = await app.enqueue_many([_prepare_task(app, body, mutation.request_id(body))])
        document = {**asdict(await made.status()), "created": made.created}
        return MutationResult(document, 201 if made.created else 200)

    return await mutation.execute(body, work, status=201)


@router.post("/api/tasks/{task_id}/cancel", response_model=CanceledTaskResponse)
async def cancel_task(mutation: OperateMutation, task_id: TaskId, body: CancelTaskRequest | None = None) -> Response:
    """Cancel a task: at once if it is not running, or with `force`; otherwise its worker is asked to stop it."""
    command = body or CancelTaskRequest()

    async def work(app: RequestApp) -> Any:
        task = app.handle(task_id)
        outcome = await task.cancel(command.reason, force=command.force)
        status = await task.status()
        if outcome == "ended":
            raise illegal_transition_problem(TASK_ROW, task_id, status.state, TaskRowState.CANCELED, "Task has ended")
        return {"outcome": outcome, "task": asdict(status)}

    return await mutation.execute(command, work)


@router.post("/api/tasks/{task_id}/requeue", response_model=TaskResponse)
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
        return asdict(status)

    return await mutation.execute(command, work)


@router.get("/api/tasks", response_model=Page[TaskSummaryResponse])
async def list_tasks(
    app: ReadApp,
    state: Annotated[list[TaskRowState] | None, Query(description="In one of these states.")] = None,
    namespace: Annotated[Name | None, Query(description="Of this namespace.")] = None,
    type: Annotated[Name | None, Query(description="Of this type.")] = None,  # noqa: A002 - the name of the column
    tag: Annotated[Name | None, Query(description="With this tag.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List tasks, the newest first."""
    found = await app.find(
        states=state, namespace=namespace, type=type, tag=tag, limit=limit + 1, before=decode_id(cursor)
    )
    return json_response(make_page([asdict(task) for task in found], limit, lambda last: [last["id"]]))


@router.get("/api/tasks/{task_id}", response_model=TaskResponse)
async def show_task(app: ReadApp, task_id: TaskId) -> Response:
    """Show a task."""
    return json_response(asdict(await app.handle(task_id).status()))


@router.get("/api/tasks/{task_id}/history", response_model=Page[TaskMoveResponse])
async def show_task_history(
    app: ReadApp, task_id: TaskId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
) -> Response:
    """List every transition of a task, oldest first."""
    task = app.handle(task_id)
    records = await task.history()
    if not records:
        await task.status()
    page = slice_page(records, limit, cursor)
    return json_response({**page, "items": [asdict(record) for record in page["items"]]})


@router.get(
    "/api/tasks/{task_id}/result",
    response_model=TaskResultResponse,
    responses={202: {"model": TaskResultResponse, "description": "It has not ended."}},
)
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
    return json_response({**result, "ended": status.has_ended}, 200 if status.has_ended else 202)


async def _wait(task: handle.TaskHandle[Any], seconds: float) -> None:
    try:
        await task.result(seconds)
    except (TimeoutError, TaskFailedError):
        return


def _prepare_task(app: Interlock, body: NewTaskRequest, request_id: str | None) -> NewTask:
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
