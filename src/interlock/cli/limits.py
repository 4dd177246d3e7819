"""`interlock limits`: list, set and delete concurrency and rate limits."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from interlock.cli.app_context import InJson, run_with_connection
from interlock.cli.format import format_json, format_table, print_note
from interlock.cli.status import LIMIT_HEADER, limit_row
from interlock.store.limits import Limit, delete_limits, put_limits
from interlock.store.stats import list_limits

app = typer.Typer(
    help="List, set and delete concurrency and rate limits. Tasks name their limit with `limit_key`.",
    epilog="Example: interlock limits set mail --max-running 5 --max-starts 100 --period 60",
    no_args_is_help=True,
)

Key = Annotated[str, typer.Argument(help="The limit key.", metavar="KEY")]


@app.command("list")
def list_(context: typer.Context, in_json: InJson = False) -> None:
    """List limits with their use; those with the most waiting tasks come first.

    `running` counts pending and running tasks, `starts` the tasks that were admitted within the period.
    """
    found = run_with_connection(context, lambda connection, app: list_limits(connection, now=app.now()))
    typer.echo(
        format_json([limit._asdict() for limit in found])
        if in_json
        else format_table(LIMIT_HEADER, map(limit_row, found))
    )


@app.command("set")
def set_(
    context: typer.Context,
    key: Key,
    max_running: Annotated[int | None, typer.Option(help="Concurrency limit: tasks at once.", metavar="N")] = None,
    max_starts: Annotated[int | None, typer.Option(help="Rate limit: starts per period.", metavar="N")] = None,
    period: Annotated[float | None, typer.Option(help="The period of the rate limit.", metavar="SECONDS")] = None,
) -> None:
    """Store a limit, or replace the one of this key. It applies at once to waiting and new tasks.

    A limit that an app declares is stored again, with the app's values, when that app opens.
    """
    window = None if period is None else timedelta(seconds=period)
    limit = Limit(key, max_running=max_running, max_starts=max_starts, period=window)
    changed = run_with_connection(context, lambda connection, app: put_limits(connection, [limit], now=app.now()))
    print_note(f"limit {key} is stored" if changed else f"limit {key} is unchanged")


@app.command()
def delete(context: typer.Context, key: Key) -> None:
    """Delete a limit. The leading worker then admits the tasks that waited for it."""
    if not run_with_connection(context, lambda connection, _: delete_limits(connection, [key])):
        print_note(f"there is no limit {key}; `interlock limits list` shows the limits")
        raise typer.Exit(1)
    print_note(f"limit {key} is deleted")
