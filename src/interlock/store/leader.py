"""Leader election for maintenance duties (schedules, limits, retention, webhooks), by a lease in table `leaders`.

Invariant: at most one holder has an unexpired lease. A holder may not notice that its lease has expired, so every
transaction of a duty also takes the duty's lock.
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
    """The current leader and the time at which its lease expires."""

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
    """Acquire or renew the lease; False while another process holds it."""
    parameters = {"duty": duty, "holder": holder, "lease": lease, "now": now}
    return bool(await run(connection, LEADERS["acquire_leadership"], parameters))


async def resign_leadership(connection: Connection, holder: str, *, duty: str = MAINTENANCE) -> bool:
    """Release the lease and notify the candidates; False when it was no longer held."""
    resigned = bool(await run(connection, LEADERS["resign_leadership"], {"duty": duty, "holder": holder}))
    if resigned:
        await run(connection, TASKS["notify_duties"], {"duties": ["leader"]})
    return resigned


async def read_leader(connection: Connection, *, duty: str = MAINTENANCE, now: datetime | None = None) -> Leader | None:
    """Return the current leader; None when the lease is free or expired."""
    rows = await run(connection, LEADERS["read_leader"], {"duty": duty, "now": now})
    return Leader(**rows[0]) if rows else None


@asynccontextmanager
async def duty_transaction(
    connection: Connection, duty: str, *, now: datetime | None = None
) -> AsyncIterator[datetime]:
    """Open a transaction that holds the lock of a duty; yield the server's time once the lock is held."""
    async with transaction(connection):
        await run(connection, LEADERS["lock_duty"], {"duty": duty})
        yield await read_clock(connection, now=now)


async def read_clock(connection: Connection, *, now: datetime | None = None) -> datetime:
    """Read the server's time, the one clock that all processes use."""
    (row,) = await run(connection, LEADERS["read_clock"], {"now": now})
    moment: datetime = row["now"]
    return moment


async def seconds_until(
    connection: Connection, due: datetime | None, *, limit: float, now: datetime | None = None
) -> float:
    """Return the seconds until a time by the server's clock, from 0 to `limit`; `limit` if there is none."""
    if due is None:
        return limit
    return min(max((due - await read_clock(connection, now=now)).total_seconds(), 0.0), limit)
