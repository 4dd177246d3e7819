"""Several statements in one trip to the database.

Invariant: they run in the order in which they are given, in the transaction that is open; when one is refused, those
behind it have not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.store.database import translated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from psycopg.rows import DictRow

    from interlock.store.database import Connection
    from interlock.store.statements import Statement

Asked = tuple["Statement", "Mapping[str, Any]"]


async def run_together(connection: Connection, asked: Sequence[Asked]) -> list[list[DictRow]]:
    """Run these statements and give the rows of each."""
    with translated(connection):
        async with connection.pipeline():
            cursors = [await connection.execute(statement.sql, parameters) for statement, parameters in asked]
        return [await cursor.fetchall() if cursor.description is not None else [] for cursor in cursors]


async def run_all(connection: Connection, asked: Sequence[Asked]) -> None:
    """Run these statements for what they do, one after the other; for one or two that is faster than a pipeline."""
    with translated(connection):
        for statement, parameters in asked:
            await connection.execute(statement.sql, parameters)
