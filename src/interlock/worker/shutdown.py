"""The end of a worker: running tasks get their grace, the others are returned, and everything is closed.

Invariant: it ends within the limit, whatever handlers and the database do. While there is time, a database that is lost
is looked for, so that what is finished can be reported; what could not be written is left to its lease.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from interlock.errors import StoreError
from interlock.lifecycle import TaskState
from interlock.telemetry import log
from interlock.worker.claims import backoff
from interlock.worker.interruption import Interruption
from interlock.worker.patience import end, within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock.worker.attempt import TaskStateMachine
    from interlock.worker.connections import Connections
    from interlock.worker.parts import Parts
    from interlock.worker.settings import WorkerSettings

LAST_PART = 1 / 6  # of the limit, kept for stopping handlers, reporting and closing
TICK = 0.1


class Shutdown:
    """One worker's way from SHUTTING_DOWN to STOPPED."""

    def __init__(
        self,
        parts: Parts,
        settings: WorkerSettings,
        active: dict[int, TaskStateMachine],
        connections: Connections,
        *,
        asked_at: float,
        connect: Callable[[], Awaitable[object]],
        hurry: asyncio.Event,
        changed: asyncio.Event,
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._active = active
        self._connections = connections
        self._deadline = asked_at + settings.shutdown_limit
        self._asked_at = asked_at
        self._connect = connect
        self._hurry = hurry
        self._changed = changed

    async def run(self) -> None:
        """Wind everything up."""
        self._parts.resign()
        looking = asyncio.create_task(self._stay_connected())
        kept = self._settings.shutdown_limit * LAST_PART
        await self._until(self._is_idle, min(self._asked_at + self._settings.grace, self._deadline - kept))
        # An event loop that was blocked may have left less of the time than was to be kept.
        part = max(min(kept, self._deadline - time.monotonic()), 0.0) / 10
        for attempt in list(self._active.values()):
            attempt.interrupt(Interruption.SHUTDOWN)
        await self._until(self._is_idle, time.monotonic() + 4 * part, in_a_hurry_too=True)
        await self._until(self._is_reported, self._deadline - 6 * part)
        await end(looking, courtesy=part / 2)
        await self._return_the_rest(part)
        await self._parts.close(3 * part)
        await self._connections.close(courtesy=part / 2)

    # --- what is waited for

    def _is_idle(self) -> bool:
        return not self._active

    def _is_reported(self) -> bool:
        """Whether all there is left to do is to return those that cannot be stopped, and that can be done."""
        return self._is_idle() or (len(self._running()) == len(self._active) and self._connections.are_up)

    def _running(self) -> list[TaskStateMachine]:
        return [attempt for attempt in self._active.values() if attempt.state is TaskState.PROCESSING]

    async def _until(self, seen: Callable[[], bool], moment: float, *, in_a_hurry_too: bool = False) -> None:
        """Wait for something, at most until a moment, and in a hurry only where that makes sense."""
        while not seen() and (left := moment - time.monotonic()) > 0:
            if self._hurry.is_set() and not in_a_hurry_too:
                return
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(TICK, left)):
                    await self._changed.wait()

    # --- the database

    async def _stay_connected(self) -> None:
        """Look for the database whenever it is lost, with growing pauses."""
        failures = 0
        while True:
            if self._connections.are_up:
                failures = 0
                await self._connections.lost.wait()
            try:
                await self._connect()
            except (StoreError, OSError) as error:
                failures += 1
                log.warning("shutdown_without_database", error=str(error) or type(error).__name__)
                await asyncio.sleep(backoff(self._settings, failures))

    async def _return_the_rest(self, seconds: float) -> None:
        """Put back what could not be stopped: a thread that will not end, a coroutine that swallows everything."""
        claimed = [attempt.claimed for attempt in self._running() if attempt.claimed is not None]
        with suppress(TimeoutError):
            await within(seconds, self._parts.claims.give_back(self._connections.claiming, claimed))
