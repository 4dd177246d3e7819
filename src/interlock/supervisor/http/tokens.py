"""Endpoints of tokens: list, create, revoke.

Invariant: the secret of a token is in one response, the one that creates it, and stored nowhere: therefore the request
takes no idempotency key, whose response would be stored.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from interlock.client.app import Interlock
from interlock.postgres.connection import transaction
from interlock.store.access import create_token as create_stored_token
from interlock.store.access import list_tokens as list_stored_tokens
from interlock.store.access import revoke_token as revoke_stored_token
from interlock.supervisor.http.auth import AdminCaller
from interlock.supervisor.http.idempotency import AdminMutation, RequestApp, json_response
from interlock.supervisor.http.pagination import DEFAULT_LIMIT, Cursor, Limit, slice_page
from interlock.supervisor.http.problems import Problem, problems
from interlock.supervisor.http.requests import ApiRoute, Command, NewTokenRequest, PathName
from interlock.supervisor.http.responses import CreatedTokenResponse, Page, RemovedResponse, TokenResponse

router = APIRouter(tags=["tokens"], route_class=ApiRoute)


@router.get("/api/tokens", response_model=Page[TokenResponse])
async def list_tokens(
    request: Request,
    caller: AdminCaller,
    revoked: Annotated[bool, Query(description="Include revoked tokens.")] = False,  # noqa: FBT002 - a query parameter
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List the tokens, oldest first, without their secrets."""
    del caller
    app: Interlock = request.app.state.app
    async with app.connection() as connection:
        page = slice_page(await list_stored_tokens(connection, revoked=revoked), limit, cursor)
    return json_response({**page, "items": [asdict(token) for token in page["items"]]})


@router.post("/api/tokens", status_code=201, response_model=CreatedTokenResponse)
@problems("not_possible", "invalid_input")
async def create_token(request: Request, caller: AdminCaller, body: NewTokenRequest) -> Response:
    """Create a token. Its secret is in this response and cannot be read again.

    There is no idempotency key: if the response was lost, revoke the token and create it again.
    """
    if "Idempotency-Key" in request.headers:
        field, message = "header.Idempotency-Key", "a token is created without a key: its secret is not stored"
        raise Problem("invalid_request", f"{field}: {message}", {"errors": [{"field": field, "message": message}]})
    app: Interlock = request.app.state.app
    lifetime = None if body.days is None else timedelta(days=body.days)
    async with app.connection() as connection, transaction(connection):
        if any(token.name == body.name for token in await list_stored_tokens(connection)):
            raise Problem("not_possible", f"a token {body.name} exists already; revoke it, or choose another name")
        token, secret = await create_stored_token(
            connection,
            body.name,
            body.scope,
            actor=caller.actor,
            namespaces=body.namespaces,
            lifetime=lifetime,
            now=app.now(),
        )
    return json_response({**asdict(token), "token": secret}, 201)


@router.delete("/api/tokens/{name:path}", response_model=RemovedResponse)
@problems("unknown_token_name")
async def revoke_token(mutation: AdminMutation, name: PathName) -> Response:
    """Revoke a token: requests with it are refused from now on."""

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            revoked = await revoke_stored_token(connection, name, actor=app.actor, now=app.now())
        if not revoked:
            raise Problem("unknown_token_name", f"there is no token {name} in use")
        return {"name": name, "deleted": True}

    return await mutation.execute(Command(), work)
