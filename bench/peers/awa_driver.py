"""Awa: https://pypi.org/project/awa-pg/, Python handlers on its Rust runtime."""

from __future__ import annotations

import asyncio
import importlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driver import main

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

QUEUE = "bench"
WORKERS = 500


@dataclass
class Noop:
    """The arguments of the task."""

    number: int = 0


def client_of(url: str) -> Any:
    """Create a client; imported lazily, since Awa may not be installed. Its URLs need a host before the socket."""
    return importlib.import_module("awa").AsyncClient(url.replace("@/", "@localhost/", 1))


class AwaDriver:
    """Awa."""

    setting = "queue storage, one queue of 500 workers; enqueue_many_copy"
    # Its view `awa.jobs` takes minutes for this many tasks; these are the tables behind it.
    remaining = (
        "select (select count(*) from awa.ready_entries) - (select count(*) from awa.done_entries)"
        " - (select coalesce(sum(completed_count), 0) from awa.receipt_completion_batches)"
    )

    async def prepare(self, url: str) -> None:
        """Create the schema, with the storage of new installations."""
        async with client_of(url) as client:
            await client.migrate()
            await client.install_queue_storage()

    async def enqueue_in_bulk(self, url: str, tasks: int) -> float:
        """Enqueue all in one call."""
        async with client_of(url) as client:
            jobs = [Noop() for _ in range(tasks)]
            began = time.perf_counter()
            await client.enqueue_many_copy(jobs, queue=QUEUE)
            return time.perf_counter() - began

    async def enqueue_singly(self, url: str, tasks: int) -> float:
        """Enqueue one by one."""
        async with client_of(url) as client:
            await client.insert(Noop(), queue=QUEUE)
            began = time.perf_counter()
            for _ in range(tasks):
                await client.insert(Noop(), queue=QUEUE)
            return time.perf_counter() - began

    async def enqueue_when_asked(
        self, url: str, ask: Callable[[Callable[[], Awaitable[object]]], Awaitable[None]]
    ) -> None:
        """Connect once."""
        async with client_of(url) as client:
            await ask(lambda: client.insert(Noop(), queue=QUEUE))

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run a worker in a new event loop."""
        asyncio.run(self._work(url, concurrency, handled))

    async def _work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run the runtime with this many workers on the queue."""
        client = client_of(url)

        @client.task(Noop, queue=QUEUE)  # type: ignore[untyped-decorator]  # may not be installed
        async def noop(_job: Any) -> None:
            handled()

        await client.start([(QUEUE, min(concurrency, WORKERS))])
        await asyncio.Event().wait()


if __name__ == "__main__":
    main(AwaDriver())
