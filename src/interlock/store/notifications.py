"""LISTEN and NOTIFY, as far as the driver is concerned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from interlock.store.database import translated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

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


async def hear(connection: Connection, seconds: float) -> AsyncIterator[tuple[str, str]]:
    """Give the notifications that arrive within a time, as pairs of channel and payload."""
    with translated(connection):
        async for notification in connection.notifies(timeout=seconds):
            yield notification.channel, notification.payload
