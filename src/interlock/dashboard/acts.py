"""Acts of the pages: the changing endpoints of the REST API below `/ui/act`, for the caller of the browser's session.

Invariant: an act needs a session (where tokens are needed), the CSRF token of its page, an idempotency key that was
made when the act was offered, and the scope that the endpoint itself requires. Its actor is the token of the session. A
viewer who chose to read only is refused.
"""

from __future__ import annotations

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from interlock.dashboard.viewer import find_viewer
from interlock.supervisor.http import sessions
from interlock.supervisor.http.app import PARTS
from interlock.supervisor.http.problems import Problem, problem_response
from interlock.supervisor.http.request_log import bind_actor
from interlock.supervisor.http.sessions import require_csrf

PATH = "/ui/act"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


async def authorize_act(request: Request) -> None:
    """Make the viewer the caller of the request, or refuse it."""
    if request.method in SAFE_METHODS:
        raise Problem("method_not_allowed", "only requests that change something are acts; pages read by themselves")
    viewer = await find_viewer(request)
    require_csrf(request)
    if viewer.read_only:
        raise Problem("insufficient_scope", "this browser is switched to read only")
    if "idempotency-key" not in request.headers:
        raise Problem("invalid_request", "an act of a page needs an Idempotency-Key header")
    request.state.caller = viewer.caller
    bind_actor(viewer.caller.actor)


def mount_acts(api: FastAPI) -> None:
    """Mount the endpoints of an API for its acts."""
    acts = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    acts.state = api.state
    for kind in (Problem, RequestValidationError, HTTPException):
        acts.add_exception_handler(kind, problem_response)
    for part in PARTS:
        if part is not sessions:
            acts.include_router(part.router, dependencies=[Depends(authorize_act)])
    api.mount(PATH, acts)
