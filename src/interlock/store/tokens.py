"""Tokens: who may use the API, and what for.

Invariant: a token is shown once, to whoever makes it. What is stored is its SHA-256, from which it cannot be found: it
is 256 bits of chance, and no word that somebody could guess.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from interlock.errors import InputError
from interlock.store.database import run
from interlock.store.idempotency import ACCESS

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from uuid import UUID

    from interlock.store.database import Connection

PREFIX = "il_"
BYTES = 32
LONGEST_NAME = 100


class Scope(StrEnum):
    """What a token allows; each includes those before it."""

    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"

    def includes(self, other: Scope) -> bool:
        """Tell whether this scope allows what the other one does."""
        order = list(Scope)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True)
class Token:
    """What is stored of a token."""

    id: UUID
    name: str
    scope: str
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    revoked_by: str | None
    last_used_at: datetime | None


@dataclass(frozen=True, slots=True)
class Recognised:
    """Whoever sent a good token: its name, which the records show, and its scope."""

    name: str
    scope: Scope


async def create_token(
    connection: Connection,
    name: str,
    scope: Scope,
    *,
    actor: str,
    lifetime: timedelta | None = None,
    now: datetime | None = None,
) -> tuple[Token, str]:
    """Make a token; give what is stored of it, and the token itself, which nobody can read again."""
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
        raise InputError(f"the name of a token must be 1 to {LONGEST_NAME} printable characters, not {name!r}")
    secret = PREFIX + secrets.token_urlsafe(BYTES)
    parameters = {
        "name": name,
        "scope": str(scope),
        "token_hash": hashed(secret),
        "actor": actor,
        "lifetime": lifetime,
        "now": now,
    }
    rows = await run(connection, ACCESS["insert_token"], parameters)
    if not rows:
        raise InputError(f"there is a token {name!r} already; revoke it first, or take another name")
    return Token(**rows[0]), secret


async def revoke_token(connection: Connection, name: str, *, actor: str, now: datetime | None = None) -> bool:
    """Let a token open nothing from now on; False when none of this name is in use."""
    return bool(await run(connection, ACCESS["revoke_token"], {"name": name, "actor": actor, "now": now}))


async def list_tokens(connection: Connection, *, revoked: bool = False) -> list[Token]:
    """List tokens, oldest first; revoked ones too if asked for."""
    return [Token(**row) for row in await run(connection, ACCESS["list_tokens"], {"revoked": revoked})]


async def recognise_token(connection: Connection, secret: str, *, now: datetime | None = None) -> Recognised | None:
    """Tell whose token this is; None when it is unknown, revoked or expired."""
    parameters = {"token_hash": hashed(secret), "now": now}
    rows = await run(connection, ACCESS["recognise_token"], parameters)
    if not rows:
        return None
    if rows[0]["is_stale"]:
        await run(connection, ACCESS["note_use_of_token"], parameters)
    return Recognised(rows[0]["name"], Scope(rows[0]["scope"]))


async def count_usable_tokens(connection: Connection, *, now: datetime | None = None) -> int:
    """Count the tokens that open something."""
    (row,) = await run(connection, ACCESS["count_usable_tokens"], {"now": now})
    tokens: int = row["tokens"]
    return tokens


def hashed(secret: str) -> bytes:
    """Give what is stored of a token."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
