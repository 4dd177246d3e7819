"""Keeps the leases of all running attempts, from a thread and a connection of its own.

Invariant: a handler that blocks the worker's event loop cannot starve the renewals; an attempt whose lease could not
be prolonged in time is interrupted before another worker may start the task.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

from interlock.errors import StatementError
from interlock.lifecycle import TaskState
from interlock.store.database import connect
from interlock.store.tasks import Held, renew_running_tasks, save_checkpoint
from interlock.telemetry import leases_lost_total, log
from interlock.worker.attempt import Interruption

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from uuid import UUID

    from interlock.client.context import TaskContext
    from interlock.store.database import Connection
    from interlock.store.tasks import Lost, Renewed
    from interlock.worker.attempt import TaskStateMachine
    from interlock.worker.settings import WorkerSettings

PROGRESS_INTERVAL = 1.0
RETRY_INTERVAL = 0.5


class LeaseKeeper:
    """Renews leases, writes progress and checkpoints, and hears of cancellations, beside the worker's loop."""

    def __init__(
        self,
        url: str,
        settings: WorkerSettings,
        active: dict[int, TaskStateMachine],
        cancel: Callable[[TaskStateMachine, str | None], None],
    ) -> None:
        self._url = url
        self._settings = settings
        self._active = active
        self._cancel = cancel
        self._home = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._poked = asyncio.Event()
        self._stopping = False
        self._everything = False
        self._progressed: set[UUID] = set()
        self._stack = AsyncExitStack()
        self._connection: Connection | None = None
        self._using = asyncio.Lock()
        self._thread = threading.Thread(target=self._main, name="interlock-leases", daemon=True)

    def start(self) -> None:
        """Begin to keep leases."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and its connection; safe twice, safe before start."""
        if not self._thread.is_alive():
            return
        self._stopping = True
        self._loop.call_soon_threadsafe(self._poked.set)
        self._thread.join(timeout=5)

    def poke(self) -> None:
        """Renew everything now, because somebody may have asked for a cancellation."""
        self._everything = True
        self._loop.call_soon_threadsafe(self._poked.set)

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
        async with asyncio.timeout(self._settings.lease / 3), self._using:
            return await save_checkpoint(await self._connected(), context.task_id, context.attempt, value)

    # --- the thread

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._keep())
        finally:
            self._loop.close()

    async def _keep(self) -> None:
        pause = min(self._settings.lease / 3, PROGRESS_INTERVAL)
        async with self._stack:
            while not self._stopping:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._poked.wait(), pause)
                self._poked.clear()
                try:
                    await self._renew(self._due())
                    pause = min(self._settings.lease / 3, PROGRESS_INTERVAL)
                except Exception as error:  # noqa: BLE001 - this thread is the safety net: it must not end
                    log.warning("lease_renewal_failed", error=str(error) or type(error).__name__)
                    self._connection = None
                    pause = min(RETRY_INTERVAL, self._settings.lease / 6)
                self._expire()

    def _due(self) -> list[TaskStateMachine]:
        """Choose the attempts that have used a third of their lease, or have something to say."""
        everything, self._everything = self._everything, False
        said, self._progressed = self._progressed, set()
        limit = time.monotonic() + self._settings.lease * 2 / 3
        return [
            attempt
            for attempt in list(self._active.values())
            if attempt.state is TaskState.PROCESSING
            and (everything or attempt.lease_until <= limit or attempt.key[0] in said)
        ]

    async def _renew(self, attempts: Sequence[TaskStateMachine]) -> None:
        if not attempts:
            return
        by_id = {attempt.key[0]: attempt for attempt in attempts}
        held = [Held(*attempt.key, attempt.latest_progress) for attempt in attempts]
        until = time.monotonic() + self._settings.lease
        renewed, lost = await self._ask_to_renew(held)
        for row in renewed:
            by_id[row.id].lease_until = until
            if row.cancel_requested_at is not None:
                self._home.call_soon_threadsafe(self._cancel, by_id[row.id], row.reason)
        for missing in lost:
            self._lose(by_id[missing.id], "another has it")

    async def _ask_to_renew(self, held: list[Held]) -> tuple[list[Renewed], list[Lost]]:
        """Prolong the leases; one that waits for a lock, or for a network that is gone, is given up in time."""
        lease = self._settings.lease_time
        async with asyncio.timeout(self._settings.lease / 3), self._using:
            connection = await self._connected()
            try:
                return await renew_running_tasks(connection, held, lease=lease)
            except StatementError as error:
                log.warning("progress_refused", error=str(error))
                bare = [attempt._replace(progress=None) for attempt in held]
                return await renew_running_tasks(connection, bare, lease=lease)

    def _expire(self) -> None:
        now = time.monotonic()
        for attempt in list(self._active.values()):
            if attempt.state is TaskState.PROCESSING and attempt.lease_until <= now:
                self._lose(attempt, "it could not be renewed in time")

    def _lose(self, attempt: TaskStateMachine, why: str) -> None:
        if attempt.state is not TaskState.PROCESSING:
            return  # it was settled while we asked
        leases_lost_total.inc()
        log.warning("lease_lost", task_id=attempt.task_id, attempt=attempt.key[1], reason=why)
        self._home.call_soon_threadsafe(attempt.interrupt, Interruption.LEASE_LOST, f"lease lost: {why}")

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            await self._stack.aclose()
            self._connection = await self._stack.enter_async_context(connect(self._url))
        return self._connection
