"""Webhooks: completion notices that wait in table `callbacks` until they are delivered.

A webhook that fails too often is given up: it stays as a dead letter until it is retried, discarded or deleted by
retention.

Invariant: a webhook is deleted only after delivery, or after it was given up. Its number of tries fences
it: a sender whose visibility timeout has passed changes nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.postgres.query import load_statements, run
from interlock.store.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

WEBHOOKS = load_statements("webhooks")
VISIBILITY_TIMEOUT = timedelta(seconds=30)


class Webhook(NamedTuple):
    """A claimed webhook of a task or a job; `tries` counts this delivery too."""

    id: int
    task_id: UUID | None
    attempt: int | None
    job_id: UUID | None
    state: str
    url: str
    tries: int
    definition: dict[str, str] | None  # name and version of a job's workflow

    def payload(self) -> dict[str, Any]:
        """Return the body to post: ids and the state, no input, output or error, which may hold secrets."""
        if self.job_id is None:
            return {"task_id": str(self.task_id), "state": self.state, "attempt": self.attempt}
        return {"job_id": str(self.job_id), "status": self.state, **(self.definition or {})}


class GivenUpWebhook(NamedTuple):
    """A dead letter: a webhook that is not tried again, and its last error."""

    id: int
    task_id: UUID | None
    attempt: int | None
    job_id: UUID | None
    state: str
    url: str
    tries: int
    error: str | None
    given_up_at: datetime


class FailedDelivery(NamedTuple):
    """A failed delivery; `delay` is the backoff in seconds, None gives the webhook up."""

    notice: Webhook
    error: str
    delay: float | None


async def claim_due_webhooks(
    connection: Connection, *, limit: int, visibility: timedelta = VISIBILITY_TIMEOUT, now: datetime | None = None
) -> list[Webhook]:
    """Claim due webhooks; unless settled, they become due again after the visibility timeout."""
    parameters = {"limit": limit, "visibility": visibility, "now": now}
    return [Webhook(**row) for row in await run(connection, WEBHOOKS["claim_due_webhooks"], parameters)]


async def delete_delivered_webhooks(connection: Connection, notices: Sequence[Webhook]) -> int:
    """Delete delivered webhooks; return the number that were still held by this sender."""
    if not notices:
        return 0
    parameters = {"ids": [notice.id for notice in notices], "tries": [notice.tries for notice in notices]}
    return len(await run(connection, WEBHOOKS["delete_delivered_webhooks"], parameters))


async def postpone_failed_webhooks(
    connection: Connection, failures: Sequence[FailedDelivery], *, now: datetime | None = None
) -> int:
    """Store errors and the times of the next tries; return the number that were still held by this sender."""
    if not failures:
        return 0
    parameters = {
        "ids": [failure.notice.id for failure in failures],
        "tries": [failure.notice.tries for failure in failures],
        "errors": [failure.error for failure in failures],
        "delays": [failure.delay for failure in failures],
        "now": now,
    }
    return len(await run(connection, WEBHOOKS["postpone_failed_webhooks"], parameters))


async def next_callback_at(connection: Connection) -> datetime | None:
    """Return the time at which the next webhook is due."""
    rows = await run(connection, WEBHOOKS["next_callback_at"], {})
    return rows[0]["next_try_at"] if rows else None


async def list_given_up_webhooks(connection: Connection, *, limit: int = 100, after: int = 0) -> list[GivenUpWebhook]:
    """List dead letters, oldest first; `after` is the cursor: the last id of the page before."""
    rows = await run(connection, WEBHOOKS["list_given_up_webhooks"], {"limit": limit, "after": after})
    return [GivenUpWebhook(**row) for row in rows]


async def retry_given_up_webhooks(
    connection: Connection, ids: Sequence[int] | None = None, *, now: datetime | None = None
) -> list[int]:
    """Make dead letters due again, all or those of `ids`; return their ids."""
    parameters = {"ids": None if ids is None else list(ids), "now": now}
    retried = sorted(row["id"] for row in await run(connection, WEBHOOKS["retry_given_up_webhooks"], parameters))
    if retried:
        await run(connection, TASKS["notify_duties"], {"duties": ["callbacks"]})
    return retried


async def discard_given_up_webhooks(connection: Connection, ids: Sequence[int] | None = None) -> list[int]:
    """Delete dead letters, all or those of `ids`; return their ids."""
    parameters = {"ids": None if ids is None else list(ids)}
    return sorted(row["id"] for row in await run(connection, WEBHOOKS["discard_given_up_webhooks"], parameters))
