"""Authentication and authorization: bearer tokens with scopes; on a loopback address a token is optional by default.

Invariant: a token in a request is checked, also where none is needed. Every transition caused by a request is recorded
under the name of its token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from interlock.store.access import TokenScope, authenticate_token
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock.client.app import Interlock

ANONYMOUS_ACTOR = "api"
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="interlock"'}

_bearer = HTTPBearer(
    auto_error=False, description="A token of `interlock token create`; not needed on a loopback address by default."
)
BearerToken = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the actor for the records, and the scope of the token."""

    actor: str
    scope: TokenScope

    def require(self, scope: TokenScope, what: str = "this") -> None:
        """Raise 403 unless the caller has the scope."""
        if not self.scope.includes(scope):
            raise Problem(
                "insufficient_scope",
                f"{what} needs scope {scope}, and the token has {self.scope}",
                {"required": str(scope)},
                headers={"WWW-Authenticate": f'{CHALLENGE["WWW-Authenticate"]}, error="insufficient_scope"'},
            )


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Finds the caller of a request by its bearer token."""

    app: Interlock
    token_required: bool

    async def authenticate(self, token: HTTPAuthorizationCredentials | None, *, has_header: bool) -> Caller:
        """Return the caller, or raise 401; `has_header`: the request has an Authorization header of any form."""
        if token is None:
            if has_header:
                raise Problem("unknown_token", "the Authorization header must be: Bearer TOKEN", headers=CHALLENGE)
            if self.token_required:
                raise Problem("missing_token", "send a token as Authorization: Bearer TOKEN", headers=CHALLENGE)
            return Caller(ANONYMOUS_ACTOR, TokenScope.ADMIN)
        async with self.app.connection() as connection:
            known = await authenticate_token(connection, token.credentials)
        if known is None:
            raise Problem("unknown_token", "the token is unknown, revoked or expired", headers=CHALLENGE)
        return Caller(f"token:{known.name}", known.scope)


def caller_with(scope: TokenScope) -> Callable[[Request, HTTPAuthorizationCredentials | None], Awaitable[Caller]]:
    """Make a dependency that authenticates the caller and requires a scope."""

    async def authenticate(request: Request, token: BearerToken) -> Caller:
        authenticator: Authenticator = request.app.state.authenticator
        caller = await authenticator.authenticate(token, has_header="authorization" in request.headers)
        caller.require(scope)
        return caller

    return authenticate


ReadCaller = Annotated[Caller, Depends(caller_with(TokenScope.READ))]
OperateCaller = Annotated[Caller, Depends(caller_with(TokenScope.OPERATE))]
AdminCaller = Annotated[Caller, Depends(caller_with(TokenScope.ADMIN))]
