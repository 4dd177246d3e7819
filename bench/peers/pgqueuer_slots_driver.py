"""PgQueuer with at most as many tasks at once as the worker of Interlock: `max_concurrent_tasks`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from driver import main
from pgqueuer_driver import PgQueuerDriver, library

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_LIMIT = 2


class PgQueuerSlotsDriver(PgQueuerDriver):
    """PgQueuer, with a limit of tasks."""

    async def _work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run a PgQueuer with the largest batches that it accepts for the limit: half of it."""
        pool = await library("asyncpg").create_pool(url, min_size=4, max_size=8)
        queue = library("pgqueuer").PgQueuer(library("pgqueuer.db").AsyncpgPoolDriver(pool))

        @queue.entrypoint("noop")  # type: ignore[untyped-decorator]  # may not be installed
        async def noop(_job: Any) -> None:
            handled()

        limit = max(concurrency, MIN_LIMIT)
        await queue.run(batch_size=limit // 2, max_concurrent_tasks=limit)


if __name__ == "__main__":
    asyncio.set_event_loop_policy(library("uvloop").EventLoopPolicy())
    main(PgQueuerSlotsDriver())
