"""Endpoints of pools: a desired number of workers with one spec, which the supervisors keep.

Invariant: an endpoint changes the row of the pool; the supervisors add and end the workers. Only a deletion ends them
itself, in its own transaction.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from interlock.store.pools import NewPool, create_pool, delete_pool, list_pools, read_pool, scale_pool
from interlock.store.workers import WorkerSpec
from interlock.supervisor.http.idempotency import AdminMutation, OperateMutation, ReadApp, RequestApp, json_response
from interlock.supervisor.http.pagination import DEFAULT_LIMIT, Cursor, Limit, decode_text, make_page
from interlock.supervisor.http.problems import problems
from interlock.supervisor.http.requests import ApiRoute, Command, NewPoolRequest, PoolName, ScaleRequest
from interlock.supervisor.http.responses import LOCATION, Page, PoolResponse, with_location

router = APIRouter(tags=["pools"], route_class=ApiRoute)


@router.post("/api/pools", status_code=201, response_model=PoolResponse, responses={**LOCATION})
@problems("not_possible")
async def make_pool(mutation: AdminMutation, body: NewPoolRequest) -> Response:
    """Create a pool: the supervisors start the desired number of workers and replace those that end, for ever."""

    async def work(app: RequestApp) -> Any:
        pool = NewPool(
            body.name,
            body.desired,
            WorkerSpec(**body.spec_values()),
            workspace_id=body.workspace_id,
            labels=body.labels,
        )
        async with app.connection() as connection:
            await create_pool(connection, pool, actor=app.actor, now=app.now())
            return await read_pool(connection, body.name)

    return with_location(await mutation.execute(body, work, status=201), "/api/pools/{name}")


@router.get("/api/pools", response_model=Page[PoolResponse])
async def show_pools(app: ReadApp, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Response:
    """List the pools by name, with the numbers of workers that they should have and have."""
    async with app.connection() as connection:
        found = await list_pools(connection, after=decode_text(cursor), limit=limit + 1)
    return json_response(make_page(found, limit, lambda last: [last["name"]]))


@router.get("/api/pools/{name}", response_model=PoolResponse)
@problems("unknown_pool")
async def show_pool(app: ReadApp, name: PoolName) -> Response:
    """Show a pool."""
    async with app.connection() as connection:
        return json_response(await read_pool(connection, name))


@router.post("/api/pools/{name}/scale", response_model=PoolResponse)
@problems("unknown_pool")
async def change_desired(mutation: OperateMutation, name: PoolName, body: ScaleRequest) -> Response:
    """Set the desired number of workers. Workers too many finish their tasks within their grace, idle ones first."""

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            await scale_pool(connection, name, body.desired, actor=app.actor, now=app.now())
            return await read_pool(connection, name)

    return await mutation.execute(body, work)


@router.delete("/api/pools/{name}", response_model=PoolResponse)
@problems("unknown_pool", "not_possible")
async def remove_pool(mutation: AdminMutation, name: PoolName) -> Response:
    """Delete a pool and end its workers, which finish their tasks within their grace; answer with the deleted pool."""

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            before = await read_pool(connection, name)
            await delete_pool(connection, name, actor=app.actor, now=app.now())
            return before

    return await mutation.execute(Command(), work)
