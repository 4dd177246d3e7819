"""Workers over REST: made, started, paused, resumed, terminated and looked at.

Invariant: a call moves the row and nothing else. Whoever runs the process sees to it that it follows.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from interlock.lifecycle import SupervisedWorkerEvent, SupervisedWorkerState
from interlock.store.workers import WorkerSpec, create_worker, find_workers, move_worker, read_worker, read_worker_moves
from interlock.supervisor.http.idempotency import Act, Acting, Administering, Operating, Reading, shown
from interlock.supervisor.http.requests import (
    USUAL,
    Cursor,
    Limit,
    Name,
    NewWorker,
    Reasoned,
    WorkerId,
    page,
    read_number,
    read_time_and_id,
)
from interlock.supervisor.http.responses import Move, Page, Worker

router = APIRouter(tags=["workers"])

HIDDEN = frozenset({"metadata", "seen_until"})


@router.post("/api/workers", status_code=201, response_model=Worker)
async def make_worker(act: Administering, body: NewWorker) -> Response:
    """Make a worker. It is IDLE until it is started."""

    async def work(app: Acting) -> Any:
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
            return described(await read_worker(connection, id_))

    return await act.perform(body, work, status=201)


@router.post("/api/workers/{worker_id}/start", response_model=Worker)
async def start_worker(act: Operating, worker_id: WorkerId, body: Reasoned | None = None) -> Response:
    """Start a worker that is IDLE: its process comes up and takes tasks."""
    return await _move(act, worker_id, SupervisedWorkerEvent.START_TASK, body)


@router.post("/api/supervisor/workers/{worker_id}/pause", response_model=Worker)
async def pause_worker(act: Operating, worker_id: WorkerId, body: Reasoned | None = None) -> Response:
    """Pause a worker that is RUNNING: it finishes what it has, and takes nothing new."""
    return await _move(act, worker_id, SupervisedWorkerEvent.PAUSE, body)


@router.post("/api/supervisor/workers/{worker_id}/resume", response_model=Worker)
async def resume_worker(act: Operating, worker_id: WorkerId, body: Reasoned | None = None) -> Response:
    """Resume a worker that is PAUSED: it takes tasks again."""
    return await _move(act, worker_id, SupervisedWorkerEvent.RESUME, body)


@router.post("/api/supervisor/workers/{worker_id}/terminate", response_model=Worker)
async def terminate_worker(act: Administering, worker_id: WorkerId, body: Reasoned | None = None) -> Response:
    """Terminate a worker in any state: its process stops, and what it held is free."""
    return await _move(act, worker_id, SupervisedWorkerEvent.TERMINATE, body)


@router.get("/api/workers", response_model=Page[Worker])
async def list_workers(
    app: Reading,
    status: Annotated[SupervisedWorkerState | None, Query(description="In this state.")] = None,
    workspace_id: Annotated[Name | None, Query(description="Of this workspace.")] = None,
    role: Annotated[Name | None, Query(description="worker or orchestrator.")] = None,
    limit: Limit = USUAL,
    cursor: Cursor = None,
) -> Response:
    """List workers, the newest first, with those that registered themselves."""
    async with app.connection() as connection:
        found = await find_workers(
            connection,
            status=status,
            workspace_id=workspace_id,
            role=role,
            before=read_time_and_id(cursor),
            limit=limit + 1,
        )
    rows = [described(row) for row in found]
    return shown(page(rows, limit, lambda last: [last["created_at"].isoformat(), last["id"]]))


@router.get("/api/workers/{worker_id}", response_model=Worker)
async def show_worker(app: Reading, worker_id: WorkerId) -> Response:
    """Show a worker."""
    async with app.connection() as connection:
        return shown(described(await read_worker(connection, worker_id)))


@router.get("/api/workers/{worker_id}/history", response_model=Page[Move])
async def show_worker_history(
    app: Reading, worker_id: WorkerId, limit: Limit = USUAL, cursor: Cursor = None
) -> Response:
    """List every move that a worker made, oldest first."""
    async with app.connection() as connection:
        moves = await read_worker_moves(connection, worker_id, after=read_number(cursor), limit=limit + 1)
        if not moves:
            await read_worker(connection, worker_id)
    return shown(page(moves, limit, lambda last: [last["id"]]))


async def _move(act: Act, worker_id: str, event: SupervisedWorkerEvent, body: Reasoned | None) -> Response:
    given = body or Reasoned()

    async def work(app: Acting) -> Any:
        async with app.connection() as connection:
            await move_worker(connection, worker_id, event, actor=app.actor, reason=given.reason, now=app.now())
            return described(await read_worker(connection, worker_id))

    return await act.perform(given, work)


def described(row: dict[str, Any]) -> dict[str, Any]:
    """Give a worker as answers show it."""
    metadata = row["metadata"]
    return {
        **{name: value for name, value in row.items() if name not in HIDDEN},
        "role": metadata.get("role", "worker"),
        "spec": metadata.get("spec"),
        "labels": metadata.get("labels") or {},
    }
