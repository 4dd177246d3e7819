"""The retention duty: deletes ended tasks and jobs past their age in batches, and maintains the audit partitions.

Invariant: it resumes where the last batch ended, and by id goes no further than where tasks can be old enough. Once a
day it scans everything, for ids that clients chose themselves.
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
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.retention import RetentionBatch

DAY_S = 86_400.0
ROUND_INTERVAL_S = 600.0  # from the end of one scan to the start of the next
BATCH_PAUSE_S = 0.05  # between batches, so that other work goes first


class DeleteBatch(Protocol):
    """Deletes the next batch of a scan: over tasks, then over jobs."""

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
        """Delete one batch, and return how far the scan came."""


class RetentionDuty:
    """Deletes one batch per run."""

    name = "retention"

    def __init__(self, retention: Retention, *, batch_size: int = BATCH_SIZE) -> None:
        self._retention = retention
        self._batch_size = batch_size
        self._after: UUID | None = None
        self._scans: list[DeleteBatch] = []  # left of this round
        self._scans_all = False
        # All due at once: a new leader does not know what the previous one did.
        self._next_full_scan = 0.0
        self._next_partitions = 0.0
        self._warned = False

    async def run_once(self, connection: Connection, *, now: datetime | None = None) -> float:
        """Delete the next batch; return the seconds until the one after it."""
        if time.monotonic() >= self._next_partitions:
            await self._renew_partitions(connection, now)
            self._next_partitions = time.monotonic() + DAY_S
        if not self._scans:
            await delete_expired(connection, self._retention, now=now)
            await delete_ended_workers(connection, self._retention, now=now)
            self._scans_all = time.monotonic() >= self._next_full_scan
            self._scans = [delete_ended_tasks, delete_ended_jobs]
        while self._scans:
            if await self._delete_batch(connection, self._scans[0], now) >= self._batch_size:
                return BATCH_PAUSE_S
            self._after = None
            del self._scans[0]
        if self._scans_all:
            self._next_full_scan = time.monotonic() + DAY_S
        return ROUND_INTERVAL_S

    async def _delete_batch(self, connection: Connection, delete_batch: DeleteBatch, now: datetime | None) -> int:
        shortest = self._retention.shortest
        if shortest is None:
            return 0
        before = None
        if not self._scans_all:
            before = first_id_at(await read_clock(connection, now=now) - shortest + CLOCK_SLACK)
        scanned = await delete_batch(
            connection,
            self._retention,
            after=self._after,
            before=before,
            stretch=self._batch_size,
            now=now,
        )
        self._after = scanned.last
        return scanned.walked

    async def _renew_partitions(self, connection: Connection, now: datetime | None) -> None:
        dropped = await maintain_record_partitions(connection, self._retention, now=now)
        if dropped:
            log.info("records_dropped", partitions=dropped)
        elif dropped is None and not self._warned:
            self._warned = True
            log.warning(
                "record_partitions_not_renewed",
                hint="this role may not, or the tables were busy; `interlock migrate` as their owner does it too",
            )
