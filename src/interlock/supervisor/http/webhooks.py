"""Endpoints of given-up webhooks, the dead letters of the outbox: list, retry, discard.

Invariant: a webhook that is still to be sent is never changed here.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from interlock.store.webhooks import discard_given_up_webhooks, list_given_up_webhooks, retry_given_up_webhooks
from interlock.supervisor.http.idempotency import OperateMutation, ReadApp, RequestApp, json_response
from interlock.supervisor.http.pagination import DEFAULT_LIMIT, Cursor, Limit, decode_number, make_page
from interlock.supervisor.http.requests import ApiRoute, WebhooksRequest
from interlock.supervisor.http.responses import ChangedWebhooksResponse, GivenUpWebhookResponse, Page

router = APIRouter(tags=["webhooks"], route_class=ApiRoute)


@router.get("/api/webhooks", response_model=Page[GivenUpWebhookResponse])
async def list_webhooks(app: ReadApp, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Response:
    """List the webhooks that were given up after repeated failures, oldest first."""
    async with app.connection() as connection:
        found = await list_given_up_webhooks(connection, limit=limit + 1, after=decode_number(cursor))
    return json_response(make_page([webhook._asdict() for webhook in found], limit, lambda last: [last["id"]]))


@router.post("/api/webhooks/retry", response_model=ChangedWebhooksResponse)
async def retry_webhooks(mutation: OperateMutation, body: WebhooksRequest) -> Response:
    """Send given-up webhooks again, with a new set of tries. The answer lists those that were given up."""

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            ids = await retry_given_up_webhooks(connection, body.ids, now=app.now())
        return {"ids": ids, "count": len(ids)}

    return await mutation.execute(body, work)


@router.post("/api/webhooks/discard", response_model=ChangedWebhooksResponse)
async def discard_webhooks(mutation: OperateMutation, body: WebhooksRequest) -> Response:
    """Delete given-up webhooks: they are never sent. The answer lists those that were given up."""

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            ids = await discard_given_up_webhooks(connection, body.ids)
        return {"ids": ids, "count": len(ids)}

    return await mutation.execute(body, work)
