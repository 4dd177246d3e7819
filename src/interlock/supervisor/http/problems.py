"""Error responses as problem details (RFC 9457), each with a code for programs. Every 4xx and 5xx is made here.

A 409 has one of three codes. `illegal_transition`: the lifecycle does not allow the move; made from the database's
refusal (`IllegalTransition`), or by `illegal_transition_problem` where the engine reports that nothing was changed.
`not_possible`: the endpoint itself raises `Problem`, or the workflow is blocked (`DefinitionChangedError`).

Invariant: no response shows a stack trace, a statement or a secret; an unexpected error is `internal_error` only.
"""

from __future__ import annotations

from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from interlock.errors import (
    DefinitionChangedError,
    DisconnectedError,
    ElementsError,
    IllegalTransition,
    InputError,
    InterlockError,
    JobConflictError,
    RequestReusedError,
    StatementError,
    UnknownJobError,
    UnknownLimitError,
    UnknownNamespaceError,
    UnknownPoolError,
    UnknownScheduleError,
    UnknownTaskError,
    UnknownWorkerError,
)
from interlock.store.pools import PoolConflictError
from interlock.supervisor.http.metrics import count_refused_transition
from interlock.supervisor.http.request_log import REQUEST_ID_FIELD, current_request_id, request_log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.requests import Request

    from interlock.machine import Machine

Endpoint = TypeVar("Endpoint", bound="Callable[..., Any]")

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:interlock:problem:"
FIRST_SERVER_ERROR_STATUS = 500
MAX_ERRORS = 100  # that one problem lists

# every code, with its status and title
CODES: Mapping[str, tuple[int, str]] = {
    "bad_request": (400, "The request cannot be read"),
    "missing_token": (401, "A token is needed"),
    "unknown_token": (401, "The token is not valid"),
    "sign_in_failed": (401, "The sign-in is not valid"),
    "insufficient_scope": (403, "The token does not allow this"),
    "namespace_not_allowed": (403, "The token is limited to other namespaces"),
    "invalid_csrf_token": (403, "The CSRF token is not the one of the session"),
    "cross_origin": (403, "Requests from pages of other origins are refused"),
    "unknown_path": (404, "There is no such path"),
    "unknown_worker": (404, "There is no such worker"),
    "unknown_job": (404, "There is no such job"),
    "unknown_task": (404, "There is no such task"),
    "unknown_namespace": (404, "There is no such namespace"),
    "unknown_pool": (404, "There is no such pool"),
    "unknown_workflow": (404, "There is no such workflow"),
    "unknown_schedule": (404, "There is no such schedule"),
    "unknown_limit": (404, "There is no such limit"),
    "unknown_token_name": (404, "There is no token of that name"),
    "method_not_allowed": (405, "The path does not take this method"),
    "request_timeout": (408, "The request did not arrive in time"),
    "illegal_transition": (409, "The lifecycle does not allow this move"),
    "not_possible": (409, "That cannot be done now"),
    "job_conflict": (409, "An unfinished job has the key"),
    "event_expired": (410, "The event is too old to resume from"),
    "body_too_large": (413, "The body is too large"),
    "unsupported_media_type": (415, "The body must be JSON"),
    "unknown_host": (421, "The request is for another host"),
    "invalid_request": (422, "The request does not fit the schema"),
    "invalid_input": (422, "The request makes no sense here"),
    "key_reused": (422, "The idempotency key was used for another request"),
    "too_many_requests": (429, "Too many requests at once"),
    "head_too_large": (431, "The head of the request is too large"),
    "internal_error": (500, "Something went wrong here"),
    "busy": (503, "The database is busy"),
    "timeout": (503, "The request took too long"),
    "database_unavailable": (503, "The database cannot be reached"),
    "stopping": (503, "The supervisor is stopping"),
    "supervision_stalled": (503, "Worker processes are not supervised"),
    "no_live_worker": (503, "No worker is live"),
}
RETRY_AFTER = {"Retry-After": "1"}
# the first that fits counts
_ERROR_CODES: Mapping[type[InterlockError], str] = {
    UnknownWorkerError: "unknown_worker",
    UnknownJobError: "unknown_job",
    UnknownTaskError: "unknown_task",
    UnknownPoolError: "unknown_pool",
    UnknownNamespaceError: "unknown_namespace",
    UnknownScheduleError: "unknown_schedule",
    UnknownLimitError: "unknown_limit",
    PoolConflictError: "not_possible",
    RequestReusedError: "key_reused",
    JobConflictError: "job_conflict",
    InputError: "invalid_input",
    DefinitionChangedError: "not_possible",
}
_HTTP_CODES = {404: "unknown_path", 405: "method_not_allowed", 415: "unsupported_media_type"}
# SQLSTATE prefixes: transient errors, and values that PostgreSQL cannot store
_TRANSIENT_SQLSTATES = ("40", "53", "55P03", "57014", "57P")
_DATA_SQLSTATES = ("22",)
_INTERNAL_DETAIL = "the supervisor's log has the details"


