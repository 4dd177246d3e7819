"""Entry points: run an orchestrator as a process, or beside other work in one event loop."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from interlock.client.app import Interlock
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.orchestrator.process import Orchestrator
from interlock.telemetry import served_registry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.orchestrator.settings import OrchestratorSettings


def run_orchestrator(config: Config | None = None) -> None:
    """Run an orchestrator until it is asked to stop. It needs no app of the user: jobs are in the database."""
    settings = config or Config.load()
    if settings.metrics_port is not None:
        try:
            start_http_server(settings.metrics_port, addr=settings.metrics_host, registry=served_registry())
        except OSError as error:
            place = f"{settings.metrics_host}:{settings.metrics_port}"
            raise ConfigError(f"metrics cannot be served on {place}: {error.strerror}") from None
    gc.collect()
    gc.freeze()  # imported modules live as long as the process: no collection need scan them
    asyncio.run(Orchestrator(Interlock(config=settings)).serve())


@asynccontextmanager
async def orchestrating(app: Interlock, settings: OrchestratorSettings | None = None) -> AsyncIterator[Orchestrator]:
    """Run an orchestrator beside the caller's own work, until the block ends."""
    orchestrator = Orchestrator(app, settings)
    await orchestrator.start()
    try:
        yield orchestrator
    finally:
        await orchestrator.stop()
