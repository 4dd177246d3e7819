"""Middleware around the whole API: checks of sender and token, limits on requests and streams, headers, metrics, log.

Invariant: a request that is too large, too slow, over a limit, without a valid token, for another host or sent by a
page of another origin reaches no endpoint. A request takes a place among the concurrent ones only while the server
works for it, not while its body arrives. Health is answered whatever the load. Every response has the security headers
and the id of its request.
"""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.routing import Match

from interlock.supervisor.http.auth import ANONYMOUS_ACTOR
from interlock.supervisor.http.capacity import BodyBuffer, CheckQueue, KnownTokens, Shares, too_many
from interlock.supervisor.http.connections import OVERLOADED, Network, client_key, is_in
from interlock.supervisor.http.metrics import METHODS, observe_request
from interlock.supervisor.http.problems import Problem, problem_response
from interlock.supervisor.http.request_log import REQUEST_ID_HEADER, choose_request_id, lines_of_request, request_log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from interlock.supervisor.http.auth import Caller

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
# Answered whatever the load, without a token.
HEALTH_PATHS = frozenset({"/healthz", "/readyz"})
# Responses without an end: exempt from the request timeout, the concurrency limit and the histogram of durations.
STREAM_PATHS = frozenset({"/api/events", "/ui/events"})
# Paths that need a token; it is checked before the body is read.
TOKEN_PATHS = ("/api/", "/metrics")
MAX_CONCURRENT_REQUESTS = 500
MAX_CLIENT_REQUESTS = 250
MAX_STREAMS = 250
MAX_CLIENT_STREAMS = 50
# Checks of tokens that are not known to be good, fewer than the database connections of an app.
MAX_TOKEN_CHECKS = 4
MAX_CLIENT_TOKEN_CHECKS = 2
TOKEN_CHECK_WAIT_S = 5.0
MAX_BUFFERED_BYTES = 67_108_864  # of all bodies that have arrived in part
MAX_UNAUTHENTICATED_BUFFERED_BYTES = 8_388_608  # of those of callers without a token
CLIENTS_PER_BUFFER = 4  # one client gets a quarter
MAX_UNAUTHENTICATED_BODY_BYTES = 65_536
# A body must arrive with this rate on average, after the first seconds.
MIN_BODY_BYTES_PER_S = 16_384
MIN_BODY_TIMEOUT_S = 5.0
# A token is checked again if the body took longer than this: it may have been revoked meanwhile.
TOKEN_CHECK_LIFETIME_S = 1.0
CLIENT_CLOSED_REQUEST = 499  # in metrics and log, as other servers have it: the client left before the response
FIRST_ERROR_STATUS = 400
WEBSOCKET_POLICY_VIOLATION = 1008  # RFC 6455


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits. Without `allowed_hosts`, every Host header is accepted; `proxies` may name their clients."""

    allowed_hosts: frozenset[str] | None
    max_body_bytes: int
    timeout_s: float
    max_concurrent: int = MAX_CONCURRENT_REQUESTS
    max_of_client: int = MAX_CLIENT_REQUESTS
    max_streams: int = MAX_STREAMS
    max_streams_of_client: int = MAX_CLIENT_STREAMS
    max_unauthenticated_bytes: int = MAX_UNAUTHENTICATED_BUFFERED_BYTES
    proxies: tuple[Network, ...] = ()

    @property
    def max_buffered_bytes(self) -> int:
        """The size of all bodies of authenticated callers that may be in memory at once."""
        return max(MAX_BUFFERED_BYTES, 4 * self.max_body_bytes)


class _ClientLeft(Exception):  # noqa: N818 - not an error
    """The client closed the connection before its request was complete."""


class RequestLimitsMiddleware:
    """Enforces `RequestLimits`; the outermost ASGI application. `authenticate` raises 401."""

    def __init__(
        self,
        app: ASGIApp,
        limits: RequestLimits,
        *,
        authenticate: Callable[[Request], Awaitable[Caller]] | None = None,
        stopping: asyncio.Event | None = None,
    ) -> None:
        self._app = app
        self._limits = limits
        self._authenticate = authenticate
        self._stopping = stopping or asyncio.Event()
        self._places = Shares(limits.max_concurrent, limits.max_of_client, "concurrent requests")
        self._streams = Shares(limits.max_streams, limits.max_streams_of_client, "open streams")
        self._bodies = _body_shares(limits.max_buffered_bytes)
        self._unauthenticated_bodies = _body_shares(limits.max_unauthenticated_bytes)
        self._unknown_tokens = CheckQueue(MAX_TOKEN_CHECKS, MAX_CLIENT_TOKEN_CHECKS, TOKEN_CHECK_WAIT_S)
        self._known_tokens = KnownTokens()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request: pass it on, or answer with the problem."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": WEBSOCKET_POLICY_VIOLATION})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send, self._limits.proxies)
        with lines_of_request(exchange.request_id, exchange.client):
            try:
                await self._handle(exchange, receive)
            finally:
                exchange.record()

    async def _handle(self, exchange: _Exchange, receive: Receive) -> None:
        try:
            self._check_sender(exchange)
            if exchange.path in HEALTH_PATHS:
                await self._respond(exchange, _replay_body(b"", receive))
                return
            await self._handle_checked(exchange, receive)
        except _ClientLeft:
            exchange.status = CLIENT_CLOSED_REQUEST
        except Exception as error:
            if exchange.response_started:
                raise
            problem = _timeout_problem(self._limits.timeout_s) if isinstance(error, TimeoutError) else error
            response = problem_response(Request(exchange.scope), problem)
            await response(exchange.scope, receive, exchange.send)

    async def _handle_checked(self, exchange: _Exchange, receive: Receive) -> None:
        """Check the token, read the body, and pass the request on: each within the limits."""
        if exchange.state.get(OVERLOADED):
            raise too_many("too many connections are open", {"Connection": "close"})
        began = time.monotonic()
        await self._check_token(exchange)
        authenticated = self._authenticate is None or "caller" in exchange.state
        buffer = BodyBuffer(self._bodies if authenticated else self._unauthenticated_bodies, exchange.limited_key)
        try:
            if not exchange.has_unused_body():
                limit = self._limits.max_body_bytes
                await self._read_body(
                    exchange, receive, buffer, limit if authenticated else min(limit, MAX_UNAUTHENTICATED_BODY_BYTES)
                )
            body = bytes(buffer.content)
            if body and exchange.headers.get("content-type", "").partition(";")[0].strip().lower() not in JSON_TYPES:
                raise Problem("unsupported_media_type", "send the body as Content-Type: application/json")
            if time.monotonic() - began > TOKEN_CHECK_LIFETIME_S:
                exchange.state.pop("caller", None)
                await self._check_token(exchange)
            replayed = _replay_body(body, receive)
            if exchange.path in STREAM_PATHS:
                await self._stream(exchange, replayed)
            else:
                with self._places.take(exchange.limited_key):
                    await self._respond(exchange, replayed)
        finally:
            buffer.release()

    async def _respond(self, exchange: _Exchange, receive: Receive) -> None:
        async with asyncio.timeout(self._limits.timeout_s):
            await self._app(exchange.scope, receive, exchange.send)

    async def _stream(self, exchange: _Exchange, receive: Receive) -> None:
        """Pass on a request for a stream, which ends when the client leaves or the server stops."""
        if self._stopping.is_set():
            raise Problem("stopping", "connect to another supervisor, or later", headers={"Retry-After": "1"})
        # a HEAD request gets the headers only
        ending = exchange.headers_sent if exchange.is_head else self._stopping
        with self._streams.take(exchange.limited_key):
            await self._app(exchange.scope, _receive_until(ending, receive), exchange.send)
            if exchange.response_started and not exchange.response_complete:
                await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _check_token(self, exchange: _Exchange) -> None:
        """Raise 401 without a valid token. Callers whose token was valid before do not wait for unknown ones."""
        authenticate = self._authenticate
        if authenticate is None or not exchange.path.startswith(TOKEN_PATHS):
            return
        request, credentials = Request(exchange.scope), exchange.headers.get("authorization")
        if credentials is None:
            await authenticate(request)  # which needs no database
            return
        look_up = functools.partial(self._look_up_token, authenticate, request, credentials)
        if self._known_tokens.find(credentials) is None and await self._unknown_tokens.run(
            exchange.client_key, credentials, look_up
        ):
            return
        await look_up()  # not limited: requests with the same token share look-ups

    async def _look_up_token(
        self, authenticate: Callable[[Request], Awaitable[Caller]], request: Request, credentials: str
    ) -> None:
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                caller = await authenticate(request)
        except Problem:
            self._known_tokens.remove(credentials)
            raise
        self._known_tokens.add(credentials, caller.actor)

    def _check_sender(self, exchange: _Exchange) -> None:
        headers = exchange.headers
        names = self._limits.allowed_hosts
        if names is not None and _host_name(headers.get("host", "")) not in names:
            raise Problem("unknown_host", "the Host header names a host that this supervisor does not serve")
        if exchange.method not in SAFE_METHODS:
            _check_origin(headers)
        if headers.get("transfer-encoding") is not None and headers.get("content-length") is not None:
            # a proxy that heeds the other one of them sees other requests on this connection than this server
            detail = "the request has both Content-Length and Transfer-Encoding"
            raise Problem("bad_request", detail, headers={"Connection": "close"})

    async def _read_body(self, exchange: _Exchange, receive: Receive, body: BodyBuffer, limit: int) -> None:
        """Append the parts of a body that arrive, within the limits of size, time and rate."""
        length = exchange.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        clock, longest = asyncio.get_running_loop().time, self._limits.timeout_s
        began = clock()
        try:
            async with asyncio.timeout(min(longest, MIN_BODY_TIMEOUT_S)) as deadline:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientLeft
                    part = message.get("body", b"")
                    if len(body.content) + len(part) > limit:
                        raise _too_large(limit)
                    body.append(part)
                    if not message.get("more_body", False):
                        return
                    allowed = MIN_BODY_TIMEOUT_S + len(body.content) / MIN_BODY_BYTES_PER_S
                    deadline.reschedule(began + min(longest, allowed))
        except TimeoutError:
            detail = (
                f"{len(body.content)} bytes of the body arrived in {clock() - began:.0f} s; the limits are "
                f"{MIN_BODY_BYTES_PER_S} bytes a second and {longest:g} s for the whole body"
            )
            raise Problem("request_timeout", detail, headers={"Connection": "close"}) from None


class _Exchange:
    """One request and its response: adds the headers of every response; counts and logs the request at its end."""

    def __init__(self, scope: Scope, send: Send, proxies: tuple[Network, ...]) -> None:
        self.is_head = scope["method"] == "HEAD"
        # a HEAD request is handled like a GET request, whose body is not sent
        self.scope = {**scope, "method": "GET"} if self.is_head else scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = Headers(scope=scope)
        self.state = self.scope.setdefault("state", {})
        self.client = _client_address(scope, self.headers, proxies)
        self.client_key = self.state["client_key"] = client_key(self.client)
        self.request_id = choose_request_id(self.headers.get(REQUEST_ID_HEADER))
        self.status = 500
        self.response_started = False
        self.response_complete = False
        self.headers_sent = asyncio.Event()
        self._began = time.perf_counter()
        self._send = send

    @property
    def limited_key(self) -> str:
        """The client that the limit of concurrent requests counts for: the token, or without one the address."""
        caller: Caller | None = self.state.get("caller")
        return self.client_key if caller is None or caller.actor == ANONYMOUS_ACTOR else caller.actor

    def has_unused_body(self) -> bool:
        """Tell whether the request has a body and no endpoint that may read it: its head is enough for 404 and 405."""
        has_body = self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers
        return has_body and "app" in self.scope and not _has_route(self.scope, self.scope["method"])

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            self.response_started = True
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            headers[REQUEST_ID_HEADER] = self.request_id
            if "allow" in headers:
                headers["Allow"] = ", ".join(_allowed_methods(self.scope)) or headers["Allow"]
        elif message["type"] == "http.response.body":
            self.response_complete = not message.get("more_body", False)
            if self.is_head:
                message = {**message, "body": b""}
        await self._send(message)
        if self.response_started:
            self.headers_sent.set()

    def record(self) -> None:
        """Count the request and write its log line."""
        took = time.perf_counter() - self._began
        route = getattr(self.scope.get("route"), "path", None)
        observe_request(self.method, route, self.status, None if self.path in STREAM_PATHS else took)
        caller: Caller | None = self.state.get("caller")
        request_log.write(
            "info",
            "request",
            kind="request" if self.status < FIRST_ERROR_STATUS else "request:refused",
            method=self.method,
            path=self.path,
            status=self.status,
            milliseconds=round(took * 1000, 1),
            client=self.client,
            actor=None if caller is None else caller.actor,
        )


def _body_shares(total: int) -> Shares:
    return Shares(total, total // CLIENTS_PER_BUFFER, "bytes of bodies in memory", {"Connection": "close"})


def _client_address(scope: Scope, headers: Headers, proxies: tuple[Network, ...]) -> str:
    """Return the address of the client: the peer's, or the last one that a trusted proxy forwarded for."""
    address: str = (scope.get("client") or ("unknown", 0))[0]
    hops = headers.get("x-forwarded-for", "").split(",") if proxies else []
    while hops and is_in(address, proxies):
        address = hops.pop().strip() or address
    return address


