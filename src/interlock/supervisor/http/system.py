"""Endpoints of the whole system: namespaces, status, explanations, metrics, health.

Invariant: `/healthz` and `/readyz` need no token and reveal nothing but yes or no.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from interlock.client.app import Interlock
from interlock.errors import DisconnectedError, StoreError, UnknownJobError, UnknownTaskError
from interlock.store.leader import read_clock
from interlock.store.limits import list_namespaces, read_paused_namespaces
from interlock.store.stats import overview_document, read_overview
from interlock.store.workers import read_last_worker_move, read_worker
from interlock.supervisor.http.idempotency import OperateMutation, ReadApp, RequestApp, json_response
from interlock.supervisor.http.problems import Problem
from interlock.supervisor.http.requests import NamespaceName, ReasonedRequest
from interlock.supervisor.http.responses import (
    ExplanationResponse,
    HealthResponse,
    NamespaceMovedResponse,
    NamespaceResponse,
    Page,
    StatusResponse,
)
from interlock.telemetry import log

router = APIRouter(tags=["system"])

READINESS_TIMEOUT_S = 3.0


class ExplainedKind(StrEnum):
    """The kinds that can be explained."""

    TASK = "task"
    STEP = "step"
    JOB = "job"
    WORKER = "worker"


@router.get("/api/namespaces", response_model=Page[NamespaceResponse])
async def show_namespaces(app: ReadApp) -> Response:
    """List the namespaces that have unfinished tasks or are paused."""
    async with app.connection() as connection:
        found = await list_namespaces(connection)
    return json_response({"items": [namespace._asdict() for namespace in found], "next": None})


@router.post("/api/namespaces/{name}/pause", response_model=NamespaceMovedResponse)
async def pause_namespace(
    mutation: OperateMutation, name: NamespaceName, body: ReasonedRequest | None = None
) -> Response:
    """Pause a namespace: its tasks are not claimed until it is resumed; running tasks go on."""
    command = body or ReasonedRequest()

    async def work(app: RequestApp) -> Any:
        return {"name": name, "paused": True, "tasks": await app.pause(name, command.reason)}

    return await mutation.execute(command, work)


@router.post("/api/namespaces/{name}/resume", response_model=NamespaceMovedResponse)
async def resume_namespace(
    mutation: OperateMutation, name: NamespaceName, body: ReasonedRequest | None = None
) -> Response:
    """Resume a namespace: its tasks are claimed again."""

    async def work(app: RequestApp) -> Any:
        async with app.connection() as connection:
            if name not in await read_paused_namespaces(connection):
                raise Problem("not_possible", f"namespace {name} is not paused")
        return {"name": name, "paused": False, "tasks": await app.resume(name)}

    return await mutation.execute(body or ReasonedRequest(), work)


@router.get("/api/status", response_model=StatusResponse)
async def show_status(
    app: ReadApp,
    all: Annotated[bool, Query(description="Count ended tasks too, which may take long.")] = False,  # noqa: A002, FBT002 - as the command's flag is named
) -> Response:
    """Show the counts of tasks, jobs and processes, as `interlock status --json` does."""
    async with app.connection() as connection:
        return json_response(overview_document(await read_overview(connection, whole=all)))


@router.get("/api/explain/{kind}/{id}", response_model=ExplanationResponse)
async def explain(
    app: ReadApp,
    kind: ExplainedKind,
    id_: Annotated[str, Path(alias="id", min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$")],
) -> Response:
    """Explain why a task, a step, a job or a worker makes no progress."""
    if kind is ExplainedKind.WORKER:
        return json_response(await _explain_worker(app, id_))
    found = await app.explain(id_)
    if (found.kind == "job") is not (kind is ExplainedKind.JOB):
        unknown = UnknownJobError if kind is ExplainedKind.JOB else UnknownTaskError
        raise unknown(f"there is no {kind} {id_}: it is a {found.kind}")
    return json_response(asdict(found))


async def _explain_worker(app: Interlock, worker_id: str) -> dict[str, Any]:
    async with app.connection() as connection:
        row = await read_worker(connection, worker_id)
        last = await read_last_worker_move(connection, worker_id)
        now = await read_clock(connection)
    facts = []
    if last is not None:
        facts.append(f"{last['event']} by {last['actor']}" + (f": {last['reason']}" if last["reason"] else ""))
    if row["heartbeat_at"] is None:
        facts.append("its process never sent a heartbeat")
    else:
        age = (now - row["heartbeat_at"]).total_seconds()
        facts.append(f"the last heartbeat is {age:.0f} s old" + ("" if row["live"] else "; the process is not live"))
    if row.get("process_note"):
        facts.append(str(row["process_note"]))
    return {
        "kind": "worker",
        "id": worker_id,
        "name": worker_id,
        "state": row["status"],
        "since": row["created_at"] if last is None else last["recorded_at"],
        "facts": facts,
        "through": [],
        "causes": [],
    }


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def show_metrics(request: Request, app: ReadApp) -> Response:
    """Return the metrics in the Prometheus text format."""
    del app
    try:
        await request.app.state.transitions.update()
    except StoreError as error:
        log.warning("moves_not_counted", error=str(error))
    content = generate_latest(request.app.state.registry)
    return Response(content, headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.get("/healthz", response_model=HealthResponse)
async def show_health() -> Response:
    """Answer that the supervisor is alive."""
    return json_response({"status": "ok"})


@router.get("/readyz", response_model=HealthResponse)
async def show_readiness(request: Request) -> Response:
    """Answer whether the supervisor is ready: 503 if the database cannot be reached."""
    app: Interlock = request.app.state.app
    try:
        async with asyncio.timeout(READINESS_TIMEOUT_S), app.connection() as connection:
            await read_clock(connection)
    except TimeoutError:
        raise DisconnectedError(f"the database did not answer within {READINESS_TIMEOUT_S:g} s") from None
    return json_response({"status": "ready"})
