"""LISTEN and NOTIFY, as far as the driver is concerned."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from psycopg import sql

from interlock.store.database import translated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGconn

    from interlock.store.database import Connection


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
