"""The LeaseKeeper: renews the leases of attempts from a thread and a connection of its own, until they are settled.

Invariant: a handler that blocks the worker's event loop cannot starve the renewals. An attempt whose lease could not be
renewed in time is interrupted before another worker may start the task, whatever happened to the renewal.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from interlock.errors import DisconnectedError, StatementError
from interlock.lifecycle import TaskState
from interlock.model.backoff import Backoff
from interlock.postgres.connection import connect
from interlock.postgres.retry import RetryState, raise_if_canceled
from interlock.service import BackgroundService, cancel_and_wait, wait_for_event
from interlock.store.tasks import HeldAttempt, renew_running_tasks, save_checkpoint
from interlock.telemetry import log
from interlock.worker.attempt import TAKEN_OVER
from interlock.worker.cancellation import CANCEL_TIMEOUT_S, run_within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Sequence
    from concurrent.futures import Future
    from uuid import UUID

    from interlock.client.context import TaskContext
    from interlock.postgres.connection import Connection
    from interlock.store.tasks import LostAttempt, RenewedLease
    from interlock.worker.attempt import TaskStateMachine
    from interlock.worker.loop_thread import LoopThread
    from interlock.worker.settings import WorkerSettings

T = TypeVar("T")

PROGRESS_INTERVAL_S = 1.0
RETRY_BASE_S, RETRY_CAP_S = 0.1, 0.5
KEEP_CONNECTION_S = 15.0  # longer than the pause between the renewals of a lease of the default length
# An attempt in REPORTING has a known outcome, which the database may refuse for longer than a lease.
# One in CLAIMING waits for a slot.
UNDECIDED_STATES = frozenset({TaskState.CLAIMING, TaskState.PROCESSING})
HELD_STATES = UNDECIDED_STATES | {TaskState.REPORTING}
GIVEN_UP = -math.inf  # the `lease_until` of an attempt that was interrupted because its lease is lost


class AttemptStopper(Protocol):
    """Stops handlers in the worker's loop: the worker's Runner."""

    def cancel(self, attempt: TaskStateMachine, reason: str | None, /) -> None:
        """Ask a handler to stop, and stop it after the cancel grace."""

    def lose(self, attempt: TaskStateMachine, reason: str, /, *, has_stalled: bool) -> None:
        """Stop a handler whose lease is lost; `has_stalled` if this process stood still during the lease."""


class LeaseKeeper(BackgroundService):
    """Renews leases, writes progress and checkpoints, and receives cancellation requests with the renewals.

    It runs in the loop of a LoopThread; interruptions and cancellations are called in the worker's loop.
    """

    def __init__(
        self,
        url: str,
        settings: WorkerSettings,
        active: dict[int, TaskStateMachine],
        *,
        thread: LoopThread,
        runner: AttemptStopper,
    ) -> None:
        super().__init__("leases")
        self._url = url
        self._settings = settings
        self._active = active
        self._thread = thread
        self._runner = runner
        self._ticked_at = time.monotonic()
        self._stalled_at = -math.inf
        self._renew_requested = asyncio.Event()
        self._renew_all = False
        self._progressed: set[UUID] = set()
        self._stack = AsyncExitStack()
        self._connection: Connection | None = None
        self._used_at = -math.inf
        self._in_use = asyncio.Lock()

    async def run(self) -> None:
        """Renew leases and watch for expired ones.

        Both at the same time: a renewal that hangs must not hide that the leases expire.
        """
        loops = [asyncio.create_task(self._keep_renewing()), asyncio.create_task(self._keep_expiring())]
        try:
            await asyncio.gather(*loops)
        finally:
            await cancel_and_wait(loops, timeout_s=CANCEL_TIMEOUT_S)

    async def stop(self) -> None:
        """Stop renewing and close the connection."""
        await super().stop()
        await self._disconnect()

    def renew_now(self) -> None:
        """Renew all leases at once: the reply carries cancellation requests. Safe from any thread."""
        self._renew_all = True
        self._thread.call(self._renew_requested.set)

    # --- the WorkerChannel of task contexts: called by handlers, in any thread

    def progressed(self, context: TaskContext) -> None:
        """Write the progress of an attempt with the next renewal."""
        if context.task_id is not None:
            self._progressed.add(context.task_id)

    def save_checkpoint(self, context: TaskContext, value: Any) -> Future[bool]:
        """Store a checkpoint, fenced by the attempt number."""
        return asyncio.run_coroutine_threadsafe(self._save_checkpoint(context, value), self._thread.loop)

    async def _save_checkpoint(self, context: TaskContext, value: Any) -> bool:
        if context.task_id is None:
            return False
        task_id = context.task_id
        return await self._query(lambda connection: save_checkpoint(connection, task_id, context.attempt, value))

    # --- renewal

    async def _keep_renewing(self) -> None:
        interval = min(self._settings.lease / 3, PROGRESS_INTERVAL_S)
        cap_s = min(RETRY_CAP_S, self._settings.lease / 6)  # several tries fit into the rest of a lease
        retries = RetryState(Backoff.exponential(RETRY_BASE_S, cap=cap_s, jitter=0.5))
        pause = interval
        while True:
            await wait_for_event(self._renew_requested, pause)
            self._renew_requested.clear()
            try:
                await self._renew(self._due())
                await self._disconnect_at_rest()
                retries.reset()
                pause = interval
            except Exception as error:  # noqa: BLE001 - the safety net of all attempts must not end
                raise_if_canceled()
                log.warning("lease_renewal_failed", error=str(error) or type(error).__name__)
                pause = retries.next_delay_s()

    def _due(self) -> list[TaskStateMachine]:
        """Return the attempts that have used a third of their lease, or have progress to write."""
        renew_all, self._renew_all = self._renew_all, False
        progressed, self._progressed = self._progressed, set()
        limit = time.monotonic() + self._settings.lease * 2 / 3
        return [
            attempt
            for attempt in self._holding(HELD_STATES)
            if renew_all or attempt.lease_until <= limit or attempt.key[0] in progressed
        ]

    def _holding(self, states: Container[TaskState]) -> list[TaskStateMachine]:
        """Return the attempts in these states that have not been given up."""
        return [
            attempt
            for attempt in list(self._active.values())
            if attempt.state in states and attempt.lease_until != GIVEN_UP
        ]

    async def _renew(self, attempts: Sequence[TaskStateMachine]) -> None:
        if not attempts:
            return
        by_id = {attempt.key[0]: attempt for attempt in attempts}
        held = [HeldAttempt(*attempt.key, attempt.latest_progress) for attempt in attempts]
        until = time.monotonic() + self._settings.lease
        renewed, lost = await self._query(lambda connection: self._renew_or_drop_progress(connection, held))
        for row in renewed:
            attempt = by_id[row.id]
            if attempt.lease_until == GIVEN_UP:
                continue  # too late: its handler is being stopped
            attempt.lease_until = until
            if attempt.has_context:
                attempt.context.lease_timeout = datetime.now(UTC) + timedelta(seconds=until - time.monotonic())
            if row.cancel_requested_at is not None and attempt.state in UNDECIDED_STATES:
                self._thread.call_home(self._runner.cancel, attempt, row.reason)
        for missing in lost:
            self._lose(by_id[missing.id], TAKEN_OVER)

    async def _renew_or_drop_progress(
        self, connection: Connection, held: list[HeldAttempt]
    ) -> tuple[list[RenewedLease], list[LostAttempt]]:
        """Renew leases; without progress if the database refuses that, because the lease matters more."""
        lease = self._settings.lease_time
        try:
            return await renew_running_tasks(connection, held, lease=lease)
        except StatementError as error:
            log.warning("progress_refused", error=str(error))
            bare = [attempt._replace(progress=None) for attempt in held]
            return await renew_running_tasks(connection, bare, lease=lease)

    # --- lost leases

    async def _keep_expiring(self) -> None:
        tick = min(self._settings.lease / 6, PROGRESS_INTERVAL_S)
        while True:
            self._note_stall(time.monotonic())
            next_expiry = self._expire(time.monotonic())
            await asyncio.sleep(min(max(next_expiry - time.monotonic(), 0.001), tick))

    def _note_stall(self, now: float) -> None:
        """Note that this thread did not run for a third of a lease: the process was frozen, or a handler blocked it."""
        if now - self._ticked_at > self._settings.lease / 3:
            self._stalled_at = now
        self._ticked_at = now

    def _expire(self, now: float) -> float:
        """Give up the attempts whose lease has expired; return when the next lease expires."""
        next_expiry = math.inf
        for attempt in self._holding(UNDECIDED_STATES):
            if attempt.lease_until <= now:
                self._lose(attempt, "it could not be renewed in time")
            else:
                next_expiry = min(next_expiry, attempt.lease_until)
        return next_expiry

    def _lose(self, attempt: TaskStateMachine, reason: str) -> None:
        if attempt.state not in UNDECIDED_STATES or attempt.lease_until == GIVEN_UP:
            return  # being settled, which finds out by itself, or given up before
        attempt.lease_until = GIVEN_UP
        attempt.record_lost_lease(reason)
        now = time.monotonic()
        self._note_stall(now)
        has_stalled = now - self._stalled_at <= self._settings.lease
        self._thread.call_home(partial(self._runner.lose, attempt, reason, has_stalled=has_stalled))

    # --- the connection

    async def _query(self, query: Callable[[Connection], Awaitable[T]]) -> T:
        """Run a query for at most a third of a lease: it may wait for a lock, or for a network that is gone."""
        return await run_within(self._settings.lease / 3, self._query_in_turn(query))

    async def _query_in_turn(self, query: Callable[[Connection], Awaitable[T]]) -> T:
        async with self._in_use:
            self._used_at = time.monotonic()
            try:
                return await query(await self._connected())
            except asyncio.CancelledError:
                await self._disconnect()  # its reply may never come
                raise

    async def _connected(self) -> Connection:
        if self.stopping.is_set():
            raise DisconnectedError("the worker is stopping")
        if self._connection is None or self._connection.closed:
            await self._disconnect()
            self._connection = await self._stack.enter_async_context(connect(self._url))
        return self._connection

    async def _disconnect_at_rest(self) -> None:
        """Close the connection when nothing has needed it for a while."""
        if self._connection is not None and time.monotonic() - self._used_at > KEEP_CONNECTION_S:
            async with self._in_use:
                await self._disconnect()

    async def _disconnect(self) -> None:
        """Close the connection without a message to a server that may be gone."""
        if self._connection is not None:
            await self._connection.close()
        self._connection = None
        await self._stack.aclose()
