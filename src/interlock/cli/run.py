"""`interlock worker`: one worker process, set up by flags over the environment over the file.

Invariant: metrics have no token, so they leave this machine only when a flag on this very command says so.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

import typer

from interlock.cli.app_context import command_config, database_running, load_command_app
from interlock.cli.format import print_note
from interlock.client.app import Interlock
from interlock.config import Config, is_loopback
from interlock.errors import ConfigError
from interlock.model.graph import BUILT_IN_HANDLER
from interlock.orchestrator.run import run_orchestrator
from interlock.postgres.connection import connect, database_url
from interlock.postgres.notifier import WakeMode
from interlock.telemetry import configure_logging
from interlock.worker.run import run_worker


def worker(
    context: typer.Context,
    app: Annotated[
        str | None, typer.Option(help="The app whose tasks to run.", metavar="PACKAGE.MODULE:APP", show_default=False)
    ] = None,
    namespaces: Annotated[
        str | None, typer.Option(help="Take tasks of these namespaces only; `default` unless given.", metavar="A,B")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="How many tasks to run at once; 1 unless given.")] = None,
    name: Annotated[
        str | None, typer.Option(help="The first part of the worker's id; the host's name unless given.")
    ] = None,
    lease: Annotated[
        float | None, typer.Option(help="Seconds after which a silent worker's tasks are taken back; 30 unless given.")
    ] = None,
    grace: Annotated[
        float | None, typer.Option(help="Seconds that running tasks get at a shutdown; 20 unless given.")
    ] = None,
    mode: Annotated[
        WakeMode | None, typer.Option(help="How an idle worker learns of new tasks; hybrid unless given.")
    ] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve /metrics on this port.", metavar="PORT")] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option(help="The address to serve them on; 127.0.0.1 unless given. There is no token.", metavar="HOST"),
    ] = None,
) -> None:
    """Run the tasks of an app. Ctrl-C or SIGTERM lets running tasks finish within the grace; a second one does not."""
    config = command_config(
        context,
        app=app,
        namespaces=namespaces,
        concurrency=concurrency,
        worker_name=name,
        lease=lease,
        grace=grace,
        wake_mode=mode,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
    )
    if config.app is None:
        raise ConfigError("which app? Set --app, INTERLOCK_APP or `app` in interlock.toml to package.module:app")
    if config.metrics_port is not None and metrics_host is None and not is_loopback(config.metrics_host):
        raise ConfigError(
            f"metrics would be served on {config.metrics_host} to whoever can reach it, without a token; "
            "if that is meant, say so with --metrics-host"
        )
    found = load_command_app(context, config.app)
    warn_of_idleness(found, config)
    with database_running(found):
        run_worker(config)


def warn_of_idleness(app: Interlock, config: Config) -> None:
    """Say what would leave the worker without anything to do."""
    homes = sorted({task.namespace for task in app.tasks.values() if task.name != BUILT_IN_HANDLER})
    if not homes:
        print_note(f"warning: the app {config.app} has no tasks; are the modules that define them imported?")
    elif not set(homes) & set(config.namespaces):
        print_note(
            f"warning: the tasks of {config.app} are enqueued to {', '.join(homes)}, "
            f"and this worker takes from {', '.join(config.namespaces)} only; see --namespaces"
        )


# SECTION cli/metrics
# Where metrics may be served.
#
# Invariant: they have no token, so they leave this machine only when a flag on this very command says so.


def refuse_public_metrics(config: Config, flag: str | None) -> None:
    """Refuse to serve metrics to other machines, unless the flag of the command asks for it."""
    if config.metrics_port is not None and flag is None and not is_loopback(config.metrics_host):
        raise ConfigError(
            f"metrics would be served on {config.metrics_host} to whoever can reach it, without a token; "
            "if that is meant, say so with --metrics-host"
        )


# SECTION cli/orchestrator
# `interlock orchestrator`: one orchestrator process, set up by flags over the environment over the file.


def orchestrator(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Option(help="The first part of the orchestrator's id; the host's name unless given.")
    ] = None,
    mode: Annotated[WakeMode | None, typer.Option(help="How it learns of step results; hybrid unless given.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve /metrics on this port.", metavar="PORT")] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option(help="The address to serve them on; 127.0.0.1 unless given. There is no token.", metavar="HOST"),
    ] = None,
) -> None:
    """Advance jobs as their steps end. Any number can run at once. Ctrl-C or SIGTERM finishes the batch under way."""
    config = command_config(
        context, worker_name=name, wake_mode=mode, metrics_port=metrics_port, metrics_host=metrics_host
    )
    refuse_public_metrics(config, metrics_host)
    with database_running(Interlock(config=config)):
        run_orchestrator(config)


# SECTION cli/supervisor
# `interlock supervisor`: the API and the pool of workers, set up by flags over the environment over the file.
#
# Invariant: others are let in only with a token; an address that others can reach is not served while there is none.


def supervisor(
    context: typer.Context,
    host: Annotated[
        str | None,
        typer.Option(
            help="The address to serve the API on; 127.0.0.1 unless given. Others need tokens.", metavar="HOST"
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="The port; 8321 unless given, 0 for any.", metavar="PORT")] = None,
    app: Annotated[
        str | None,
        typer.Option(
            help="The app that its workers run, and against which tasks are checked.", metavar="PACKAGE.MODULE:APP"
        ),
    ] = None,
    require_token: Annotated[
        bool | None, typer.Option("--require-token", help="Ask for a token on a loopback address too.")
    ] = None,
    leave_workers: Annotated[
        bool, typer.Option("--leave-workers", help="Let the workers' processes go on when it stops.")
    ] = False,
) -> None:
    """Serve the API, and keep the processes of the workers that are made with it. Ctrl-C stops it in good order."""
    # not at the top: it brings a web server along, which no other command needs
    from interlock.supervisor.run import run_supervisor  # noqa: PLC0415 - heavy, and seldom needed

    config = command_config(
        context, supervisor_host=host, supervisor_port=port, app=app, supervisor_require_token=require_token
    )
    used = (
        Interlock(config=config, max_connections=config.supervisor_connections)
        if config.app is None
        else load_command_app(context, config.app)
    )
    with database_running(used):
        run_supervisor(config, app=used, leave=leave_workers, started=_tell)


def _tell(address: str) -> None:
    print_note(f"the API is at {address}, described at {address}/docs")


# SECTION cli/up
# `interlock up`: the database, the orchestrator, the API and some workers with one command, and one Ctrl-C.

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
    config = command_config(
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
    with database_running(used):
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
    found = load_command_app(context, config.app)
    if workers:
        warn_of_idleness(found, config)
    return found


async def _run(app: Interlock, config: Config, workers: int) -> None:
    # not at the top: it brings a web server along, which no other command needs
    from interlock.postgres.migrate import migrate  # noqa: PLC0415 - heavy, and seldom needed
    from interlock.supervisor.run import run_together  # noqa: PLC0415 - the same

    with database_url(app.config) as url:
        async with connect(url) as connection:
            for migration in await migrate(connection, queue=config.orchestration_queue):
                print_note(f"applied {migration.name}")
        await run_together(
            app, config, workers=workers, started=lambda address: _print_addresses(app, config, workers, address)
        )


def _print_addresses(app: Interlock, config: Config, workers: int, address: str) -> None:
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
