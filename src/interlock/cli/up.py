"""`interlock up`: the database, the orchestrator, the API and some workers with one command, and one Ctrl-C."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

import typer

from interlock.cli.opening import loaded, located, settings
from interlock.cli.output import tell
from interlock.cli.worker import warn_of_idleness
from interlock.client.app import Interlock
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.store.database import connect, database_url
from interlock.telemetry import configure_logging

WORKERS = 2
MOST = 100


def up(
    context: typer.Context,
    app: Annotated[
        str | None,
        typer.Option(
            help="The app whose tasks to run; without one there are no workers.",
            metavar="PACKAGE.MODULE:APP",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="How many worker processes; 2 unless given.", metavar="N", min=0, max=MOST)
    ] = None,
    namespaces: Annotated[
        str | None, typer.Option(help="Take tasks of these namespaces only; `default` unless given.", metavar="A,B")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="How many tasks each worker runs at once; 1 unless given.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="The address to serve the API on; 127.0.0.1 unless given. Others need tokens.", metavar="HOST"
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="The port; 8321 unless given, 0 for any.", metavar="PORT")] = None,
) -> None:
    """Run everything on this machine: database, orchestrator, API and workers. Ctrl-C stops all, a second one now.

    The database is migrated first. Logs are kept to warnings unless --log-level says otherwise.
    """
    config = settings(
        context,
        app=app,
        namespaces=namespaces,
        concurrency=concurrency,
        supervisor_host=host,
        supervisor_port=port,
    )
    config = _quiet(context, config)
    count = _count(config, workers)
    used = _app(context, config, count)
    with located(used):
        asyncio.run(_run(used, config, count))


def _quiet(context: typer.Context, config: Config) -> Config:
    """Keep to warnings, so that the addresses stay in sight, unless somebody asked for a level."""
    given = context.parent is not None and context.parent.params.get("log_level") is not None
    if given or config.log_level != Config().log_level:
        return config
    configure_logging("warning", "json" if config.log_format == "json" else "console")
    return replace(config, log_level="warning")


def _count(config: Config, workers: int | None) -> int:
    if config.app is None and workers:
        raise ConfigError(
            f"which app are {workers} workers to run? Set --app, INTERLOCK_APP or `app` in interlock.toml "
            "to package.module:app"
        )
    return 0 if config.app is None else WORKERS if workers is None else workers


def _app(context: typer.Context, config: Config, workers: int) -> Interlock:
    if config.app is None:
        return Interlock(config=config, max_connections=config.supervisor_connections)
    found = loaded(context, config.app)
    if workers:
        warn_of_idleness(found, config)
    return found


async def _run(app: Interlock, config: Config, workers: int) -> None:
    # not at the top: it brings a web server along, which no other command needs
    from interlock.store.migrate import migrate  # noqa: PLC0415 - heavy, and seldom needed
    from interlock.supervisor.together import run_together  # noqa: PLC0415 - the same

    with database_url(app.config) as url:
        async with connect(url) as connection:
            for migration in await migrate(connection, queue=config.orchestration_queue):
                tell(f"applied {migration.name}")
        await run_together(app, config, workers=workers, started=lambda address: _tell(app, config, workers, address))


def _tell(app: Interlock, config: Config, workers: int, address: str) -> None:
    """Say where everything is."""
    place = app.url if app.config.database_url is None else "your own server"
    hands = f"{workers} of {config.app}" if workers else "none"
    if config.app is None:
        hands += "; --app package.module:app gives them something to run"
    typer.echo(f"database      {place}")
    typer.echo(f"API           {address}, described at {address}/docs")
    typer.echo("orchestrator  in this process")
    typer.echo(f"workers       {hands}")
    typer.echo("Ctrl-C stops all of it; a second one does not wait for running tasks")
