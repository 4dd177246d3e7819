"""Runs a supervisor as a process of its own: the API, and the pool of the workers that it keeps.

Invariant: whatever ends first ends both; the first signal ends them in good order, the second one now.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from interlock.client.app import Interlock
from interlock.client.loading import load_app
from interlock.supervisor.pool import Pool
from interlock.supervisor.pool_settings import PoolSettings
from interlock.supervisor.serve import serve_api

if TYPE_CHECKING:
    from collections.abc import Callable

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
        pool = Pool(app.url, placed, settings)
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
