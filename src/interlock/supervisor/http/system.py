"""Endpoints of the whole system: namespaces, status, explanations, the doctor, metrics, health.

Invariant: `/healthz` and `/readyz` need no token and reveal nothing but yes or no.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import AwareDatetime
from starlette.responses import Response

from interlock.client.app import Interlock
from interlock.client.explain import ExplainedKind, Explanation, Fact, as_work_id, unknown_id_error
from interlock.errors import DisconnectedError, StoreError
from interlock.postgres.connection import connect
from interlock.store.access import read_job_namespace, read_task_namespace
from interlock.store.doctor import DoctorReport, examine
from interlock.store.limits import list_namespaces, read_paused_namespaces
from interlock.store.pools import count_dead_pools, have_given_up
from interlock.store.stats import overview_document, read_overview
from interlock.supervisor.http.auth import limits_namespaces
from interlock.supervisor.http.idempotency import CallerApp, OperateMutation, ReadApp, RequestApp, json_response
from interlock.supervisor.http.problems import RETRY_AFTER, Problem, problems
from interlock.supervisor.http.requests import ApiRoute, NamespaceName, ReasonedRequest
from interlock.supervisor.http.responses import (
    DoctorResponse,
    ExplanationResponse,
    HealthResponse,
    NamespaceMovedResponse,
    NamespaceResponse,
    Page,
    StatusResponse,
)
from interlock.supervisor.pool.pool import Pool
from interlock.supervisor.pool.settings import PoolSettings
from interlock.telemetry import log

router = APIRouter(tags=["system"], route_class=ApiRoute)

READINESS_TIMEOUT_S = 3.0
EXAMINATION_MAX_AGE_S = 10.0
METRICS_EXAMPLE = 'queue_depth{namespace="mail",state="pending"} 12.0'
OTHERS = frozenset({"task", "job", "worker"})  # evidence that a token limited to namespaces may not see


@router.get("/api/namespaces", response_model=Page[NamespaceResponse])
@limits_namespaces
async def show_namespaces(app: ReadApp) -> Response:
    """List the namespaces that have unfinished tasks or are paused."""
    async with app.connection() as connection:
        found = await list_namespaces(connection)
    shown = [namespace._asdict() for namespace in found if app.caller.may_use(namespace.name)]
    return json_response({"items": shown, "next": None})


@router.post("/api/namespaces/{name}/pause", response_model=NamespaceMovedResponse)
@limits_namespaces
@problems("namespace_not_allowed")
async def pause_namespace(
    mutation: OperateMutation, name: NamespaceName, body: ReasonedRequest | None = None
) -> Response:
    """Pause a namespace: its tasks are not claimed until it is resumed; running tasks go on."""
    command = body or ReasonedRequest()

    async def work(app: RequestApp) -> Any:
        return {"name": name, "paused": True, "tasks": await app.pause(name, command.reason)}

    return await mutation.execute(command, work)


@router.post("/api/namespaces/{name}/resume", response_model=NamespaceMovedResponse)
@limits_namespaces
@problems("not_possible", "namespace_not_allowed")
async def resume_namespace(
    mutation: OperateMutation, name: NamespaceName, body: ReasonedRequest | None = None
) -> Response:
    """Resume a namespace: its tasks are claimed again."""

    async def work(app: RequestApp) -> Any:
        app.caller.require_namespace(name)
        async with app.connection() as connection:
            if name not in await read_paused_namespaces(connection):
                raise Problem("not_possible", f"namespace {name} is not paused")
        return {"name": name, "paused": False, "tasks": await app.resume(name)}

    return await mutation.execute(body or ReasonedRequest(), work)


@router.get("/api/status", response_model=StatusResponse)
async def show_status(
    app: ReadApp,
    all: Annotated[bool, Query(description="Count every task and job, which may take long.")] = False,  # noqa: A002, FBT002 - as the command's flag is named
) -> Response:
    """Show the counts of tasks, jobs and processes, as `interlock status --json` does."""
    async with app.connection() as connection:
        return json_response(overview_document(await read_overview(connection, whole=all)))


class SharedExamination:
    """The quick examination of `interlock doctor`, made at most every `max_age_s` for all callers together."""

    def __init__(self, app: Interlock, max_age_s: float = EXAMINATION_MAX_AGE_S) -> None:
        self._app = app
        self._max_age_s = max_age_s
        self._lock = asyncio.Lock()
        self.latest: DoctorReport | None = None
        self._made_at = 0.0

    async def read(self, max_age_s: float = 0.0) -> DoctorReport:
        """Return the latest report, or a new one if that is too old; `max_age_s`: where an older one is enough."""
        async with self._lock:
            if self.latest is None or time.monotonic() - self._made_at >= max(max_age_s, self._max_age_s):
                async with self._app.connection() as connection:
                    self.latest = await examine(connection, now=self._app.now())
                self._made_at = time.monotonic()
            return self.latest


@router.get("/api/doctor", response_model=DoctorResponse)
async def show_doctor(request: Request, app: ReadApp) -> Response:
    """Examine the database quickly, as `interlock doctor --json` does; calls within 10 seconds share one report."""
    del app
    shared: SharedExamination = request.app.state.doctor
    return json_response((await shared.read()).document())


@router.get("/api/explain/{kind}/{id:path}", response_model=ExplanationResponse)
@limits_namespaces
@problems(
    *("unknown_task", "unknown_job", "unknown_worker", "unknown_namespace", "unknown_schedule", "unknown_limit"),
    *("invalid_input", "namespace_not_allowed"),
)
async def explain(
    app: ReadApp,
    kind: ExplainedKind,
    id_: Annotated[str, Path(alias="id", min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]+$")],
    at: Annotated[
        AwareDatetime | None, Query(description="As of this time, with its zone, as far as the records tell.")
    ] = None,
) -> Response:
    """Explain why a task, step, job, worker, namespace, schedule or limit makes no progress, and what would help."""
    if kind in {ExplainedKind.TASK, ExplainedKind.STEP, ExplainedKind.JOB}:
        found = await _explain_work(app, as_work_id(id_, kind), kind, at)
    else:
        if kind is ExplainedKind.NAMESPACE:
            app.caller.require_namespace(id_)
        else:
            app.caller.require_all_namespaces()
        found = await app.explain(id_, kind=kind, at=at)
    return json_response(asdict(found if app.caller.namespaces is None else _without_others(found)))


async def _explain_work(app: CallerApp, id_: UUID, kind: ExplainedKind, at: datetime | None) -> Explanation:
    """Explain a task or a job; one outside the caller's namespaces looks like an unknown one."""
    if app.caller.namespaces is not None:
        async with app.connection() as connection:
            namespace = await read_task_namespace(connection, id_) or await read_job_namespace(connection, id_)
        if not app.caller.may_use(namespace):
            raise unknown_id_error(id_, kind)
    return await app.explain(id_, kind=kind, at=at)


