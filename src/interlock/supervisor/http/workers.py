"""Endpoints of supervised workers: create, start, pause, resume, terminate, read.

Invariant: an endpoint changes the row only; the pool that holds the row makes the process follow.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from interlock.lifecycle import SupervisedWorkerEvent, SupervisedWorkerState
from interlock.store.workers import WorkerSpec, create_worker, find_workers, move_worker, read_worker, read_worker_moves
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
    decode_number,
    decode_time_and_id,
    make_page,
)
from interlock.supervisor.http.requests import Name, NewWorkerRequest, ReasonedRequest, WorkerId
from interlock.supervisor.http.responses import MoveResponse, Page, WorkerResponse

router = APIRouter(tags=["workers"])

INTERNAL_COLUMNS = frozenset({"metadata", "seen_until"})


@router.post("/api/workers", status_code=201, response_model=WorkerResponse)
async def make_worker(mutation: AdminMutation, body: NewWorkerRequest) -> Response:
    """Create a worker. It is IDLE until it is started."""

    async def work(app: RequestApp) -> Any:
        spec = body.model_dump(exclude={"request_id", "workspace_id", "labels"})
        if spec["namespaces"] is not None:
            spec["namespaces"] = tuple(dict.fromkeys(spec["namespaces"]))
        async with app.connection() as connection:
            id_ = await create_worker(
                connection,
                workspace_id=body.workspace_id,
                spec=WorkerSpec(**spec),
                labels=body.labels,
                actor=app.actor,
                now=app.now(),
            )
            return worker_document(await read_worker(connection, id_))

    return await mutation.execute(body, work, status=201)


@router.post("/api/workers/{worker_id}/start", response_model=WorkerResponse)
async def start_worker(mutation: OperateMutation, worker_id: WorkerId, body: ReasonedRequest | None = None) -> Response:
    """Start a worker that is IDLE: its process starts and claims tasks."""
    return await _move(mutation, worker_id, SupervisedWorkerEvent.START_TASK, body)


@router.post("/api/supervisor/workers/{worker_id}/pause", response_model=WorkerResponse)
async def pause_worker(mutation: OperateMutation, worker_id: WorkerId, body: ReasonedRequest | None = None) -> Response:
    """Pause a worker that is RUNNING: it finishes the tasks that it holds and claims no more."""
    return await _move(mutation, worker_id, SupervisedWorkerEvent.PAUSE, body)


@router.post("/api/supervisor/workers/{worker_id}/resume", response_model=WorkerResponse)
async def resume_worker(
    mutation: OperateMutation, worker_id: WorkerId, body: ReasonedRequest | None = None
) -> Response:
    """Resume a worker that is PAUSED: it claims tasks again."""
    return await _move(mutation, worker_id, SupervisedWorkerEvent.RESUME, body)


@router.post("/api/supervisor/workers/{worker_id}/terminate", response_model=WorkerResponse)
async def terminate_worker(
    mutation: AdminMutation, worker_id: WorkerId, body: ReasonedRequest | None = None
) -> Response:
    """Terminate a worker in any state: its process stops, and the tasks that it held return to the queue."""
    return await _move(mutation, worker_id, SupervisedWorkerEvent.TERMINATE, body)


@router.get("/api/workers", response_model=Page[WorkerResponse])
async def list_workers(
    app: ReadApp,
    status: Annotated[SupervisedWorkerState | None, Query(description="In this state.")] = None,
    workspace_id: Annotated[Name | None, Query(description="Of this workspace.")] = None,
    role: Annotated[Name | None, Query(description="worker or orchestrator.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List workers, the newest first, including those that registered themselves."""
    async with app.connection() as connection:
        found = await find_workers(
            connection,
            status=status,
            workspace_id=workspace_id,
            role=role,
            before=decode_time_and_id(cursor),
            limit=limit + 1,
        )
    rows = [worker_document(row) for row in found]
    return json_response(make_page(rows, limit, lambda last: [last["created_at"].isoformat(), last["id"]]))


@router.get("/api/workers/{worker_id}", response_model=WorkerResponse)
async def show_worker(app: ReadApp, worker_id: WorkerId) -> Response:
    """Show a worker."""
    async with app.connection() as connection:
        return json_response(worker_document(await read_worker(connection, worker_id)))


@router.get("/api/workers/{worker_id}/history", response_model=Page[MoveResponse])
async def show_worker_history(
    app: ReadApp, worker_id: WorkerId, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
) -> Response:
    """List every transition of a worker, oldest first."""
    async with app.connection() as connection:
        moves = await read_worker_moves(connection, worker_id, after=decode_number(cursor), limit=limit + 1)
        if not moves:
            await read_worker(connection, worker_id)
    return json_response(make_page(moves, limit, lambda last: [last["id"]]))


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
        **{name: value for name, value in row.items() if name not in INTERNAL_COLUMNS},
        "role": metadata.get("role", "worker"),
        "spec": metadata.get("spec"),
        "labels": metadata.get("labels") or {},
    }
