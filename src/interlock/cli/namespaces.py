"""`interlock namespaces`: list, pause and resume namespaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.app_context import InJson, run_with_app, run_with_connection
from interlock.cli.format import format_json, format_table, format_time, print_note
from interlock.client.app import Interlock
from interlock.errors import ConfigError
from interlock.store.limits import list_namespaces, read_paused_namespaces

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

app = typer.Typer(
    help="List, pause and resume namespaces.",
    epilog='Example: interlock namespaces pause reports --reason "printer out of paper"',
    no_args_is_help=True,
)

HEADER = ("namespace", "pending", "running", "held", "limited", "paused (UTC)", "by", "reason")

Name = Annotated[str, typer.Argument(help="The namespace.", metavar="NAME")]


@app.command("list")
def list_(context: typer.Context, in_json: InJson = False) -> None:
    """List the namespaces that are paused or have unfinished tasks.

    `held` counts tasks that wait for the namespace to be resumed, `limited` those that wait for a limit.
    """
    found = run_with_connection(context, lambda connection, _: list_namespaces(connection))
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
    reason: Annotated[str | None, typer.Option(help="The reason, which held tasks show.")] = None,
) -> None:
    """Hold the tasks of a namespace until it is resumed; running tasks continue. Prints the number of held tasks."""
    _check_name(name)
    held = run_with_app(Interlock(config=context.obj), lambda used: used.pause(name, reason))
    print_note(f"namespace {name} is paused")
    typer.echo(held)


@app.command()
def resume(context: typer.Context, name: Name) -> None:
    """Resume a paused namespace. Prints the number of released tasks."""
    _check_name(name)

    async def work(connection: Connection, used: Interlock) -> tuple[bool, int]:
        was_paused = name in await read_paused_namespaces(connection)
        return was_paused, await used.resume(name)

    was_paused, released = run_with_connection(context, work)
    print_note(f"namespace {name} is resumed" if was_paused else f"namespace {name} was not paused")
    typer.echo(released)


def _check_name(name: str) -> None:
    if not name.strip():
        raise ConfigError("the name of a namespace must be a non-empty string")
