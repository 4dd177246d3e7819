"""Completion notices between the outcome that wrote them and the receiver that takes them.

Invariant: a notice leaves the table only when it was delivered, or with its age after it was given up; whoever posts
one holds it by its number of tries, so that a late poster changes nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from interlock.postgres.query import load_statements, run
from interlock.store.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

CALLBACKS = load_statements("callbacks")
VISIBILITY_TIMEOUT = timedelta(seconds=30)


class Webhook(NamedTuple):
    """One completion notice to post, and which try this is."""

    id: int
    task_id: UUID
    attempt: int
    state: str
    url: str
    tries: int


class GivenUpWebhook(NamedTuple):
    """A notice that could not be delivered, and why."""

    id: int
    task_id: UUID
    attempt: int
    state: str
    url: str
    tries: int
    error: str | None
    given_up_at: datetime


class FailedDelivery(NamedTuple):
    """A notice that was not taken: to be tried again after `delay` seconds, or never (None)."""

    notice: Webhook
    error: str
    delay: float | None


async def claim_due_callbacks(
    connection: Connection, *, limit: int, visibility: timedelta = VISIBILITY_TIMEOUT, now: datetime | None = None
) -> list[Webhook]:
    """Take notices that are due; unless settled, they come due again after `visibility`."""
    parameters = {"limit": limit, "visibility": visibility, "now": now}
    return [Webhook(**row) for row in await run(connection, CALLBACKS["claim_due_callbacks"], parameters)]


async def delete_delivered_callbacks(connection: Connection, notices: Sequence[Webhook]) -> int:
    """Strike off what was delivered; give how many of them were still held."""
    if not notices:
        return 0
    parameters = {"ids": [notice.id for notice in notices], "tries": [notice.tries for notice in notices]}
    return len(await run(connection, CALLBACKS["delete_delivered_callbacks"], parameters))


async def postpone_failed_callbacks(
    connection: Connection, failures: Sequence[FailedDelivery], *, now: datetime | None = None
) -> int:
    """Note why these were not taken and when to try again, if ever; give how many of them were still held."""
    if not failures:
        return 0
    parameters = {
        "ids": [failure.notice.id for failure in failures],
        "tries": [failure.notice.tries for failure in failures],
        "errors": [failure.error for failure in failures],
        "delays": [failure.delay for failure in failures],
        "now": now,
    }
    return len(await run(connection, CALLBACKS["postpone_failed_callbacks"], parameters))


async def next_callback_at(connection: Connection) -> datetime | None:
    """Tell when the next notice is due."""
    rows = await run(connection, CALLBACKS["next_callback_at"], {})
    return rows[0]["next_try_at"] if rows else None


async def list_given_up_callbacks(connection: Connection, *, limit: int = 100) -> list[GivenUpWebhook]:
    """List notices that could not be delivered, oldest first."""
    return [
        GivenUpWebhook(**row) for row in await run(connection, CALLBACKS["list_given_up_callbacks"], {"limit": limit})
    ]


async def retry_given_up_callbacks(
    connection: Connection, ids: Sequence[int] | None = None, *, now: datetime | None = None
) -> int:
    """Post notices that were given up once more, all or these; give how many."""
    parameters = {"ids": None if ids is None else list(ids), "now": now}
    retried = len(await run(connection, CALLBACKS["retry_given_up_callbacks"], parameters))
    if retried:
        await run(connection, TASKS["notify_duties"], {"duties": ["callbacks"]})
    return retried
