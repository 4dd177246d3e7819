"""Runs a supervisor as a process of its own: the API, and the pool of the workers that it keeps.

Invariant: whatever ends first ends both; the first signal ends them in good order, the second one now.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interlock.client.app import Interlock, load_app
from interlock.orchestrator.process import Orchestrator
from interlock.supervisor.http.app import serve_api
from interlock.supervisor.pool.pool import Pool
from interlock.supervisor.pool.settings import PoolSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from interlock.config import Config


def run_supervisor(
    config: Config,
    *,
    app: Interlock | None = None,
    leave: bool = False,
    started: Callable[[str], None] = lambda _: None,
) -> None:
    """Supervise until asked to stop. With `leave`, the workers' processes go on when it stops."""
    used = app if app is not None else _app_of(config)
    asyncio.run(supervise(used, config, PoolSettings.of(config, leave=leave), started=started))


async def supervise(
    app: Interlock, config: Config, settings: PoolSettings, *, started: Callable[[str], None] = lambda _: None
) -> None:
    """Serve the API and keep the pool, until a signal comes or one of them fails."""
    stop = asyncio.Event()
    async with app:
        # the processes use the database that the app uses, whoever named it
        placed = replace(config, database_url=app.config.database_url, data_dir=app.config.data_dir)
        pool = Pool(app.url, placed, settings, notifier=app.notifier)
        _obey_signals(stop, pool)
        tasks = [
            asyncio.create_task(serve_api(app, config, stop, started=started)),
            asyncio.create_task(pool.run(stop)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, BaseException):
                raise outcome


def _obey_signals(stop: asyncio.Event, pool: Pool) -> None:
    def obey() -> None:
        if stop.is_set():
            pool.hurry()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, obey)


def _app_of(config: Config) -> Interlock:
    """Give the app that the settings name, so that what is enqueued can be checked; without one, a plain app."""
    if config.app is None:
        return Interlock(config=config, max_connections=config.supervisor_connections)
    return load_app(config.app)


# SECTION supervisor/together
# Runs everything that one machine needs in one process tree: the orchestrator, the API, and a pool of workers.
#
# Invariant: whatever ends first ends all; nothing is left behind, neither in good order nor when this process is
# killed,
# because its workers are tied to it. What workers finish while they stop is still carried on.

SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def run_together(
    app: Interlock, config: Config, *, workers: int, started: Callable[[str], None] = lambda _: None
) -> None:
    """Run all of it until a signal comes; `started` gets the address of the API once workers are on their way."""
    stop = asyncio.Event()
    async with app:
        # the processes use the database that the app uses, whoever named it
        placed = replace(config, database_url=app.config.database_url, data_dir=app.config.data_dir)
        pool = Pool(app.url, placed, PoolSettings.of(config, tied=True), notifier=app.notifier)
        orchestrator = Orchestrator(app)
        _stop_all_on_signals(stop, pool, orchestrator)
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


def _stop_all_on_signals(stop: asyncio.Event, pool: Pool, orchestrator: Orchestrator) -> None:
    def obey() -> None:
        if stop.is_set():
            pool.hurry()
            orchestrator.request_stop()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, obey)
