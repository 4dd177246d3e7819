"""What a worker takes from the queue and puts back: claims in fair shares, recovery, and how long to rest.

Invariant: whether a task may run was decided before it became pending; claiming decides only who runs it.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from interlock.errors import DisconnectedError, StatementError
from interlock.lifecycle import TaskRowEvent
from interlock.store.limits import paused_namespaces
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.tasks import Outcome, claim_pending_tasks, notify_tasks, settle_running_tasks, until_next_run
from interlock.telemetry import claim_batch_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask
    from interlock.worker.settings import WorkerSettings


class Claims:
    """One worker's dealings with the queue."""

    def __init__(
        self, worker_id: str, settings: WorkerSettings, types: Iterable[str], callback_url: str | None = None
    ) -> None:
        self._worker_id = worker_id
        self._callback_url = callback_url
        self._settings = settings
        self._types = sorted(types)
        self._paused: set[str] = set()
        self._reread_paused = True
        self._rotation = 0
        self._recovered_at = -1e9
        self.is_exhausted = False  # the latest claim found all that was due

    def reread_paused_namespaces(self) -> None:
        """Have the next look find out which namespaces are paused."""
        self._reread_paused = True

    async def claim(self, connection: Connection, free: int) -> list[ClaimedTask]:
        """Claim up to so many tasks of the namespaces that are not paused."""
        namespaces = [name for name in self._settings.namespaces if name not in self._paused]
        if not namespaces:
            return []
        # A share that is smaller than the number of namespaces begins with another one every time.
        self._rotation = (self._rotation + 1) % len(namespaces)
        claimed = await claim_pending_tasks(
            connection,
            actor=self._worker_id,
            types=self._types,
            namespaces=namespaces[self._rotation :] + namespaces[: self._rotation],
            limit=free,
            lease=self._settings.lease_time,
            callback_url=self._callback_url,
        )
        claim_batch_size.observe(len(claimed))
        share = -(-free // len(namespaces))
        found = Counter(task.namespace for task in claimed) if len(claimed) >= share else {}
        self.is_exhausted = all(count < share for count in found.values())
        return claimed

    async def give_back(self, connection: Connection | None, claimed: Sequence[ClaimedTask]) -> None:
        """Return tasks that will not be run here after all; they have used up no try."""
        reason = f"returned by {self._worker_id}, which shuts down"
        outcomes = [Outcome(task.id, task.attempt, TaskRowEvent.RETURN, reason=reason) for task in claimed]
        if outcomes and connection is not None:
            # if it cannot be written, the lease runs out and recovery does the same
            with suppress(DisconnectedError, StatementError):
                await settle_running_tasks(connection, outcomes, actor=self._worker_id)
                await notify_tasks(connection, {task.namespace for task in claimed})

    async def recover(self, connection: Connection) -> bool:
        """Take back what dead workers held; False when that was looked after a moment ago."""
        due = time.monotonic() - self._recovered_at >= self._settings.recovery_interval
        if due:
            while await recover_expired_tasks(connection, actor=self._worker_id):
                pass
            self._recovered_at = time.monotonic()
        if due or self._reread_paused:
            self._reread_paused = False
            self._paused = await paused_namespaces(connection)
        return due

    async def until_next(self, connection: Connection | None, longest: float) -> float:
        """Seconds until the next pending task is due, at most `longest`."""
        if connection is None:
            return longest
        try:
            remaining = await until_next_run(connection, types=self._types, namespaces=self._settings.namespaces)
        except DisconnectedError:
            return 0.0  # the next claim finds out what is wrong
        except StatementError:
            return longest  # and not at once again and again
        if remaining is None:
            return longest
        return min(longest, max(remaining.total_seconds(), 0.001))


def backoff(settings: WorkerSettings, empty_looks: int) -> float:
    """Seconds to rest after so many empty looks: twice as long each time, up to a cap, and never in step."""
    grown: float = settings.poll_base * 2 ** min(empty_looks, 20)
    return min(grown, settings.poll_cap) * random.uniform(0.8, 1.2)  # noqa: S311 - jitter
