"""Endpoints of limits: list with their use, show with holders and changes, override, restore, delete.

Invariant: a change of a limit at run time needs scope admin and is recorded with the actor and the reason.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from interlock.errors import ConfigError, InputError
from interlock.postgres.connection import Connection
from interlock.store.limit_overrides import override_limit, read_limit_changes, read_limit_holders
from interlock.store.limit_overrides import restore_limit as restore_stored_limit
from interlock.store.limits import Limit as LimitRule
from interlock.store.limits import delete_limits
from interlock.store.stats import list_limits
from interlock.supervisor.http.idempotency import AdminMutation, ReadApp, RequestApp, json_response
from interlock.supervisor.http.pagination import DEFAULT_LIMIT, Cursor, Limit, slice_page
from interlock.supervisor.http.problems import Problem, problems
from interlock.supervisor.http.requests import ApiRoute, LimitOverrideRequest, PathName, ReasonedRequest, Text
from interlock.supervisor.http.responses import LimitDetailsResponse, LimitResponse, Page, RemovedResponse

router = APIRouter(tags=["limits"], route_class=ApiRoute)


@router.get("/api/limits", response_model=Page[LimitResponse])
async def list_limit_use(app: ReadApp, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Response:
    """List the keys in use and the rules, with their use; those with the most waiting tasks come first."""
    async with app.connection() as connection:
        page = slice_page(await list_limits(connection, now=app.now()), limit, cursor)
    return json_response({**page, "items": [found._asdict() for found in page["items"]]})


@router.get("/api/limits/{limit_key:path}", response_model=LimitDetailsResponse)
@problems("unknown_limit")
async def show_limit(app: ReadApp, limit_key: PathName) -> Response:
    """Show a key or a pattern: its use, the tasks that hold it, and what operators changed."""
    async with app.connection() as connection:
        return json_response(await _read_details(connection, limit_key))


@router.put("/api/limits/{limit_key:path}", response_model=LimitDetailsResponse)
@problems("invalid_input")
async def set_limit(mutation: AdminMutation, limit_key: PathName, body: LimitOverrideRequest) -> Response:
    """Set the rule of a key or a pattern, in place of the declared one, until it is restored."""

    async def work(app: RequestApp) -> Any:
        given = body.model_dump(exclude={"request_id", "reason", "period"})
        period = None if body.period is None else timedelta(seconds=body.period)
        try:
            rule = LimitRule(limit_key, period=period, **given)
        except ConfigError as error:
            raise InputError(str(error)) from None
        async with app.connection() as connection:
            await override_limit(connection, rule, actor=app.actor, reason=body.reason, now=app.now())
            return await _read_details(connection, limit_key)

    return await mutation.execute(body, work)


@router.post("/api/limits/{limit_key:path}/restore", response_model=RemovedResponse)
@problems("not_possible")
async def restore_limit(mutation: AdminMutation, limit_key: PathName, body: ReasonedRequest | None = None) -> Response:
    """Take an override back: the declared rule applies again. Without one the limit is `deleted`."""
    command = body or ReasonedRequest()

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            restored = await restore_stored_limit(
                connection, limit_key, actor=app.actor, reason=command.reason, now=app.now()
            )
            if not restored:
                raise Problem("not_possible", f"limit {limit_key} is not overridden")
            change = (await read_limit_changes(connection, limit_key, limit=1))[0]
        return {"name": limit_key, "deleted": change.after is None}

    return await mutation.execute(command, work)


@router.delete("/api/limits/{limit_key:path}", response_model=RemovedResponse)
@problems("unknown_limit")
async def delete_limit(
    mutation: AdminMutation,
    limit_key: PathName,
    reason: Annotated[Text | None, Query(description="The reason, for the records.")] = None,
) -> Response:
    """Delete a limit, declared or not; tasks that waited for it are admitted. An app that declares it stores it."""

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            deleted = await delete_limits(connection, [limit_key], actor=app.actor, reason=reason, now=app.now())
        if not deleted:
            raise Problem("unknown_limit", f"there is no limit {limit_key}")
        return {"name": limit_key, "deleted": True}

    return await mutation.execute(ReasonedRequest(reason=reason), work)


async def _read_details(connection: Connection, key: str) -> dict[str, Any]:
    """Read a limit; one that is gone but has records is shown with these."""
    found = next((limit for limit in await list_limits(connection) if limit.key == key), None)
    if found is None:
        raise Problem("unknown_limit", f"there is no limit {key}, and no task has the key")
    return {
        **found._asdict(),
        "holders": [holder._asdict() for holder in await read_limit_holders(connection, key)],
        "changes": [change._asdict() for change in await read_limit_changes(connection, key)],
    }
