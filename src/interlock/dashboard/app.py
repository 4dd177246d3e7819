"""Adds the dashboard to the API's application: pages, static files, live updates and acts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from starlette.responses import Response

from interlock.dashboard import stream
from interlock.dashboard.acts import mount_acts
from interlock.dashboard.live import LiveHub
from interlock.dashboard.pages import error_page
from interlock.dashboard.render import MEDIA_TYPES, STATIC_FILES, read_static
from interlock.dashboard.views import (
    approvals,
    audit,
    doctor,
    job,
    jobs,
    limits,
    machines,
    namespaces,
    overview,
    schedules,
    sorts,
    task,
    tasks,
    workers,
)
from interlock.supervisor.http.problems import Problem, problem_from_error, problem_response

if TYPE_CHECKING:
    from fastapi import Request

    from interlock.client.app import Interlock

# A page group is a module of `views` with a `router`; the order decides between paths that overlap.
VIEWS = (
    overview, machines, jobs, job, tasks, task, approvals, workers, namespaces, schedules, limits, sorts, audit, doctor
)  # fmt: skip
NOT_FOUND = 404
FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable"}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Dashboard:
    """State that the pages of one server share."""

    app: Interlock
    hub: LiveHub
    stopping: asyncio.Event  # set when the server stops: streams end


def add_dashboard(api: FastAPI) -> None:
    """Add the dashboard to an API; an extension of `create_api`."""
    app: Interlock = api.state.app
    api.state.dashboard = Dashboard(app, LiveHub(app, api.state.doctor), api.state.stopping)
    for view in VIEWS:
        api.include_router(view.router)
    api.include_router(stream.router)
    api.include_router(router)
    mount_acts(api)
    api.add_exception_handler(NOT_FOUND, show_unknown_path)


async def show_unknown_path(request: Request, error: Exception) -> Response:
    """Answer a browser that asks for an unknown page with a page, and everything else as the API does."""
    if "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/"):
        return error_page(request, problem_from_error(error))
    return problem_response(request, error)


@router.get("/ui/static/{build}/{name}")
async def show_static(build: str, name: str) -> Response:
    """Return a static file; its URL changes with its content."""
    del build
    if name not in STATIC_FILES:
        raise Problem("unknown_path", "there is no such file")
    return Response(read_static(name), headers=FOR_EVER, media_type=MEDIA_TYPES[name.rpartition(".")[2]])
