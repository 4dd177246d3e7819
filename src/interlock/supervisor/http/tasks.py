"""Tasks over REST: enqueued, looked at, waited for, canceled and requeued.

Invariant: a task that the supervisor's own app declares is checked against its signature; any other is taken by its
name, and the worker that runs it says whether its arguments fit.
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
from interlock.model.options import NewTask as PreparedTask
from interlock.supervisor.http.idempotency import Acting, Operating, Outcome, Reading, shown
from interlock.supervisor.http.problems import Problem, refused_move
from interlock.supervisor.http.requests import (
    USUAL,
    CancelTask,
    Cursor,
    Limit,
    Name,
    NewTask,
    Reasoned,
    TaskId,
    page,
    read_id,
    slice_of,
)
from interlock.supervisor.http.responses import (
    CanceledTask,
    EnqueuedTask,
    Page,
    Task,
    TaskMove,
    TaskResult,
    TaskSummary,
)

router = APIRouter(tags=["tasks"])

LONGEST_WAIT = 20.0


@router.post("/api/tasks", status_code=201, response_model=EnqueuedTask, responses={200: {"model": EnqueuedTask}})
async def enqueue_task(act: Operating, body: NewTask) -> Response:
    """Enqueue a task."""

    async def work(app: Acting) -> Outcome:
        (made,) = await app.enqueue_many([_prepared(app, body, act.request_id(body))])
        document = {**asdict(await made.status()), "created": made.created}
        return Outcome(document, 201 if made.created else 200)

    return await act.perform(body, work, status=201)


@router.post("/api/tasks/{task_id}/cancel", response_model=CanceledTask)
async def cancel_task(act: Operating, task_id: TaskId, body: CancelTask | None = None) -> Response:
    """Cancel a task: at once if it does not run, else by asking its worker, or at once too with `force`."""
    given = body or CancelTask()

    async def work(app: Acting) -> Any:
        task = app.handle(task_id)
        outcome = await task.cancel(given.reason, force=given.force)
        status = await task.status()
        if outcome == "ended":
            raise refused_move(TASK_ROW, task_id, status.state, TaskRowState.CANCELED, "Task has ended")
        return {"outcome": outcome, "task": asdict(status)}

    return await act.perform(given, work)


@router.post("/api/tasks/{task_id}/requeue", response_model=Task)
async def requeue_task(act: Operating, task_id: TaskId, body: Reasoned | None = None) -> Response:
    """Give a task that is in error or was canceled a new set of tries."""
    given = body or Reasoned()

    async def work(app: Acting) -> Any:
        task = app.handle(task_id)
        _refuse_step(await task.status())
        requeued = await task.requeue(given.reason)
        status = await task.status()
        if not requeued:
            taken = f"Another task has the unique key {status.unique_key!r} now"
            raise refused_move(TASK_ROW, task_id, status.state, TaskRowState.PENDING, taken)
        return asdict(status)

    return await act.perform(given, work)


@router.get("/api/tasks", response_model=Page[TaskSummary])
async def list_tasks(
    app: Reading,
    state: Annotated[list[TaskRowState] | None, Query(description="In one of these states.")] = None,
    namespace: Annotated[Name | None, Query(description="Of this namespace.")] = None,
    type: Annotated[Name | None, Query(description="Of this type.")] = None,  # noqa: A002 - the name of the column
    tag: Annotated[Name | None, Query(description="With this tag.")] = None,
    limit: Limit = USUAL,
    cursor: Cursor = None,
) -> Response:
    """List tasks, the newest first."""
    found = await app.find(
        states=state, namespace=namespace, type=type, tag=tag, limit=limit + 1, before=read_id(cursor)
    )
    return shown(page([asdict(task) for task in found], limit, lambda last: [last["id"]]))


@router.get("/api/tasks/{task_id}", response_model=Task)
async def show_task(app: Reading, task_id: TaskId) -> Response:
    """Show a task."""
    return shown(asdict(await app.handle(task_id).status()))


@router.get("/api/tasks/{task_id}/history", response_model=Page[TaskMove])
async def show_task_history(app: Reading, task_id: TaskId, limit: Limit = USUAL, cursor: Cursor = None) -> Response:
    """List every move that a task made, oldest first."""
    task = app.handle(task_id)
    records = await task.history()
    if not records:
        await task.status()
    found = slice_of(records, limit, cursor)
    return shown({**found, "items": [asdict(record) for record in found["items"]]})


@router.get(
    "/api/tasks/{task_id}/result",
    response_model=TaskResult,
    responses={202: {"model": TaskResult, "description": "It has not ended."}},
)
async def show_result(
    request: Request,
    app: Reading,
    task_id: TaskId,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="Wait for its end so many seconds.")] = 0,
) -> Response:
    """Show what came of a task: 200 when it has ended, well or not, 202 when it has not."""
    task = app.handle(task_id)
    status = await task.status()
    if wait and not status.has_ended:
        await _wait(task, min(wait, request.app.state.config.supervisor_timeout / 2))
        status = await task.status()
    told = {name: getattr(status, name) for name in ("id", "state", "output", "error")}
    return shown({**told, "ended": status.has_ended}, 200 if status.has_ended else 202)


async def _wait(task: handle.TaskHandle[Any], seconds: float) -> None:
    try:
        await task.result(seconds)
    except (TimeoutError, TaskFailedError):
        return


def _prepared(app: Interlock, body: NewTask, request_id: str | None) -> PreparedTask:
    given = body.model_dump(exclude={"type", "input", "request_id"}, exclude_none=True)
    options: dict[str, Any] = {**given, "request_id": request_id}
    if app.tasks.get(body.type) is None:
        return unchecked_task(body.type, body.input, options, app.config.callback_url)
    task = app.tasks[body.type]
    return task.options(**options).prepare(**task.decode(body.input))


def _refuse_step(status: TaskStatus) -> None:
    try:
        refuse_step(status)
    except InputError as error:
        raise Problem("not_possible", str(error)) from None
