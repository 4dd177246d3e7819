"""Authentication and authorization: bearer tokens with scopes, which may be limited to namespaces.

Invariant: a token in a request is checked, also where none is needed. Every transition caused by a request is recorded
under the name of its token.

Invariant: a token that is limited to namespaces reaches an endpoint only if the endpoint is marked with
`limits_namespaces`, or its path names one task or job (`task_id`, `job_id`) of these namespaces. All others refuse it.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from uuid import UUID

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.base import SecurityBase

from interlock.client.job_handle import unknown_job_error
from interlock.client.task_handle import unknown_task_error
from interlock.store.access import (
    Principal,
    TokenScope,
    authenticate_token,
    read_job_namespace,
    read_task_namespace,
)
from interlock.supervisor.http.problems import Problem
from interlock.supervisor.http.request_log import bind_actor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection

EndpointT = TypeVar("EndpointT", bound="Callable[..., Any]")

ANONYMOUS_ACTOR = "api"
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="interlock"'}
LIMITS_NAMESPACES = "_limits_namespaces"  # the attribute of a marked endpoint
NAMED_BY_PATH = frozenset({"task_id", "job_id"})  # parameters of paths that name something of a namespace

_bearer = HTTPBearer(
    auto_error=False, description="A token of `interlock token create`, or the local one: `interlock token local`."
)
BearerToken = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the actor for the records, and the rights of the token."""

    actor: str
    scope: TokenScope
    namespaces: frozenset[str] | None = None  # None: all

    @classmethod
    def from_principal(cls, principal: Principal) -> Caller:
        """Return the caller that a token authenticates."""
        return cls(f"token:{principal.name}", principal.scope, principal.namespaces)

    def require(self, scope: TokenScope, what: str = "this") -> None:
        """Raise 403 unless the caller has the scope."""
        if not self.scope.includes(scope):
            raise Problem(
                "insufficient_scope",
                f"{what} needs scope {scope}, and the token has {self.scope}",
                {"required": str(scope)},
                headers={"WWW-Authenticate": f'{CHALLENGE["WWW-Authenticate"]}, error="insufficient_scope"'},
            )

    def may_use(self, namespace: str | None) -> bool:
        """Tell whether the caller may see and change what belongs to a namespace."""
        return self.namespaces is None or namespace in self.namespaces

    def require_namespace(self, namespace: str) -> None:
        """Raise 403 unless the caller may use the namespace."""
        if not self.may_use(namespace):
            raise self._outside(f"the namespace {namespace!r} is not one of them")

    def require_all_namespaces(self) -> None:
        """Raise 403 if the token is limited to namespaces: for what concerns the whole system."""
        if self.namespaces is not None:
            raise self._outside("this concerns all of them")

    def scoped_key(self, key: str | None) -> str | None:
        """Return the request id under which tasks, jobs and signals are stored: each actor has keys of its own."""
        return None if key is None else f"{self.actor}:{key}"

    def request_ids(self, given: str | None) -> list[str] | None:
        """Return the request ids that a filter matches: the given one as it is stored, and the key of this actor."""
        return None if given is None else [given, f"{self.actor}:{given}"]

    def _outside(self, why: str) -> Problem:
        allowed: Sequence[str] = sorted(self.namespaces or ())
        detail = f"the token is limited to the namespaces {', '.join(allowed)}, and {why}"
        return Problem("namespace_not_allowed", detail, {"namespaces": allowed})


ANONYMOUS = Caller(ANONYMOUS_ACTOR, TokenScope.ADMIN)


class TokenLookups:
    """Looks up tokens. Requests that arrive during a look-up of their token share the next one.

    Invariant: the look-up that decides on a request begins after the request has arrived.
    """

    def __init__(self, app: Interlock) -> None:
        self._app = app
        self._running: dict[str, asyncio.Future[None]] = {}
        self._next: dict[str, asyncio.Task[Principal | None]] = {}

    async def find(self, secret: str) -> Principal | None:
        """Return the principal of a token; None when the token is unknown, revoked or expired."""
        shared = self._next.get(secret)
        if shared is None:
            if secret not in self._running:
                return await self._look_up(secret)
            shared = self._next[secret] = asyncio.create_task(self._look_up_next(secret), context=Context())
            shared.add_done_callback(_ignore_error)  # those that wait get it
        return await asyncio.shield(shared)  # a request that ends early ends no other

    async def _look_up_next(self, secret: str) -> Principal | None:
        while secret in self._running:
            await self._running[secret]
        del self._next[secret]
        return await self._look_up(secret)

    async def _look_up(self, secret: str) -> Principal | None:
        done = self._running[secret] = asyncio.get_running_loop().create_future()
        try:
            async with self._app.connection() as connection:
                return await authenticate_token(connection, secret)
        finally:
            del self._running[secret]
            done.set_result(None)


