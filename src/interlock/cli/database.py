"""`interlock db`: the embedded PostgreSQL server; `interlock migrate`: the schema of the database in use."""

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
from interlock.postgres.connection import connect, database_url, embedded_server, validate_database_url
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.guards import generate as generate_guards
from interlock.postgres.migrate import applied_migrations, grant, known_migrations, pending_migrations, sql_directory
from interlock.postgres.migrate import migrate as apply

app = typer.Typer(
    help="Control the embedded PostgreSQL server. Other commands start and stop it by themselves.",
    epilog="Example: interlock db psql -- -c 'select count(*) from interlock.tasks'",
    no_args_is_help=True,
)


def _embedded(config: Config) -> EmbeddedServer:
    if config.database_url is not None:
        raise ConfigError(
            "a database URL is set, so the embedded server is not in use; unset INTERLOCK_DATABASE_URL "
            "(or leave out --database-url) to use it"
        )
    return embedded_server(config, print_note)


@app.command()
def start(context: typer.Context) -> None:
    """Start the server and keep it running until `interlock db stop`. Prints its URL."""
    typer.echo(_embedded(context.obj).start())


@app.command()
def stop(context: typer.Context) -> None:
    """Stop the server at once. Transactions of its users are rolled back; expired leases are recovered later."""
    print_note("stopped" if _embedded(context.obj).stop() else "it was not running")


@app.command()
def status(context: typer.Context) -> None:
    """Show whether the server runs, its process and its URL."""
    found = _embedded(context.obj).status()
    typer.echo(f"data directory  {found.data_dir}")
    typer.echo(f"running         {'yes' if found.running else 'no'}")
    if found.running:
        typer.echo(f"version         {found.version}\nprocess         {found.pid}\nurl             {found.url}")
        typer.echo(f"stops           {'on interlock db stop' if found.pinned else 'when its last user leaves'}")


@app.command()
def url(context: typer.Context) -> None:
    """Print the libpq URL of the database in use, for psql and any driver."""
    config: Config = context.obj
    typer.echo(config.database_url or _embedded(config).url())


@app.command()
def psql(
    context: typer.Context,
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments for psql, after --.")] = None,
) -> None:
    """Open psql on the database in use; starts the embedded server if needed."""
    config: Config = context.obj
    extra = arguments or []
    # This process is replaced by psql, so that psql receives the signals: Ctrl-C ends a query, not the session.
    if config.database_url is not None:
        url = validate_database_url(config.database_url)
        program = Path(shutil.which("psql") or EmbeddedServer.psql_path())
        _restore_signals()
        os.execv(program, [str(program), url, *extra])  # noqa: S606 - the user's own psql, or ours; no shell
    with _embedded(config) as server:
        _restore_signals()
        server.hand_over(server.psql_path(), server.url(), *extra)


def _restore_signals() -> None:
    """Restore the default of SIGPIPE: Python ignores it, and the replaced process would inherit that."""
    if sys.platform != "win32":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def migrate(
    context: typer.Context,
    status: Annotated[bool, typer.Option("--status", help="Show applied and pending migrations.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the SQL without running it.")] = False,
    grant_to: Annotated[
        str | None,
        typer.Option(help="Afterwards grant this role the rights to run the engine.", metavar="ROLE"),
    ] = None,
    generate: Annotated[
        bool,
        typer.Option("--generate", help="For developers: regenerate sql/guards.sql from lifecycle.py."),
    ] = False,
) -> None:
    """Migrate the database to the schema of this release. Safe at any time, and from several processes at once.

    Examples: `interlock migrate --status`, `interlock migrate --grant-to app`.
    """
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
        applied = await apply(connection, note=print_note, queue=queue)
        print_note(f"{len(applied)} migrations applied" if applied else "the database is up to date")
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
