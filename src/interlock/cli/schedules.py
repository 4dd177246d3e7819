"""`interlock schedules`: list, run, pause, resume and delete schedules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.app_context import InJson, Reason, run_with_connection
from interlock.cli.format import format_json, format_table, print_note
from interlock.cli.status import SCHEDULE_HEADER, schedule_row
from interlock.store.leader import read_clock
from interlock.store.schedules import delete_schedules, list_schedules, pause_schedules, resume_schedules
from interlock.workflow.fire_schedules import run_schedule

if TYPE_CHECKING:
    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection

app = typer.Typer(
    help="List, run, pause, resume and delete schedules. An app declares them with `app.periodic` and `app.schedule`.",
    epilog="Example: interlock schedules pause nightly_report --reason 'stock-taking'",
    no_args_is_help=True,
)

Names = Annotated[list[str], typer.Argument(help="The schedules.", metavar="NAME...")]


@app.command("list")
def list_(context: typer.Context, in_json: InJson = False) -> None:
    """List schedules with their last and next ticks."""

    async def read(connection: Connection, _: Interlock) -> str:
        found = await list_schedules(connection)
        if in_json:
            return format_json([schedule._asdict() for schedule in found])
        now = await read_clock(connection)
        return format_table(SCHEDULE_HEADER, (schedule_row(schedule, now) for schedule in found))

    typer.echo(run_with_connection(context, read))


@app.command()
def run(context: typer.Context, name: Annotated[str, typer.Argument(help="The schedule.", metavar="NAME")]) -> None:
    """Fire a schedule once now, also a paused one; its ticks stay as they are. Prints the id of the task or job."""
    made = run_with_connection(
        context, lambda connection, app: run_schedule(connection, name, actor=app.actor, now=app.now())
    )
    if made is None:
        print_note(f"there is no schedule {name!r}; `interlock schedules list` shows them")
        raise typer.Exit(1)
    typer.echo(made)


@app.command()
def pause(context: typer.Context, names: Names, reason: Reason = None) -> None:
    """Stop firing schedules until they are resumed. Tasks and jobs that were made already still run."""
    _change(
        context,
        names,
        "paused",
        lambda connection, app: pause_schedules(connection, names, actor=app.actor, reason=reason, now=app.now()),
    )


@app.command()
def resume(context: typer.Context, names: Names, reason: Reason = None) -> None:
    """Fire paused schedules again from their next tick on. Ticks during the pause are not caught up on."""
    _change(
        context,
        names,
        "resumed",
        lambda connection, app: resume_schedules(connection, names, actor=app.actor, reason=reason, now=app.now()),
    )


@app.command()
def delete(context: typer.Context, names: Names) -> None:
    """Delete schedules. A schedule that an app still declares is stored again when that app opens; pause it instead."""
    _change(context, names, "deleted", lambda connection, _: delete_schedules(connection, names))


def _change(
    context: typer.Context,
    names: Sequence[str],
    done: str,
    change: Callable[[Connection, Interlock], Awaitable[list[str]]],
) -> None:
    """Change schedules and print the changed ones; exit with 1 when one was not changed."""
    changed = set(run_with_connection(context, change))
    for name in dict.fromkeys(names):
        if name in changed:
            typer.echo(f"{name}  {done}")
    missing = [name for name in names if name not in changed]
    if missing:
        print_note(f"not {done}: {', '.join(missing)}; `interlock schedules list` shows the schedules and their state")
        raise typer.Exit(1)
