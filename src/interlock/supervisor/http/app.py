"""The FastAPI application: endpoints, middleware, error handlers, the OpenAPI document and the page that shows it.

Invariant: the OpenAPI document has every response, and every error is a problem detail. The page works without a
network and runs no script but its own.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import Response

from interlock.config import Config, is_loopback
from interlock.supervisor.http import jobs as api_jobs
from interlock.supervisor.http import system as api_system
from interlock.supervisor.http import tasks as api_tasks
from interlock.supervisor.http import workers as api_workers
from interlock.supervisor.http.auth import Authenticator
from interlock.supervisor.http.idempotency import BoundedWaitApp
from interlock.supervisor.http.metrics import COMMIT_LAG, TransitionMetrics
from interlock.supervisor.http.middleware import LOOPBACK_HOSTS, RequestLimits, RequestLimitsMiddleware
from interlock.supervisor.http.problems import CODES, MEDIA_TYPE, Problem, problem_response
from interlock.supervisor.http.responses import ProblemResponse
from interlock.telemetry import served_registry

if TYPE_CHECKING:
    from datetime import timedelta

    from interlock.client.app import Interlock


ABOUT = """
Workers, jobs and tasks of one Interlock database.

Every request that changes state accepts an `Idempotency-Key` header, or `request_id` in its body: the same request
again gets the same response. Errors are problem details (RFC 9457) with a `code`. Lists are paginated: `next` of one
page is the `cursor` of the following one.
"""
MAX_CONNECTION_WAIT_S = 15.0
PUBLIC_PATHS = frozenset({"/healthz", "/readyz"})


DOCS_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
MODEL_SUFFIX = re.compile(r"(?<=[a-z])(Request|Response)(?=[_\]]|$)")  # also within Page[TaskResponse]
MEDIA_TYPES = {"docs.html": "text/html", "docs.js": "text/javascript", "docs.css": "text/css"}

router = APIRouter(include_in_schema=False)  # the page at /docs


class Api(FastAPI):
    """The application, whose OpenAPI document lists every problem of every operation."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document; it is built once."""
        if self.openapi_schema is None:
            document = get_openapi(
                title=self.title, version=self.version, description=self.description, routes=self.routes
            )
            self.openapi_schema = _drop_model_suffixes(_add_problems(document))
        return self.openapi_schema


def create_api(app: Interlock, config: Config, *, host: str | None = None, lag: timedelta = COMMIT_LAG) -> FastAPI:
    """Create the API of an app, which must be open while it is served; `host` is the address that it is bound to."""
    bound = config.supervisor_host if host is None else host
    local = is_loopback(bound)
    api = Api(
        title="Interlock",
        version=version("interlock"),
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    bounded = BoundedWaitApp(app, min(MAX_CONNECTION_WAIT_S, config.supervisor_timeout / 2))
    api.state.app = bounded
    api.state.config = config
    api.state.key_locks = WeakValueDictionary()
    api.state.authenticator = Authenticator(bounded, token_required=config.supervisor_require_token or not local)
    api.state.transitions = TransitionMetrics(bounded.connection, lag=lag)
    transitions = CollectorRegistry()
    transitions.register(api.state.transitions)
    api.state.registry = served_registry(transitions)
    for kind in (Problem, RequestValidationError, HTTPException):
        api.add_exception_handler(kind, problem_response)
    for part in (api_workers, api_jobs, api_tasks, api_system):
        api.include_router(part.router)
    api.include_router(router)
    names = {name.lower() for name in config.supervisor_names}
    limits = RequestLimits(
        allowed_hosts=frozenset(LOOPBACK_HOSTS | names) if local else frozenset(names) or None,
        max_body_bytes=config.supervisor_body_limit,
        timeout_s=config.supervisor_timeout,
    )
    api.add_middleware(RequestLimitsMiddleware, limits=limits)
    return api


def _drop_model_suffixes(document: dict[str, Any]) -> dict[str, Any]:
    """Rename the components: the model `TaskResponse` is the schema `Task`, and `NewTaskRequest` is `NewTask`."""
    components = document["components"]
    components["schemas"] = {MODEL_SUFFIX.sub("", name): schema for name, schema in components["schemas"].items()}
    nodes: list[Any] = [document]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            node |= {
                key: MODEL_SUFFIX.sub("", node[key]) for key in ("$ref", "title") if isinstance(node.get(key), str)
            }
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
    return document


def _add_problems(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = ProblemResponse.model_json_schema(ref_template="#/components/schemas/{model}")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            operation["responses"] |= _problem_responses(path, method)
    return document


def _problem_responses(path: str, method: str) -> dict[str, Any]:
    codes: dict[int, list[str]] = {}
    for code, (status, _) in CODES.items():
        if _is_possible(status, path, method):
            codes.setdefault(status, []).append(code)
    schema = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        str(status): {"description": ", ".join(f"`{code}`" for code in names), "content": schema}
        for status, names in codes.items()
    }


def _is_possible(status: int, path: str, method: str) -> bool:
    """Return whether an operation can answer with a status."""
    if status in {401, 403} and path in PUBLIC_PATHS:
        return False
    return status != HTTPStatus.CONFLICT or method != "get"


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
