"""The viewer of a page: the caller that a browser's session stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request

from interlock.store.access import TokenScope, hash_token
from interlock.supervisor.http.auth import Caller
from interlock.supervisor.http.problems import Problem
from interlock.supervisor.http.sessions import csrf_token, session_caller, session_secret

if TYPE_CHECKING:
    from datetime import datetime

READ_ONLY_COOKIE = "interlock_read_only"


@dataclass(frozen=True, slots=True)
class Viewer:
    """A person with a session, or anybody where no token is required."""

    caller: Caller
    csrf_token: str
    read_only: bool = False
    expires_at: datetime | None = None
    session: bytes | None = None  # the hash under which the session is stored

    @property
    def namespaces(self) -> frozenset[str] | None:
        """The namespaces that the viewer may see; None: all."""
        return self.caller.namespaces

    def require_namespace(self, namespace: str | None) -> None:
        """Raise 403 for a namespace that the token does not cover."""
        if namespace is not None and self.namespaces is not None and namespace not in self.namespaces:
            raise Problem("insufficient_scope", f"the token does not cover namespace {namespace}")

    def require_all_namespaces(self, what: str) -> None:
        """Raise 403 for a token that is limited to namespaces: `what` shows the whole system."""
        if self.namespaces is not None:
            names = ", ".join(sorted(self.namespaces))
            raise Problem(
                "namespace_not_allowed", f"the token is limited to the namespaces {names}, and {what} shows all of them"
            )

    def may(self, scope: str) -> bool:
        """Return whether acts of a scope are offered to the viewer."""
        return not self.read_only and self.caller.scope.includes(TokenScope(scope))

    def require_act(self, scope: str) -> None:
        """Raise 403 if acts of a scope are not offered to the viewer."""
        if not self.may(scope):
            raise Problem("insufficient_scope", f"this needs the scope {scope}, in a browser that is not read only")

    @property
    def offered_scope(self) -> str:
        """The scope whose acts are offered."""
        return TokenScope.READ if self.read_only else self.caller.scope


@dataclass(frozen=True, slots=True)
class OfferedActs:
    """The acts of a live fragment. Viewers with the same scope share it: the scope is the argument of its topic."""

    scope: str

    def may(self, scope: str) -> bool:
        """Return whether acts of a scope are offered."""
        known = self.scope in set(TokenScope)
        return known and TokenScope(self.scope).includes(TokenScope(scope))


async def find_viewer(request: Request) -> Viewer:
    """Return the viewer of a request, or raise 401."""
    caller = await session_caller(request)
    if caller is None:
        raise Problem("sign_in_failed", "sign in first; `interlock dashboard` prints a link")
    secret = session_secret(request)
    return Viewer(
        caller,
        csrf_token(request),
        read_only=request.cookies.get(READ_ONLY_COOKIE) == "1",
        session=None if secret is None else hash_token(secret),
    )
