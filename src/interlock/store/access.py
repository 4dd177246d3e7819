"""API tokens, sign-in codes and sessions of browsers, and idempotency keys.

Invariant: the secret of a token is returned once, by `create_token`. Only its SHA-256 is stored; a slow hash is not
needed, because the secret is 256 random bits. The same holds for codes and sessions.

Invariant: a sign-in code works once. A session acts as its token, for as long as that is neither revoked nor expired.

Invariant: an idempotency key and the effect of its request commit together or not at all. A row without a response is
visible only to the transaction that writes it.
"""

from __future__ import annotations

import hashlib
import secrets
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from interlock.config import ends_addresses
from interlock.errors import InputError
from interlock.model.options import check_text
from interlock.postgres.query import load_statements, pipelined_transaction, read_prepared, run
from interlock.store.enqueue import insert_task_call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.model.options import NewTask
    from interlock.postgres.connection import Connection

ACCESS = load_statements("access")
RETENTION = load_statements("retention")
BATCH_SIZE = 1000  # idempotency keys that one statement deletes
TOKEN_PREFIX = "il_"  # noqa: S105 - marks a token in logs and secret scanners; it is no secret
TOKEN_BYTES = 32
MAX_TOKEN_NAME_LENGTH = 100
MAX_TOKEN_NAMESPACES = 100
SIGN_IN_CODE_LIFETIME = timedelta(minutes=2)
SESSION_LIFETIME = timedelta(hours=12)
SESSION_IDLE_LIMIT = timedelta(hours=2)


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
    namespaces: list[str] | None  # None: all
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    revoked_by: str | None
    last_used_at: datetime | None


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller: the name of its token, which records show as the actor, and its rights."""

    name: str
    scope: TokenScope
    namespaces: frozenset[str] | None = None  # None: all


async def create_token(
    connection: Connection,
    name: str,
    scope: TokenScope,
    *,
    actor: str,
    namespaces: Sequence[str] | None = None,
    lifetime: timedelta | None = None,
    secret: str | None = None,
    now: datetime | None = None,
) -> tuple[Token, str]:
    """Create a token, limited to some namespaces if they are given; return its row and the secret.

    The secret cannot be read again. It is made here, unless one of `new_token_secret` is given.
    """
    if not name.strip() or not name.isprintable() or len(name) > MAX_TOKEN_NAME_LENGTH or not ends_addresses(name):
        rule = f"1 to {MAX_TOKEN_NAME_LENGTH} printable characters, and not . or .."
        raise InputError(f"the name of a token must be {rule}, not {name!r}")
    _check_namespaces(namespaces)
    secret = new_token_secret() if secret is None else secret
    parameters = {
        "name": name,
        "scope": str(scope),
        "namespaces": None if namespaces is None else sorted(set(namespaces)),
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
    rows = await read_prepared(connection, ACCESS["authenticate_token"], parameters)
    if not rows:
        return None
    if rows[0]["is_stale"]:
        await run(connection, ACCESS["touch_token"], parameters)
    return _principal(rows[0])


async def find_token(connection: Connection, secret: str, *, now: datetime | None = None) -> tuple[str, bool] | None:
    """Return the name of a token and whether it can be used; None when the database does not know it."""
    rows = await run(connection, ACCESS["find_token"], {"token_hash": hash_token(secret), "now": now})
    return (rows[0]["name"], rows[0]["is_usable"]) if rows else None


async def count_usable_tokens(connection: Connection, *, now: datetime | None = None) -> int:
    """Count the tokens that are neither revoked nor expired."""
    (row,) = await run(connection, ACCESS["count_usable_tokens"], {"now": now})
    tokens: int = row["tokens"]
    return tokens


def new_token_secret() -> str:
    """Make the secret of a token: 256 random bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def hash_token(secret: str) -> bytes:
    """Return the hash under which a token, a code or a session is stored."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _check_namespaces(namespaces: Sequence[str] | None) -> None:
    if namespaces is None:
        return
    if not 0 < len(namespaces) <= MAX_TOKEN_NAMESPACES:
        raise InputError(f"a token is limited to 1 to {MAX_TOKEN_NAMESPACES} namespaces, not {len(namespaces)}")
    for name in namespaces:
        try:
            check_text("namespace", name)
        except ValueError as error:
            raise InputError(str(error)) from None


def _principal(row: Mapping[str, Any]) -> Principal:
    limited = row["namespaces"]
    return Principal(row["name"], TokenScope(row["scope"]), None if limited is None else frozenset(limited))


async def create_sign_in_code(connection: Connection, name: str, *, now: datetime | None = None) -> str:
    """Make a code that signs a browser in once, within two minutes, as the token of this name."""
    code = secrets.token_urlsafe(TOKEN_BYTES)
    parameters = {"code_hash": hash_token(code), "name": name, "lifetime": SIGN_IN_CODE_LIFETIME, "now": now}
    if not await run(connection, ACCESS["create_sign_in_code"], parameters):
        raise InputError(f"there is no token {name!r} in use; `interlock token list` shows them")
    return code


async def create_session_by_code(connection: Connection, code: str, *, now: datetime | None = None) -> str | None:
    """Exchange a sign-in code for a session and return its secret; None when the code is unknown, used or expired."""
    return await _create_session(connection, "create_session_by_code", {"code_hash": hash_token(code)}, now)


async def create_session_by_token(connection: Connection, secret: str, *, now: datetime | None = None) -> str | None:
    """Begin a session of a token and return its secret; None when the token is unknown, revoked or expired."""
    return await _create_session(connection, "create_session_by_token", {"token_hash": hash_token(secret)}, now)


async def _create_session(
    connection: Connection, statement: str, proof: Mapping[str, bytes], now: datetime | None
) -> str | None:
    session = secrets.token_urlsafe(TOKEN_BYTES)
    parameters = {**proof, "session_hash": hash_token(session), "lifetime": SESSION_LIFETIME, "now": now}
    return session if await run(connection, ACCESS[statement], parameters) else None


async def authenticate_session(
    connection: Connection, session: str, *, now: datetime | None = None
) -> Principal | None:
    """Return the principal of a session; None when it has ended, was idle for too long, or its token is not usable."""
    parameters = {"session_hash": hash_token(session), "idle": SESSION_IDLE_LIMIT, "now": now}
    rows = await run(connection, ACCESS["authenticate_session"], parameters)
    if not rows:
        return None
    if rows[0]["is_stale"]:
        await run(connection, ACCESS["touch_session"], parameters)
    return _principal(rows[0])


async def delete_session(connection: Connection, session: str) -> bool:
    """End a session; False when there is none."""
    return bool(await run(connection, ACCESS["delete_session"], {"session_hash": hash_token(session)}))


async def read_task_namespace(connection: Connection, id_: UUID) -> str | None:
    """Return the namespace of a task; None when it is unknown."""
    return _first_namespace(await run(connection, ACCESS["read_task_namespace"], {"id": id_}))


async def read_job_namespace(connection: Connection, id_: UUID) -> str | None:
    """Return the namespace of a job; None when it is unknown."""
    return _first_namespace(await run(connection, ACCESS["read_job_namespace"], {"id": id_}))


async def read_workflow_namespace(connection: Connection, name: str, version: str | None) -> str | None:
    """Return the namespace of a workflow, of its newest version unless one is named; None when it is unknown."""
    wanted = {"name": name, "version": version}
    return _first_namespace(await run(connection, ACCESS["read_workflow_namespace"], wanted))


def _first_namespace(rows: Sequence[Mapping[str, Any]]) -> str | None:
    return rows[0]["namespace"] if rows else None


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request to execute once: its actor, its idempotency key, its endpoint and the digest of its body."""

    actor: str
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
    key = {"actor": request.actor, "request_id": request.key}
    parameters = {**key, "endpoint": request.endpoint, "request_hash": request.digest}
    while True:
        if await run(connection, ACCESS["claim_idempotency_key"], {**parameters, "lifetime": lifetime, "now": now}):
            return None
        rows = await run(connection, ACCESS["read_idempotency_key"], key)
        if rows:  # otherwise the key was deleted between the two statements
            fits = rows[0]["endpoint"] == request.endpoint and rows[0]["request_hash"] == request.digest
            return StoredResponse(rows[0]["response_status"], rows[0]["response_body"], fits)


