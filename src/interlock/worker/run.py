"""The ways to run a worker: as a process of its own, or beside other work in one event loop."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from interlock.client.loading import load_app
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.worker.process import WorkerStateMachine
from interlock.worker.settings import WorkerSettings, get_instance_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.client.app import Interlock
    from interlock.worker.assignment import Assignment


def run_worker(config: Config | None = None, assignment: Assignment | None = None) -> None:
    """Run a worker named after this instance, or for the row of a supervisor, until it is asked to stop."""
    _worker(config or Config.load(), assignment).run()


def _worker(settings: Config, assignment: Assignment | None) -> WorkerStateMachine:
    if assignment is None:
        app = _app_of(settings)
        return WorkerStateMachine(get_instance_name(settings.worker_name), app, WorkerSettings.of(settings))
    settings = replace(settings, metrics_port=None)  # one of many that are set up alike: they cannot share a port
    app = _app_of(settings)
    # the row is in the supervisor's database, whatever the app says of itself
    app.config = replace(app.config, database_url=settings.database_url, data_dir=settings.data_dir)
    wanted = replace(WorkerSettings.of(settings), row=assignment.row, generation=assignment.generation)
    return WorkerStateMachine(assignment.instance, app, wanted)


@asynccontextmanager
async def serving(app: Interlock, settings: WorkerSettings | None = None) -> AsyncIterator[WorkerStateMachine]:
    """Run a worker beside the caller's own work, until the block ends; it is then shut down in good order."""
    worker = WorkerStateMachine(
        get_instance_name(app.config.worker_name), app, settings or WorkerSettings.of(app.config)
    )
    running = asyncio.create_task(worker.serve(signals=False))
    try:
        yield worker
    finally:
        if worker.is_running() and not worker.context.shutdown_requested:
            worker.request_shutdown()
        await running


def _app_of(config: Config) -> Interlock:
    """Load the app that the settings name, and serve its metrics if they say where."""
    if config.app is None:
        raise ConfigError("which app? Set --app, INTERLOCK_APP or `app` in interlock.toml to package.module:app")
    if config.metrics_port is not None:
        try:
            start_http_server(config.metrics_port, addr=config.metrics_host)
        except OSError as error:
            place = f"{config.metrics_host}:{config.metrics_port}"
            raise ConfigError(f"metrics cannot be served on {place}: {error.strerror}") from None
    return load_app(config.app)
