"""`interlock limits`: list, show, override, restore and delete limits."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.cli.app_context import InJson, Reason, run_with_connection
from interlock.cli.format import format_json, format_table, format_time, print_note
from interlock.cli.status import LIMIT_HEADER, limit_row
from interlock.store.limit_overrides import (
    override_limit,
    read_limit_changes,
    read_limit_holders,
    restore_limit,
)
from interlock.store.limits import Limit, delete_limits
from interlock.store.stats import list_limits

if TYPE_CHECKING:
    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection

app = typer.Typer(
    help="List and change limits on concurrency, starts, weight and cost. Tasks name theirs with `limit_key`.",
    epilog="Example: interlock limits set mail --max-running 5 --max-starts 100 --period 60",
    no_args_is_help=True,
)

HOLDER_HEADER = ("task", "state", "namespace", "type", "weight", "worker", "started (UTC)")
CHANGE_HEADER = ("time (UTC)", "event", "before", "after", "actor", "reason")

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
    `cost` are those within the period; `next` is the time at which waiting tasks go on; `override` shows who overrides
    the declared rule.
    """
    found = run_with_connection(context, lambda connection, app: list_limits(connection, now=app.now()))
    typer.echo(
        format_json([limit._asdict() for limit in found])
        if in_json
        else format_table(LIMIT_HEADER, map(limit_row, found))
    )


@app.command()
def show(context: typer.Context, key: Key, in_json: InJson = False) -> None:
    """Show a limit: its use, the first 100 tasks that hold it, and what operators changed, newest first."""

    async def read(connection: Connection, used: Interlock) -> dict[str, Any] | None:
        limits = [limit for limit in await list_limits(connection, now=used.now()) if limit.key == key]
        changes = await read_limit_changes(connection, key)
        if not limits and not changes:
            return None
        return {"limits": limits, "holders": await read_limit_holders(connection, key), "changes": changes}

    found = run_with_connection(context, read)
    if found is None:
        print_note(f"there is no limit {key}; `interlock limits list` shows the limits")
        raise typer.Exit(1)
    if in_json:
        document = {name: [each._asdict() for each in rows] for name, rows in found.items() if name != "limits"}
        limit = found["limits"][0]._asdict() if found["limits"] else {"key": key, "rule": None}
        typer.echo(format_json({**limit, **document}))
        return
    typer.echo(format_table(LIMIT_HEADER, map(limit_row, found["limits"])))
    if found["holders"]:
        rows = (
            (h.id, h.state, h.namespace, h.type, f"{h.weight:g}", h.worker_id, format_time(h.started_at))
            for h in found["holders"]
        )
        typer.echo(f"\n{format_table(HOLDER_HEADER, rows)}")
    if found["changes"]:
        records = (
            (format_time(c.recorded_at), c.event, _format_rule(c.before), _format_rule(c.after), c.actor, c.reason)
            for c in found["changes"]
        )
        typer.echo(f"\n{format_table(CHANGE_HEADER, records)}")


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
    reason: Reason = None,
) -> None:
    """Set the limit of a key, in place of the one that an app declares. It applies at once to waiting and new tasks.

    It stays until `interlock limits restore KEY`, also when the app opens again. With --share alone, the key has no
    bound.
    """
    window = None if period is None else timedelta(seconds=period)
    limit = Limit(key, max_running, max_starts, window, max_weight, max_cost, share)
    run_with_connection(
        context,
        lambda connection, app: override_limit(connection, limit, actor=app.actor, reason=reason, now=app.now()),
    )
    print_note(f"limit {key} is set")


@app.command()
def restore(context: typer.Context, key: Key, reason: Reason = None) -> None:
    """Take back what `interlock limits set` set: the declared limit applies again, or none if none is declared."""
    restored = run_with_connection(
        context, lambda connection, app: restore_limit(connection, key, actor=app.actor, reason=reason, now=app.now())
    )
    if not restored:
        print_note(f"limit {key} is not overridden; `interlock limits list` shows the limits")
        raise typer.Exit(1)
    print_note(f"limit {key} is restored")


@app.command()
def delete(context: typer.Context, key: Key, reason: Reason = None) -> None:
    """Delete a limit, declared or not. The leading worker then admits the tasks that waited for it.

    New tasks of a key without any limit are refused, and an app that declares the limit stores it again when it opens.
    To lift a limit and keep its key, use `interlock limits set KEY --share 1`.
    """
    deleted = run_with_connection(
        context, lambda connection, app: delete_limits(connection, [key], actor=app.actor, reason=reason, now=app.now())
    )
    if not deleted:
        print_note(f"there is no limit {key}; `interlock limits list` shows the limits")
        raise typer.Exit(1)
    print_note(f"limit {key} is deleted")


def _format_rule(rule: dict[str, Any] | None) -> str:
    if rule is None:
        return ""
    return ", ".join(f"{name} {value:g}" for name, value in sorted(rule.items()) if value is not None)
