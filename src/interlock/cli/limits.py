"""`interlock limits`: list, set and delete limits."""

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
    help="List, set and delete limits on concurrency, starts, weight and cost. Tasks name theirs with `limit_key`.",
    epilog="Example: interlock limits set mail --max-running 5 --max-starts 100 --period 60",
    no_args_is_help=True,
)

Key = Annotated[
    str,
    typer.Argument(
        help="The limit key, or a pattern such as mail:*, for each key that begins so.",
        metavar="KEY",
    ),
]


@app.command("list")
def list_(context: typer.Context, in_json: InJson = False) -> None:
    """List keys in use and rules with their use; those with the most waiting tasks come first.

    `rule` is the pattern that applies to the key. `running` counts pending and running tasks; `starts`, `weight` and
    `cost` are those within the period; `next` is the time at which waiting tasks go on.
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
    max_weight: Annotated[float | None, typer.Option(help="Weight of the starts per period.", metavar="NUMBER")] = None,
    max_cost: Annotated[float | None, typer.Option(help="Budget: reported cost per period.", metavar="NUMBER")] = None,
    period: Annotated[float | None, typer.Option(help="The period.", metavar="SECONDS")] = None,
    share: Annotated[
        float | None,
        typer.Option(help="Share of a limit in common with other keys; 1 if not given.", metavar="NUMBER"),
    ] = None,
) -> None:
    """Store a limit, or replace the one of this key. It applies at once to waiting and new tasks.

    A limit that an app declares is stored again, with the app's values, when that app opens. With --share alone,
    the key has no bound.
    """
    window = None if period is None else timedelta(seconds=period)
    limit = Limit(key, max_running, max_starts, window, max_weight, max_cost, share)
    changed = run_with_connection(context, lambda connection, app: put_limits(connection, [limit], now=app.now()))
    print_note(f"limit {key} is stored" if changed else f"limit {key} is unchanged")


@app.command()
def delete(context: typer.Context, key: Key) -> None:
    """Delete a limit. The leading worker then admits the tasks that waited for it.

    New tasks of a key without any limit are refused. To lift a limit and keep its key, use
    `interlock limits set KEY --share 1`.
    """
    if not run_with_connection(context, lambda connection, _: delete_limits(connection, [key])):
        print_note(f"there is no limit {key}; `interlock limits list` shows the limits")
        raise typer.Exit(1)
    print_note(f"limit {key} is deleted")
