"""The retention duty: deletes ended tasks and jobs past their age in batches, and maintains the audit partitions.

Ids are in the order of time, so that the rows that come of age are those after the ones that came of age before: walks
by id follow the clock, each from where it ended last. A row comes of age when its task has ended long enough ago, which
is after its id has: for each age there are walks at several distances behind the clock, and a row that one of them
meets too early is left to the next. Rows that ended later still are found by sweeps from the first id on, and once a
day by one of all ids, since clients may choose ids.

Invariant: between two batches it rests for as long as the batch took, so that it uses at most half of one connection.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from interlock.store.leader import read_clock
from interlock.store.retention import (
    BATCH_SIZE,
    Retention,
    delete_ended_jobs,
    delete_ended_tasks,
    delete_ended_workers,
    delete_expired,
    first_id_at,
    maintain_record_partitions,
)
from interlock.telemetry import log, retention_deleted_total, retention_overdue_seconds

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.retention import RetentionBatch

DAY_S = 86_400.0
FOREVER_S = float("inf")
# Of walks behind the clock: the tasks that they delete ended within this time after they were made.
DISTANCES = (timedelta(seconds=10), timedelta(minutes=10), timedelta(hours=1), timedelta(hours=6))
FOLLOW_INTERVAL_S = 30.0  # from one such walk to the next, at least
SWEEP_INTERVAL_S = 600.0  # from the end of one sweep to the start of the next, at least
SWEEP_REST_FACTOR = 9  # and so many times the time that it took
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BEHIND_S = 3_600.0  # rows that are past their age for longer than this are a backlog
BEHIND_LOG_INTERVAL_S = 3_600.0


class DeleteBatch(Protocol):
    """Deletes the next batch of a walk: over tasks, or over jobs."""

    __name__: str

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
        """Delete one batch, and return how far the walk came."""


TABLES: dict[str, DeleteBatch] = {"tasks": delete_ended_tasks, "jobs": delete_ended_jobs}


@dataclass(slots=True)
class Walk:
    """A walk by id over one table: a sweep, or one that follows the clock."""

    table: str
    after: UUID | None
    before: UUID | None  # None: to the last id
    follows: Follower | None = None


class Follower(NamedTuple):
    """The walks after the clock over one table, for rows of an age, at a distance."""

    table: str
    age: timedelta
    distance: timedelta

    @property
    def interval_s(self) -> float:
        """Seconds from one of these walks to the next."""
        return max(FOLLOW_INTERVAL_S, self.distance.total_seconds() / 10)


class Backlog:
    """How far retention is behind, for the metric, the heartbeat and the log of this process."""

    def __init__(self) -> None:
        self.overdue_s = 0.0
        self._next_log = 0.0

    def note(self, batch: RetentionBatch, distance: timedelta, batch_size: int, took_s: float) -> None:
        """Note a batch of a walk. Single rows that are long overdue ended late, or have ids that a client chose."""
        overdue_s = 0.0 if batch.overdue is None else max((batch.overdue - distance).total_seconds(), 0.0)
        if batch.deleted < batch_size / 2 and overdue_s >= BEHIND_S:
            return
        self._set(overdue_s)
        if overdue_s >= BEHIND_S and time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + BEHIND_LOG_INTERVAL_S
            log.warning(
                "retention_behind",
                overdue_s=round(overdue_s),
                rows_per_second=round(batch.deleted / max(took_s * 2, 1e-6)),
                hint="rows are deleted later than the retention ages say; the rate is that of the latest batch",
            )

    def clear(self) -> None:
        """Nothing that is past its age is left, or another process deletes it."""
        self._set(0.0)

    def _set(self, overdue_s: float) -> None:
        self.overdue_s = overdue_s
        retention_overdue_seconds.set(overdue_s)

    def document(self) -> dict[str, Any]:
        """Return the statistics for the heartbeat: empty unless retention is behind."""
        return {"retention_overdue_s": round(self.overdue_s)} if self.overdue_s >= BEHIND_S else {}


backlog = Backlog()  # one process leads


class RetentionDuty:
    """Deletes one batch per run."""

    name = "retention"

    def __init__(self, retention: Retention, *, batch_size: int = BATCH_SIZE) -> None:
        self._retention = retention
        self._batch_size = batch_size
        self.walks: list[Walk] = []  # the first one is under way
        self.followers = {
            Follower(table, age, distance): 0.0  # time of its next walk
            for distance in DISTANCES
            for age in retention.ages
            for table in TABLES
        }
        self.followed: dict[Follower, UUID] = {}  # where the latest walk ended
        # All due at once: a new leader does not know what the previous one did.
        self.next_sweep = 0.0 if self.followers else FOREVER_S
        self._next_full_sweep = self._next_expired = self._next_partitions = 0.0
        self._sweep_began = 0.0
        self._warned = False

    async def run_once(self, connection: Connection, *, now: datetime | None = None) -> float:
        """Delete the next batch; return the seconds until the one after it."""
        began = time.monotonic()
        if began >= self._next_partitions:
            await self._renew_partitions(connection, now)
        if began >= self._next_expired:
            expired = await delete_expired(connection, self._retention, batch=self._batch_size, now=now)
            workers = await delete_ended_workers(connection, self._retention, now=now)
            if expired.more or workers >= BATCH_SIZE:
                return time.monotonic() - began
            self._next_expired = time.monotonic() + SWEEP_INTERVAL_S
        await self._plan(connection, now)
        while self.walks:
            if await self._walk(connection, self.walks[0], now) >= self._batch_size:
                return time.monotonic() - began
            self._end_walk(self.walks.pop(0))
        backlog.clear()
        due = min(self.next_sweep, self._next_expired, *self.followers.values())
        return max(due - time.monotonic(), 0.0)

    async def _plan(self, connection: Connection, now: datetime | None) -> None:
        """Add the walks that are due: those after the clock go first.

        The first one of each only remembers its end: the first sweep, which is due then too, goes over all rows.
        """
        moment = time.monotonic()
        clock = await read_clock(connection, now=now)
        followers = [follower for follower, due in self.followers.items() if moment >= due]
        ends = {follower: _first_id_of_age(clock, follower.age + follower.distance) for follower in followers}
        self.walks[:0] = [
            Walk(follower.table, self.followed.get(follower, end), end, follower) for follower, end in ends.items()
        ]
        self.followers.update((follower, FOREVER_S) for follower in followers)  # until the walk has ended
        if moment >= self.next_sweep:
            is_full = moment >= self._next_full_sweep
            before = None if is_full else _first_id_of_age(clock, self._retention.ages[0])
            self.walks += [Walk(table, None, before) for table in TABLES]
            self._sweep_began, self.next_sweep = moment, FOREVER_S
            if is_full:
                self._next_full_sweep = moment + DAY_S

    async def _walk(self, connection: Connection, walk: Walk, now: datetime | None) -> int:
        began = time.monotonic()
        batch = await TABLES[walk.table](
            connection,
            self._retention,
            after=walk.after,
            before=walk.before,
            stretch=self._batch_size,
            now=now,
        )
        walk.after = batch.last
        retention_deleted_total.labels(walk.table).inc(batch.deleted)
        distance = timedelta(0) if walk.follows is None else walk.follows.distance
        backlog.note(batch, distance, self._batch_size, time.monotonic() - began)
        return batch.walked

    def _end_walk(self, walk: Walk) -> None:
        ended = time.monotonic()
        if walk.follows is not None:
            assert walk.before is not None  # noqa: S101 - the clock's
            self.followed[walk.follows] = walk.before
            self.followers[walk.follows] = ended + walk.follows.interval_s
        elif not self.walks:
            self.next_sweep = ended + max(SWEEP_INTERVAL_S, SWEEP_REST_FACTOR * (ended - self._sweep_began))

    async def _renew_partitions(self, connection: Connection, now: datetime | None) -> None:
        dropped = await maintain_record_partitions(connection, self._retention, now=now)
        # Not renewed because the tables were busy: tried again soon.
        self._next_partitions = time.monotonic() + (SWEEP_INTERVAL_S if dropped is None else DAY_S)
        if dropped:
            log.info("records_dropped", partitions=dropped)
        elif dropped is None and not self._warned:
            self._warned = True
            log.warning(
                "record_partitions_not_renewed",
                hint="this role may not, or the tables were busy; `interlock migrate` as their owner does it too",
            )


def _first_id_of_age(clock: datetime, age: timedelta) -> UUID:
    """Return the lowest id that is not older; an age may reach back before the first one."""
    return first_id_at(clock - min(age, clock - EPOCH))
