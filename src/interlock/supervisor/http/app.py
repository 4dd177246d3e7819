"""The FastAPI application: endpoints, middleware, error handlers, and the page that shows the OpenAPI document.

Invariant: every error is a problem detail. The page works without a network and runs no script but its own.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import Response

from interlock.client.group_commit import GroupCommit
from interlock.config import Config, is_loopback
from interlock.supervisor.http import (
    audit,
    bulk,
    events,
    jobs,
    limits,
    pools,
    schedules,
    sessions,
    system,
    tasks,
    tokens,
    webhooks,
    workers,
    workflows,
)
from interlock.supervisor.http.auth import Authenticator, TokenLookups, authenticate_request
from interlock.supervisor.http.connections import parse_networks
from interlock.supervisor.http.events import EventFeed
from interlock.supervisor.http.idempotency import BoundedWaitApp
from interlock.supervisor.http.metrics import COMMIT_LAG, PoolMetrics, TransitionMetrics
from interlock.supervisor.http.middleware import LOOPBACK_HOSTS, RequestLimits, RequestLimitsMiddleware
from interlock.supervisor.http.openapi import build_document, operation_id
from interlock.supervisor.http.problems import Problem, encode_json, problem_response
from interlock.telemetry import served_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from interlock.client.app import Interlock
    from interlock.supervisor.pool.pool import Pool


ABOUT = """
Workers, jobs and tasks of one Interlock database.

Every request that changes state accepts an `Idempotency-Key` header, or `request_id` in its body: the same request
again gets the same response. Errors are problem details (RFC 9457) with a `code`. Lists are paginated: `next` of one
page is the `cursor` of the following one, and a page with a `next` may be short. `state` and `status` are two names of
the same value.
"""
MAX_CONNECTION_WAIT_S = 15.0
# Modules with the endpoints of the API; the dashboard offers the same ones to browsers that are signed in. Those of the
# most frequent requests come first: a route is searched in this order.
PARTS = (
    tasks, jobs, workers, pools, bulk, workflows, schedules, limits, webhooks, tokens, events, audit, system, sessions
)  # fmt: skip


DOCS_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
MEDIA_TYPES = {"docs.html": "text/html", "docs.js": "text/javascript", "docs.css": "text/css"}

router = APIRouter(include_in_schema=False)  # the OpenAPI document, and the page at /docs


class Api(FastAPI):
    """The application with its OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document; it is built once."""
        if self.openapi_schema is None:
            self.openapi_schema = build_document(self)
        return self.openapi_schema

    @cached_property
    def encoded_document(self) -> bytes:
        """The OpenAPI document as JSON: it has half a million bytes, and callers without a token can ask for it."""
        return encode_json(self.openapi())


def create_api(
    app: Interlock,
    config: Config,
    *,
    host: str | None = None,
    lag: timedelta = COMMIT_LAG,
    pool: Pool | None = None,
    extensions: Sequence[Callable[[FastAPI], None]] = (),
) -> FastAPI:
    """Create the API of an app, which must be open while it is served; `host` is the address that it is bound to.

    Each extension is called with the API at the end, to add routes of its own; the dashboard is one.
    """
    bound = config.supervisor_host if host is None else host
    local = is_loopback(bound)
    api = Api(
        title="Interlock",
        version=version("interlock"),
        description=ABOUT,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
    )
    bounded = BoundedWaitApp(app, min(MAX_CONNECTION_WAIT_S, config.supervisor_timeout / 2))
    api.state.app = bounded
    api.state.config = config
    api.state.stopping = asyncio.Event()  # set when the server stops: streams end
    api.state.events = EventFeed(bounded)
    api.state.readiness_check = None
    api.state.pool = pool
    api.state.key_locks = WeakValueDictionary()
    api.state.authenticator = Authenticator(
        bounded, token_required=not (config.supervisor_no_token and local), lookups=TokenLookups(bounded)
    )
    api.state.group_commit = GroupCommit(bounded.connection)
    api.state.csrf_key = sessions.new_csrf_key()
    api.state.sign_in_attempts = sessions.SignInAttempts()
    api.state.transitions = TransitionMetrics(bounded.connection, lag=lag)
    api.state.pool_metrics = PoolMetrics(bounded.connection)
    api.state.doctor = system.SharedExamination(bounded)
    of_database = CollectorRegistry()
    of_database.register(api.state.transitions)
    of_database.register(api.state.pool_metrics)
    api.state.registry = served_registry(of_database)
    for kind in (Problem, RequestValidationError, HTTPException):
        api.add_exception_handler(kind, problem_response)
    for part in PARTS:
        api.include_router(part.router)
    api.include_router(router)
    names = {name.lower() for name in config.supervisor_names}
    request_limits = RequestLimits(
        allowed_hosts=frozenset(LOOPBACK_HOSTS | names) if local else frozenset(names) or None,
        max_body_bytes=config.supervisor_body_limit,
        timeout_s=config.supervisor_timeout,
        proxies=parse_networks(config.supervisor_proxies),
    )
    api.add_middleware(
        RequestLimitsMiddleware, limits=request_limits, authenticate=authenticate_request, stopping=api.state.stopping
    )
    for extend in extensions:
        extend(api)
    return api


@router.get("/openapi.json")
async def show_document(request: Request) -> Response:
    """Return the OpenAPI document."""
    return Response(request.app.encoded_document, media_type="application/json")


@router.get("/docs")
async def show_docs() -> Response:
    """Return the page that shows the OpenAPI document."""
    return _static_file("docs.html")


@router.get("/docs/docs.js")
async def show_script() -> Response:
    """Return the script of the page."""
    return _static_file("docs.js")


@router.get("/docs/docs.css")
async def show_style() -> Response:
    """Return the style sheet of the page."""
    return _static_file("docs.css")


def _static_file(name: str) -> Response:
    content = files("interlock.supervisor.http").joinpath("static", name).read_bytes()
    return Response(
        content, headers={"Content-Security-Policy": DOCS_CONTENT_SECURITY_POLICY}, media_type=MEDIA_TYPES[name]
    )
