"""A user's own connection, used for a moment as one of ours.

Invariant: it comes back as it was, in the same transaction: nothing here commits or rolls back what is the user's.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import psycopg
from psycopg.rows import dict_row

from interlock.errors import InputError
from interlock.store.database import translated
from interlock.store.enqueue import is_blocking

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.store.database import Connection
    from interlock.store.enqueue import AsyncConnection, SyncConnection


@asynccontextmanager
async def lent(connection: AsyncConnection | SyncConnection) -> AsyncIterator[Connection]:
    """Give a user's connection with the rows and cursors that our statements expect."""
    if is_blocking(connection):
        raise InputError("this needs an async psycopg connection (psycopg.AsyncConnection), not a blocking one")
    rows, cursors = connection.row_factory, connection.cursor_factory
    connection.row_factory = cast("Any", dict_row)
    connection.cursor_factory = psycopg.AsyncCursor
    try:
        with translated(connection):
            if not connection.autocommit:
                # begins the user's transaction, if it has not begun: blocks of ours are then parts of it
                await connection.execute("select 1")
            yield connection
    finally:
        connection.row_factory, connection.cursor_factory = rows, cursors
