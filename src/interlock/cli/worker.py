"""`interlock worker`: one worker process, set up by flags over the environment over the file.

Invariant: metrics have no token, so they leave this machine only when a flag on this very command says so.
"""

from __future__ import annotations

from typing import Annotated

import typer

from interlock.cli.opening import loaded, located, settings
from interlock.cli.output import tell
from interlock.client.app import Interlock
from interlock.client.graph import BUILT_IN
from interlock.config import Config, is_loopback
from interlock.errors import ConfigError
from interlock.worker.run import run_worker
from interlock.worker.settings import WakeMode


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
    config = settings(
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
    found = loaded(context, config.app)
    warn_of_idleness(found, config)
    with located(found):
        run_worker(config)


def warn_of_idleness(app: Interlock, config: Config) -> None:
    """Say what would leave the worker without anything to do."""
    homes = sorted({task.namespace for task in app.tasks.values() if task.name != BUILT_IN})
    if not homes:
        tell(f"warning: the app {config.app} has no tasks; are the modules that define them imported?")
    elif not set(homes) & set(config.namespaces):
        tell(
            f"warning: the tasks of {config.app} are enqueued to {', '.join(homes)}, "
            f"and this worker takes from {', '.join(config.namespaces)} only; see --namespaces"
        )
