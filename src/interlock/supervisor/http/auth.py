"""Who makes a request, and whether they may: bearer tokens, and nobody's name on a loopback address.

Invariant: a token that was sent is checked, also where none is needed; every move that comes of a request is recorded
under the name of its token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from interlock.store.access import Scope, authenticate_token
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock.client.app import Interlock

ANONYMOUS = "api"
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="interlock"'}

_bearer = HTTPBearer(
    auto_error=False, description="A token of `interlock token create`; not needed on a loopback address by default."
)
Sent = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever makes a request: the name for the records, and what they may do."""

    actor: str
    scope: Scope

    def require(self, scope: Scope, what: str = "this") -> None:
        """Refuse what the caller may not do."""
        if not self.scope.includes(scope):
            raise Problem(
                "insufficient_scope",
                f"{what} needs scope {scope}, and the token has {self.scope}",
                {"required": str(scope)},
                headers={"WWW-Authenticate": f'{CHALLENGE["WWW-Authenticate"]}, error="insufficient_scope"'},
            )


@dataclass(frozen=True, slots=True)
class Access:
    """How callers are recognised."""

    app: Interlock
    token_required: bool

    async def recognise(self, sent: HTTPAuthorizationCredentials | None, *, said: bool) -> Caller:
        """Tell who calls; `said` when there is an Authorization header at all."""
        if sent is None:
            if said:
                raise Problem("unknown_token", "the Authorization header must be: Bearer TOKEN", headers=CHALLENGE)
            if self.token_required:
                raise Problem("missing_token", "send a token as Authorization: Bearer TOKEN", headers=CHALLENGE)
            return Caller(ANONYMOUS, Scope.ADMIN)
        async with self.app.connection() as connection:
            known = await authenticate_token(connection, sent.credentials)
        if known is None:
            raise Problem("unknown_token", "the token is unknown, revoked or expired", headers=CHALLENGE)
        return Caller(f"token:{known.name}", known.scope)


def caller_with(scope: Scope) -> Callable[[Request, HTTPAuthorizationCredentials | None], Awaitable[Caller]]:
    """Give a dependency that lets only callers with a scope pass."""

    async def recognise(request: Request, sent: Sent) -> Caller:
        access: Access = request.app.state.access
        caller = await access.recognise(sent, said="authorization" in request.headers)
        caller.require(scope)
        return caller

    return recognise


ReadingCaller = Annotated[Caller, Depends(caller_with(Scope.READ))]
OperatingCaller = Annotated[Caller, Depends(caller_with(Scope.OPERATE))]
AdministeringCaller = Annotated[Caller, Depends(caller_with(Scope.ADMIN))]
