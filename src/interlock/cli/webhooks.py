"""`interlock webhooks`: the dead letters among the webhooks, which were given up after repeated failures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.app_context import InJson, run_with_connection
from interlock.cli.format import format_json, format_table, format_time, print_note
from interlock.errors import ConfigError
from interlock.store.webhooks import (
    GivenUpWebhook,
    discard_given_up_webhooks,
    list_given_up_webhooks,
    retry_given_up_webhooks,
)

if TYPE_CHECKING:
    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection

app = typer.Typer(
    help="List, retry and discard dead letters: webhooks that were given up after repeated failures.",
    epilog="Example: interlock webhooks retry --all",
    no_args_is_help=True,
)

HEADER = ("id", "given up (UTC)", "tries", "of", "task or job", "state", "url", "error")

Ids = Annotated[list[int] | None, typer.Argument(help="The webhooks; or --all.", metavar="ID...")]
Every = Annotated[bool, typer.Option("--all", help="All webhooks that were given up.")]


@app.command("list")
def list_(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many webhooks.")] = 100,
    in_json: InJson = False,
) -> None:
    """List webhooks that were given up, oldest first."""
    found = run_with_connection(context, lambda connection, _: list_given_up_webhooks(connection, limit=limit))
    if in_json:
        typer.echo(format_json([webhook._asdict() for webhook in found]))
        return
    typer.echo(format_table(HEADER, map(_row, found)))


def _row(webhook: GivenUpWebhook) -> tuple[object, ...]:
    subject = ("task", webhook.task_id) if webhook.job_id is None else ("job", webhook.job_id)
    given_up = format_time(webhook.given_up_at)
    return webhook.id, given_up, webhook.tries, *subject, webhook.state, webhook.url, webhook.error


@app.command()
def retry(context: typer.Context, ids: Ids = None, every: Every = False) -> None:
    """Send given-up webhooks again, with a new set of tries. Prints their number.

    Retry after the receiver answers again; a worker sends them.
    """
    _change(
        context,
        ids,
        every,
        "retry",
        lambda connection, app: retry_given_up_webhooks(connection, ids or None, now=app.now()),
    )


@app.command()
def discard(context: typer.Context, ids: Ids = None, every: Every = False) -> None:
    """Delete given-up webhooks: they are never sent. Prints their number."""
    _change(context, ids, every, "discard", lambda connection, _: discard_given_up_webhooks(connection, ids or None))


def _change(
    context: typer.Context,
    ids: list[int] | None,
    every: bool,
    verb: str,
    change: Callable[[Connection, Interlock], Awaitable[list[int]]],
) -> None:
    if every == bool(ids):
        raise ConfigError(f"{verb} needs the ids of webhooks, or --all, not both")
    changed = run_with_connection(context, change)
    typer.echo(len(changed))
    if ids and len(changed) < len(set(ids)):
        print_note("the others were not given up, or do not exist; `interlock webhooks list` shows them")
        raise typer.Exit(1)
