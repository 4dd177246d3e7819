"""Isolation: runs tasks that are suspected of killing their worker alone, one after the other.

A suspected task waits for a worker that runs nothing else. A worker that is busy makes room: it claims nothing until
its tasks have ended, then runs the suspected ones for a while, and goes on.

Invariant: while a suspected task runs, this worker runs no other. At most one busy worker makes room at a time, and for
a bounded time: if its tasks take longer, another one tries. Suspected tasks take at most half of a worker's time.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from interlock.store.leader import acquire_leadership, resign_leadership
from interlock.store.task_admin import exonerate_tasks
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask
    from interlock.worker.attempt import TaskStateMachine
    from interlock.worker.fetcher import Fetcher

DUTY = "isolation"
DRAIN_LIMIT_S = 10.0  # for the running tasks to end
TURN_S = 5.0  # for suspected tasks, before the others have their turn
REST_S = 30.0  # after running tasks did not end in time


class Isolation:
    """One worker's suspected tasks: whether some wait, whether it makes room for them, and whether one runs."""

    def __init__(self, worker_id: str, fetcher: Fetcher, active: Mapping[int, TaskStateMachine]) -> None:
        self._worker_id = worker_id
        self._fetcher = fetcher
        self._active = active
        self._drain_until: float | None = None
        self._turn_until: float | None = None
        self._rest_until = 0.0  # the turn of other tasks
        self._busy_until = 0.0  # no room is made before this time
        self._is_alone = False
        self._survived: dict[UUID, int] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether suspected tasks wait, and it is their turn."""
        return self.seconds_until_turn() <= 0

    def seconds_until_turn(self) -> float:
        """Return the seconds until suspected tasks that wait have their turn; infinity if none wait."""
        if not self._fetcher.has_suspects:
            return math.inf
        begins = max(self._rest_until, self._busy_until) if self._active else self._rest_until
        return max(begins - time.monotonic(), 0.0)

    def seconds_to_wait(self) -> float | None:
        """Return how long no task may be claimed beside the active ones; 0 if that is allowed, None without a limit."""
        if not self._active:
            self._is_alone = False
        if self._is_alone:
            return None
        if self._drain_until is None or not self._active:
            return 0.0
        return max(self._drain_until - time.monotonic(), 0.0)

    async def claim(self, connection: Connection) -> list[ClaimedTask] | None:
        """Claim a suspected task if nothing else runs; an empty list while room is made; None to claim other tasks."""
        if not self.is_wanted:
            if self._drain_until is not None:  # another worker has taken them
                await self._end_turn(connection)
            return None
        if self._active:
            return [] if await self._make_room(connection) else None
        now = time.monotonic()
        self._turn_until = self._turn_until or now + TURN_S
        claimed = await self._fetcher.claim_suspect(connection) if now < self._turn_until else None
        if claimed:
            self._is_alone = True
            return claimed
        if claimed is None:
            self._rest_until = now + TURN_S
        await self._end_turn(connection)
        return None

    async def _make_room(self, connection: Connection) -> bool:
        """Start to wait until the running tasks have ended; False if another worker does, or they take too long."""
        now = time.monotonic()
        if self._drain_until is not None:
            if now < self._drain_until:
                return True
            log.info("isolation_postponed", worker_id=self._worker_id, active=len(self._active))
            self._busy_until = now + REST_S
            await self._end_turn(connection)
            return False
        lease = timedelta(seconds=DRAIN_LIMIT_S + TURN_S)
        if not await acquire_leadership(connection, self._worker_id, duty=DUTY, lease=lease):
            self._busy_until = now + TURN_S
            return False
        log.info("isolation_started", worker_id=self._worker_id, active=len(self._active))
        self._drain_until = now + DRAIN_LIMIT_S
        return True

    async def _end_turn(self, connection: Connection) -> None:
        leads = self._drain_until is not None
        self._drain_until = self._turn_until = None
        if leads:
            await resign_leadership(connection, self._worker_id, duty=DUTY)

    # --- tasks that are not to be suspected

    def survive(self, attempt: TaskStateMachine) -> None:
        """Note that this process lives although an attempt lost its lease: the task has not killed it."""
        self._survived[attempt.key[0]] = attempt.key[1]

    async def exonerate(self, connection: Connection) -> None:
        """Clear the suspicion against noted tasks, as their expired leases are recovered."""
        if self._survived:
            noted, self._survived = self._survived, {}
            try:
                self._survived |= await exonerate_tasks(connection, noted)
            except BaseException:
                self._survived = noted | self._survived
                raise
