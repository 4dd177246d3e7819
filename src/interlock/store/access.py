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
from interlock.postgres.query import load_statements, run

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from uuid import UUID

    from interlock.postgres.connection import Connection


# SECTION store/idempotency
# Keys of requests: what was answered to one is kept, and given again to whoever sends the same request.
#
# Invariant: a key and the effect of its request commit together or not at all. A row whose answer is missing is seen by
# nobody but the transaction that writes it.

ACCESS = load_statements("access")
RETENTION = load_statements("retention")
STRETCH = 1000


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request that is to be carried out once: its key, where it goes, and what it says, as a digest."""

    key: str
    endpoint: str
    digest: str


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """What was answered to a key; `fits` when it was the same request."""

    status: int
    body: str
    fits: bool


async def claim_idempotency_key(
    connection: Connection, request: IdempotentRequest, *, lifetime: timedelta, now: datetime | None = None
) -> StoredResponse | None:
    """Take a key for the connection's transaction; give the answer instead if the key has one.

    Whoever comes while another transaction has the key waits for its end: then there is an answer, or the key is free.
    """
    parameters = {"request_id": request.key, "endpoint": request.endpoint, "request_hash": request.digest}
    while True:
        if await run(connection, ACCESS["claim_idempotency_key"], {**parameters, "lifetime": lifetime, "now": now}):
            return None
        rows = await run(connection, ACCESS["read_idempotency_key"], {"request_id": request.key})
        if rows:  # else it was removed in between
            fits = rows[0]["endpoint"] == request.endpoint and rows[0]["request_hash"] == request.digest
            return StoredResponse(rows[0]["response_status"], rows[0]["response_body"], fits)


async def store_idempotent_response(connection: Connection, key: str, status: int, body: str) -> None:
    """Keep the answer to a key that this transaction has taken."""
    parameters = {"request_id": key, "response_status": status, "response_body": body}
    await run(connection, ACCESS["store_idempotent_response"], parameters)


async def delete_expired_idempotency_keys(connection: Connection, *, now: datetime | None = None) -> int:
    """Delete the keys whose time is over, some at a time; give how many. The leader among the workers does so too."""
    deleted = 0
    while rows := await run(connection, RETENTION["delete_expired_idempotency_keys"], {"batch": STRETCH, "now": now}):
        deleted += len(rows)
    return deleted


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
class Principal:
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


async def authenticate_token(connection: Connection, secret: str, *, now: datetime | None = None) -> Principal | None:
    """Tell whose token this is; None when it is unknown, revoked or expired."""
    parameters = {"token_hash": hashed(secret), "now": now}
    rows = await run(connection, ACCESS["authenticate_token"], parameters)
    if not rows:
        return None
    if rows[0]["is_stale"]:
        await run(connection, ACCESS["touch_token"], parameters)
    return Principal(rows[0]["name"], Scope(rows[0]["scope"]))


async def count_usable_tokens(connection: Connection, *, now: datetime | None = None) -> int:
    """Count the tokens that open something."""
    (row,) = await run(connection, ACCESS["count_usable_tokens"], {"now": now})
    tokens: int = row["tokens"]
    return tokens


def hashed(secret: str) -> bytes:
    """Give what is stored of a token."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
