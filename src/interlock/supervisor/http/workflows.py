"""Endpoints of workflows: list, definition, versions, diagram.

Invariant: a name may have any characters: in a path it is percent-encoded.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from interlock.errors import InputError
from interlock.model.workflow_diagram import workflow_mermaid, workflow_svg
from interlock.postgres.connection import Connection
from interlock.store.workflows import (
    StoredWorkflow,
    list_newest_workflows,
    read_workflow,
    read_workflow_versions,
)
from interlock.supervisor.http.idempotency import ReadApp, json_response
from interlock.supervisor.http.pagination import DEFAULT_LIMIT, Cursor, Limit, decode_name, make_page
from interlock.supervisor.http.problems import Problem, problems
from interlock.supervisor.http.requests import ApiRoute, Name, PathName
from interlock.supervisor.http.responses import Page, WorkflowResponse, WorkflowSummaryResponse

router = APIRouter(tags=["workflows"], route_class=ApiRoute)

Version = Annotated[Name | None, Query(description="The version; the newest by default.")]


@router.get("/api/workflows", response_model=Page[WorkflowSummaryResponse])
async def list_workflows(app: ReadApp, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Response:
    """List the workflows by name, each with its newest version."""
    async with app.connection() as connection:
        found = await list_newest_workflows(connection, limit=limit + 1, after=decode_name(cursor))
    return json_response(make_page(found, limit, lambda last: [last["name"]]))


@router.get("/api/workflows/{name:path}", response_model=WorkflowResponse)
@problems("unknown_workflow")
async def show_workflow(app: ReadApp, name: PathName, version: Version = None) -> Response:
    """Show a workflow: its definition, and all its versions, newest first."""
    async with app.connection() as connection:
        found = await _read_workflow(connection, name, version)
        versions = await read_workflow_versions(connection, name)
    document = {field: value for field, value in found._asdict().items() if field != "id"}
    return json_response({**document, "versions": versions})


@router.get(
    "/api/diagrams/{name:path}",
    response_class=Response,
    responses={
        200: {
            "content": {
                "image/svg+xml": {"schema": {"type": "string"}, "example": "<svg …></svg>"},
                "text/plain": {"schema": {"type": "string"}, "example": "flowchart TD …"},
            },
            "description": "The diagram.",
        }
    },
)
@problems("unknown_workflow", "invalid_input")
async def draw_workflow(
    app: ReadApp,
    name: PathName,
    version: Version = None,
    format: Annotated[Literal["svg", "mermaid"], Query(description="SVG, or a Mermaid flowchart.")] = "svg",  # noqa: A002 - as the flag of `interlock diagram` is named
) -> Response:
    """Draw the steps of a workflow as an SVG, or as text for Mermaid."""
    async with app.connection() as connection:
        found = await _read_workflow(connection, name, version)
    if format == "mermaid":
        return Response(workflow_mermaid(found.definition), media_type="text/plain")
    try:
        return Response(workflow_svg(found.definition), media_type="image/svg+xml")
    except ValueError as error:
        raise InputError(str(error)) from None


async def _read_workflow(connection: Connection, name: str, version: str | None) -> StoredWorkflow:
    found = await read_workflow(connection, name, version)
    if found is None:
        which = name if version is None else f"{name} version {version}"
        raise Problem("unknown_workflow", f"there is no workflow {which}")
    return found
