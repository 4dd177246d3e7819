"""Endpoints of supervised workers: create, start, pause, resume, terminate, read.

Invariant: an endpoint changes the row only; the pool that holds the row makes the process follow.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from interlock.errors import IllegalTransition
from interlock.lifecycle import SupervisedWorkerEvent, SupervisedWorkerState
from interlock.store.access import TokenScope
from interlock.store.leader import read_clock
from interlock.store.workers import (
    WorkerSpec,
    create_worker,
    find_worker_page,
    kill_worker,
    move_worker,
    read_last_worker_move,
    read_worker,
    transition_worker,
)
from interlock.supervisor.http.idempotency import (
    AdminMutation,
    Mutation,
    OperateMutation,
    ReadApp,
    RequestApp,
    json_response,
)
from interlock.supervisor.http.pagination import (
    DEFAULT_LIMIT,
    Cursor,
    Limit,
    decode_time_and_id,
    history_page,
    time_page,
)
from interlock.supervisor.http.problems import Problem, problem_from_error, problems
from interlock.supervisor.http.requests import (
    ApiRoute,
    Moment,
    Name,
    NewWorkerRequest,
    PoolFilter,
    ReasonedRequest,
    StateTransitionRequest,
    TerminateWorkerRequest,
    WorkerId,
    either_name,
)
from interlock.supervisor.http.responses import (
    LOCATION,
    MoveResponse,
    Page,
    StateTransitionResult,
    WorkerResponse,
    document_of,
    with_location,
)

router = APIRouter(tags=["workers"], route_class=ApiRoute)

INTERNAL_COLUMNS = frozenset({"metadata", "seen_until"})


@router.post("/api/workers", status_code=201, response_model=WorkerResponse, responses={**LOCATION})
async def make_worker(mutation: AdminMutation, body: NewWorkerRequest) -> Response:
    """Create a worker. It is IDLE until it is started."""

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            id_ = await create_worker(
                connection,
                workspace_id=body.workspace_id,
                spec=WorkerSpec(**body.spec_values()),
                labels=body.labels,
                actor=app.actor,
                now=app.now(),
            )
            return worker_document(await read_worker(connection, id_))

    return with_location(await mutation.execute(body, work, status=201), "/api/workers/{id}")


@router.post("/api/workers/{worker_id}/start", response_model=WorkerResponse)
@problems("unknown_worker", "illegal_transition")
async def start_worker(mutation: OperateMutation, worker_id: WorkerId, body: ReasonedRequest | None = None) -> Response:
    """Start a worker that is IDLE: its process starts and claims tasks."""
    return await _move(mutation, worker_id, SupervisedWorkerEvent.START_TASK, body)


@router.post("/api/supervisor/workers/{worker_id}/pause", response_model=WorkerResponse)
@problems("unknown_worker", "illegal_transition")
async def pause_worker(mutation: OperateMutation, worker_id: WorkerId, body: ReasonedRequest | None = None) -> Response:
    """Pause a worker that is RUNNING: it finishes the tasks that it holds and claims no more."""
    return await _move(mutation, worker_id, SupervisedWorkerEvent.PAUSE, body)


@router.post("/api/supervisor/workers/{worker_id}/resume", response_model=WorkerResponse)
@problems("unknown_worker", "illegal_transition")
async def resume_worker(
    mutation: OperateMutation, worker_id: WorkerId, body: ReasonedRequest | None = None
) -> Response:
    """Resume a worker that is PAUSED: it claims tasks again."""
    return await _move(mutation, worker_id, SupervisedWorkerEvent.RESUME, body)


@router.post("/api/supervisor/workers/{worker_id}/terminate", response_model=WorkerResponse)
@problems("unknown_worker", "illegal_transition", "invalid_input")
async def terminate_worker(
    mutation: AdminMutation, worker_id: WorkerId, body: TerminateWorkerRequest | None = None
) -> Response:
    """Terminate a worker in any state: running tasks get its grace, and what does not finish returns to the queue.

    With `force`, its process and the process group are killed at once, also while it stops already.
    """
    command = body or TerminateWorkerRequest()
    if not command.force:
        return await _move(mutation, worker_id, SupervisedWorkerEvent.TERMINATE, command)

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            await kill_worker(connection, worker_id, actor=app.actor, reason=command.reason, now=app.now())
            return worker_document(await read_worker(connection, worker_id))

    return await mutation.execute(command, work)


@router.post("/api/supervisor/workers/{worker_id}/transition", response_model=StateTransitionResult)
@problems("unknown_worker", "illegal_transition")
async def move_worker_to_state(
    mutation: OperateMutation, worker_id: WorkerId, body: StateTransitionRequest
) -> Response:
    """Move a worker to a state. An illegal transition is 409; the problem has the members of the result too."""
    if body.worker_id != worker_id:
        message = "differs from the worker of the path"
        raise Problem(
            "invalid_request", f"worker_id: {message}", {"errors": [{"field": "worker_id", "message": message}]}
        )
    if body.to_state is SupervisedWorkerState.TERMINATED:
        mutation.caller.require(TokenScope.ADMIN, "terminating a worker")

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            moment = await read_clock(connection, now=app.now())
            try:
                move = await transition_worker(
                    connection, worker_id, body.to_state, actor=app.actor, reason=body.reason, now=app.now()
                )
            except IllegalTransition as error:
                problem = problem_from_error(error)
                problem.extensions |= StateTransitionResult(
                    worker_id=worker_id,
                    from_state=SupervisedWorkerState(str(error.from_state)),
                    to_state=body.to_state,
                    timestamp=moment,
                    success=False,
                    error=str(error),
                ).model_dump()
                raise problem from error
            recorded = await read_last_worker_move(connection, worker_id)
        return {
            "worker_id": worker_id,
            "from_state": move.from_state,
            "to_state": move.to_state,
            "timestamp": moment if recorded is None else recorded["recorded_at"],
            "success": True,
            "error": None,
        }

    return await mutation.execute(body, work)


@router.get("/api/workers", response_model=Page[WorkerResponse])
async def list_workers(
    app: ReadApp,
    status: Annotated[list[SupervisedWorkerState] | None, Query(description="In one of these states.")] = None,
    state: Annotated[list[SupervisedWorkerState] | None, Query(description="The same as `status`.")] = None,
    workspace_id: Annotated[Name | None, Query(description="Of this workspace.")] = None,
    role: Annotated[Name | None, Query(description="worker or orchestrator.")] = None,
    pool: Annotated[PoolFilter | None, Query(description="Of this pool.")] = None,
    namespace: Annotated[Name | None, Query(description="Serves this namespace.")] = None,
    host: Annotated[Name | None, Query(description="Its process runs on this host.")] = None,
    created_after: Annotated[Moment | None, Query(description="Created at this time or later.")] = None,
    created_before: Annotated[Moment | None, Query(description="Created before this time.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List workers, the newest first, including those that registered themselves."""
    async with app.connection() as connection:
        page = await find_worker_page(
            connection,
            statuses=either_name(status, state),
            workspace_id=workspace_id,
            role=role,
            pool=pool,
            namespace=namespace,
            host=host,
            created_after=created_after,
            created_before=created_before,
            before=decode_time_and_id(cursor),
            limit=limit,
        )
    return json_response(time_page(page, worker_document))


