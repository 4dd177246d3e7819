"""PgQueuer: https://pypi.org/project/pgqueuer/, on a pool of asyncpg with uvloop, which its own command uses."""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import TYPE_CHECKING, Any

from driver import main

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BATCH = 500
BULK = 1000


def library(name: str) -> Any:
    """Import a module that may not be installed."""
    return importlib.import_module(name)


async def queries_of(url: str) -> Any:
    """Connect for enqueueing."""
    connection = await library("asyncpg").connect(url)
    return library("pgqueuer.queries").Queries(library("pgqueuer.db").AsyncpgDriver(connection))


class PgQueuerDriver:
    """PgQueuer."""

    setting = f"batch_size {BATCH}, asyncpg pool, uvloop; enqueue of lists of {BULK}"
    remaining = "select (exists (select from pgqueuer))::int"

    async def prepare(self, url: str) -> None:
        """Create the schema."""
        await (await queries_of(url)).install()

    async def enqueue_in_bulk(self, url: str, tasks: int) -> float:
        """Enqueue lists."""
        queries = await queries_of(url)
        began = time.perf_counter()
        for start in range(0, tasks, BULK):
            size = min(BULK, tasks - start)
            await queries.enqueue(["noop"] * size, [None] * size, [0] * size)
        return time.perf_counter() - began

    async def enqueue_singly(self, url: str, tasks: int) -> float:
        """Enqueue one by one."""
        queries = await queries_of(url)
        await queries.enqueue("noop", None)
        began = time.perf_counter()
        for _ in range(tasks):
            await queries.enqueue("noop", None)
        return time.perf_counter() - began

    async def enqueue_when_asked(
        self, url: str, ask: Callable[[Callable[[], Awaitable[object]]], Awaitable[None]]
    ) -> None:
        """Connect once."""
        queries = await queries_of(url)
        await ask(lambda: queries.enqueue("noop", None))

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run a worker in a new event loop."""
        asyncio.run(self._work(url, concurrency, handled))

    async def _work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run a PgQueuer. Its batches are as large as the slots: its own limit of concurrency slows it down."""
        pool = await library("asyncpg").create_pool(url, min_size=4, max_size=8)
        queue = library("pgqueuer").PgQueuer(library("pgqueuer.db").AsyncpgPoolDriver(pool))

        @queue.entrypoint("noop")  # type: ignore[untyped-decorator]  # may not be installed
        async def noop(_job: Any) -> None:
            handled()

        await queue.run(batch_size=min(concurrency, BATCH))


if __name__ == "__main__":
    asyncio.set_event_loop_policy(library("uvloop").EventLoopPolicy())
    main(PgQueuerDriver())