def _allowed_methods(scope: Scope) -> list[str]:
    """List the methods that the path accepts."""
    accepted = {method for method in METHODS if _has_route(scope, method)}
    return sorted(accepted | {"HEAD"} if "GET" in accepted else accepted)


def _has_route(scope: Scope, method: str) -> bool:
    """Tell whether the application has an endpoint for the path and a method."""
    routes = scope["app"].routes if "app" in scope else []
    probe = {name: scope[name] for name in ("type", "path", "root_path", "headers", "app") if name in scope}
    return any(route.matches({**probe, "method": method})[0] is Match.FULL for route in routes)


def _check_origin(headers: Headers) -> None:
    """Raise 403 for requests from pages of other origins: on a loopback address no token would stop them."""
    origin, host = headers.get("origin"), headers.get("host", "")
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


def _too_large(limit: int) -> Problem:
    return Problem("body_too_large", f"the limit is {limit} bytes", {"limit": limit}, headers={"Connection": "close"})


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


def _receive_until(ending: asyncio.Event, receive: Receive) -> Receive:
    """Return a receive function that reports a disconnect as soon as the event is set."""

    async def receive_or_end() -> Message:
        received = asyncio.ensure_future(receive())
        ended = asyncio.ensure_future(ending.wait())
        try:
            await asyncio.wait({received, ended}, return_when=asyncio.FIRST_COMPLETED)
            return received.result() if received.done() else {"type": "http.disconnect"}
        finally:
            received.cancel()
            ended.cancel()

    return receive_or_end
