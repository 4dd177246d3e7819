"""Middleware around the whole API: limits on requests, host and origin checks, security headers, metrics and log.

Invariant: a request that is too large, too slow, over the concurrency limit, for another host or sent by a page of
another origin reaches no endpoint. Every response has the security headers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request

from interlock.supervisor.http.metrics import observe_request
from interlock.supervisor.http.problems import Problem, problem_response
from interlock.telemetry import log

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
JSON_TYPES = ("application/json", "application/merge-patch+json")
MAX_CONCURRENT_REQUESTS = 500
WEBSOCKET_POLICY_VIOLATION = 1008  # RFC 6455


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits. Without `allowed_hosts`, every Host header is accepted."""

    allowed_hosts: frozenset[str] | None
    max_body_bytes: int
    timeout_s: float
    max_concurrent: int = MAX_CONCURRENT_REQUESTS


class RequestLimitsMiddleware:
    """Enforces `RequestLimits`; the outermost ASGI application."""

    def __init__(self, app: ASGIApp, limits: RequestLimits) -> None:
        self._app = app
        self._limits = limits
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request: pass it on, or answer with the problem."""
        if scope["type"] != "http":
            await self._handle_other(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        self._in_flight += 1
        try:
            await self._handle(scope, receive, answer)
        finally:
            self._in_flight -= 1
            took = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", None)
            observe_request(scope["method"], route, status, took)
            log.info(
                "request", method=scope["method"], path=scope["path"], status=status, milliseconds=round(took * 1000, 1)
            )

    async def _handle_other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a WebSocket that is for this host and from its own origin."""
        if scope["type"] == "websocket":
            try:
                self._check_sender(scope)
            except Problem:
                await send({"type": "websocket.close", "code": WEBSOCKET_POLICY_VIOLATION})
                return
        await self._app(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, answer: Send) -> None:
        response_started = False

        async def respond(message: Message) -> None:
            nonlocal response_started
            response_started = True
            await answer(message)

        try:
            self._check_sender(scope)
            self._check_concurrency()
            body = await self._read_body(scope, receive)
            async with asyncio.timeout(self._limits.timeout_s):
                await self._app(scope, _replay_body(body, receive), respond)
        except Exception as error:
            if response_started:
                raise
            problem = _timeout_problem(self._limits.timeout_s) if isinstance(error, TimeoutError) else error
            response = problem_response(Request(scope), problem)
            await response(scope, receive, answer)

    def _check_concurrency(self) -> None:
        if self._in_flight > self._limits.max_concurrent:
            raise Problem("too_many_requests", "try again in a moment", headers={"Retry-After": "1"})

    def _check_sender(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        names = self._limits.allowed_hosts
        if names is not None and _host_name(host) not in names:
            raise Problem("unknown_host", "the Host header names a host that this supervisor does not serve")
        if scope.get("method") not in SAFE_METHODS:
            _check_origin(headers, host)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Read the whole body within the size limit and the timeout; only JSON is accepted."""
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limits.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > self._limits.max_body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            detail = f"the body did not arrive within {self._limits.timeout_s:g} s"
            raise Problem("request_timeout", detail, headers={"Connection": "close"}) from None
        if body and headers.get("content-type", "").partition(";")[0].strip().lower() not in JSON_TYPES:
            raise Problem("unsupported_media_type", "send the body as Content-Type: application/json")
        return bytes(body)

    def _too_large(self) -> Problem:
        limit = self._limits.max_body_bytes
        return Problem(
            "body_too_large", f"the limit is {limit} bytes", {"limit": limit}, headers={"Connection": "close"}
        )


def _check_origin(headers: Headers, host: str) -> None:
    """Raise 403 for requests from pages of other origins: on a loopback address no token would stop them."""
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        raise Problem("cross_origin", "the Origin header names another origin")
    if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
        raise Problem("cross_origin", "the Sec-Fetch-Site header says that a page of another site sent the request")


def _host_name(host: str) -> str:
    """Return a Host header without its port."""
    name = host.lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0]


def _timeout_problem(seconds: float) -> Problem:
    return Problem(
        "timeout",
        f"no response within {seconds:g} s; a request with a key is safe to repeat",
        headers={"Retry-After": "1"},
    )


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that gives the body that was already read."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
