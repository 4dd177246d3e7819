"""The OpenAPI document: operation ids, summaries, examples, and the problems that each operation can answer with.

Invariant: an operation documents a code if and only if it can answer with it: codes of the endpoint itself are declared
with `@problems(...)`, those of the layers before it follow from its parameters and the scope that it needs. Every
request body and every JSON response has an example that fits its schema.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from interlock.supervisor.http.auth import LIMITS_NAMESPACES, NAMED_BY_PATH, AdminCaller, OperateCaller, ReadCaller
from interlock.supervisor.http.examples import REQUEST_EXAMPLES, make_example
from interlock.supervisor.http.middleware import HEALTH_PATHS, SAFE_METHODS
from interlock.supervisor.http.problems import CODES, MEDIA_TYPE, TYPE_PREFIX
from interlock.supervisor.http.requests import all_dependants
from interlock.supervisor.http.responses import ProblemResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fastapi import FastAPI
    from fastapi.dependencies.models import Dependant

JSON = "application/json"
MODEL_SUFFIX = re.compile(r"(?<=[a-z])(Request|Response)(?=[_\]]|$)")  # also within Page[TaskResponse]
TAGS = {
    "workers": "Supervised worker processes.",
    "pools": "Desired numbers of workers, which the supervisors keep.",
    "jobs": "Runs of workflows, their steps, signals and approvals.",
    "tasks": "Tasks: enqueue, read, wait, cancel, requeue.",
    "workflows": "Stored workflow definitions.",
    "schedules": "Tasks and jobs at set times.",
    "limits": "Limits on concurrency, starts, weight and cost.",
    "webhooks": "Webhooks that were given up.",
    "tokens": "Tokens of this API.",
    "events": "Recorded transitions as a stream of server-sent events.",
    "audit": "Recorded transitions as a list.",
    "system": "Namespaces, status, explanations, the doctor, metrics, health.",
}
# Codes that any request can get; and those that any request can get but for health checks, which no limit applies to.
COMMON_CODES = frozenset({"unknown_host", "head_too_large", "internal_error"})
LIMIT_CODES = frozenset({"too_many_requests", "busy", "timeout", "database_unavailable"})
BODY_CODES = frozenset({"bad_request", "request_timeout", "body_too_large", "unsupported_media_type"})
TOKEN_CODES = frozenset({"missing_token", "unknown_token"})


def operation_id(route: APIRoute) -> str:
    """Return the operation id of a route: the name of its function."""
    return route.name


def build_document(api: FastAPI) -> dict[str, Any]:
    """Build the OpenAPI document of the API."""
    tags = [{"name": name, "description": description} for name, description in TAGS.items()]
    document = get_openapi(
        title=api.title, version=api.version, description=api.description, routes=api.routes, tags=tags
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["ProblemResponse"] = ProblemResponse.model_json_schema(ref_template="#/components/schemas/{model}")
    for route in documented_routes(api.routes):
        if route.path_format not in document["paths"]:
            continue  # of a router that is not in the document
        for method in route.methods or ():
            operation = document["paths"][route.path_format][method.lower()]
            _describe(operation, route)
            operation["responses"].pop("422", None)
            operation["responses"] |= _problem_responses(possible_codes(route, method), route.path_format)
    _drop_model_suffixes(document)
    for operations in document["paths"].values():
        for operation in operations.values():
            _add_examples(operation, document["components"]["schemas"])
    return document


def possible_codes(route: APIRoute, method: str) -> frozenset[str]:
    """Return the codes that an operation can answer with."""
    codes = set(COMMON_CODES) | getattr(route.endpoint, "__problems__", frozenset())
    if route.path not in HEALTH_PATHS:
        codes |= LIMIT_CODES
    codes |= _token_codes(route)
    if method not in SAFE_METHODS:
        codes |= {"cross_origin"} | BODY_CODES
    if any(_has_parameters(dependency) for dependency in all_dependants(route.dependant)):
        codes.add("invalid_request")
    if any(
        field.alias == "Idempotency-Key" for each in all_dependants(route.dependant) for field in each.header_params
    ):
        codes.add("key_reused")
    if "{" in route.path and ":path}" not in route.path:
        codes.add("unknown_path")  # a value with a slash in it makes another path
    return frozenset(codes)


def _token_codes(route: APIRoute) -> set[str]:
    """Return the codes for the token of a request: none where none is needed."""
    codes: set[str] = set()
    scopes = {id(dependency.call) for dependency in all_dependants(route.dependant)}
    if scopes & {_scope_call(caller) for caller in (ReadCaller, OperateCaller, AdminCaller)}:
        codes |= TOKEN_CODES
        named = any(field.name in NAMED_BY_PATH for field in route.dependant.path_params)
        if not named and not getattr(route.endpoint, LIMITS_NAMESPACES, False):
            codes.add("namespace_not_allowed")
    if scopes & {_scope_call(caller) for caller in (OperateCaller, AdminCaller)}:
        codes.add("insufficient_scope")
    return codes


def documented_routes(routes: Iterable[Any]) -> Iterator[APIRoute]:
    """Yield the routes that are in the document; newer versions of FastAPI keep those of a router together."""
    for route in routes:
        if isinstance(route, APIRoute):
            if route.include_in_schema:
                yield route
        elif hasattr(route, "original_router"):
            yield from documented_routes(route.original_router.routes)


def _scope_call(caller: Any) -> int:
    return id(caller.__metadata__[0].dependency)


def _has_parameters(dependant: Dependant) -> bool:
    return bool(dependant.path_params or dependant.query_params or dependant.header_params or dependant.body_params)


def _describe(operation: dict[str, Any], route: APIRoute) -> None:
    """Use the first sentence of the docstring as the summary, all of it as the description."""
    text = inspect.getdoc(route.endpoint) or ""
    first = re.split(r"(?<=[.:;])\s", text, maxsplit=1)[0]
    operation["summary"] = first.rstrip(".:;")
    operation["description"] = " ".join(text.split())


def _problem_responses(codes: frozenset[str], path: str) -> dict[str, Any]:
    by_status: dict[int, list[str]] = {}
    for code, (status, _) in CODES.items():
        if code in codes:
            by_status.setdefault(status, []).append(code)
    return {
        str(status): {
            "description": ", ".join(f"`{name}`" for name in names),
            "content": {
                MEDIA_TYPE: {
                    "schema": {"$ref": "#/components/schemas/ProblemResponse"},
                    "examples": {name: {"value": _problem_example(name, path)} for name in names},
                }
            },
        }
        for status, names in by_status.items()
    }


def _problem_example(code: str, path: str) -> dict[str, Any]:
    status, title = CODES[code]
    return {
        "type": TYPE_PREFIX + code,
        "title": title,
        "status": status,
        "detail": title,
        "instance": path,
        "code": code,
    }


def _add_examples(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    body = operation.get("requestBody", {}).get("content", {}).get(JSON)
    if body is not None and "example" not in body:
        name = _model_name(body["schema"])
        body["example"] = REQUEST_EXAMPLES.get(name) or make_example(body["schema"], schemas, optional=False)
    for response in operation["responses"].values():
        content = response.get("content", {}).get(JSON)
        if content is not None and "example" not in content:
            content["example"] = make_example(content["schema"], schemas)


def _model_name(schema: dict[str, Any]) -> str:
    """Return the name of the model of a body, also of one that may be left out."""
    choices = schema.get("anyOf", [schema])
    return next((choice["$ref"].rpartition("/")[2] for choice in choices if "$ref" in choice), "")


def _drop_model_suffixes(document: dict[str, Any]) -> None:
    """Rename the components: the model `TaskResponse` is the schema `Task`, and `NewTaskRequest` is `NewTask`."""
    components = document["components"]
    names = [MODEL_SUFFIX.sub("", name) for name in components["schemas"]]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"models with the same name but for Request and Response: {', '.join(twice)}")
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
