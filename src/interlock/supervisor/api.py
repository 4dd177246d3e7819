"""The supervisor's API put together: its paths, its door, its errors, and the document that describes them.

Invariant: every answer that can be given stands in the OpenAPI document, and every error is a problem detail.
"""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from interlock.config import Config, is_loopback
from interlock.supervisor import api_docs, api_jobs, api_system, api_tasks, api_workers
from interlock.supervisor.acting import Served
from interlock.supervisor.auth import Access
from interlock.supervisor.documents import Problem as ProblemDocument
from interlock.supervisor.door import LOOPBACK_NAMES, Door, Rules
from interlock.supervisor.moves import LAG, MoveMetrics
from interlock.supervisor.problems import CODES, MEDIA_TYPE, Problem, answer_problem

if TYPE_CHECKING:
    from datetime import timedelta

    from interlock.client.app import Interlock

ABOUT = """
Workers, jobs and tasks of one Interlock database.

Every request that changes something takes an `Idempotency-Key` header, or `request_id` in its body: the same request
again gives the same answer. Errors are problem details (RFC 9457) with a `code`. Lists come in pages: `next` of one is
the `cursor` of the following.
"""
PATIENCE = 15.0  # seconds to wait for a connection to the database
PUBLIC = frozenset({"/healthz", "/readyz"})


class Api(FastAPI):
    """The API, with every problem that it can answer in its description."""

    def openapi(self) -> dict[str, Any]:
        """Describe it; once, since it does not change."""
        if self.openapi_schema is None:
            document = get_openapi(
                title=self.title, version=self.version, description=self.description, routes=self.routes
            )
            self.openapi_schema = _with_problems(document)
        return self.openapi_schema


def create_api(app: Interlock, config: Config, *, host: str | None = None, lag: timedelta = LAG) -> FastAPI:
    """Make the API of an app, which must be open while it is served; `host` is the address that it is bound to."""
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
    served = Served(app, min(PATIENCE, config.supervisor_timeout / 2))
    api.state.app = served
    api.state.config = config
    api.state.turns = WeakValueDictionary()
    api.state.access = Access(served, token_required=config.supervisor_require_token or not local)
    api.state.moves = MoveMetrics(served.connection, lag=lag)
    api.state.registry = CollectorRegistry()
    api.state.registry.register(api.state.moves)
    for kind in (Problem, RequestValidationError, HTTPException):
        api.add_exception_handler(kind, answer_problem)
    for part in (api_workers, api_jobs, api_tasks, api_system, api_docs):
        api.include_router(part.router)
    names = {name.lower() for name in config.supervisor_names}
    rules = Rules(
        frozenset(LOOPBACK_NAMES | names) if local else frozenset(names) or None,
        config.supervisor_body_limit,
        config.supervisor_timeout,
    )
    api.add_middleware(Door, rules=rules)
    return api


def _with_problems(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            operation["responses"] |= _problems(path, method)
    return document


def _problems(path: str, method: str) -> dict[str, Any]:
    codes: dict[int, list[str]] = {}
    for code, (status, _) in CODES.items():
        if _can_be(status, path, method):
            codes.setdefault(status, []).append(code)
    schema = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        str(status): {"description": ", ".join(f"`{code}`" for code in names), "content": schema}
        for status, names in codes.items()
    }


def _can_be(status: int, path: str, method: str) -> bool:
    """Tell whether a status can be the answer of an operation."""
    if status in {401, 403} and path in PUBLIC:
        return False
    return status != HTTPStatus.CONFLICT or method != "get"
