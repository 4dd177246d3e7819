"""Idempotency: executes a state-changing request once per key, in one transaction with its stored response.

Invariant: a request does all its work on one connection, in one transaction that also stores its key. The stored
response is replayed for the same request only. A request that got no response has changed nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakValueDictionary

from fastapi import Depends, Header, Request
from starlette.responses import Response

from interlock.client.app import Interlock
from interlock.errors import DisconnectedError
from interlock.postgres.connection import transaction
from interlock.store.access import IdempotentRequest, claim_idempotency_key, store_idempotent_response
from interlock.supervisor.http.auth import AdminCaller, Caller, OperateCaller, ReadCaller
from interlock.supervisor.http.metrics import count_keyed_request
from interlock.supervisor.http.problems import MEDIA_TYPE, Problem, encode_json, problem_from_error, record_problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from datetime import timedelta

    from interlock.postgres.connection import Connection
    from interlock.supervisor.http.requests import Command

JSON = "application/json"
REPLAYED_HEADER = {"Idempotency-Replayed": "true"}
FIRST_ERROR_STATUS = 400
FIRST_SERVER_ERROR_STATUS = 500

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="Makes the request safe to repeat: the same key gives the same answer. `request_id` does the same.",
    ),
]


class BoundedWaitApp(Interlock):
    """An app for the API: waits at most `connection_timeout_s` for a connection of the pool."""

    def __init__(self, app: Interlock, connection_timeout_s: float) -> None:
        self.__dict__.update(app.__dict__)
        self._connection_timeout_s = connection_timeout_s

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Take a connection from the pool; DisconnectedError after the timeout."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._connection_timeout_s):
                    connection = await stack.enter_async_context(super().connection())
            except TimeoutError:
                raise DisconnectedError(f"no connection was free within {self._connection_timeout_s:g} s") from None
            yield connection


class RequestApp(Interlock):
    """An app bound to one request: all calls use its connection and record its actor."""

    def __init__(self, app: Interlock, connection: Connection, actor: str) -> None:
        self.__dict__.update(app.__dict__)
        self.actor = actor
        self._request_connection = connection

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Return the request's connection, inside its transaction."""
        yield self._request_connection


@dataclass(frozen=True, slots=True)
class MutationResult:
    """The document to answer with, and the status if it differs from the endpoint's usual one."""

    document: Any
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Mutation:
    """A request that changes state."""

    request: Request
    caller: Caller
    key: str | None

    async def execute(
        self, body: Command, work: Callable[[RequestApp], Awaitable[MutationResult | Any]], *, status: int = 200
    ) -> Response:
        """Do the work in one transaction, or replay the stored response of the request's key."""
        app: Interlock = self.request.app.state.app
        keyed = self._keyed_request(body)
        if keyed is not None:
            async with self._key_lock(keyed):
                return await self._execute_once(app, keyed, work, status)
        async with app.connection() as connection, transaction(connection):
            content, code = _encode_result(await work(RequestApp(app, connection, self.caller.actor)), status)
        return Response(content, code, media_type=_media_type(code))

    def request_id(self, body: Command) -> str | None:
        """Return the key under which the engine itself deduplicates the request."""
        return body.request_id if body.request_id is not None else self.key

    def _keyed_request(self, body: Command) -> IdempotentRequest | None:
        if body.request_id is not None and self.key is not None and body.request_id != self.key:
            message = "differs from the Idempotency-Key header; send one of them, or the same in both"
            raise Problem(
                "invalid_request", f"request_id: {message}", {"errors": [{"field": "request_id", "message": message}]}
            )
        key = self.request_id(body)
        if key is None:
            return None
        content = json.dumps([self.caller.actor, body.model_dump(mode="json", exclude={"request_id"})], sort_keys=True)
        return IdempotentRequest(
            key, f"{self.request.method} {self.request.url.path}", hashlib.sha256(content.encode()).hexdigest()
        )

    def _key_lock(self, keyed: IdempotentRequest) -> asyncio.Lock:
        """Return the lock of a key in this process: requests that wait for it hold no connection of the pool."""
        locks: WeakValueDictionary[str, asyncio.Lock] = self.request.app.state.key_locks
        return locks.setdefault(keyed.key, asyncio.Lock())

    async def _execute_once(
        self,
        app: Interlock,
        keyed: IdempotentRequest,
        work: Callable[[RequestApp], Awaitable[MutationResult | Any]],
        status: int,
    ) -> Response:
        lifetime: timedelta = self.request.app.state.config.idempotency_lifetime
        async with app.connection() as connection, transaction(connection):
            stored = await claim_idempotency_key(connection, keyed, lifetime=lifetime, now=app.now())
            if stored is not None:
                return _replay(stored.status, stored.body, fits=stored.fits)
            content, code = await self._do_work(RequestApp(app, connection, self.caller.actor), work, status)
            await store_idempotent_response(connection, keyed.key, code, content.decode())
        count_keyed_request("miss")
        return Response(content, code, media_type=_media_type(code))

    async def _do_work(
        self, app: RequestApp, work: Callable[[RequestApp], Awaitable[MutationResult | Any]], status: int
    ) -> tuple[bytes, int]:
        """Do the work in a savepoint: a refusal (4xx) is a response to store, a failure (5xx) is not."""
        path = self.request.url.path
        try:
            async with app.connection() as connection, transaction(connection):
                return _encode_result(await work(app), status)
        except Exception as error:
            problem = problem_from_error(error)
            if problem.status >= FIRST_SERVER_ERROR_STATUS:
                raise
            record_problem(problem, error, self.request.method, path)
            return encode_json(problem.document(path)), problem.status


def _encode_result(result: MutationResult | Any, status: int) -> tuple[bytes, int]:
    if isinstance(result, MutationResult):
        return encode_json(result.document), result.status or status
    return encode_json(result), status


def _replay(status: int, body: str, *, fits: bool) -> Response:
    """Answer with the stored response of a key; 422 if the key was used for another request."""
    if not fits:
        count_keyed_request("conflict")
        raise Problem("key_reused", "the key was used before for another path, body or caller; use a new key")
    count_keyed_request("hit")
    return Response(body, status, REPLAYED_HEADER, _media_type(status))


def _media_type(status: int) -> str:
    return MEDIA_TYPE if status >= FIRST_ERROR_STATUS else JSON


def json_response(document: Any, status: int = 200) -> Response:
    """Answer with a document."""
    return Response(encode_json(document), status, media_type=JSON)


async def _operate(request: Request, caller: OperateCaller, key: IdempotencyKey = None) -> Mutation:
    return Mutation(request, caller, key)


async def _administer(request: Request, caller: AdminCaller, key: IdempotencyKey = None) -> Mutation:
    return Mutation(request, caller, key)


async def _read(request: Request, caller: ReadCaller) -> Interlock:
    del caller
    app: Interlock = request.app.state.app
    return app


# Parameters of endpoints, by the scope that they require
OperateMutation = Annotated[Mutation, Depends(_operate)]
AdminMutation = Annotated[Mutation, Depends(_administer)]
ReadApp = Annotated[Interlock, Depends(_read)]