@router.get("/api/workers/{worker_id}", response_model=WorkerResponse)
@problems("unknown_worker")
async def show_worker(app: ReadApp, worker_id: WorkerId) -> Response:
    """Show a worker."""
    async with app.connection() as connection:
        return json_response(worker_document(await read_worker(connection, worker_id)))


@router.get("/api/workers/{worker_id}/history", response_model=Page[MoveResponse])
@problems("unknown_worker")
async def show_worker_history(
    app: ReadApp, worker_id: WorkerId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
) -> Response:
    """List every transition of a worker, oldest first."""
    async with app.connection() as connection:
        page = await history_page(connection, "worker", worker_id, limit, cursor)
        if not page["items"]:
            await read_worker(connection, worker_id)
    return json_response(page)


async def _move(
    mutation: Mutation, worker_id: str, event: SupervisedWorkerEvent, body: ReasonedRequest | None
) -> Response:
    command = body or ReasonedRequest()

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            await move_worker(connection, worker_id, event, actor=app.actor, reason=command.reason, now=app.now())
            return worker_document(await read_worker(connection, worker_id))

    return await mutation.execute(command, work)


def worker_document(row: dict[str, Any]) -> dict[str, Any]:
    """Return a worker as responses show it."""
    metadata = row["metadata"]
    return {
        **document_of({name: value for name, value in row.items() if name not in INTERNAL_COLUMNS}),
        "role": metadata.get("role", "worker"),
        "spec": metadata.get("spec"),
        "labels": metadata.get("labels") or {},
    }