async def enqueue_for_key(
    connection: Connection,
    request: IdempotentRequest,
    task: NewTask,
    *,
    respond: Callable[[dict[str, Any]], tuple[int, str]],
    lifetime: timedelta,
    now: datetime | None = None,
) -> tuple[int, str] | None:
    """Claim a key, store its task and its response, in one transaction of two round trips; return the response.

    None, with nothing stored, if the key has a response, or the task exists or needs a closer look.
    """
    key = {"actor": request.actor, "request_id": request.key}
    claim = {**key, "endpoint": request.endpoint, "request_hash": request.digest, "lifetime": lifetime, "now": now}
    with suppress(_ClaimRefused):
        async with pipelined_transaction(connection) as send:
            claimed = await send((ACCESS["claim_idempotency_key"], claim))
            inserted = await send(insert_task_call(task, actor=request.actor))
            if not await claimed.fetchall():
                raise _ClaimRefused
            rows = await inserted.fetchall()
            if not rows:
                raise _ClaimRefused
            status, body = respond(rows[0]["document"])
            await send((ACCESS["store_idempotent_response"], {**key, "response_status": status, "response_body": body}))
        return status, body
    return None


class _ClaimRefused(Exception):  # noqa: N818 - not an error: rolls the transaction back
    """The request needs more than its key and its task."""


async def store_idempotent_response(connection: Connection, request: IdempotentRequest, status: int, body: str) -> None:
    """Store the response for a key that this transaction has claimed."""
    key = {"actor": request.actor, "request_id": request.key}
    parameters = {**key, "response_status": status, "response_body": body}
    await run(connection, ACCESS["store_idempotent_response"], parameters)


async def delete_expired_idempotency_keys(connection: Connection, *, now: datetime | None = None) -> int:
    """Delete expired keys in batches; return their number. Retention does the same on the leading worker."""
    deleted = 0
    parameters = {"batch": BATCH_SIZE, "now": now}
    while rows := await run(connection, RETENTION["delete_expired_idempotency_keys"], parameters):
        deleted += len(rows)
    return deleted


async def delete_expired_sign_ins(connection: Connection, *, now: datetime | None = None) -> int:
    """Delete expired sign-in codes and sessions; return their number. Retention does the same on the leading worker."""
    codes = await run(connection, RETENTION["delete_expired_sign_in_codes"], {"now": now})
    sessions = await run(connection, RETENTION["delete_expired_sessions"], {"idle": SESSION_IDLE_LIMIT, "now": now})
    return len(codes) + len(sessions)
