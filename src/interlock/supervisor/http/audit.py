"""The audit feed: who moved which task, job or worker, from which state to which, when and why."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from interlock.errors import InputError
from interlock.store.audit import KINDS, RecordFilter, find_records
from interlock.store.leader import read_clock
from interlock.supervisor.http.auth import ReadCaller, limits_namespaces
from interlock.supervisor.http.events import EventKind
from interlock.supervisor.http.idempotency import ReadApp, json_response
from interlock.supervisor.http.pagination import (
    DEFAULT_LIMIT,
    Cursor,
    Limit,
    decode_record_cursor,
    encode_record_cursor,
)
from interlock.supervisor.http.problems import problems
from interlock.supervisor.http.requests import ApiRoute, Moment, Name
from interlock.supervisor.http.responses import AuditRecordResponse, Page

router = APIRouter(tags=["audit"], route_class=ApiRoute)

DEFAULT_RANGE = timedelta(days=1)
FIRST_RECORD_AT = datetime(1970, 1, 1, tzinfo=UTC)


@router.get("/api/audit", response_model=Page[AuditRecordResponse])
@limits_namespaces
@problems("invalid_input")
async def list_records(
    app: ReadApp,
    caller: ReadCaller,
    kind: Annotated[list[EventKind] | None, Query(description="Of one of these kinds.")] = None,
    id: Annotated[Name | None, Query(description="Of this task, job or worker.")] = None,  # noqa: A002 - the name of the member
    actor: Annotated[Name | None, Query(description="By this actor.")] = None,
    event: Annotated[Name | None, Query(description="By this event.")] = None,
    from_state: Annotated[Name | None, Query(description="From this state.")] = None,
    to_state: Annotated[Name | None, Query(description="To this state.")] = None,
    database_role: Annotated[Name | None, Query(description="By a client with this role of PostgreSQL.")] = None,
    recorded_after: Annotated[
        Moment | None,
        Query(description="At this time or later; without an `id`, a day before `recorded_before` by default."),
    ] = None,
    recorded_before: Annotated[Moment | None, Query(description="Before this time; now by default.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Response:
    """List recorded transitions of tasks, jobs and workers that meet all conditions, the newest first."""
    before, began_since = decode_record_cursor(cursor)
    async with app.connection() as connection:
        latest = recorded_before or await read_clock(connection)
        default = FIRST_RECORD_AT if id is not None else latest - DEFAULT_RANGE
        since = recorded_after or began_since or default
        if since > latest:
            raise InputError("recorded_after must not be later than recorded_before")
        reachable: frozenset[str] | None = caller.namespaces
        kinds = KINDS if kind is None else [str(each) for each in kind]
        if reachable is not None:  # workers serve several namespaces
            kinds = [each for each in kinds if each != EventKind.WORKER]
        wanted = RecordFilter(
            since=since,
            until=recorded_before,
            kinds=kinds,
            id=id,
            actor=actor,
            event=event,
            from_state=from_state,
            to_state=to_state,
            database_role=database_role,
            namespaces=None if reachable is None else sorted(reachable),
        )
        page = await find_records(connection, wanted, before=before, limit=limit)
    following = None if page.next is None else encode_record_cursor(page.next, since)
    return json_response({"items": page.items, "next": following})
