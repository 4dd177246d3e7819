"""API tokens and idempotency keys.

Invariant: the secret of a token is returned once, by `create_token`. Only its SHA-256 is stored; a slow hash is not
needed, because the secret is 256 random bits.

Invariant: an idempotency key and the effect of its request commit together or not at all. A row without a response is
visible only to the transaction that writes it.
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

ACCESS = load_statements("access")
RETENTION = load_statements("retention")
BATCH_SIZE = 1000  # idempotency keys that one statement deletes
TOKEN_PREFIX = "il_"  # noqa: S105 - marks a token in logs and secret scanners; it is no secret
TOKEN_BYTES = 32
MAX_TOKEN_NAME_LENGTH = 100


class TokenScope(StrEnum):
    """The rights of a token; each scope includes those before it."""

    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"

    def includes(self, other: TokenScope) -> bool:
        """Tell whether this scope grants everything that the other one does."""
        order = list(TokenScope)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True)
class Token:
    """The stored row of a token."""

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
    """An authenticated caller: the name of its token, which records show as the actor, and its scope."""

    name: str
    scope: TokenScope


async def create_token(
    connection: Connection,
    name: str,
    scope: TokenScope,
    *,
    actor: str,
    lifetime: timedelta | None = None,
    now: datetime | None = None,
) -> tuple[Token, str]:
    """Create a token; return its row and the secret, which cannot be read again."""
    if not name.strip() or not name.isprintable() or len(name) > MAX_TOKEN_NAME_LENGTH:
        raise InputError(f"the name of a token must be 1 to {MAX_TOKEN_NAME_LENGTH} printable characters, not {name!r}")
    secret = TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    parameters = {
        "name": name,
        "scope": str(scope),
        "token_hash": hash_token(secret),
        "actor": actor,
        "lifetime": lifetime,
        "now": now,
    }
    rows = await run(connection, ACCESS["create_token"], parameters)
    if not rows:
        raise InputError(f"a token {name!r} exists already; revoke it first, or choose another name")
    return Token(**rows[0]), secret


async def revoke_token(connection: Connection, name: str, *, actor: str, now: datetime | None = None) -> bool:
    """Revoke a token; False when no unrevoked token has this name."""
    return bool(await run(connection, ACCESS["revoke_token"], {"name": name, "actor": actor, "now": now}))


async def list_tokens(connection: Connection, *, revoked: bool = False) -> list[Token]:
    """List tokens, oldest first; with `revoked`, revoked ones too."""
    return [Token(**row) for row in await run(connection, ACCESS["list_tokens"], {"revoked": revoked})]


async def authenticate_token(connection: Connection, secret: str, *, now: datetime | None = None) -> Principal | None:
    """Return the principal of a token; None when the token is unknown, revoked or expired."""
    parameters = {"token_hash": hash_token(secret), "now": now}
    rows = await run(connection, ACCESS["authenticate_token"], parameters)
    if not rows:
        return None
    if rows[0]["is_stale"]:
        await run(connection, ACCESS["touch_token"], parameters)
    return Principal(rows[0]["name"], TokenScope(rows[0]["scope"]))


async def count_usable_tokens(connection: Connection, *, now: datetime | None = None) -> int:
    """Count the tokens that are neither revoked nor expired."""
    (row,) = await run(connection, ACCESS["count_usable_tokens"], {"now": now})
    tokens: int = row["tokens"]
    return tokens


def hash_token(secret: str) -> bytes:
    """Return the hash under which a token is stored."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request to execute once: its idempotency key, its endpoint and the digest of its body."""

    key: str
    endpoint: str
    digest: str


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The response stored for a key; `fits` when the stored request equals the present one."""

    status: int
    body: str
    fits: bool


async def claim_idempotency_key(
    connection: Connection, request: IdempotentRequest, *, lifetime: timedelta, now: datetime | None = None
) -> StoredResponse | None:
    """Claim a key for the connection's transaction (None), or return the response that is stored for it.

    While another transaction holds the key, the statement waits for its end: afterwards the key has a response or is
    free.
    """
    parameters = {"request_id": request.key, "endpoint": request.endpoint, "request_hash": request.digest}
    while True:
        if await run(connection, ACCESS["claim_idempotency_key"], {**parameters, "lifetime": lifetime, "now": now}):
            return None
        rows = await run(connection, ACCESS["read_idempotency_key"], {"request_id": request.key})
        if rows:  # otherwise the key was deleted between the two statements
            fits = rows[0]["endpoint"] == request.endpoint and rows[0]["request_hash"] == request.digest
            return StoredResponse(rows[0]["response_status"], rows[0]["response_body"], fits)


async def store_idempotent_response(connection: Connection, key: str, status: int, body: str) -> None:
    """Store the response for a key that this transaction has claimed."""
    parameters = {"request_id": key, "response_status": status, "response_body": body}
    await run(connection, ACCESS["store_idempotent_response"], parameters)


async def delete_expired_idempotency_keys(connection: Connection, *, now: datetime | None = None) -> int:
    """Delete expired keys in batches; return their number. Retention does the same on the leading worker."""
    deleted = 0
    parameters = {"batch": BATCH_SIZE, "now": now}
    while rows := await run(connection, RETENTION["delete_expired_idempotency_keys"], parameters):
        deleted += len(rows)
    return deleted
