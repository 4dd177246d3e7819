"""The protocol of maintenance duties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from interlock.store.leader import read_clock

if TYPE_CHECKING:
    from datetime import datetime

    from interlock.postgres.connection import Connection


class Duty(Protocol):
    """Maintenance that only the leader does, a bounded amount per run."""

    @property
    def name(self) -> str:
        """The name that hints use."""

    async def run_once(self, connection: Connection, /) -> float:
        """Run once; return the seconds until the next run, unless a hint comes before."""


async def seconds_until(
    connection: Connection, due: datetime | None, *, limit: float, now: datetime | None = None
) -> float:
    """Return the seconds until a time by the server's clock, from 0 to `limit`; `limit` if there is none."""
    if due is None:
        return limit
    return min(max((due - await read_clock(connection, now=now)).total_seconds(), 0.0), limit)
