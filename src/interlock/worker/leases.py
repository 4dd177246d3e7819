"""Keeps the leases of all running attempts, from a thread and a connection of its own.

Invariant: a handler that blocks the worker's event loop cannot starve the renewals; an attempt whose lease could not
be prolonged in time is interrupted before another worker may start the task, whatever became of the renewal.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from interlock.errors import StatementError
from interlock.lifecycle import TaskState
from interlock.postgres.connection import connect
from interlock.postgres.retry import raise_if_canceled
from interlock.store.tasks import HeldAttempt, renew_running_tasks, save_checkpoint
from interlock.telemetry import leases_lost_total, log
from interlock.worker.cancellation import end, within
from interlock.worker.outcome import Interruption

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from concurrent.futures import Future
    from uuid import UUID

    from interlock.client.context import TaskContext
    from interlock.postgres.connection import Connection
    from interlock.store.tasks import LostAttempt, RenewedLease
    from interlock.worker.attempt import TaskStateMachine
    from interlock.worker.settings import WorkerSettings


# SECTION worker/losses
# Attempts that lost their task, each counted once, whoever finds out.
#
# Invariant: the keeper of the leases, in its thread, and whoever reports an outcome may find out at the same time;
# one of
# them counts.

ANOTHER_HAS_IT = "another has it"

_finding_out = threading.Lock()


def count_lost(attempt: TaskStateMachine, why: str = ANOTHER_HAS_IT) -> None:
    """Count and log that an attempt does not hold its task any more, unless that is known."""
    with _finding_out:
        if attempt.is_lost:
            return
        attempt.is_lost = True
    leases_lost_total.inc()
    log.warning("lease_lost", task_id=attempt.task_id, attempt=attempt.key[1], reason=why)


T = TypeVar("T")

PROGRESS_INTERVAL = 1.0
RETRY_INTERVAL = 0.5
GIVEN_UP = -math.inf  # the end of a lease that was lost, and told to be


class LeaseKeeper:
    """Renews leases, writes progress and checkpoints, and hears of cancellations, beside the worker's loop.

    `beside` is other work that a blocking handler must not starve either: it runs in the same thread, until its event.
    """

    def __init__(
        self,
        url: str,
        settings: WorkerSettings,
        active: dict[int, TaskStateMachine],
        cancel: Callable[[TaskStateMachine, str | None], None],
        beside: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
    ) -> None:
        self._url = url
        self._settings = settings
        self._active = active
        self._cancel = cancel
        self._beside = beside
        self._home = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._poked = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()  # of the worker's loop
        self._patience = 0.0  # with what runs beside, once it is to stop
        self._everything = False
        self._progressed: set[UUID] = set()
        self._stack = AsyncExitStack()
        self._connection: Connection | None = None
        self._using = asyncio.Lock()
        self._thread = threading.Thread(target=self._main, name="interlock-leases", daemon=True)

    def start(self) -> None:
        """Begin to keep leases."""
        self._thread.start()

    async def stop(self, seconds: float) -> None:
        """End the thread and its connection, and wait for that at most so long; safe twice, safe before start."""
        if not self._thread.is_alive():
            return
        self._patience = seconds / 2
        self.call(self._stopping.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have something done in the thread; not when that has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def poke(self) -> None:
        """Renew everything now, because somebody may have asked for a cancellation."""
        self._everything = True
        self.call(self._poked.set)

    # --- the Line of the contexts: called from handlers, in any thread

    def progressed(self, context: TaskContext) -> None:
        """Hear that there is progress to write with the next renewal."""
        if context.task_id is not None:
            self._progressed.add(context.task_id)

    def save_checkpoint(self, context: TaskContext, value: Any) -> Future[bool]:
        """Store a checkpoint under the attempt's number."""
        return asyncio.run_coroutine_threadsafe(self._save(context, value), self._loop)

    async def _save(self, context: TaskContext, value: Any) -> bool:
        if context.task_id is None:
            return False
        task_id = context.task_id
        return await self._asked(lambda connection: save_checkpoint(connection, task_id, context.attempt, value))

    # --- the thread

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()
            with suppress(RuntimeError):  # the worker's loop is closed: nobody waits
                self._home.call_soon_threadsafe(self._stopped.set)

    async def _live(self) -> None:
        keeping = [asyncio.create_task(self._keep()), asyncio.create_task(self._look_after_expiry())]
        beside = asyncio.create_task(self._beside(self._stopping))
        await self._stopping.wait()
        await end(*keeping)
        await asyncio.wait([beside], timeout=self._patience)
        await end(*asyncio.all_tasks() - {asyncio.current_task()})
        await self._hang_up()

    async def _keep(self) -> None:
        pause = min(self._settings.lease / 3, PROGRESS_INTERVAL)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._poked.wait()
            self._poked.clear()
            try:
                await self._renew(self._due())
                pause = min(self._settings.lease / 3, PROGRESS_INTERVAL)
            except Exception as error:  # noqa: BLE001 - this thread is the safety net: it must not end
                raise_if_canceled()
                log.warning("lease_renewal_failed", error=str(error) or type(error).__name__)
                pause = min(RETRY_INTERVAL, self._settings.lease / 6)

    async def _look_after_expiry(self) -> None:
        """Beside the renewals, not between them: one that hangs must not hide that the leases run out."""
        tick = min(self._settings.lease / 6, PROGRESS_INTERVAL)
        while True:
            following = self._expire(time.monotonic())
            await asyncio.sleep(min(max(following - time.monotonic(), 0.001), tick))

    def _expire(self, now: float) -> float:
        """Give up the attempts whose lease has run out; tell when the next one does."""
        following = math.inf
        for attempt in self._holding():
            if attempt.lease_until <= now:
                self._lose(attempt, "it could not be renewed in time")
            else:
                following = min(following, attempt.lease_until)
        return following

    def _holding(self) -> list[TaskStateMachine]:
        """List the attempts that run and have not been given up."""
        return [
            attempt
            for attempt in list(self._active.values())
            if attempt.state is TaskState.PROCESSING and attempt.lease_until != GIVEN_UP
        ]

    def _due(self) -> list[TaskStateMachine]:
        """Choose the attempts that have used a third of their lease, or have something to say."""
        everything, self._everything = self._everything, False
        said, self._progressed = self._progressed, set()
        limit = time.monotonic() + self._settings.lease * 2 / 3
        return [
            attempt
            for attempt in self._holding()
            if everything or attempt.lease_until <= limit or attempt.key[0] in said
        ]

    async def _renew(self, attempts: Sequence[TaskStateMachine]) -> None:
        if not attempts:
            return
        by_id = {attempt.key[0]: attempt for attempt in attempts}
        held = [HeldAttempt(*attempt.key, attempt.latest_progress) for attempt in attempts]
        until = time.monotonic() + self._settings.lease
        renewed, lost = await self._asked(lambda connection: self._ask_to_renew(connection, held))
        for row in renewed:
            attempt = by_id[row.id]
            if attempt.lease_until == GIVEN_UP:
                continue  # too late: its handler is being stopped
            attempt.lease_until = until
            if attempt.has_context:
                attempt.context.lease_timeout = datetime.now(UTC) + timedelta(seconds=until - time.monotonic())
            if row.cancel_requested_at is not None:
                self._home.call_soon_threadsafe(self._cancel, attempt, row.reason)
        for missing in lost:
            self._lose(by_id[missing.id], ANOTHER_HAS_IT)

    async def _ask_to_renew(
        self, connection: Connection, held: list[HeldAttempt]
    ) -> tuple[list[RenewedLease], list[LostAttempt]]:
        lease = self._settings.lease_time
        try:
            return await renew_running_tasks(connection, held, lease=lease)
        except StatementError as error:
            log.warning("progress_refused", error=str(error))
            bare = [attempt._replace(progress=None) for attempt in held]
            return await renew_running_tasks(connection, bare, lease=lease)

    def _lose(self, attempt: TaskStateMachine, why: str) -> None:
        if attempt.state is not TaskState.PROCESSING or attempt.lease_until == GIVEN_UP:
            return  # it was settled while we asked, or it was told before
        attempt.lease_until = GIVEN_UP
        count_lost(attempt, why)
        self._home.call_soon_threadsafe(attempt.interrupt, Interruption.LEASE_LOST, f"lease lost: {why}")

    # --- its connection

    async def _asked(self, ask: Callable[[Connection], Awaitable[T]]) -> T:
        """Ask the server something; what waits for a lock, or for a network that is gone, is given up in time."""
        return await within(self._settings.lease / 3, self._in_turn(ask))

    async def _in_turn(self, ask: Callable[[Connection], Awaitable[T]]) -> T:
        async with self._using:
            try:
                return await ask(await self._connected())
            except asyncio.CancelledError:
                await self._hang_up()  # it may wait for its answer for ever
                raise

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            await self._hang_up()
            self._connection = await self._stack.enter_async_context(connect(self._url))
        return self._connection

    async def _hang_up(self) -> None:
        """Close the connection without a word to a server that may be gone."""
        if self._connection is not None:
            await self._connection.close()
        self._connection = None
        await self._stack.aclose()
