"""Refusals and failures as RFC 9457 has them: problem details, each with a code that a program can act on.

Invariant: no answer shows a stack trace, a statement or a secret; what nobody foresaw is `internal_error` and no more.
"""

from __future__ import annotations

from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from interlock.errors import (
    DisconnectedError,
    IllegalTransition,
    InputError,
    InterlockError,
    StatementError,
    UnknownJobError,
    UnknownTaskError,
    UnknownWorkerError,
)
from interlock.lifecycle import MACHINES
from interlock.supervisor.http.metrics import failed_transitions_total
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request

    from interlock.machine import Machine
MEDIA_TYPE = "application/problem+json"
KIND = "urn:interlock:problem:"

# every code that can be answered, with its status and its title
CODES: Mapping[str, tuple[int, str]] = {
    "bad_request": (400, "The request cannot be read"),
    "missing_token": (401, "A token is needed"),
    "unknown_token": (401, "The token is not valid"),
    "insufficient_scope": (403, "The token does not allow this"),
    "cross_origin": (403, "Requests from pages of other origins are refused"),
    "unknown_path": (404, "There is no such path"),
    "unknown_worker": (404, "There is no such worker"),
    "unknown_job": (404, "There is no such job"),
    "unknown_task": (404, "There is no such task"),
    "method_not_allowed": (405, "The path does not take this method"),
    "request_timeout": (408, "The request did not arrive in time"),
    "illegal_transition": (409, "The lifecycle does not allow this move"),
    "not_possible": (409, "That cannot be done now"),
    "body_too_large": (413, "The body is too large"),
    "unsupported_media_type": (415, "The body must be JSON"),
    "unknown_host": (421, "The request is for another host"),
    "invalid_request": (422, "The request does not fit the schema"),
    "invalid_input": (422, "The request makes no sense here"),
    "key_reused": (422, "The idempotency key was used for another request"),
    "too_many_requests": (429, "Too many requests at once"),
    "internal_error": (500, "Something went wrong here"),
    "busy": (503, "The database is busy"),
    "timeout": (503, "The request took too long"),
    "database_unavailable": (503, "The database cannot be reached"),
}
_RETRY = {"Retry-After": "1"}
_UNKNOWN: Mapping[type[InterlockError], str] = {
    UnknownWorkerError: "unknown_worker",
    UnknownJobError: "unknown_job",
    UnknownTaskError: "unknown_task",
}
_HTTP = {404: "unknown_path", 405: "method_not_allowed", 415: "unsupported_media_type"}
# SQLSTATEs of what goes away by itself, and of values that PostgreSQL cannot hold
_PASSING = ("40", "53", "55P03", "57014", "57P")
_UNFIT = ("22",)


class Problem(Exception):  # noqa: N818 - the name of RFC 9457
    """A request that is not carried out, and why."""

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
        """Give the members of RFC 9457, the code and what else there is to say."""
        return {
            "type": KIND + self.code,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "instance": instance,
            "code": self.code,
            **self.extensions,
        }

    def response(self, instance: str) -> Response:
        """Answer with it."""
        return Response(encoded(self.document(instance)), self.status, self.headers, MEDIA_TYPE)


def encoded(document: Any) -> bytes:
    """Write JSON; a length of time is a number of seconds."""
    return orjson.dumps(document, default=_json_of)


def _json_of(value: object) -> object:
    return value.total_seconds() if isinstance(value, timedelta) else str(value)


def problem_of(error: Exception) -> Problem:
    """Say what an error is to whoever made the request."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        code = _HTTP.get(error.status_code, "bad_request")
        detail = CODES[code][1] if code != "bad_request" else str(error.detail)
        return Problem(code, detail, headers=error.headers)
    if isinstance(error, InterlockError):
        return _of_engine(error)
    return Problem("internal_error", "what it was is in the supervisor's log")


def _of_engine(error: InterlockError) -> Problem:
    if isinstance(error, IllegalTransition):
        return _illegal(error)
    if isinstance(error, DisconnectedError):
        return Problem("database_unavailable", "try again in a moment", headers=_RETRY)
    if isinstance(error, StatementError):
        return _of_database(error)
    for kind, code in _UNKNOWN.items():
        if isinstance(error, kind):
            return Problem(code, str(error))
    if isinstance(error, InputError):
        return Problem("invalid_input", str(error))
    return Problem("internal_error", "what it was is in the supervisor's log")


def _of_database(error: StatementError) -> Problem:
    state = str(getattr(error.__cause__, "sqlstate", None) or "")
    if state.startswith(_PASSING):
        return Problem("busy", "try again in a moment", headers=_RETRY)
    if state.startswith(_UNFIT):
        return Problem("invalid_input", "the request holds a value that the database cannot store")
    return Problem("internal_error", "what it was is in the supervisor's log")


def _illegal(error: IllegalTransition) -> Problem:
    said = {"from": error.from_state, "to": error.to_state, "allowed": [str(state) for state in error.allowed]}
    return Problem("illegal_transition", str(error), {**said, "machine": error.machine, "id": error.row})


def refused_move(machine: Machine[Any, Any], id_: object, source: str, target: str, otherwise: str) -> Problem:
    """Refuse a move in the words of its lifecycle; `otherwise` when the table would allow it, and the row does not."""
    states = {str(state): state for state in machine.states}
    allowed = [str(state) for state in machine.allowed_targets(states[source])]
    sentence = machine.validate_transition(states[source], states[target])
    said = {"from": source, "to": target, "allowed": allowed, "machine": machine.name, "id": str(id_)}
    return Problem("illegal_transition", sentence or otherwise, said)


def _invalid(error: RequestValidationError) -> Problem:
    """Name the fields, and say what is wrong with each, without the values, which may be secrets."""
    broken = next((each for each in error.errors() if each["type"] == "json_invalid"), None)
    if broken is not None:
        return Problem("bad_request", f"the body is not valid JSON, at character {broken['loc'][-1]}")
    found = [
        {"field": _field(each["loc"]), "message": str(each["msg"]).removeprefix("Value error, ")}
        for each in error.errors()
    ]
    detail = "; ".join(f"{each['field']}: {each['message']}" for each in found[:5])
    return Problem("invalid_request", detail, {"errors": found})


def _field(loc: Sequence[Any]) -> str:
    place, *names = [str(part) for part in loc]
    return ".".join(names) if names and place == "body" else ".".join([place, *names])


def answer_problem(request: Request, error: Exception) -> Response:
    """Answer with what an error is; count a refused move, log what nobody foresaw."""
    problem = problem_of(error)
    note_problem(problem, error, request.method, request.url.path)
    return problem.response(request.url.path)


def note_problem(problem: Problem, error: Exception, method: str, path: str) -> None:
    """Count and log a problem, once."""
    if problem.code == "illegal_transition":
        said = problem.extensions
        failed_transitions_total.labels(_known(said["machine"]), str(said["from"]), str(said["to"])).inc()
        log.warning(
            "invalid_transition_attempted",
            machine=said["machine"],
            current_state=said["from"],
            wanted_state=said["to"],
            reason=problem.detail,
        )
    elif problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("request_failed", method=method, path=path, error=f"{type(error).__name__}: {error}", exc_info=error)
    elif problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
        log.warning("request_put_off", method=method, path=path, code=problem.code, error=str(error))


def _known(machine: str) -> str:
    names = {known.name for known in MACHINES.values()}
    return machine if machine in names else "other"
