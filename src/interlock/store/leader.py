"""The lead over duties that only one worker may do at a time, as a lease in the database.

Invariant: at any time at most one holder has a lead that has not run out; and since a holder may not notice that its
lead did, every transaction of a duty runs under a lock of its own.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from interlock.postgres.connection import transaction
from interlock.postgres.query import load_statements, run
from interlock.store.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime

    from interlock.postgres.connection import Connection

LEADERS = load_statements("leaders")
LEADER_LEASE = timedelta(seconds=10)
MAINTENANCE = "maintenance"


class Leader(NamedTuple):
    """Who holds a lead, and until when unless it is renewed."""

    holder: str
    expires_at: datetime


async def acquire_leadership(
    connection: Connection,
    holder: str,
    *,
    duty: str = MAINTENANCE,
    lease: timedelta = LEADER_LEASE,
    now: datetime | None = None,
) -> bool:
    """Take the lead or prolong it; False while another holds it."""
    parameters = {"duty": duty, "holder": holder, "lease": lease, "now": now}
    return bool(await run(connection, LEADERS["acquire_leadership"], parameters))


async def resign_leadership(connection: Connection, holder: str, *, duty: str = MAINTENANCE) -> bool:
    """Give the lead up, and wake who may take it; False when it was not held any more."""
    resigned = bool(await run(connection, LEADERS["resign_leadership"], {"duty": duty, "holder": holder}))
    if resigned:
        await run(connection, TASKS["notify_duties"], {"duties": ["leader"]})
    return resigned


async def read_leader(connection: Connection, *, duty: str = MAINTENANCE, now: datetime | None = None) -> Leader | None:
    """Tell who leads; None when nobody does."""
    rows = await run(connection, LEADERS["read_leader"], {"duty": duty, "now": now})
    return Leader(**rows[0]) if rows else None


@asynccontextmanager
async def duty_transaction(
    connection: Connection, duty: str, *, now: datetime | None = None
) -> AsyncIterator[datetime]:
    """Open a transaction in which nobody else does this duty, and give the time at which it became so."""
    async with transaction(connection):
        await run(connection, LEADERS["lock_duty"], {"duty": duty})
        yield await read_clock(connection, now=now)


async def read_clock(connection: Connection, *, now: datetime | None = None) -> datetime:
    """Ask the server for the time; all processes go by this one clock."""
    (row,) = await run(connection, LEADERS["read_clock"], {"now": now})
    moment: datetime = row["now"]
    return moment
