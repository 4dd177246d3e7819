"""Keys of requests: what was answered to one is kept, and given again to whoever sends the same request.

Invariant: a key and the effect of its request commit together or not at all. A row whose answer is missing is seen by
nobody but the transaction that writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.store.database import run
from interlock.store.statements import load_statements

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from interlock.store.database import Connection

ACCESS = load_statements("access")
RETENTION = load_statements("retention")
STRETCH = 1000


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request that is to be carried out once: its key, where it goes, and what it says, as a digest."""

    key: str
    endpoint: str
    digest: str


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What was answered to a key; `fits` when it was the same request."""

    status: int
    body: str
    fits: bool


async def take_key(
    connection: Connection, request: KeyedRequest, *, lifetime: timedelta, now: datetime | None = None
) -> StoredAnswer | None:
    """Take a key for the connection's transaction; give the answer instead if the key has one.

    Whoever comes while another transaction has the key waits for its end: then there is an answer, or the key is free.
    """
    parameters = {"request_id": request.key, "endpoint": request.endpoint, "request_hash": request.digest}
    while True:
        if await run(connection, ACCESS["take_key"], {**parameters, "lifetime": lifetime, "now": now}):
            return None
        rows = await run(connection, ACCESS["read_key"], {"request_id": request.key})
        if rows:  # else it was removed in between
            fits = rows[0]["endpoint"] == request.endpoint and rows[0]["request_hash"] == request.digest
            return StoredAnswer(rows[0]["response_status"], rows[0]["response_body"], fits)


async def answer_key(connection: Connection, key: str, status: int, body: str) -> None:
    """Keep the answer to a key that this transaction has taken."""
    parameters = {"request_id": key, "response_status": status, "response_body": body}
    await run(connection, ACCESS["answer_key"], parameters)


async def delete_expired_keys(connection: Connection, *, now: datetime | None = None) -> int:
    """Delete the keys whose time is over, some at a time; give how many. The leader among the workers does so too."""
    deleted = 0
    while rows := await run(connection, RETENTION["delete_expired_idempotency_keys"], {"batch": STRETCH, "now": now}):
        deleted += len(rows)
    return deleted
