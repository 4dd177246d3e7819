"""Keeps the worker's row in the database: says that it is here, for whom it works, and in the end that it has gone.

Invariant: a heartbeat that fails costs the worker no task: it goes on working, and says again that it is here as soon
as the database can be reached.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interlock.errors import StoreError
from interlock.store.listening import heed_cancellation
from interlock.store.presence import (
    BEATS,
    PRESENCE,
    RUNNING,
    keep_worker,
    leave_worker,
    part_from_worker,
    welcome_worker,
)
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta

    from interlock.store.database import Connection
    from interlock.store.presence import Process

LAST_WORD = 2.0  # seconds that the farewell may take


class Presence:
    """One worker's row. `run` it as a task until `stop`; `poke` it when what the worker serves has changed."""

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        process: Process,
        *,
        statistics: Callable[[], Mapping[str, Any]] = dict,
        told: Callable[[str], None] = lambda _: None,
        lease: timedelta = PRESENCE,
        clock: Callable[[], datetime | None] = lambda: None,
    ) -> None:
        self._connect = connect
        self.process = process
        self._statistics = statistics
        self._told = told
        self._lease = lease
        self._clock = clock
        self._poked = asyncio.Event()
        self.status: str | None = None  # of the row, as the latest heartbeat found it

    def serve(self, namespaces: tuple[str, ...]) -> None:
        """Serve other namespaces from now on, and say so at once."""
        self.process = replace(self.process, namespaces=namespaces)
        self.poke()

    def poke(self) -> None:
        """Have the next heartbeat come at once."""
        self._poked.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Say that the worker is here, again and again, until `stop`; then end its row."""
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self.poke())
        try:
            while not stop.is_set():
                try:
                    async with self._connect() as connection:
                        await self._beat(connection, stop)
                except (StoreError, OSError, TimeoutError) as error:
                    heed_cancellation()
                    log.warning("heartbeat_failed", worker_id=self.process.id, error=str(error) or "it took too long")
                    if not stop.is_set():
                        self._poked.clear()  # it was not heard, and is not to be repeated without a pause
                        await self._rest()
        finally:
            stopping.cancel()

    async def _beat(self, connection: Connection, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._poked.clear()
            said = replace(self.process, statistics=self._statistics())
            async with asyncio.timeout(self._lease.total_seconds()):
                status = await keep_worker(connection, said, lease=self._lease, now=self._clock())
            if status != self.status:
                log.info("worker_presence", worker_id=self.process.id, status=status)
                if status == RUNNING and (self.status is not None or self.process.generation is not None):
                    await welcome_worker(connection)  # no row was made for it, which would have told of it
                self.status = status
                self._told(status)
            await self._rest()
        with suppress(StoreError, TimeoutError):  # without it, the row is not live for long anyway
            async with asyncio.timeout(LAST_WORD):
                await self._leave(connection)

    async def _leave(self, connection: Connection) -> None:
        if self.process.generation is None:
            await leave_worker(connection, self.process.id, now=self._clock())
        else:
            await part_from_worker(connection, self.process, now=self._clock())

    async def _rest(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._lease.total_seconds() / BEATS):
                await self._poked.wait()
