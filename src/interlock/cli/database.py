"""`interlock db`: the embedded PostgreSQL server, by hand."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from interlock.cli.format import print_note
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.postgres.connection import connect, database_url, validate_database_url
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.guards import generate as generate_guards
from interlock.postgres.migrate import applied_migrations, grant, known_migrations, pending_migrations, sql_directory
from interlock.postgres.migrate import migrate as apply

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
    return EmbeddedServer(config.data_dir, report_progress=print_note)


@app.command()
def start(context: typer.Context) -> None:
    """Start the server and let it run until `interlock db stop`. Prints its URL."""
    typer.echo(_embedded(context.obj).start())


@app.command()
def stop(context: typer.Context) -> None:
    """Stop the server, whoever uses it; their work is rolled back and can be taken up again."""
    print_note("stopped" if _embedded(context.obj).stop() else "it was not running")


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
        url = validate_database_url(config.database_url)
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


# SECTION cli/migrate
# `interlock migrate`: brings the database to the schema of this release.


def migrate(
    context: typer.Context,
    status: Annotated[bool, typer.Option("--status", help="Show what is applied and what is pending.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the SQL that would run, and run nothing.")] = False,
    grant_to: Annotated[
        str | None, typer.Option(help="Then let this role run the engine without owning it.", metavar="ROLE")
    ] = None,
    generate: Annotated[
        bool,
        typer.Option("--generate", help="For developers: write sql/guards.sql anew if lifecycle.py changed."),
    ] = False,
) -> None:
    """Bring the database to the schema of this release. Safe to run at any time, by any number at once."""
    if generate:
        path = Path(str(sql_directory().joinpath("guards.sql")))
        typer.echo(f"wrote {path.name}" if generate_guards(path) else "the guards are up to date")
        return
    config: Config = context.obj
    with database_url(config, print_note) as url:
        if status:
            asyncio.run(_show_status(url))
        elif dry_run:
            asyncio.run(_show_pending(url))
        else:
            asyncio.run(_migrate(url, grant_to, config.orchestration_queue))


async def _migrate(url: str, role: str | None, queue: str) -> None:
    async with connect(url) as connection:
        mine = await apply(connection, note=print_note, queue=queue)
        print_note(f"{len(mine)} migrations applied" if mine else "the database is up to date")
        if role is not None:
            await grant(connection, role)
            print_note(f"role {role} may run the engine")


async def _show_status(url: str) -> None:
    async with connect(url) as connection:
        applied = await applied_migrations(connection)
    for record in applied:
        typer.echo(f"applied  {record.name}  {record.applied_at:%Y-%m-%d %H:%M:%S %Z}")
    for migration in pending_migrations(known_migrations(), applied):
        typer.echo(f"pending  {migration.name}")


async def _show_pending(url: str) -> None:
    async with connect(url) as connection:
        pending = pending_migrations(known_migrations(), await applied_migrations(connection))
    for migration in pending:
        typer.echo(f"-- {migration.name}\n{migration.text}")
    print_note(f"{len(pending)} migrations would be applied" if pending else "the database is up to date")