def _ignore_error(task: asyncio.Task[Principal | None]) -> None:
    if not task.cancelled():
        task.exception()


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Finds the caller of a request by its bearer token."""

    app: Interlock
    token_required: bool
    lookups: TokenLookups

    async def authenticate(self, token: HTTPAuthorizationCredentials | None, *, has_header: bool) -> Caller:
        """Return the caller, or raise 401; `has_header`: the request has an Authorization header of any form."""
        if token is None:
            if has_header:
                raise Problem("unknown_token", "the Authorization header must be: Bearer TOKEN", headers=CHALLENGE)
            if self.token_required:
                raise Problem("missing_token", "send a token as Authorization: Bearer TOKEN", headers=CHALLENGE)
            return ANONYMOUS
        known = await self.lookups.find(token.credentials)
        if known is None:
            raise Problem("unknown_token", "the token is unknown, revoked or expired", headers=CHALLENGE)
        return Caller.from_principal(known)


def limits_namespaces(endpoint: EndpointT) -> EndpointT:
    """Mark an endpoint that itself keeps to the namespaces of its caller: `app.caller` of the app that it gets."""
    setattr(endpoint, LIMITS_NAMESPACES, True)
    return endpoint


async def authenticate_request(request: Request) -> Caller:
    """Return the caller of a request, or raise 401. The token is looked up once: the middleware does it first."""
    known: Caller | None = getattr(request.state, "caller", None)
    if known is None:
        authenticator: Authenticator = request.app.state.authenticator
        token = await _bearer(request)
        known = await authenticator.authenticate(token, has_header="authorization" in request.headers)
        request.state.caller = known
        bind_actor(known.actor)
    return known


class CallerWith(SecurityBase):
    """A dependency that authenticates the caller and requires a scope.

    It declares the security scheme of the OpenAPI document by itself: another dependency for that costs each request
    as much as the check. `request.state.caller` is a caller that the middleware has authenticated already.
    """

    def __init__(self, scope: TokenScope) -> None:
        self.model = _bearer.model
        self.scheme_name = _bearer.scheme_name
        self._scope = scope

    async def __call__(self, request: Request) -> Caller:
        """Return the caller; raise 401 or 403 otherwise."""
        caller = await authenticate_request(request)
        caller.require(self._scope)
        if caller.namespaces is not None:
            await _require_reach(request, caller, request.app.state.authenticator.app)
        return caller


async def _require_reach(request: Request, caller: Caller, app: Interlock) -> None:
    """Raise 404 for a task or a job outside the caller's namespaces, and 403 where the endpoint is not marked."""
    named = request.path_params.keys() & NAMED_BY_PATH
    if not named:
        if not getattr(request.scope["endpoint"], LIMITS_NAMESPACES, False):
            caller.require_all_namespaces()
        return
    async with app.connection() as connection:
        for name in named:
            try:
                id_ = UUID(request.path_params[name])
            except ValueError:
                continue  # the endpoint refuses it
            if name == "job_id":
                await require_job(connection, caller, id_)
            elif not caller.may_use(await read_task_namespace(connection, id_)):
                raise unknown_task_error(id_)


async def require_job(connection: Connection, caller: Caller, id_: UUID) -> None:
    """Raise the error of an unknown job for one outside the caller's namespaces."""
    if caller.namespaces is not None and not caller.may_use(await read_job_namespace(connection, id_)):
        raise unknown_job_error(id_)


ReadCaller = Annotated[Caller, Depends(CallerWith(TokenScope.READ))]
OperateCaller = Annotated[Caller, Depends(CallerWith(TokenScope.OPERATE))]
AdminCaller = Annotated[Caller, Depends(CallerWith(TokenScope.ADMIN))]