class Problem(Exception):  # noqa: N818 - the name of RFC 9457
    """A request that is refused or failed. Endpoints raise it; `code` is one of CODES."""

    def __init__(
        self,
        code: str,
        detail: str,
        extensions: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.status, self.title = CODES[code]
        self.detail = detail
        self.headers = dict(headers or {})
        self.extensions = dict(extensions or {})

    def document(self, instance: str) -> dict[str, Any]:
        """Return the members of RFC 9457, the code, the id of the HTTP request and the extensions."""
        request_id = current_request_id()
        return {
            "type": TYPE_PREFIX + self.code,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "instance": instance,
            "code": self.code,
            **({} if request_id is None else {REQUEST_ID_FIELD: request_id}),
            **self.extensions,
        }

    def response(self, instance: str) -> Response:
        """Return the response."""
        return Response(encode_json(self.document(instance)), self.status, self.headers, MEDIA_TYPE)


def problems(*codes: str) -> Callable[[Endpoint], Endpoint]:
    """Declare the codes that an endpoint itself can answer with, for the OpenAPI document; a test holds it to them."""
    unknown = set(codes) - set(CODES)
    if unknown:
        raise ValueError(f"unknown problem codes: {sorted(unknown)}")

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.__problems__ = frozenset(codes)  # type: ignore[attr-defined]
        return endpoint

    return declare


def encode_json(document: Any) -> bytes:
    """Encode JSON; a timedelta becomes a number of seconds."""
    return orjson.dumps(document, default=_encode_value)


def _encode_value(value: object) -> object:
    return value.total_seconds() if isinstance(value, timedelta) else str(value)


def problem_from_error(error: Exception) -> Problem:
    """Convert any exception to the problem that the caller gets."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestValidationError):
        return _from_validation_error(error)
    if isinstance(error, HTTPException):
        code = _HTTP_CODES.get(error.status_code, "bad_request")
        detail = CODES[code][1] if code != "bad_request" else str(error.detail)
        return Problem(code, detail, headers=error.headers)
    if isinstance(error, InterlockError):
        return _from_interlock_error(error)
    return Problem("internal_error", _INTERNAL_DETAIL)


def _from_interlock_error(error: InterlockError) -> Problem:
    if isinstance(error, IllegalTransition):
        return _from_illegal_transition(error)
    if isinstance(error, DisconnectedError):
        return Problem("database_unavailable", "try again in a moment", headers=RETRY_AFTER)
    if isinstance(error, StatementError):
        return _from_statement_error(error)
    if isinstance(error, ElementsError):
        return invalid_elements_problem("jobs", error.errors)
    code = next((code for kind, code in _ERROR_CODES.items() if isinstance(error, kind)), "internal_error")
    if code == "internal_error":
        return Problem(code, _INTERNAL_DETAIL)
    job_id = getattr(error, "job_id", None)
    return Problem(code, str(error), {} if job_id is None else {"job_id": str(job_id)})


def invalid_elements_problem(name: str, errors: Sequence[tuple[int, str]]) -> Problem:
    """Make a 422 for elements of the list `name` of a bulk request; each error has the index of its element."""
    listed = [
        {"index": index, "field": f"{name}.{index}", "message": message} for index, message in errors[:MAX_ERRORS]
    ]
    detail = "; ".join(f"element {index}: {message}" for index, message in errors[:5])
    return Problem("invalid_input", detail, {"errors": listed})


def _from_statement_error(error: StatementError) -> Problem:
    state = str(getattr(error.__cause__, "sqlstate", None) or "")
    if state.startswith(_TRANSIENT_SQLSTATES):
        return Problem("busy", "try again in a moment", headers=RETRY_AFTER)
    if state.startswith(_DATA_SQLSTATES):
        return Problem("invalid_input", "the request holds a value that the database cannot store")
    return Problem("internal_error", _INTERNAL_DETAIL)


def _from_illegal_transition(error: IllegalTransition) -> Problem:
    """Make a 409 from a move that the database refused."""
    extensions = {
        "from": error.from_state,
        "to": error.to_state,
        "allowed": [str(state) for state in error.allowed],
        "machine": error.machine,
        "id": error.row,
    }
    return Problem("illegal_transition", str(error), extensions)


def illegal_transition_problem(
    machine: Machine[Any, Any], id_: object, source: str, target: str, otherwise: str
) -> Problem:
    """Make a 409 for a move that was not made, and count it: it did not reach the guards of the database.

    `otherwise` is the detail if the machine itself would allow the move.
    """
    count_refused_transition(machine.name, source, target)
    states = {str(state): state for state in machine.states}
    allowed = [str(state) for state in machine.allowed_targets(states[source])]
    sentence = machine.validate_transition(states[source], states[target])
    extensions = {"from": source, "to": target, "allowed": allowed, "machine": machine.name, "id": str(id_)}
    return Problem("illegal_transition", sentence or otherwise, extensions)


def _from_validation_error(error: RequestValidationError) -> Problem:
    """Name the invalid fields and the reasons, without the values, which may be secrets."""
    broken = next((each for each in error.errors() if each["type"] == "json_invalid"), None)
    if broken is not None:
        return Problem("bad_request", f"the body is not valid JSON, at character {broken['loc'][-1]}")
    errors = [
        {
            **_element_index(each["loc"]),
            "field": _field_path(each["loc"]),
            "message": str(each["msg"]).removeprefix("Value error, "),
        }
        for each in error.errors()[:MAX_ERRORS]
    ]
    detail = "; ".join(f"{each['field']}: {each['message']}" for each in errors[:5])
    return Problem("invalid_request", detail, {"errors": errors})


def _element_index(loc: Sequence[Any]) -> dict[str, int]:
    """Return the index of the element of a bulk request that an error is in."""
    match loc:
        case ("body", "tasks" | "jobs", int(index), *_):
            return {"index": index}
    return {}


def _field_path(loc: Sequence[Any]) -> str:
    place, *names = [str(part) for part in loc]
    return ".".join(names) if names and place == "body" else ".".join([place, *names])


def problem_response(request: Request, error: Exception) -> Response:
    """Answer an exception with its problem, and log it."""
    problem = problem_from_error(error)
    record_problem(problem, error, request.method, request.url.path)
    return problem.response(request.url.path)


def record_problem(problem: Problem, error: Exception, method: str, path: str) -> None:
    """Log refused transitions, transient failures and unexpected errors."""
    if problem.code == "illegal_transition":
        move = problem.extensions
        request_log.write(
            "warning",
            "invalid_transition_attempted",
            machine=move["machine"],
            current_state=move["from"],
            wanted_state=move["to"],
            reason=problem.detail,
        )
    elif problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        request_log.write(
            "error",
            "request_failed",
            method=method,
            path=path,
            error=f"{type(error).__name__}: {error}",
            exc_info=error,
        )
    elif problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
        request_log.write("warning", "request_put_off", method=method, path=path, code=problem.code, error=str(error))
