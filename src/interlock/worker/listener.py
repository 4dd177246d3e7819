"""Hears notifications on a connection of its own, and notices when it has gone deaf.

Invariant: notifications are hints. Whatever happens here costs latency, never work: polling goes on beside it.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from interlock.errors import StoreError
from interlock.store.database import connect
from interlock.store.notifications import hear, listen, send_probe
from interlock.telemetry import log
from interlock.worker.cancellation import heed_cancellation

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.store.database import Connection

CHANNELS = ("interlock_tasks", "interlock_control", "interlock_duties", "interlock_probe")
PROBE_TIMEOUT = 5.0


class Listener:
    """Passes notifications on, probes itself, and is rebuilt when it does not hear its own probe."""

    def __init__(
        self,
        url: str,
        heard: Callable[[str, str], None],
        probe_interval: float,
        probe_timeout: float = PROBE_TIMEOUT,
    ) -> None:
        self._url = url
        self._heard = heard
        self._probe_interval = probe_interval
        self._probe_timeout = probe_timeout
        self.connection: Connection | None = None
        self.rebuilt = 0

    @property
    def is_hearing(self) -> bool:
        """Whether notifications arrive, as far as is known."""
        return self.connection is not None

    async def run(self) -> None:
        """Listen until this task is canceled, over one connection after another."""
        pause = 0.1
        while True:
            try:
                async with connect(self._url) as connection:
                    await listen(connection, CHANNELS)
                    self.connection = connection
                    pause = 0.1
                    # whatever was sent while nobody listened is found by looking once
                    self._heard("interlock_tasks", "*")
                    await self._attend(connection)
            except (StoreError, OSError) as error:
                heed_cancellation()
                log.warning("listener_lost", error=str(error))
            finally:
                self.connection = None
            self.rebuilt += 1
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    async def _attend(self, connection: Connection) -> None:
        while True:
            await self._pass_on(connection, self._probe_interval, until=None)
            token = secrets.token_hex(8)
            await send_probe(connection, token)
            if not await self._pass_on(connection, self._probe_timeout, until=token):
                raise StoreError("the listener did not hear its own probe")

    async def _pass_on(self, connection: Connection, seconds: float, *, until: str | None) -> bool:
        """Pass notifications on for a while; True as soon as the probe that we wait for is heard."""
        async for channel, payload in hear(connection, seconds):
            if channel != "interlock_probe":
                self._heard(channel, payload)
            elif payload == until:
                return True
        return False
