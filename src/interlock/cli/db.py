"""`interlock db`: the embedded PostgreSQL server, by hand."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from interlock.cli.output import tell
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.store.database import checked_url
from interlock.store.embedded import EmbeddedServer

app = typer.Typer(
    help="The embedded PostgreSQL server. Commands start it by themselves; these are for doing it by hand.",
    no_args_is_help=True,
)


def _embedded(config: Config) -> EmbeddedServer:
    if config.database_url is not None:
        raise ConfigError(
            "a database URL is set, so there is no embedded server to work with; unset INTERLOCK_DATABASE_URL "
            "(or leave out --database-url) to use it"
        )
    return EmbeddedServer(config.data_dir, note=tell)


@app.command()
def start(context: typer.Context) -> None:
    """Start the server and let it run until `interlock db stop`. Prints its URL."""
    typer.echo(_embedded(context.obj).start())


@app.command()
def stop(context: typer.Context) -> None:
    """Stop the server, whoever uses it; their work is rolled back and can be taken up again."""
    tell("stopped" if _embedded(context.obj).stop() else "it was not running")


@app.command()
def status(context: typer.Context) -> None:
    """Tell whether the server runs, and where."""
    found = _embedded(context.obj).status()
    typer.echo(f"data directory  {found.data_dir}")
    typer.echo(f"running         {'yes' if found.running else 'no'}")
    if found.running:
        typer.echo(f"version         {found.version}\nprocess         {found.pid}\nurl             {found.url}")
        typer.echo(f"stops           {'on interlock db stop' if found.pinned else 'when its last user leaves'}")


@app.command()
def url(context: typer.Context) -> None:
    """Print the libpq URL of the database in use; psql and every driver accept it."""
    config: Config = context.obj
    typer.echo(config.database_url or _embedded(config).url())


@app.command()
def psql(
    context: typer.Context,
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments for psql, after --.")] = None,
) -> None:
    """Open psql on the database in use, starting the embedded server if need be."""
    config: Config = context.obj
    extra = arguments or []
    # This process becomes psql, so that signals are psql's own affair: Ctrl-C ends a query there, not the session.
    if config.database_url is not None:
        url = checked_url(config.database_url)
        program = Path(shutil.which("psql") or EmbeddedServer.psql_path())
        _restore_signals()
        os.execv(program, [str(program), url, *extra])  # noqa: S606 - the user's own psql, or ours; no shell
    with _embedded(config) as server:
        _restore_signals()
        server.hand_over(server.psql_path(), server.url(), *extra)


def _restore_signals() -> None:
    """Give SIGPIPE back its meaning, which Python takes away from itself and so from what it becomes."""
    if sys.platform != "win32":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
