"""Sign-in of browsers: a page that exchanges a one-time code or a token for a session cookie, and CSRF tokens.

For pages: `session_caller(request)` is who is signed in, `csrf_token(request)` the token that a page carries, and
`require_csrf(request)` the check of every request that changes something.

Invariant: the cookie counts on pages and below `/ui`, never for `/api` and `/metrics`. A page of another site cannot
act with it: the cookie is SameSite=Strict, and each change needs the CSRF token, which only our own pages can read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from importlib.resources import files
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator
from starlette.responses import Response

from interlock.store.access import (
    SESSION_LIFETIME,
    authenticate_session,
    create_session_by_code,
    create_session_by_token,
    delete_session,
)
from interlock.supervisor.http.auth import ANONYMOUS, Caller
from interlock.supervisor.http.idempotency import json_response
from interlock.supervisor.http.problems import Problem
from interlock.supervisor.local_token import SIGN_IN_PATH

router = APIRouter(include_in_schema=False)

PAGE_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
CSRF_HEADER = "X-CSRF-Token"
SESSION_COOKIE = "interlock_session"
SECURE_SESSION_COOKIE = "__Host-interlock_session"
PATHS_WITHOUT_SESSION = ("/api", "/metrics")
FAILURES_PER_MINUTE = 20  # of one client address
FAILURE_WINDOW_S = 60.0
MAX_ADDRESSES = 10_000
_CSRF_PURPOSE = b"interlock csrf"
_SIGN_IN_FILES = {"enter.html": "text/html", "enter.js": "text/javascript", "enter.css": "text/css"}


class SignInRequest(BaseModel):
    """A one-time code, or a token."""

    model_config = ConfigDict(extra="forbid")

    code: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    token: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> SignInRequest:
        if (self.code is None) is (self.token is None):
            raise ValueError("send either code or token")
        return self


class SignInAttempts:
    """Limits failed sign-ins: so many per client and minute. A valid secret signs in however many have failed."""

    def __init__(self) -> None:
        self._failures: dict[str, list[float]] = {}

    def add_failure(self, client: str) -> None:
        """Count a failed sign-in; raise 429 when the client has failed too often."""
        recent = self._recent(client)
        if len(recent) >= FAILURES_PER_MINUTE:
            wait = max(1, round(recent[0] + FAILURE_WINDOW_S - time.monotonic()))
            raise Problem(
                "too_many_requests",
                f"too many failed sign-ins; try again in {wait} s",
                headers={"Retry-After": str(wait)},
            )
        if len(self._failures) >= MAX_ADDRESSES:
            self._failures = {known: self._recent(known) for known in self._failures if self._recent(known)}
        if client in self._failures or len(self._failures) < MAX_ADDRESSES:
            self._failures[client] = [*recent, time.monotonic()]

    def _recent(self, client: str) -> list[float]:
        since = time.monotonic() - FAILURE_WINDOW_S
        return [moment for moment in self._failures.get(client, ()) if moment > since]


async def session_caller(request: Request) -> Caller | None:
    """Return who is signed in: None without a session, or when its token was revoked.

    Where no token is needed, everybody is the anonymous caller, as for the API. The caller of a request is looked up
    once; a stream calls `renewed_session_caller` to learn that its session has ended.
    """
    if not hasattr(request.state, "session_caller"):
        request.state.session_caller = await renewed_session_caller(request)
    found: Caller | None = request.state.session_caller
    return found


async def renewed_session_caller(request: Request) -> Caller | None:
    """Look up who is signed in now."""
    if request.url.path.startswith(PATHS_WITHOUT_SESSION):
        return None
    session = session_secret(request)
    if session is not None:
        async with request.app.state.app.connection() as connection:
            principal = await authenticate_session(connection, session)
        if principal is not None:
            return Caller.from_principal(principal)
    return None if request.app.state.authenticator.token_required else ANONYMOUS


def csrf_token(request: Request) -> str:
    """Return the CSRF token of the session; where no token is needed, that of this process."""
    session = session_secret(request)
    key: bytes = request.app.state.csrf_key if session is None else session.encode()
    return _csrf_of(key)


def require_csrf(request: Request) -> None:
    """Raise 403 unless the request carries the CSRF token of its session."""
    given = request.headers.get(CSRF_HEADER, "")
    if not hmac.compare_digest(given.encode(), csrf_token(request).encode()):
        raise Problem("invalid_csrf_token", f"send the page's token as {CSRF_HEADER}; reload the page if it is old")


def page_file(name: str, media_type: str) -> Response:
    """Return a file of `static` with the content security policy of pages."""
    content = files("interlock.supervisor.http").joinpath("static", name).read_bytes()
    return Response(content, headers={"Content-Security-Policy": PAGE_CONTENT_SECURITY_POLICY}, media_type=media_type)


@router.get(SIGN_IN_PATH)
async def show_sign_in() -> Response:
    """Return the sign-in page. Its script reads the code from the fragment of the address."""
    return page_file("enter.html", _SIGN_IN_FILES["enter.html"])


@router.get("/ui/enter.js")
async def show_sign_in_script() -> Response:
    """Return the script of the sign-in page."""
    return page_file("enter.js", _SIGN_IN_FILES["enter.js"])


@router.get("/ui/enter.css")
async def show_sign_in_style() -> Response:
    """Return the style sheet of the sign-in page."""
    return page_file("enter.css", _SIGN_IN_FILES["enter.css"])


@router.post("/ui/session")
async def sign_in(request: Request, body: SignInRequest) -> Response:
    """Begin a session and set its cookie; 401 when the code or the token is not valid, 429 after many of those."""
    attempts: SignInAttempts = request.app.state.sign_in_attempts
    async with request.app.state.app.connection() as connection:
        if body.code is not None:
            session = await create_session_by_code(connection, body.code)
        else:
            session = await create_session_by_token(connection, body.token or "")
        principal = None if session is None else await authenticate_session(connection, session)
    if session is None or principal is None:
        attempts.add_failure(request.state.client_key)
        used = "code is unknown, was used or has expired" if body.code is not None else "token is not valid"
        raise Problem("sign_in_failed", f"the {used}; `interlock dashboard` prints a new link")
    response = json_response(_session_document(Caller.from_principal(principal), _csrf_of(session.encode())), 201)
    secure = _is_secure(request)
    response.set_cookie(
        _cookie_name(request, secure=secure),
        session,
        max_age=int(SESSION_LIFETIME.total_seconds()),
        path="/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )
    return response


@router.get("/ui/session")
async def show_session(request: Request) -> Response:
    """Show who is signed in, with the CSRF token; 401 without a session."""
    caller = await session_caller(request)
    if caller is None:
        raise Problem("sign_in_failed", "there is no session, or it has ended; `interlock dashboard` prints a new link")
    return json_response(_session_document(caller, csrf_token(request)))


@router.delete("/ui/session")
async def sign_out(request: Request) -> Response:
    """End the session and delete its cookie."""
    require_csrf(request)
    session = session_secret(request)
    if session is not None:
        async with request.app.state.app.connection() as connection:
            await delete_session(connection, session)
    response = Response(status_code=204)
    secure = SECURE_SESSION_COOKIE in request.cookies
    response.delete_cookie(
        _cookie_name(request, secure=secure), path="/", secure=secure, httponly=True, samesite="strict"
    )
    return response


def _session_document(caller: Caller, csrf: str) -> dict[str, Any]:
    return {
        "actor": caller.actor,
        "scope": caller.scope,
        "namespaces": None if caller.namespaces is None else sorted(caller.namespaces),
        "csrf_token": csrf,
    }


def _csrf_of(key: bytes) -> str:
    return hmac.new(key, _CSRF_PURPOSE, hashlib.sha256).hexdigest()


def new_csrf_key() -> bytes:
    """Make the key of the CSRF token of requests without a session."""
    return secrets.token_bytes(32)


def session_secret(request: Request) -> str | None:
    """Return the secret of the session cookie."""
    return request.cookies.get(SECURE_SESSION_COOKIE) or request.cookies.get(_cookie_name(request, secure=False))


def _cookie_name(request: Request, *, secure: bool) -> str:
    """Return the name of the cookie. Browsers send it to all ports of a host, so it names the port."""
    if secure:
        return SECURE_SESSION_COOKIE
    port = request.url.port
    return SESSION_COOKIE if port is None else f"{SESSION_COOKIE}_{port}"


def _is_secure(request: Request) -> bool:
    """Return whether the browser uses TLS, which a proxy in front of the supervisor may end."""
    return request.url.scheme == "https" or urlsplit(request.headers.get("origin", "")).scheme == "https"
