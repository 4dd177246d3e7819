"""The connections of one app: opened as needed, given back after use, replaced when they died at rest.

Invariant: a connection that is handed out was alive a moment ago, and is in no transaction.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.rows import DictRow
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from interlock.errors import DisconnectedError
from interlock.store.database import dialling, prepare

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.store.database import Connection

TIMEOUT = 30.0  # to wait for a connection that is free
FRESH = 1.0  # a connection that was used this many seconds ago is not asked whether it lives


class Pool:
    """Hands out connections to one database."""

    def __init__(self, url: str, *, max_size: int = 10, timeout: float = TIMEOUT) -> None:
        self._used_at: WeakKeyDictionary[psycopg.AsyncConnection[Any], float] = WeakKeyDictionary()
        self._timeout = timeout
        arguments = dialling(url)
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection[DictRow]] = AsyncConnectionPool(
            arguments.pop("conninfo"),
            connection_class=psycopg.AsyncConnection[DictRow],
            kwargs=arguments,
            min_size=1,
            max_size=max_size,
            timeout=timeout,
            num_workers=2,
            open=False,
            configure=_configure,
            check=self._check,
        )

    async def open(self) -> None:
        """Begin to connect, without waiting for it."""
        await self._pool.open()

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Lend a connection that commits each statement unless told otherwise."""
        try:
            connection = await self._pool.getconn()
        except PoolTimeout:
            raise DisconnectedError(f"no connection to the database could be had in {self._timeout:g} s") from None
        try:
            yield connection
        finally:
            self._used_at[connection] = time.monotonic()
            await self._pool.putconn(connection)

    async def _check(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Ask a connection that rested whether it lives: a server that restarted meanwhile is no user's error."""
        if time.monotonic() - self._used_at.get(connection, 0.0) > FRESH:
            await self._pool.check_connection(connection)


async def _configure(connection: psycopg.AsyncConnection[Any]) -> None:
    prepare(connection)
