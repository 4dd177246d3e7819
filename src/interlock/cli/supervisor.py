"""`interlock supervisor`: the API and the pool of workers, set up by flags over the environment over the file.

Invariant: others are let in only with a token; an address that others can reach is not served while there is none.
"""

from __future__ import annotations

from typing import Annotated

import typer

from interlock.cli.opening import loaded, located, settings
from interlock.cli.output import tell
from interlock.client.app import Interlock


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

    config = settings(
        context, supervisor_host=host, supervisor_port=port, app=app, supervisor_require_token=require_token
    )
    used = (
        Interlock(config=config, max_connections=config.supervisor_connections)
        if config.app is None
        else loaded(context, config.app)
    )
    with located(used):
        run_supervisor(config, app=used, leave=leave_workers, started=_tell)


def _tell(address: str) -> None:
    tell(f"the API is at {address}, described at {address}/docs")
