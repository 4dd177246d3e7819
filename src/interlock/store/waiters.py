"""Who waits for the end of which task or job: each function runs the statement of the same name in `sql/waiters.sql`.

Invariant: a row here is a hint. Without it the end is found by looking, a little later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.store.database import translated
from interlock.store.prepared import run_prepared
from interlock.store.statements import load_statements

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from interlock.store.database import Connection

WAITERS = load_statements("waiters")


async def insert_waiters(connection: Connection, ids: Iterable[UUID], waiter: UUID) -> None:
    """Note that somebody waits for these tasks and jobs, or still does."""
    # sorted, so that two who wait for the same tasks lock their rows in one order
    await run_prepared(connection, WAITERS["insert_waiters"], {"ids": sorted(ids), "waiter": waiter}, tuple)


async def delete_waiters(connection: Connection, ids: Iterable[UUID], waiter: UUID) -> None:
    """Forget that somebody waited for these tasks and jobs, and those that have not said so for long."""
    with translated(connection):
        await connection.execute(WAITERS["delete_waiters"].sql, {"ids": sorted(ids), "waiter": waiter})


async def find_ended(connection: Connection, ids: Iterable[UUID]) -> list[UUID]:
    """Tell which of these tasks and jobs have ended, or are gone."""
    return [id_ for (id_,) in await run_prepared(connection, WAITERS["find_ended"], {"ids": list(ids)}, tuple)]
