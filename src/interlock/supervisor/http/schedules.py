"""Endpoints of schedules: list, show, put, delete, pause, resume, run now.

Invariant: a schedule that an app declares is stored again when that app opens; pausing it is what lasts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from interlock.errors import ConfigError, InputError
from interlock.model.json_values import check_input_size
from interlock.model.options import JOB_CHECKS, as_columns, check_name, check_options
from interlock.postgres.connection import Connection
from interlock.store.schedules import (
    Schedule,
    ScheduleState,
    delete_schedules,
    list_schedules,
    pause_schedules,
    put_schedules,
    read_schedules,
    resume_schedules,
)
from interlock.supervisor.http.idempotency import Mutation, OperateMutation, ReadApp, RequestApp, json_response
from interlock.supervisor.http.pagination import DEFAULT_LIMIT, Cursor, Limit, slice_page
from interlock.supervisor.http.problems import Problem, problems
from interlock.supervisor.http.requests import ApiRoute, Command, NewScheduleRequest, PathName, ReasonedRequest
from interlock.supervisor.http.responses import (
    LOCATION,
    Page,
    RanScheduleResponse,
    RemovedResponse,
    ScheduleResponse,
    with_location,
)
from interlock.workflow.fire_schedules import run_schedule

router = APIRouter(tags=["schedules"], route_class=ApiRoute)


@router.get("/api/schedules", response_model=Page[ScheduleResponse])
async def list_all_schedules(app: ReadApp, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Response:
    """List the schedules by name, with their last and next ticks."""
    async with app.connection() as connection:
        page = slice_page(await list_schedules(connection), limit, cursor)
    return json_response({**page, "items": [schedule._asdict() for schedule in page["items"]]})


@router.get("/api/schedules/{name:path}", response_model=ScheduleResponse)
@problems("unknown_schedule")
async def show_schedule(app: ReadApp, name: PathName) -> Response:
    """Show a schedule."""
    async with app.connection() as connection:
        return json_response((await _read_schedule(connection, name))._asdict())


@router.put("/api/schedules/{name:path}", response_model=ScheduleResponse)
@problems("invalid_input")
async def put_schedule(mutation: OperateMutation, name: PathName, body: NewScheduleRequest) -> Response:
    """Store a schedule, or replace the one of this name. An unchanged rhythm keeps its next tick."""

    async def work(app: RequestApp) -> Any:
        schedule = _make_schedule(name, body)
        check_input_size(f"schedule {name!r}", schedule.input, app.config.largest_input)
        async with app.connection() as connection:
            await put_schedules(connection, [schedule], now=app.now())
            return (await _read_schedule(connection, name))._asdict()

    return await mutation.execute(body, work)


@router.delete("/api/schedules/{name:path}", response_model=RemovedResponse)
@problems("unknown_schedule")
async def delete_schedule(mutation: OperateMutation, name: PathName) -> Response:
    """Delete a schedule. One that an app still declares is stored again when that app opens."""

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            await _read_schedule(connection, name)
            await delete_schedules(connection, [name])
        return {"name": name, "deleted": True}

    return await mutation.execute(Command(), work)


@router.post("/api/schedules/{name:path}/pause", response_model=ScheduleResponse)
@problems("unknown_schedule")
async def pause_schedule(mutation: OperateMutation, name: PathName, body: ReasonedRequest | None = None) -> Response:
    """Stop firing a schedule until it is resumed. Tasks and jobs that were made already still run."""

    async def pause(connection: Connection, app: RequestApp, reason: str | None) -> None:
        await pause_schedules(connection, [name], actor=app.actor, reason=reason, now=app.now())

    return await _change(mutation, name, body or ReasonedRequest(), pause)


@router.post("/api/schedules/{name:path}/resume", response_model=ScheduleResponse)
@problems("unknown_schedule", "not_possible")
async def resume_schedule(mutation: OperateMutation, name: PathName, body: ReasonedRequest | None = None) -> Response:
    """Fire a paused schedule again from its next tick on. Ticks during the pause are not caught up on."""

    async def resume(connection: Connection, app: RequestApp, reason: str | None) -> None:
        if not await resume_schedules(connection, [name], actor=app.actor, reason=reason, now=app.now()):
            raise Problem("not_possible", f"schedule {name} is not paused")

    return await _change(mutation, name, body or ReasonedRequest(), resume)


@router.post(
    "/api/schedules/{name:path}/run", status_code=201, response_model=RanScheduleResponse, responses={**LOCATION}
)
@problems("unknown_schedule", "invalid_input", "job_conflict")
async def run_schedule_now(mutation: OperateMutation, name: PathName, body: Command | None = None) -> Response:
    """Fire a schedule once now, also a paused one; its ticks stay as they are."""

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            schedule = await _read_schedule(connection, name)
            made = await run_schedule(connection, name, actor=app.actor, now=app.now())
        return {"name": name, "kind": "task" if schedule.workflow is None else "job", "id": made}

    return with_location(await mutation.execute(body or Command(), work, status=201), "/api/{kind}s/{id}")


async def _change(
    mutation: Mutation,
    name: str,
    body: ReasonedRequest,
    change: Callable[[Connection, RequestApp, str | None], Awaitable[None]],
) -> Response:
    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            await _read_schedule(connection, name)
            await change(connection, app, body.reason)
            return (await _read_schedule(connection, name))._asdict()

    return await mutation.execute(body, work)


async def _read_schedule(connection: Connection, name: str) -> ScheduleState:
    found = await read_schedules(connection, [name])
    if not found:
        raise Problem("unknown_schedule", f"there is no schedule {name}")
    return found[0]


def _make_schedule(name: str, body: NewScheduleRequest) -> Schedule:
    """Check a schedule and its options; InputError says what is wrong."""
    given = body.model_dump(exclude={"request_id", "options", "every"})
    every = None if body.every is None else timedelta(seconds=body.every)
    try:
        if body.workflow is None:
            options = as_columns(check_options(body.options))
        else:
            options = {
                option: JOB_CHECKS[option](option, value) if option in JOB_CHECKS else value
                for option, value in body.options.items()
            }
        return Schedule(name=check_name("the name of a schedule", name), every=every, options=options, **given)
    except (ConfigError, ValueError) as error:
        raise InputError(str(error)) from None
