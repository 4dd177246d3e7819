"""Carries out a request that changes something: once for its key, in one transaction with the answer.

Invariant: whatever a request does, it does on one connection, in one transaction that also holds its key. What was
answered to a key is answered again, to the same request only; a request that came to no answer left nothing behind.
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
from interlock.supervisor.http.auth import AdministeringCaller, Caller, OperatingCaller, ReadingCaller
from interlock.supervisor.http.metrics import note_key
from interlock.supervisor.http.problems import MEDIA_TYPE, Problem, encoded, note_problem, problem_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from datetime import timedelta

    from interlock.postgres.connection import Connection
    from interlock.supervisor.http.requests import Command

JSON = "application/json"
REPLAYED = {"Idempotency-Replayed": "true"}
FAILURE = 500
REFUSAL = 400

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="Makes the request safe to repeat: the same key gives the same answer. `request_id` does the same.",
    ),
]


class Served(Interlock):
    """An app as the API uses it: whoever asks does not wait long for a connection that cannot be had."""

    def __init__(self, app: Interlock, patience: float) -> None:
        self.__dict__.update(app.__dict__)
        self._patience = patience

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Lend a connection; DisconnectedError when there is none in time."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._patience):
                    connection = await stack.enter_async_context(super().connection())
            except TimeoutError:
                raise DisconnectedError(f"no connection could be had in {self._patience:g} s") from None
            yield connection


class Acting(Interlock):
    """An app that does everything on one connection, in the name of a caller."""

    def __init__(self, app: Interlock, connection: Connection, actor: str) -> None:
        self.__dict__.update(app.__dict__)
        self.actor = actor
        self._only = connection

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Lend the one connection, in the transaction that is around it."""
        yield self._only


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request: the document to answer with, and the status if it is not the usual one."""

    document: Any
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Act:
    """A request that changes something."""

    request: Request
    caller: Caller
    key: str | None

    async def perform(
        self, body: Command, work: Callable[[Acting], Awaitable[Outcome | Any]], *, status: int = 200
    ) -> Response:
        """Carry it out, unless its key has an answer."""
        app: Interlock = self.request.app.state.app
        keyed = self._keyed(body)
        if keyed is not None:
            async with self._turn(keyed):
                return await self._perform_once(app, keyed, work, status)
        async with app.connection() as connection, transaction(connection):
            content, code = _done(await work(Acting(app, connection, self.caller.actor)), status)
        return Response(content, code, media_type=_media_type(code))

    def _turn(self, keyed: IdempotentRequest) -> asyncio.Lock:
        """Give those with one key, as far as they come to this process, their turn: one of them needs a connection."""
        turns: WeakValueDictionary[str, asyncio.Lock] = self.request.app.state.turns
        return turns.setdefault(keyed.key, asyncio.Lock())

    async def _perform_once(
        self, app: Interlock, keyed: IdempotentRequest, work: Callable[[Acting], Awaitable[Outcome | Any]], status: int
    ) -> Response:
        async with app.connection() as connection, transaction(connection):
            acting = Acting(app, connection, self.caller.actor)
            stored = await claim_idempotency_key(connection, keyed, lifetime=self._lifetime, now=app.now())
            if stored is not None:
                return _again(stored.status, stored.body, fits=stored.fits)
            content, code = await self._answer(acting, work, status)
            await store_idempotent_response(connection, keyed.key, code, content.decode())
        note_key("miss")
        return Response(content, code, media_type=_media_type(code))

    async def _answer(
        self, acting: Acting, work: Callable[[Acting], Awaitable[Outcome | Any]], status: int
    ) -> tuple[bytes, int]:
        """Do the work; a refusal is an answer too, a failure is none."""
        path = self.request.url.path
        try:
            async with acting.connection() as connection, transaction(connection):
                return _done(await work(acting), status)
        except Exception as error:
            problem = problem_of(error)
            if problem.status >= FAILURE:
                raise
            note_problem(problem, error, self.request.method, path)
            return encoded(problem.document(path)), problem.status

    @property
    def _lifetime(self) -> timedelta:
        lifetime: timedelta = self.request.app.state.config.idempotency_lifetime
        return lifetime

    def _keyed(self, body: Command) -> IdempotentRequest | None:
        sent = body.request_id
        if sent is not None and self.key is not None and sent != self.key:
            message = "differs from the Idempotency-Key header; send one of them, or the same in both"
            raise Problem(
                "invalid_request", f"request_id: {message}", {"errors": [{"field": "request_id", "message": message}]}
            )
        key = sent if sent is not None else self.key
        if key is None:
            return None
        said = json.dumps([self.caller.actor, body.model_dump(mode="json", exclude={"request_id"})], sort_keys=True)
        return IdempotentRequest(
            key, f"{self.request.method} {self.request.url.path}", hashlib.sha256(said.encode()).hexdigest()
        )

    def request_id(self, body: Command) -> str | None:
        """Give the key under which the engine itself knows the request."""
        return body.request_id if body.request_id is not None else self.key


def _done(outcome: Outcome | Any, status: int) -> tuple[bytes, int]:
    if isinstance(outcome, Outcome):
        return encoded(outcome.document), outcome.status or status
    return encoded(outcome), status


def _again(status: int, body: str, *, fits: bool) -> Response:
    if not fits:
        note_key("conflict")
        raise Problem("key_reused", "the same key was used before, for another path, body or caller; take a new one")
    note_key("hit")
    return Response(body, status, REPLAYED, _media_type(status))


def _media_type(status: int) -> str:
    return MEDIA_TYPE if status >= REFUSAL else JSON


async def operating(request: Request, caller: OperatingCaller, key: Key = None) -> Act:
    """Let those act who may operate."""
    return Act(request, caller, key)


async def administering(request: Request, caller: AdministeringCaller, key: Key = None) -> Act:
    """Let those act who may administer."""
    return Act(request, caller, key)


Operating = Annotated[Act, Depends(operating)]
Administering = Annotated[Act, Depends(administering)]


async def reading(request: Request, caller: ReadingCaller) -> Interlock:
    """Give the app to whoever may look."""
    del caller
    app: Interlock = request.app.state.app
    return app


Reading = Annotated[Interlock, Depends(reading)]


def shown(document: Any, status: int = 200) -> Response:
    """Answer with a document."""
    return Response(encoded(document), status, media_type=JSON)
