"""`interlock worker`, `orchestrator`, `supervisor` and `up`: the commands that run processes.

Invariant: metrics have no authentication, so they are served on a non-loopback address only by an explicit flag of the
command. The API needs a token, unless --no-token allows a loopback address without one; it is served on another
address only when a token exists.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.app_context import Dev, command_config, database_running, load_command_app
from interlock.cli.format import print_note
from interlock.cli.reload import run_reloading
from interlock.client.app import Interlock
from interlock.config import Config, is_loopback
from interlock.errors import ConfigError
from interlock.orchestrator.run import run_orchestrator
from interlock.postgres.connection import connect, database_url
from interlock.postgres.migrate import migrate
from interlock.postgres.notifier import WakeMode
from interlock.telemetry import configure_logging
from interlock.worker.run import run_worker

if TYPE_CHECKING:
    from interlock.supervisor.http.server import ApiServer

SIGN_IN_COMMAND = "`interlock dashboard --token-name NAME` prints a link that signs in with a token"
DEFAULT_WORKERS = 2  # of `interlock up`
MAX_WORKERS = 100

Namespaces = Annotated[
    str | None, typer.Option(help="Claim tasks of these namespaces only; `default` unless given.", metavar="A,B")
]
Reload = Annotated[
    bool, typer.Option("--reload", help="For development: restart when a source file of the app changes.")
]
NoToken = Annotated[
    bool | None,
    typer.Option("--no-token", help="Need no token on a loopback address: every user of this machine is admin then."),
]
MetricsPort = Annotated[int | None, typer.Option(help="Serve /metrics on this port.", metavar="PORT")]
MetricsHost = Annotated[
    str | None,
    typer.Option(help="The address of /metrics; 127.0.0.1 unless given. It has no authentication.", metavar="HOST"),
]


def worker(
    context: typer.Context,
    app: Annotated[
        str | None, typer.Option(help="The app whose tasks to run.", metavar="PACKAGE.MODULE:APP", show_default=False)
    ] = None,
    namespaces: Namespaces = None,
    concurrency: Annotated[int | None, typer.Option(help="The number of concurrent tasks; 1 unless given.")] = None,
    name: Annotated[
        str | None, typer.Option(help="The first part of the worker's id; the host name unless given.")
    ] = None,
    lease: Annotated[
        float | None,
        typer.Option(
            help="Visibility timeout: seconds without a renewal after which its tasks are recovered; 30 unless given."
        ),
    ] = None,
    grace: Annotated[
        float | None, typer.Option(help="Seconds that running tasks get at shutdown; 20 unless given.")
    ] = None,
    mode: Annotated[
        WakeMode | None, typer.Option(help="How an idle worker learns of new tasks; hybrid unless given.")
    ] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    dev: Dev = None,
    reload: Reload = False,
) -> None:
    """Run the tasks of an app. Ctrl-C or SIGTERM waits for running tasks up to the grace period; a second one does not.

    Example: `interlock worker --app shop.tasks:app --namespaces default,reports --concurrency 8`.
    """
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
        dev=dev,
    )
    if config.app is None:
        raise ConfigError("which app? Set --app, INTERLOCK_APP or `app` in interlock.toml to package.module:app")
    refuse_public_metrics(config, metrics_host)
    if reload:
        raise typer.Exit(run_reloading(config.app))
    found = load_command_app(context, config.app, dev=config.dev)
    warn_if_idle(found, config)
    with database_running(found):
        run_worker(config)


def warn_if_idle(app: Interlock, config: Config) -> None:
    """Warn when the worker would find no task to run."""
    homes = sorted({task.namespace for task in app.tasks.values()})
    if not homes:
        print_note(f"warning: the app {config.app} has no tasks; are the modules that define them imported?")
    elif not set(homes) & set(config.namespaces):
        print_note(
            f"warning: the tasks of {config.app} are enqueued to {', '.join(homes)}, "
            f"and this worker takes from {', '.join(config.namespaces)} only; see --namespaces"
        )


def refuse_public_metrics(config: Config, flag: str | None) -> None:
    """Refuse a non-loopback address for metrics unless it comes from the flag of this command."""
    if config.metrics_port is not None and flag is None and not is_loopback(config.metrics_host):
        raise ConfigError(
            f"metrics have no authentication and would be served on {config.metrics_host}, which is not loopback; "
            "to allow this, give the address with --metrics-host"
        )


def orchestrator(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Option(help="The first part of the orchestrator's id; the host name unless given.")
    ] = None,
    mode: Annotated[WakeMode | None, typer.Option(help="How it learns of step results; hybrid unless given.")] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
) -> None:
    """Advance jobs as their steps end; any number can run. Ctrl-C or SIGTERM finishes the current batch.

    Example: `interlock orchestrator --metrics-port 9100`.
    """
    config = command_config(
        context, worker_name=name, wake_mode=mode, metrics_port=metrics_port, metrics_host=metrics_host
    )
    refuse_public_metrics(config, metrics_host)
    with database_running(Interlock(config=config)):
        run_orchestrator(config)


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
            help="The app that its workers run and that new tasks are checked against.", metavar="PACKAGE.MODULE:APP"
        ),
    ] = None,
    no_token: NoToken = None,
    leave_workers: Annotated[
        bool, typer.Option("--leave-workers", help="Keep the worker processes running when it stops.")
    ] = False,
    dev: Dev = None,
) -> None:
    """Serve the API and run the worker processes that are created with it. Ctrl-C stops both in order.

    Example: `interlock supervisor --app shop.tasks:app --port 8321`.
    """
    from interlock.dashboard.app import add_dashboard  # noqa: PLC0415 - imports a web server, slow
    from interlock.supervisor.run import run_supervisor  # noqa: PLC0415 - the same

    config = command_config(
        context, supervisor_host=host, supervisor_port=port, app=app, supervisor_no_token=no_token, dev=dev
    )
    used = (
        Interlock(config=config, max_connections=config.supervisor_connections)
        if config.app is None
        else load_command_app(context, config.app, dev=config.dev)
    )
    with database_running(used):
        run_supervisor(
            config,
            app=used,
            leave=leave_workers,
            extensions=[add_dashboard],
            started=_note_addresses,
        )


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
        int | None,
        typer.Option(help="The number of worker processes; 2 unless given.", metavar="N", min=0, max=MAX_WORKERS),
    ] = None,
    namespaces: Namespaces = None,
    concurrency: Annotated[
        int | None, typer.Option(help="The number of concurrent tasks of each worker; 1 unless given.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="The address to serve the API on; 127.0.0.1 unless given. Others need tokens.", metavar="HOST"
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="The port; 8321 unless given, 0 for any.", metavar="PORT")] = None,
    no_token: NoToken = None,
    dev: Dev = None,
    reload: Reload = False,
) -> None:
    """Run everything on this machine: database, orchestrator, API and workers. Ctrl-C stops all, a second one at once.

    The database is migrated first. The log shows warnings only, unless --log-level is given.
    Example: `interlock up --app shop.tasks:app --workers 4`.
    """
    config = command_config(
        context,
        app=app,
        namespaces=namespaces,
        concurrency=concurrency,
        supervisor_host=host,
        supervisor_port=port,
        supervisor_no_token=no_token,
        dev=dev,
    )
    config = _default_to_warnings(context, config)
    count = _worker_count(config, workers)
    if reload:
        raise typer.Exit(run_reloading(config.app))
    used = _load_app_or_default(context, config, count)
    with database_running(used):
        asyncio.run(_run(used, config, count))


def _default_to_warnings(context: typer.Context, config: Config) -> Config:
    """Log warnings only, so that the printed addresses stay visible, unless a level is set."""
    given = context.parent is not None and context.parent.params.get("log_level") is not None
    if given or config.log_level != Config().log_level:
        return config
    configure_logging("warning", "json" if config.log_format == "json" else "console")
    return replace(config, log_level="warning")


def _worker_count(config: Config, workers: int | None) -> int:
    if config.app is None and workers:
        raise ConfigError(
            f"which app should {workers} workers run? Set --app, INTERLOCK_APP or `app` in interlock.toml "
            "to package.module:app"
        )
    return 0 if config.app is None else DEFAULT_WORKERS if workers is None else workers


def _load_app_or_default(context: typer.Context, config: Config, workers: int) -> Interlock:
    if config.app is None:
        return Interlock(config=config, max_connections=config.supervisor_connections)
    found = load_command_app(context, config.app, dev=config.dev)
    if workers:
        warn_if_idle(found, config)
    return found


async def _run(app: Interlock, config: Config, workers: int) -> None:
    from interlock.dashboard.app import add_dashboard  # noqa: PLC0415 - imports a web server, slow
    from interlock.supervisor.run import run_together  # noqa: PLC0415 - the same

    with database_url(app.config) as url:
        async with connect(url) as connection:
            for migration in await migrate(connection, queue=config.orchestration_queue):
                print_note(f"applied {migration.name}")
        await run_together(
            app,
            config,
            workers=workers,
            extensions=[add_dashboard],
            started=lambda api, pool: _print_addresses(app, config, workers, api, pool),
        )


def _note_addresses(api: ApiServer) -> None:
    print_note(f"the API is at {api.url}, described at {api.url}/docs")
    print_note(_sign_in_hint(api))


def _sign_in_hint(api: ApiServer) -> str:
    """Say how to sign in with a browser."""
    if api.sign_in_url is not None:
        return f"sign in once, within two minutes: {api.sign_in_url}"
    return "every user of this machine is admin, because no token is needed" if api.is_open else SIGN_IN_COMMAND


def _print_addresses(app: Interlock, config: Config, workers: int, api: ApiServer, pool: str) -> None:
    """Print where the parts are reached."""
    place = app.url if app.config.database_url is None else "your own server"
    described = f"{workers} of {config.app}, pool {pool}" if workers else "none"
    if config.app is None:
        described += "; --app package.module:app starts workers for an app"
    typer.echo(f"database      {place}")
    typer.echo(f"API           {api.url}, described at {api.url}/docs")
    typer.echo(f"dashboard     {_sign_in_hint(api)}")
    typer.echo("orchestrator  in this process")
    typer.echo(f"workers       {described}")
    typer.echo("Ctrl-C stops all of it; a second one does not wait for running tasks")
