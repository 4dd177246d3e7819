"""Deletes what is past its age, a stretch at a time, and keeps the partitions of the records in order.

Invariant: it remembers how far it came, and goes no further by id than where tasks could be old enough; only once a
day does it walk everything, for ids that somebody chose himself.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from interlock.store.leader import read_clock
from interlock.store.retention import (
    BATCH_SIZE,
    CLOCK_SLACK,
    Retention,
    delete_ended_jobs,
    delete_ended_tasks,
    delete_ended_workers,
    delete_expired,
    first_id_at,
    maintain_record_partitions,
)
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.retention import RetentionBatch

DAY = 86_400.0
ROUND = 600.0  # seconds from the end of one walk to the beginning of the next
PAUSE = 0.05  # seconds between stretches, so that the work of others goes first


class Walk(Protocol):
    """One of the walks of a round: over tasks, then over jobs."""

    async def __call__(
        self,
        connection: Connection,
        retention: Retention,
        /,
        *,
        after: UUID | None,
        before: UUID | None,
        stretch: int,
        now: datetime | None,
    ) -> RetentionBatch:
        """Do the next stretch, and tell how far that came."""


class RetentionDuty:
    """The duty: one stretch of the walk at a time."""

    name = "retention"

    def __init__(
        self, retention: Retention, *, clock: Callable[[], datetime | None] = lambda: None, stretch: int = BATCH_SIZE
    ) -> None:
        self._retention = retention
        self._clock = clock
        self._stretch = stretch
        self._after: UUID | None = None
        self._left: list[Walk] = []  # of this round
        self._whole = False
        # All due at once: a new leader does not know what the one before it did.
        self._next_whole = 0.0
        self._next_partitions = 0.0
        self._told = False

    async def act(self, connection: Connection) -> float:
        """Do the next stretch; give the seconds until the one after it."""
        if time.monotonic() >= self._next_partitions:
            await self._renew_partitions(connection)
            self._next_partitions = time.monotonic() + DAY
        if not self._left:
            await delete_expired(connection, self._retention, now=self._clock())
            await delete_ended_workers(connection, self._retention, now=self._clock())
            self._whole = time.monotonic() >= self._next_whole
            self._left = [delete_ended_tasks, delete_ended_jobs]
        while self._left:
            if await self._walk(connection, self._left[0]) >= self._stretch:
                return PAUSE
            self._after = None
            del self._left[0]
        if self._whole:
            self._next_whole = time.monotonic() + DAY
        return ROUND

    async def _walk(self, connection: Connection, walk: Walk) -> int:
        shortest = self._retention.shortest
        if shortest is None:
            return 0
        before = None
        if not self._whole:
            before = first_id_at(await read_clock(connection, now=self._clock()) - shortest + CLOCK_SLACK)
        stretch = await walk(
            connection,
            self._retention,
            after=self._after,
            before=before,
            stretch=self._stretch,
            now=self._clock(),
        )
        self._after = stretch.last
        return stretch.walked

    async def _renew_partitions(self, connection: Connection) -> None:
        dropped = await maintain_record_partitions(connection, self._retention, now=self._clock())
        if dropped:
            log.info("records_dropped", partitions=dropped)
        elif dropped is None and not self._told:
            self._told = True
            log.warning(
                "record_partitions_not_renewed",
                hint="this role may not, or the tables were busy; `interlock migrate` as their owner does it too",
            )
