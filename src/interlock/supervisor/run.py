"""Runs a supervisor (the API and a pool of workers), alone or together with an orchestrator in one process.

Invariant: when one part ends, all end. The first SIGINT or SIGTERM stops them gracefully, the second one does not wait
for running tasks.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from interlock.client.app import Interlock, load_app
from interlock.orchestrator.process import Orchestrator
from interlock.supervisor.http.server import ApiServer
from interlock.supervisor.pool.pool import Pool
from interlock.supervisor.pool.settings import PoolSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastapi import FastAPI

    from interlock.config import Config
    from interlock.service import BackgroundService

UP_POOL = "up"  # name of the pool of `interlock up`, if it is free
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_supervisor(
    config: Config,
    *,
    app: Interlock | None = None,
    leave: bool = False,
    extensions: Sequence[Callable[[FastAPI], None]] = (),
    started: Callable[[ApiServer], None] = lambda _: None,
) -> None:
    """Run a supervisor until a signal arrives. With `leave`, the worker processes run on when it stops."""
    if app is None:
        # the declared app, to check what is enqueued over REST; without one, any task and job is accepted by name
        app = (
            Interlock(config=config, max_connections=config.supervisor_connections)
            if config.app is None
            else load_app(config.app)
        )
    settings = PoolSettings.from_config(config, leave_running=leave)
    asyncio.run(supervise(app, config, settings, extensions=extensions, started=started))


async def supervise(
    app: Interlock,
    config: Config,
    settings: PoolSettings,
    *,
    extensions: Sequence[Callable[[FastAPI], None]] = (),
    started: Callable[[ApiServer], None] = lambda _: None,
) -> None:
    """Serve the API and run the pool until a signal arrives or one of them fails; `started` gets the running API."""
    async with app:
        pool = _make_pool(app, config, settings)
        api = ApiServer(app, config, pool, extensions=extensions)
        stopping = _stop_on_signals(pool.force_stop)
        try:
            await api.start()
            await pool.start()
            started(api)
            await _wait_for_end([api, pool], stopping)
        finally:
            await asyncio.gather(api.stop(), pool.stop())


async def run_together(
    app: Interlock,
    config: Config,
    *,
    workers: int,
    extensions: Sequence[Callable[[FastAPI], None]] = (),
    started: Callable[[ApiServer, str], None] = lambda _, __: None,
) -> None:
    """Run an orchestrator, the API and a pool of workers in one process tree until a signal arrives.

    The workers are a pool that is tied to this process: they end with it, also when it is killed. `started` gets the
    running API and the name of the pool. The orchestrator stops last, so that
    it advances the jobs whose steps the workers finish while they stop.
    """
    async with app:
        pool = _make_pool(app, config, PoolSettings.from_config(config, tied=True))
        api = ApiServer(app, config, pool, extensions=extensions)
        orchestrator = Orchestrator(app)

        def force_stop() -> None:
            pool.force_stop()
            orchestrator.request_stop()

        stopping = _stop_on_signals(force_stop)
        try:
            await orchestrator.start()
            await api.start()
            name = await pool.hold_pool(UP_POOL, workers)
            await pool.start()
            started(api, name)
            await _wait_for_end([api, pool], stopping)
        finally:
            await asyncio.gather(api.stop(), pool.stop())
            await orchestrator.stop()


def _make_pool(app: Interlock, config: Config, settings: PoolSettings) -> Pool:
    # the processes use the app's database, whatever the configuration names
    database = replace(config, database_url=app.config.database_url, data_dir=app.config.data_dir)
    return Pool(app.url, database, settings, notifier=app.notifier)


def _stop_on_signals(force_stop: Callable[[], None]) -> asyncio.Event:
    """Set the returned event at the first signal, and call `force_stop` at each further one."""
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            force_stop()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    return stopping


async def _wait_for_end(services: list[BackgroundService], stopping: asyncio.Event) -> None:
    """Wait until a signal arrived or a service ended, then stop all; raise the error of a service that failed."""
    ends = [asyncio.create_task(service.join()) for service in services]
    signaled = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([*ends, signaled], return_when=asyncio.FIRST_COMPLETED)
    finally:
        signaled.cancel()
        stopping.set()  # from here on a signal forces the stop
        await asyncio.gather(*(service.stop() for service in services))
    await asyncio.gather(*ends)
