"""The Fetcher: claims tasks in fair shares of the namespaces, recovers expired leases, and finds the next due time.

Invariant: whether a task may run was decided before it became pending; claiming decides only who runs it. The one
exception are limits per period: a task with a limit takes its tokens in the statement that claims it. These claims have
a rhythm of their own, so that a worker without such tasks asks for them only now and then.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from interlock.errors import DisconnectedError, StatementError
from interlock.postgres.connection import is_fault_of_session
from interlock.store.limits import read_paused_namespaces
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.tasks import (
    claim_limited_tasks,
    claim_pending_tasks,
    has_suspected_tasks,
    until_limited_start,
    until_next_run,
)
from interlock.telemetry import claim_batch_size, log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask
    from interlock.worker.settings import WorkerSettings

MIN_REST_S = 0.001
# While an old snapshot is held open, nothing removes the index entries of claimed tasks, and each claim walks them.
SLOW_LOOK_S, SLOW_LOOK_PER_TASK_S = 0.005, 0.0005  # a claim is slow that takes longer
SLOW_LOOKS = 3  # after so many slow claims in a row, only some claims look at tasks of any age
LOOK_SHARE = 20  # those that do take at most one part in so many of the time
MAX_LOOK_INTERVAL_S = 5.0  # the longest time between two of them
RECENT_MARGIN_S = (
    1.0  # a transaction that enqueues commits within this time after its start; others wait for a full look
)
FULL_RECOVERY_INTERVAL_S = 60.0  # after slow recoveries, until one looks at leases of any age again
MIN_LIMITED_REST_S = 0.01  # another worker is taking the tokens at the moment
MAX_LIMITED_DELAY_S = 5.0  # for a look at tasks with a limit without a notification, while there are always others


class Fetcher:
    """One worker's reads and claims of the queue."""

    def __init__(
        self, worker_id: str, settings: WorkerSettings, types: Iterable[str], callback_url: str | None = None
    ) -> None:
        self._worker_id = worker_id
        self._callback_url = callback_url
        self._settings = settings
        self._namespaces = settings.namespaces
        self._types = sorted(types)
        self._paused: set[str] = set()
        self._reread_paused = True
        self._rotation = 0
        self._recovered_at = -math.inf
        self._server_clock_lead_s = 0.0  # of the server's clock before this host's
        # by time.monotonic(): when a claim also asks for tasks with a limit, and when to wake up for one
        self._limited_at = -math.inf
        self._limited_due_at = math.inf
        self._limited_first = False
        # by time.monotonic(): when the last claim was sent that left no due task behind, and when one of any age is due
        self._emptied_at = -math.inf
        self._full_look_at = -math.inf
        self._slow_looks = 0
        # the same for recoveries
        self._recovery_sent_at = -math.inf
        self._full_recovery_at = -math.inf
        self._slow_recoveries = 0
        self.is_exhausted = False  # the last claim took every due task
        self.has_suspects = False  # tasks that must run alone were waiting at the last recovery

    def serve(self, namespaces: tuple[str, ...]) -> None:
        """Claim from these namespaces from now on, and forget everything read before."""
        self._namespaces = namespaces
        self._paused = set()
        self._reread_paused = True
        self._recovered_at = -math.inf
        self.expect_limited_tasks()
        self.expect_older_tasks()
        self.is_exhausted = False

    def expect_older_tasks(self) -> None:
        """Look at tasks of any age at the next claim: some may have become pending long after they were due."""
        self._full_look_at = -math.inf

    def expect_limited_tasks(self) -> None:
        """Look for tasks with a limit at the next claim: some may have been admitted."""
        self._limited_at = -math.inf
        self._limited_due_at = math.inf

    def reread_paused_namespaces(self) -> None:
        """Read again before the next claim which namespaces are paused."""
        self._reread_paused = True

    async def claim(self, connection: Connection, free: int, ahead: int = 0) -> list[ClaimedTask]:
        """Claim up to `free` tasks from the namespaces that are not paused, and `ahead` more that have no limit."""
        namespaces = self._unpaused()
        if not namespaces:
            return []
        # With fewer free slots than namespaces, each claim starts with another namespace.
        self._rotation = (self._rotation + 1) % len(namespaces)
        turn = namespaces[self._rotation :] + namespaces[: self._rotation]
        wanted = free + ahead
        if free and self.expects_limited_tasks():
            wanted = free
            limited, claimed = await self._claim_both(connection, turn, free)
        else:
            limited, claimed = [], await self._claim_unlimited(connection, turn, wanted)
            if free and not claimed and time.monotonic() >= self._limited_at:
                limited = await self._claim_limited(connection, turn, free)
        left = wanted - len(limited)
        claim_batch_size.observe(len(limited) + len(claimed))
        share = -(-left // len(namespaces))
        found = Counter(task.namespace for task in claimed) if len(claimed) >= share else {}
        self.is_exhausted = bool(left) and all(count < share for count in found.values()) and not limited
        return limited + claimed

    def expects_limited_tasks(self) -> bool:
        """Tell whether tasks with a limit may be there; if not, only an idle worker looks, which delays no others."""
        return time.monotonic() >= min(self._limited_due_at, self._limited_at + MAX_LIMITED_DELAY_S)

    async def _claim_both(
        self, connection: Connection, namespaces: list[str], free: int
    ) -> tuple[list[ClaimedTask], list[ClaimedTask]]:
        """Claim tasks with and without a limit.

        Those with a limit get half of the slots first, or a single slot in every other claim: neither kind keeps the
        other waiting.
        """
        self._limited_first = not self._limited_first
        first = free - free // 2 if free > 1 else int(self._limited_first)
        limited = await self._claim_limited(connection, namespaces, first) if first else []
        claimed = await self._claim_unlimited(connection, namespaces, free - len(limited))
        if not first and not claimed:
            limited = await self._claim_limited(connection, namespaces, free)
        return limited, claimed

    async def _claim_unlimited(self, connection: Connection, namespaces: list[str], most: int) -> list[ClaimedTask]:
        if not most:
            return []
        began = time.monotonic()
        is_full = self._slow_looks < SLOW_LOOKS or began >= self._full_look_at
        recent_s = None if is_full else began - self._emptied_at + RECENT_MARGIN_S
        claimed = await claim_pending_tasks(
            connection, namespaces=namespaces, limit=most, recent_s=recent_s, **self._claim_arguments
        )
        found = Counter(task.namespace for task in claimed)
        self._note_look(
            began,
            tasks=len(claimed),
            is_full=is_full,
            has_emptied=max(found.values(), default=0) < -(-most // len(namespaces)) and len(claimed) < most,
        )
        return claimed

    def _note_look(self, began: float, *, tasks: int, is_full: bool, has_emptied: bool) -> None:
        """Decide whether the next claims look at recent tasks only: these were due since a claim that left none behind.

        A task that becomes pending with an earlier time, as by a transaction that took long, waits for a full look.
        """
        now = time.monotonic()
        if has_emptied:
            self._emptied_at = began
        if not is_full:
            return
        is_slow = has_emptied and now - began > SLOW_LOOK_S + SLOW_LOOK_PER_TASK_S * tasks
        self._slow_looks = self._slow_looks + 1 if is_slow else 0
        self._full_look_at = now + min((now - began) * LOOK_SHARE, MAX_LOOK_INTERVAL_S)

    @property
    def _claim_arguments(self) -> dict[str, Any]:
        return {
            "actor": self._worker_id,
            "types": self._types,
            "lease": self._settings.lease_time,
            "callback_url": self._callback_url,
        }

    async def _claim_limited(self, connection: Connection, namespaces: list[str], most: int) -> list[ClaimedTask]:
        """Claim tasks with a limit. If tokens are missing, the next such claim comes when they are there."""
        claimed = await self._try_claim_limited(connection, namespaces=namespaces, limit=most)
        if claimed is None:
            self._limited_at, self._limited_due_at = time.monotonic() + self._settings.poll_cap, math.inf
            return []
        if len(claimed) == most:
            self.expect_limited_tasks()
        else:
            remaining = await until_limited_start(connection, types=self._types, namespaces=namespaces)
            rest_s = math.inf if remaining is None else max(remaining.total_seconds(), MIN_LIMITED_REST_S)
            now = time.monotonic()
            self._limited_due_at = now + rest_s
            # A look without a notification finds tasks whose notification was lost.
            self._limited_at = now + min(rest_s, self._settings.poll_cap)
        return claimed

    async def _try_claim_limited(self, connection: Connection, **wanted: Any) -> list[ClaimedTask] | None:
        """Claim tasks with a limit; None if that is refused, which must not prevent the claim of other tasks.

        A refusal against which a new connection may help is raised.
        """
        try:
            return await claim_limited_tasks(connection, **wanted, **self._claim_arguments)
        except StatementError as error:
            if is_fault_of_session(error):
                raise
            log.warning("limited_claim_refused", worker_id=self._worker_id, error=str(error))
            return None

    def _unpaused(self) -> list[str]:
        return [name for name in self._namespaces if name not in self._paused]

    async def claim_suspect(self, connection: Connection) -> list[ClaimedTask]:
        """Claim one task that is suspected of killing its worker; the caller must run nothing else."""
        wanted: Any = {"namespaces": self._unpaused(), "limit": 1, "suspected": True}
        claimed = await claim_pending_tasks(connection, **wanted, **self._claim_arguments)
        claimed = claimed or await self._try_claim_limited(connection, **wanted) or []
        self.has_suspects, self.is_exhausted = bool(claimed), False
        return claimed

    async def recover(self, connection: Connection) -> bool:
        """Recover tasks with expired leases, at most once per recovery interval; False if it is not due.

        It also finds out whether tasks wait that must run alone.
        """
        is_due = time.monotonic() - self._recovered_at >= self._settings.recovery_interval
        if is_due:
            await self._recover_expired(connection)
            self._recovered_at = time.monotonic()
        if is_due or self._reread_paused:
            self._reread_paused = False
            self._paused = await read_paused_namespaces(connection)
        if is_due:
            self.has_suspects = await has_suspected_tasks(connection, types=self._types, namespaces=self._unpaused())
        return is_due

    async def _recover_expired(self, connection: Connection) -> None:
        """Recover all tasks with expired leases; after slow recoveries, those that expired since the last one."""
        began = time.monotonic()
        is_full = self._slow_recoveries < SLOW_LOOKS or began >= self._full_recovery_at
        recent_s = None if is_full else began - self._recovery_sent_at + RECENT_MARGIN_S
        recovered = 0
        while found := await recover_expired_tasks(connection, actor=self._worker_id, recent_s=recent_s):
            recovered += len(found)
            self.expect_older_tasks()
        self._recovery_sent_at = began
        if is_full:
            now = time.monotonic()
            is_slow = now - began > SLOW_LOOK_S + SLOW_LOOK_PER_TASK_S * recovered
            self._slow_recoveries = self._slow_recoveries + 1 if is_slow else 0
            self._full_recovery_at = now + FULL_RECOVERY_INTERVAL_S

    async def seconds_until_due(self, connection: Connection | None, limit: float) -> float:
        """Return the seconds until the next pending task is due, at most `limit`."""
        if connection is None:
            return limit
        try:
            remaining, server_time = await until_next_run(connection, types=self._types, namespaces=self._namespaces)
        except DisconnectedError:
            return 0.0  # the next claim reports the error
        except StatementError:
            return limit  # no immediate repetition
        self._server_clock_lead_s = server_time.timestamp() - time.time()
        rest_s = limit if remaining is None else min(limit, max(remaining.total_seconds(), MIN_REST_S))
        due_at = min(self._limited_due_at, self._full_look_at if self._slow_looks >= SLOW_LOOKS else math.inf)
        if not self._unpaused():
            due_at = math.inf  # nothing is looked at
        return min(rest_s, max(due_at - time.monotonic(), MIN_REST_S))

    def seconds_until(self, due: float) -> float:
        """Return the seconds until a time (since the epoch) of the server's clock, as far as that is known."""
        return max(due - time.time() - self._server_clock_lead_s, 0.0) + MIN_REST_S


def poll_interval(settings: WorkerSettings, empty_polls: int) -> float:
    """Return the seconds to wait after so many empty polls: exponential up to `poll_cap`, up to 20 % less by jitter."""
    interval: float = settings.poll_base * 2 ** min(empty_polls, 20)
    return min(interval, settings.poll_cap) * random.uniform(0.8, 1.0)  # noqa: S311 - jitter
