"""`interlock webhooks`: the dead letters among the webhooks, which were given up after repeated failures."""

from __future__ import annotations

from typing import Annotated

import typer

from interlock.cli.app_context import InJson, run_with_connection
from interlock.cli.format import format_json, format_table, format_time, print_note
from interlock.errors import ConfigError
from interlock.store.webhooks import GivenUpWebhook, list_given_up_webhooks, retry_given_up_webhooks

app = typer.Typer(
    help="List and retry dead letters: webhooks that were given up after repeated failures.",
    epilog="Example: interlock webhooks retry --all",
    no_args_is_help=True,
)

HEADER = ("id", "given up (UTC)", "tries", "of", "task or job", "state", "url", "error")

Ids = Annotated[list[int] | None, typer.Argument(help="The webhooks; or --all.", metavar="ID...")]


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
def retry(
    context: typer.Context,
    ids: Ids = None,
    every: Annotated[bool, typer.Option("--all", help="All webhooks that were given up.")] = False,
) -> None:
    """Send given-up webhooks again, with a new set of tries. Prints their number.

    Retry after the receiver answers again; a worker sends them.
    """
    if every == bool(ids):
        raise ConfigError("retry needs the ids of webhooks, or --all, not both")
    retried = run_with_connection(
        context, lambda connection, app: retry_given_up_webhooks(connection, ids or None, now=app.now())
    )
    typer.echo(retried)
    if ids and retried < len(set(ids)):
        print_note("the others were not given up, or do not exist; `interlock webhooks list` shows them")
        raise typer.Exit(1)
