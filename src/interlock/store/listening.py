"""Listening on a connection of its own for whoever waits for news: probed for liveness, and rebuilt when deaf.

Invariant: notifications are hints. Whatever happens here costs latency, never work: whoever listens also looks.
"""

from __future__ import annotations

import asyncio
import secrets
from enum import StrEnum
from typing import TYPE_CHECKING

from interlock.errors import StoreError
from interlock.store.database import connect
from interlock.store.notifications import hear, listen, send_probe
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock.store.database import Connection

PROBE = "interlock_probe"
PROBE_TIMEOUT = 5.0
SHORTEST_PAUSE = 0.1
LONGEST_PAUSE = 5.0


class WakeMode(StrEnum):
    """How an idle process learns of news: by both, by notifications alone, or by looking alone."""

    HYBRID = "hybrid"
    EVENTS = "events"
    POLLING = "polling"


class Listener:
    """Passes notifications on, and calls `opened` whenever it begins to hear: before that it may have missed some."""

    def __init__(
        self,
        url: str,
        channels: Sequence[str],
        heard: Callable[[str, str], None],
        opened: Callable[[], None],
        *,
        probe_interval: float = 10.0,
        probe_timeout: float = PROBE_TIMEOUT,
    ) -> None:
        self._url = url
        self._channels = (*channels, PROBE)
        self._heard = heard
        self._opened = opened
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
        pause = SHORTEST_PAUSE
        while True:
            try:
                async with connect(self._url) as connection:
                    await listen(connection, self._channels)
                    self.connection = connection
                    pause = SHORTEST_PAUSE
                    self._opened()
                    await self._attend(connection)
            except (StoreError, OSError) as error:
                heed_cancellation()
                log.warning("listener_lost", error=str(error))
            finally:
                self.connection = None
            self.rebuilt += 1
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _attend(self, connection: Connection) -> None:
        while True:
            await self._pass_on(connection, self._probe_interval, until=None)
            token = secrets.token_hex(8)
            await send_probe(connection, token)
            if not await self._pass_on(connection, self._probe_timeout, until=token):
                raise StoreError("the listener did not hear its own probe")

    async def _pass_on(self, connection: Connection, seconds: float, *, until: str | None) -> bool:
        """Pass notifications on for a while; True as soon as the probe that we wait for is heard."""

        def heard(channel: str, payload: str) -> bool:
            if channel == PROBE:
                return payload == until
            self._heard(channel, payload)
            return False

        return await hear(connection, seconds, heard)


def heed_cancellation() -> None:
    """Stop, if that is asked for: when a connection dies at that moment, the driver tells of its death instead."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
