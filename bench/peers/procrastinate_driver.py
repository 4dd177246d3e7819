"""Procrastinate: https://pypi.org/project/procrastinate/, with psycopg."""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import TYPE_CHECKING, Any

from driver import main

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BULK = 1000
CONCURRENCY = 30


def defined(url: str, handled: Callable[[], None] | None = None) -> tuple[Any, Any]:
    """Create an app with the task; imported lazily, since Procrastinate may not be installed."""
    library = importlib.import_module("procrastinate")
    app = library.App(connector=library.PsycopgConnector(conninfo=url))

    @app.task(name="noop")  # type: ignore[untyped-decorator]  # may not be installed
    async def noop() -> None:
        if handled is not None:
            handled()

    return app, noop


class ProcrastinateDriver:
    """Procrastinate."""

    setting = f"concurrency {CONCURRENCY}, which fetches one job per statement; batch_defer of {BULK}"
    remaining = "select (exists (select from procrastinate_jobs where status in ('todo', 'doing')))::int"

    async def prepare(self, url: str) -> None:
        """Create the schema."""
        app, _ = defined(url)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    async def enqueue_in_bulk(self, url: str, tasks: int) -> float:
        """Enqueue batches."""
        app, noop = defined(url)
        async with app.open_async():
            began = time.perf_counter()
            for start in range(0, tasks, BULK):
                await noop.batch_defer_async(*({} for _ in range(min(BULK, tasks - start))))
            return time.perf_counter() - began

    async def enqueue_singly(self, url: str, tasks: int) -> float:
        """Enqueue one by one."""
        app, noop = defined(url)
        async with app.open_async():
            await noop.defer_async()
            began = time.perf_counter()
            for _ in range(tasks):
                await noop.defer_async()
            return time.perf_counter() - began

    async def enqueue_when_asked(
        self, url: str, ask: Callable[[Callable[[], Awaitable[object]]], Awaitable[None]]
    ) -> None:
        """Open the app."""
        app, noop = defined(url)
        async with app.open_async():
            await ask(noop.defer_async)

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run a worker in a new event loop."""
        asyncio.run(self._work(url, concurrency, handled))

    async def _work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run its worker with its own best concurrency; it fetches one job per statement, whatever the concurrency."""
        del concurrency
        app, _ = defined(url, handled)
        async with app.open_async():
            await app.run_worker_async(concurrency=CONCURRENCY)


if __name__ == "__main__":
    main(ProcrastinateDriver())
