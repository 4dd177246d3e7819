"""The system as a whole over REST: namespaces, status, explanations, metrics and health.

Invariant: `/healthz` and `/readyz` need no token and tell nothing but yes or no.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from starlette.responses import Response

from interlock.client.app import Interlock
from interlock.errors import DisconnectedError, StoreError, UnknownJobError, UnknownTaskError
from interlock.store.leader import read_clock
from interlock.store.limits import list_namespaces, paused_namespaces
from interlock.store.stats import overview_document, read_overview
from interlock.store.workers import read_last_worker_move, read_worker
from interlock.supervisor.http.idempotency import Acting, Operating, Reading, shown
from interlock.supervisor.http.problems import Problem
from interlock.supervisor.http.requests import NamespaceName, Reasoned
from interlock.supervisor.http.responses import Explanation, Health, Namespace, NamespaceMoved, Page, Status
from interlock.telemetry import log

router = APIRouter(tags=["system"])

SOON = 3.0  # seconds in which a supervisor that is ready can say so


class Explained(StrEnum):
    """What can be explained."""

    TASK = "task"
    STEP = "step"
    JOB = "job"
    WORKER = "worker"


@router.get("/api/namespaces", response_model=Page[Namespace])
async def show_namespaces(app: Reading) -> Response:
    """List the namespaces that have unfinished tasks or are paused."""
    async with app.connection() as connection:
        found = await list_namespaces(connection)
    return shown({"items": [namespace._asdict() for namespace in found], "next": None})


@router.post("/api/namespaces/{name}/pause", response_model=NamespaceMoved)
async def pause_namespace(act: Operating, name: NamespaceName, body: Reasoned | None = None) -> Response:
    """Let no task of a namespace start until it is resumed; what runs goes on."""
    given = body or Reasoned()

    async def work(app: Acting) -> Any:
        return {"name": name, "paused": True, "tasks": await app.pause(name, given.reason)}

    return await act.perform(given, work)


@router.post("/api/namespaces/{name}/resume", response_model=NamespaceMoved)
async def resume_namespace(act: Operating, name: NamespaceName, body: Reasoned | None = None) -> Response:
    """Let the tasks of a namespace start again."""

    async def work(app: Acting) -> Any:
        async with app.connection() as connection:
            if name not in await paused_namespaces(connection):
                raise Problem("not_possible", f"namespace {name} is not paused")
        return {"name": name, "paused": False, "tasks": await app.resume(name)}

    return await act.perform(body or Reasoned(), work)


@router.get("/api/status", response_model=Status)
async def show_status(
    app: Reading,
    all: Annotated[bool, Query(description="Count ended tasks too, even millions.")] = False,  # noqa: A002, FBT002 - as the command's flag is named
) -> Response:
    """Show how the queue is, as `interlock status --json` does."""
    async with app.connection() as connection:
        return shown(overview_document(await read_overview(connection, whole=all)))


@router.get("/api/explain/{kind}/{id}", response_model=Explanation)
async def explain(
    app: Reading,
    kind: Explained,
    id_: Annotated[str, Path(alias="id", min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$")],
) -> Response:
    """Say where a task, a step, a job or a worker is, and why it is not moving."""
    if kind is Explained.WORKER:
        return shown(await _explain_worker(app, id_))
    found = await app.explain(id_)
    if (found.kind == "job") is not (kind is Explained.JOB):
        unknown = UnknownJobError if kind is Explained.JOB else UnknownTaskError
        raise unknown(f"there is no {kind} {id_}: it is a {found.kind}")
    return shown(asdict(found))


async def _explain_worker(app: Interlock, worker_id: str) -> dict[str, Any]:
    async with app.connection() as connection:
        row = await read_worker(connection, worker_id)
        last = await read_last_worker_move(connection, worker_id)
        now = await read_clock(connection)
    facts = [] if last is None else [f"{last['event']} by {last['actor']}" + _told(last["reason"])]
    if row["heartbeat_at"] is None:
        facts.append("no process of it was ever heard of")
    else:
        silent = (now - row["heartbeat_at"]).total_seconds()
        facts.append(f"its process was last heard of {silent:.0f} s ago" + ("" if row["live"] else ", and is not live"))
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


def _told(reason: str | None) -> str:
    return f": {reason}" if reason else ""


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def show_metrics(request: Request, app: Reading) -> Response:
    """Give the metrics in Prometheus' text format."""
    del app
    try:
        await request.app.state.moves.look()
    except StoreError as error:
        log.warning("moves_not_counted", error=str(error))
    figures = generate_latest(REGISTRY) + generate_latest(request.app.state.registry)
    return Response(figures, headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.get("/healthz", response_model=Health)
async def show_health() -> Response:
    """Say that the supervisor is there."""
    return shown({"status": "ok"})


@router.get("/readyz", response_model=Health)
async def show_readiness(request: Request) -> Response:
    """Say whether the supervisor can do its work: 503 when the database cannot be reached."""
    app: Interlock = request.app.state.app
    try:
        async with asyncio.timeout(SOON), app.connection() as connection:
            await read_clock(connection)
    except TimeoutError:
        raise DisconnectedError(f"the database did not answer in {SOON:g} s") from None
    return shown({"status": "ready"})
