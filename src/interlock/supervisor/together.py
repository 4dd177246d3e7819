"""Runs everything that one machine needs in one process tree: the orchestrator, the API, and a pool of workers.

Invariant: whatever ends first ends all; nothing is left behind, neither in good order nor when this process is killed,
because its workers are tied to it. What workers finish while they stop is still carried on.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interlock.orchestrator.process import Orchestrator
from interlock.supervisor.pool import Pool
from interlock.supervisor.pool_settings import PoolSettings
from interlock.supervisor.serve import serve_api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from interlock.client.app import Interlock
    from interlock.config import Config

SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def run_together(
    app: Interlock, config: Config, *, workers: int, started: Callable[[str], None] = lambda _: None
) -> None:
    """Run all of it until a signal comes; `started` gets the address of the API once workers are on their way."""
    stop = asyncio.Event()
    async with app:
        # the processes use the database that the app uses, whoever named it
        placed = replace(config, database_url=app.config.database_url, data_dir=app.config.data_dir)
        pool = Pool(app.url, placed, PoolSettings.of(config, tied=True))
        orchestrator = Orchestrator(app)
        _obey_signals(stop, pool, orchestrator)
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with _orchestrating(orchestrator):
            serving = asyncio.create_task(serve_api(app, config, stop, started=address.set_result))
            either: set[asyncio.Future[Any]] = {serving, address}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            tasks = [serving]
            if address.done():  # else it was refused, and says why below
                await pool.add(workers)
                tasks.append(asyncio.create_task(pool.run(stop)))
                started(address.result())
            await _until_one_ends(tasks, stop)


async def _until_one_ends(tasks: list[asyncio.Task[None]], stop: asyncio.Event) -> None:
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in ended:
        if isinstance(outcome, BaseException):
            raise outcome


@asynccontextmanager
async def _orchestrating(orchestrator: Orchestrator) -> AsyncIterator[None]:
    await orchestrator.start()
    try:
        yield
    finally:
        await orchestrator.stop()


def _obey_signals(stop: asyncio.Event, pool: Pool, orchestrator: Orchestrator) -> None:
    def obey() -> None:
        if stop.is_set():
            pool.hurry()
            orchestrator.request_stop()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, obey)
