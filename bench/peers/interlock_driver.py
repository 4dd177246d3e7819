"""Interlock, with its guards and its audit, as a user runs it."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from typing import TYPE_CHECKING

from driver import main

from interlock import Interlock
from interlock.config import Config
from interlock.postgres.connection import connect
from interlock.postgres.migrate import migrate
from interlock.telemetry import configure_logging
from interlock.worker.process import WorkerStateMachine
from interlock.worker.settings import WorkerSettings, get_instance_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock.client.task import Task


def nothing() -> None:
    """Replace the board in processes that run no handler."""


def defined(url: str, handled: Callable[[], None] = nothing) -> tuple[Interlock, Task[[], None]]:
    """Create an app with the task."""
    configure_logging("warning")
    app = Interlock(config=Config(database_url=url))

    @app.task(name="noop")
    async def noop() -> None:
        handled()

    return app, noop


class InterlockDriver:
    """Interlock."""

    setting = (
        "a worker of 1,500 slots, so batches of at most 500, on asyncio's own loop;"
        " enqueueing on uvloop; enqueue_many, which is a COPY"
    )
    remaining = (
        "select (exists (select from interlock.tasks where state = 'pending'))::int"
        " + (exists (select from interlock.tasks where lease_expires_at is not null))::int"
    )

    async def prepare(self, url: str) -> None:
        """Create the schema."""
        async with connect(url) as connection:
            await migrate(connection)

    async def enqueue_in_bulk(self, url: str, tasks: int) -> float:
        """Enqueue all in one call."""
        app, noop = defined(url)
        async with app:
            async with app.connection():
                pass  # connecting is not counted
            began = time.perf_counter()
            await noop.enqueue_many({} for _ in range(tasks))
            return time.perf_counter() - began

    async def enqueue_singly(self, url: str, tasks: int) -> float:
        """Enqueue one by one."""
        app, noop = defined(url)
        async with app:
            await noop.enqueue()
            began = time.perf_counter()
            for _ in range(tasks):
                await noop.enqueue()
            return time.perf_counter() - began

    async def enqueue_when_asked(
        self, url: str, ask: Callable[[Callable[[], Awaitable[object]]], Awaitable[None]]
    ) -> None:
        """Open the app."""
        app, noop = defined(url)
        async with app:
            await ask(noop.enqueue)

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run the worker that `interlock worker` runs."""
        app, _ = defined(url, handled)
        WorkerStateMachine(get_instance_name(), app, WorkerSettings(concurrency=concurrency)).run()


if __name__ == "__main__":
    if "work" not in sys.argv:  # clients choose their own event loop
        asyncio.set_event_loop_policy(importlib.import_module("uvloop").EventLoopPolicy())
    main(InterlockDriver())
