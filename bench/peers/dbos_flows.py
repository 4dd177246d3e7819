"""DBOS: queued workflows of steps on PostgreSQL, https://pypi.org/project/dbos/."""

from __future__ import annotations

import asyncio
import importlib
import threading
from typing import TYPE_CHECKING, Any

from flows import CHAIN, FAN, WIDTH, main

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

QUEUE, PARTS = "flows", "parts"


def defined(url: str, handled: Callable[[], None] | None = None) -> Any:
    """Create the workflows and return the class of the library; imported lazily, since DBOS may not be installed."""
    library: Any = importlib.import_module("dbos")
    dbos = library.DBOS
    dbos(config={"name": "flows", "system_database_url": url, "log_level": "WARNING", "run_admin_server": False})

    @dbos.step()  # type: ignore[untyped-decorator]  # may not be installed
    def ends() -> None:
        if handled is not None:
            handled()

    @dbos.step()  # type: ignore[untyped-decorator]  # may not be installed
    def noop() -> None:
        pass

    @dbos.workflow(name=CHAIN)  # type: ignore[untyped-decorator]  # may not be installed
    def chain() -> None:
        ends()
        noop()
        ends()

    @dbos.workflow(name="part")  # type: ignore[untyped-decorator]  # may not be installed
    def part() -> None:
        noop()

    @dbos.workflow(name=FAN)  # type: ignore[untyped-decorator]  # may not be installed
    def fan() -> None:
        ends()
        for handle in [dbos.enqueue_workflow(PARTS, part) for _ in range(WIDTH)]:
            handle.get_result()
        ends()

    del chain, fan
    return dbos


def launched(dbos: Any) -> Any:
    """Launch DBOS with its queues, which it stores in its database."""
    dbos.launch()
    for name in (QUEUE, PARTS):
        dbos.register_queue(name, polling_interval_sec=0.05)
    return dbos


class DbosFlows:
    """DBOS."""

    setting = "one process, queues polled every 50 ms"
    remaining = "select (exists (select from dbos.workflow_status where status in ('ENQUEUED', 'PENDING')))::int"

    async def prepare(self, url: str) -> None:
        """Create the schema by a launch."""
        (await asyncio.to_thread(launched, defined(url))).destroy()

    async def submit(self, url: str, shape: str, flows: int) -> None:
        """Enqueue one by one."""
        client = importlib.import_module("dbos").DBOSClient(system_database_url=url)
        for _ in range(flows):
            client.enqueue({"workflow_name": shape, "queue_name": QUEUE})

    async def start_when_asked(
        self,
        url: str,
        shape: str,
        ask: Callable[[Callable[[], Awaitable[Callable[[], Awaitable[None]]]]], Awaitable[None]],
    ) -> None:
        """Wait for the result in a thread."""
        client = importlib.import_module("dbos").DBOSClient(system_database_url=url)

        async def start() -> Callable[[], Awaitable[None]]:
            handle = client.enqueue({"workflow_name": shape, "queue_name": QUEUE})

            async def finish() -> None:
                await asyncio.to_thread(handle.get_result)

            return finish

        await ask(start)

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Launch DBOS."""
        del concurrency
        launched(defined(url, handled))
        threading.Event().wait()

    def orchestrate(self, url: str) -> None:
        """Do nothing: the engine has no other process."""


if __name__ == "__main__":
    main(DbosFlows())
