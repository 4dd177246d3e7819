"""The figures duty: counts recorded moves by minute and samples the queue, for charts over time.

Invariant: it spends at most half a percent of its time on the current minute: the more a count costs, the later comes
the next one. A minute is counted again when it is over, and two and ten minutes later, for transactions that committed
late.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from interlock.store.figures import (
    MINUTE,
    add_refused_figures,
    count_minute,
    delete_old_figures,
    floor_time,
    read_last_counted_minute,
    roll_up,
    sample_depths,
    summarize_records,
)
from interlock.store.leader import read_clock

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

INTERVAL_S = 10.0
COST_FACTOR = 200  # rest so many times longer than a count of the current minute took
SETTLED_S = 5.0  # after the end of a minute, its first count
RECOUNTS = (timedelta(minutes=1), timedelta(minutes=3), timedelta(minutes=11))  # before the current minute
CLEANUP_INTERVAL_S = 600.0


class FiguresDuty:
    """Keeps the history of moves and depths."""

    name = "figures"

    def __init__(self) -> None:
        self._minute: datetime | None = None  # whose predecessors are counted
        self._next_current = 0.0
        self._next_cleanup = 0.0

    async def run_once(self, connection: Connection, *, now: datetime | None = None) -> float:
        """Count what is due; return the seconds until the next run."""
        await summarize_records(connection)  # first: counts read ranges that are not summarized whole
        clock = await read_clock(connection, now=now)
        minute = floor_time(clock, MINUTE)
        if self._minute is None:
            await self._catch_up(connection, minute, now)
        if minute != self._minute and (clock - minute).total_seconds() >= SETTLED_S:
            for age in RECOUNTS:
                await count_minute(connection, minute - age)
            await sample_depths(connection, minute, now=now)  # one of each minute, however seldom the others are
            for age in (RECOUNTS[0], RECOUNTS[-1]):
                await roll_up(connection, minute - age)
            self._minute = minute
        if time.monotonic() >= self._next_current:
            started = time.monotonic()
            await count_minute(connection, minute)
            await sample_depths(connection, minute, now=now)
            await add_refused_figures(connection, minute)
            self._next_current = started + max(INTERVAL_S, COST_FACTOR * (time.monotonic() - started))
        if time.monotonic() >= self._next_cleanup:
            await delete_old_figures(connection, now=now)
            self._next_cleanup = time.monotonic() + CLEANUP_INTERVAL_S
        return INTERVAL_S

    async def _catch_up(self, connection: Connection, minute: datetime, now: datetime | None) -> None:
        """Count the minutes without a leader, at most an hour of them."""
        last = await read_last_counted_minute(connection, now=now)
        at = max(last or minute - timedelta(minutes=60), minute - timedelta(minutes=60))
        while at < minute:
            await count_minute(connection, at)
            at += MINUTE
            if at == floor_time(at, 10 * MINUTE) or at == minute:
                await roll_up(connection, at - MINUTE)
