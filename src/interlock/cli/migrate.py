"""`interlock migrate`: brings the database to the schema of this release."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from interlock.cli.output import tell
from interlock.config import Config
from interlock.store.database import connect, database_url
from interlock.store.guards import generate as generate_guards
from interlock.store.migrate import (
    applied_migrations,
    directory,
    grant,
    known_migrations,
    pending_migrations,
)
from interlock.store.migrate import migrate as apply


def migrate(
    context: typer.Context,
    status: Annotated[bool, typer.Option("--status", help="Show what is applied and what is pending.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the SQL that would run, and run nothing.")] = False,
    grant_to: Annotated[
        str | None, typer.Option(help="Then let this role run the engine without owning it.", metavar="ROLE")
    ] = None,
    generate: Annotated[
        bool,
        typer.Option("--generate", help="For developers: write the next guards migration if lifecycle.py changed."),
    ] = False,
) -> None:
    """Bring the database to the schema of this release. Safe to run at any time, by any number at once."""
    if generate:
        written = generate_guards(Path(str(directory())))
        typer.echo(f"wrote {written.name}" if written else "the guards are up to date")
        return
    config: Config = context.obj
    with database_url(config, tell) as url:
        if status:
            asyncio.run(_show_status(url))
        elif dry_run:
            asyncio.run(_show_pending(url))
        else:
            asyncio.run(_migrate(url, grant_to, config.orchestration_queue))


async def _migrate(url: str, role: str | None, queue: str) -> None:
    async with connect(url) as connection:
        mine = await apply(connection, note=tell, queue=queue)
        tell(f"{len(mine)} migrations applied" if mine else "the database is up to date")
        if role is not None:
            await grant(connection, role)
            tell(f"role {role} may run the engine")


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
    tell(f"{len(pending)} migrations would be applied" if pending else "the database is up to date")
