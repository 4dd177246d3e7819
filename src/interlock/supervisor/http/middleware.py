"""What every request passes before anybody reads it, and every answer on its way out.

Invariant: a request that is too large, too slow, one too many, for another host or sent by a page of another origin
goes no further. No answer leaves without the headers that keep a browser from misusing it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request

from interlock.supervisor.http.metrics import note_request
from interlock.supervisor.http.problems import Problem, answer_problem
from interlock.telemetry import log

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
JSON_TYPES = ("application/json", "application/merge-patch+json")
AT_ONCE = 500
REFUSED = 1008  # of RFC 6455: a rule was broken


@dataclass(frozen=True, slots=True)
class Rules:
    """What a door lets through. Without names, every Host header is good."""

    names: frozenset[str] | None
    body_limit: int
    timeout: float
    at_once: int = AT_ONCE


class Door:
    """The outermost part of the API."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or say why not."""
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
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        self._inside += 1
        try:
            await self._handle(scope, receive, answer)
        finally:
            self._inside -= 1
            took = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", None)
            note_request(scope["method"], route, status, took)
            log.info(
                "request", method=scope["method"], path=scope["path"], status=status, milliseconds=round(took * 1000, 1)
            )

    async def _handle_other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a socket in that is for this host and comes from its own pages."""
        if scope["type"] == "websocket":
            try:
                self._check_sender(scope)
            except Problem:
                await send({"type": "websocket.close", "code": REFUSED})
                return
        await self._app(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, answer: Send) -> None:
        begun = False

        async def begin(message: Message) -> None:
            nonlocal begun
            begun = True
            await answer(message)

        try:
            self._check_sender(scope)
            self._check_number()
            body = await self._read(scope, receive)
            async with asyncio.timeout(self._rules.timeout):
                await self._app(scope, _replayed(body, receive), begin)
        except Exception as error:
            if begun:
                raise
            problem = _timed_out(self._rules.timeout) if isinstance(error, TimeoutError) else error
            response = answer_problem(Request(scope), problem)
            await response(scope, receive, answer)

    def _check_number(self) -> None:
        if self._inside > self._rules.at_once:
            raise Problem("too_many_requests", "try again in a moment", headers={"Retry-After": "1"})

    def _check_sender(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        names = self._rules.names
        if names is not None and _name_of(host) not in names:
            raise Problem("unknown_host", "the Host header names a host that this supervisor does not serve")
        if scope.get("method") not in SAFE:
            _check_origin(headers, host)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Read the whole body, as long as it is not too large."""
        headers = Headers(scope=scope)
        said = headers.get("content-length", "0")
        if said.isdecimal() and int(said) > self._rules.body_limit:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._rules.timeout):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > self._rules.body_limit:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            told = f"it took more than {self._rules.timeout:g} s"
            raise Problem("request_timeout", told, headers={"Connection": "close"}) from None
        if body and headers.get("content-type", "").partition(";")[0].strip().lower() not in JSON_TYPES:
            raise Problem("unsupported_media_type", "send the body as Content-Type: application/json")
        return bytes(body)

    def _too_large(self) -> Problem:
        limit = self._rules.body_limit
        return Problem(
            "body_too_large", f"the limit is {limit} bytes", {"limit": limit}, headers={"Connection": "close"}
        )


def _check_origin(headers: Headers, host: str) -> None:
    """Refuse what a page of somebody else sends: on a loopback address no token would stop it."""
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        raise Problem("cross_origin", "the Origin header names another origin than this one")
    if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
        raise Problem("cross_origin", "the browser says that a page of another site sent this")


def _name_of(host: str) -> str:
    """Give a Host header without its port."""
    name = host.lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0]


def _timed_out(seconds: float) -> Problem:
    return Problem(
        "timeout", f"it took more than {seconds:g} s; with a key it can be sent again", headers={"Retry-After": "1"}
    )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Give the body that was read to whoever reads it next."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
