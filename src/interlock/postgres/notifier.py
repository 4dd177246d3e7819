"""Listening on a connection of its own for whoever waits for news: probed for liveness, and rebuilt when deaf.

Invariant: notifications are hints. Whatever happens here costs latency, never work: whoever listens also looks.
"""

from __future__ import annotations

import asyncio
import secrets
from enum import StrEnum
from typing import TYPE_CHECKING

from psycopg import sql

from interlock.errors import StoreError
from interlock.postgres.connection import connect, translated
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGconn

    from interlock.postgres.connection import Connection


# SECTION store/notifications
# LISTEN and NOTIFY, as far as the driver is concerned.


async def listen(connection: Connection, channels: Sequence[str]) -> None:
    """Subscribe a connection to channels."""
    with translated(connection):
        for channel in channels:
            await connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))


async def send_probe(connection: Connection, token: str) -> None:
    """Send a notification that a listener can recognise as its own."""
    with translated(connection):
        await connection.execute("select pg_notify('interlock_probe', %s)", [token])


async def hear(connection: Connection, seconds: float, heard: Callable[[str, str], bool | None]) -> bool:
    """Pass on what is notified within a time, as channel and payload; end with True as soon as `heard` says so.

    It is passed on as it arrives, without a turn of the event loop in between: many wait for nothing else.
    """
    with translated(connection):
        # what came along with the answers to other statements
        early = [notified async for notified in connection.notifies(timeout=0)]
        told = [heard(notified.channel, notified.payload) for notified in early]
        if any(told):
            return True
        async with connection.lock:
            return await _attend(connection.pgconn, seconds, heard)


async def _attend(pgconn: PGconn, seconds: float, heard: Callable[[str, str], bool | None]) -> bool:
    loop = asyncio.get_running_loop()
    enough: asyncio.Future[bool] = loop.create_future()

    def pass_on() -> None:
        while not enough.done() and (notified := pgconn.notifies()) is not None:
            if heard(notified.relname.decode(), notified.extra.decode()):
                enough.set_result(True)

    def read() -> None:
        if enough.done():
            return
        try:
            pgconn.consume_input()
            pass_on()
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
            enough.set_exception(error)

    socket = pgconn.socket
    pass_on()
    loop.add_reader(socket, read)
    try:
        async with asyncio.timeout(seconds):
            return await enough
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(socket)


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