def _without_others(found: Explanation) -> Explanation:
    """Leave out rows of other namespaces that may be evidence: tasks that hold a limit, workers, jobs."""

    def own(fact: Fact) -> Fact:
        return replace(fact, evidence=tuple(each for each in fact.evidence if each.kind not in OTHERS))

    return replace(found, facts=tuple(map(own, found.facts)), causes=tuple(map(_without_others, found.causes)))


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": METRICS_EXAMPLE}}}},
)
async def show_metrics(request: Request, app: ReadApp) -> Response:
    """Return the metrics in the Prometheus text format."""
    del app
    try:
        await request.app.state.pool_metrics.update()
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
@problems("database_unavailable", "busy", "timeout", "supervision_stalled", "no_live_worker")
async def show_readiness(request: Request) -> Response:
    """Answer whether the supervisor is ready.

    503 if the database cannot be reached, if worker processes are not supervised, if a pool that should have workers
    has had no live one for half a minute, or if tasks are pending, workers have failed and no other one is live.
    """
    state = request.app.state
    if state.readiness_check is None or state.readiness_check.done():
        state.readiness_check = asyncio.create_task(_check_readiness(state.app.url, state.pool))
        state.readiness_check.add_done_callback(lambda check: check.cancelled() or check.exception())
    await asyncio.shield(state.readiness_check)  # all that ask meanwhile share one check
    return json_response({"status": "ready"})


async def _check_readiness(url: str, pool: Pool | None) -> None:
    """Raise the reason why the supervisor is not ready; uses a connection that requests cannot keep busy."""
    settings = PoolSettings() if pool is None else pool.settings
    start_time = timedelta(seconds=settings.ready_timeout)
    try:
        async with asyncio.timeout(READINESS_TIMEOUT_S), connect(url) as connection:
            dead = await count_dead_pools(
                connection, supervisor=None if pool is None else pool.id, start_time=start_time
            )
            given_up = await have_given_up(connection)
    except TimeoutError:
        raise DisconnectedError(f"the database did not answer within {READINESS_TIMEOUT_S:g} s") from None
    if pool is not None and pool.is_stalled:
        raise Problem("supervision_stalled", f"no reconciliation for {settings.max_poll_gap:g} s", headers=RETRY_AFTER)
    if dead:
        detail = f"no live worker for {settings.ready_timeout:g} s in {dead} of the pools; GET /api/pools shows them"
        raise Problem("no_live_worker", detail, headers=RETRY_AFTER)
    if given_up:
        detail = "tasks are pending, workers that belong to no pool have failed, and no other worker is live"
        raise Problem("no_live_worker", detail, headers=RETRY_AFTER)
