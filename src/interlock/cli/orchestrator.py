"""`interlock orchestrator`: one orchestrator process, set up by flags over the environment over the file."""

from __future__ import annotations

from typing import Annotated

import typer

from interlock.cli.metrics import refuse_public_metrics
from interlock.cli.opening import located, settings
from interlock.client.app import Interlock
from interlock.orchestrator.run import run_orchestrator
from interlock.store.listening import WakeMode


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
    config = settings(context, worker_name=name, wake_mode=mode, metrics_port=metrics_port, metrics_host=metrics_host)
    refuse_public_metrics(config, metrics_host)
    with located(Interlock(config=config)):
        run_orchestrator(config)
