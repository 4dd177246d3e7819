"""Absurd: tasks of checkpointed steps on PostgreSQL, https://pypi.org/project/absurd-sdk/ (schema: absurdctl)."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

import psycopg
from flows import CHAIN, FAN, WIDTH, main

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

QUEUE, PARTS = "flows", "parts"
POLL_INTERVAL_S = 0.01


async def nothing() -> int:
    """Run a no-op step."""
    return 1


def client(url: str, queue: str) -> Any:
    """Connect; imported lazily, since Absurd may not be installed."""
    return importlib.import_module("absurd_sdk").AsyncAbsurd(url, queue_name=queue)


def defined(url: str, handled: Callable[[], None]) -> tuple[Any, Any]:
    """Create a client for each queue, with the tasks of its worker."""
    flows, parts = client(url, QUEUE), client(url, PARTS)

    async def ends() -> int:
        handled()
        return 1

    @flows.register_task(CHAIN)  # type: ignore[untyped-decorator]  # may not be installed
    async def chain(_: Any, context: Any) -> None:
        await context.step("first", ends)
        await context.step("second", nothing)
        await context.step("third", ends)

    @flows.register_task(FAN)  # type: ignore[untyped-decorator]  # may not be installed
    async def fan(_: Any, context: Any) -> None:
        await context.step("first", ends)
        made = [await parts.spawn("part", {}) for _ in range(WIDTH)]
        for part in made:
            await context.await_task_result(part["task_id"], queue_name=PARTS)
        await context.step("last", ends)

    @parts.register_task("part")  # type: ignore[untyped-decorator]  # may not be installed
    async def part(_: Any, context: Any) -> None:
        await context.step("only", nothing)

    del chain, fan, part
    return flows, parts


class AbsurdFlows:
    """Absurd."""

    setting = "one process, one asynchronous worker for each queue, which polls every 10 ms"
    remaining = "select (exists (select from absurd.t_flows where state in ('pending', 'running', 'sleeping')))::int"

    async def prepare(self, url: str) -> None:
        """Create the schema, which comes with its command-line tool."""
        schema: str = importlib.import_module("absurdctl").BUNDLED_SCHEMA_SQL
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            await connection.execute(schema.encode())
            for queue in (QUEUE, PARTS):
                await connection.execute("select absurd.create_queue(%s)", [queue])

    async def submit(self, url: str, shape: str, flows: int) -> None:
        """Spawn one by one."""
        app = client(url, QUEUE)
        for _ in range(flows):
            await app.spawn(shape, {}, queue=QUEUE)
        await app.close()

    async def start_when_asked(
        self,
        url: str,
        shape: str,
        ask: Callable[[Callable[[], Awaitable[Callable[[], Awaitable[None]]]]], Awaitable[None]],
    ) -> None:
        """Wait as the library does, by polling."""
        app = client(url, QUEUE)

        async def start() -> Callable[[], Awaitable[None]]:
            made = await app.spawn(shape, {}, queue=QUEUE)

            async def finish() -> None:
                await app.await_task_result(made["task_id"])

            return finish

        await ask(start)
        await app.close()

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run a worker for each queue."""

        async def both() -> None:
            workers = defined(url, handled)
            await asyncio.gather(
                *(worker.start_worker(concurrency=concurrency, poll_interval=POLL_INTERVAL_S) for worker in workers)
            )

        asyncio.run(both())

    def orchestrate(self, url: str) -> None:
        """Do nothing: the engine has no other process."""


if __name__ == "__main__":
    main(AbsurdFlows())
