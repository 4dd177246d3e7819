"""What an app does before it connects: finds its server, and sees to it that the schema is there.

Invariant: the embedded server is migrated by whoever opens it; any other is left as it is.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from interlock.errors import MigrationError
from interlock.store.database import database_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.config import Config
    from interlock.store.database import Connection


@asynccontextmanager
async def located(config: Config) -> AsyncIterator[str]:
    """Give the URL of the server; the embedded one is started and left in a thread, because that takes its time."""
    context = database_url(config)
    url = await asyncio.to_thread(context.__enter__)
    try:
        yield url
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


async def see_to_schema(connection: Connection, *, is_embedded: bool) -> None:
    """Migrate the embedded server, which is ours; of any other, see that somebody has."""
    # not at the top: with the installer of the queue it is a tenth of what an import of the app costs
    from interlock.store.migrate import applied_migrations, known_migrations, migrate  # noqa: PLC0415 - needed once, when opening

    if is_embedded:
        await migrate(connection)
        return
    missing = known_migrations()[len(await applied_migrations(connection)) :]
    if missing:
        raise MigrationError(
            f"the database lacks {len(missing)} migrations of this release, from {missing[0].name} on; "
            "run `interlock migrate`"
        )
