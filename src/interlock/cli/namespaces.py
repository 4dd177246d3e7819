"""`interlock namespaces`: which there are, and letting no task of one start for a while."""

from __future__ import annotations

from typing import Annotated

import typer

from interlock.cli.app_context import run_with_app
from interlock.cli.format import format_json, format_table, format_time, print_note
from interlock.client.app import Interlock
from interlock.errors import ConfigError
from interlock.store.limits import NamespaceState, list_namespaces, paused_namespaces

app = typer.Typer(help="Namespaces: list, pause and resume them.", no_args_is_help=True)

HEADER = ("namespace", "pending", "running", "held", "limited", "paused (UTC)", "by", "reason")

Name = Annotated[str, typer.Argument(help="The namespace.", metavar="NAME")]


@app.command("list")
def list_(context: typer.Context, in_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the namespaces that have unfinished tasks or are paused."""

    async def read(used: Interlock) -> list[NamespaceState]:
        async with used.connection() as connection:
            return await list_namespaces(connection)

    found = run_with_app(Interlock(config=context.obj), read)
    if in_json:
        typer.echo(format_json([namespace._asdict() for namespace in found]))
        return
    rows = (
        (n.name, n.pending, n.running, n.held, n.limited, format_time(n.paused_at), n.paused_by, n.reason)
        for n in found
    )
    typer.echo(format_table(HEADER, rows))


@app.command()
def pause(
    context: typer.Context,
    name: Name,
    reason: Annotated[str | None, typer.Option(help="Why; the tasks that wait for it say so.")] = None,
) -> None:
    """Let no task of a namespace start until it is resumed. What runs goes on. Prints how many wait for it now."""
    _check(name)
    held = run_with_app(Interlock(config=context.obj), lambda used: used.pause(name, reason))
    print_note(f"namespace {name} is paused")
    typer.echo(held)


@app.command()
def resume(context: typer.Context, name: Name) -> None:
    """Let the tasks of a namespace start again. Prints how many waited for it."""
    _check(name)

    async def work(used: Interlock) -> tuple[bool, int]:
        async with used.connection() as connection:
            was_paused = name in await paused_namespaces(connection)
        return was_paused, await used.resume(name)

    was_paused, freed = run_with_app(Interlock(config=context.obj), work)
    print_note(f"namespace {name} is resumed" if was_paused else f"namespace {name} was not paused")
    typer.echo(freed)


def _check(name: str) -> None:
    if not name.strip():
        raise ConfigError("the name of a namespace must not be empty")
