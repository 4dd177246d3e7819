"""`interlock token`: who may use the supervisor's API, and what for.

Invariant: a token is printed once, when it is made, and nowhere else.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from interlock.cli.app_context import run_with_app
from interlock.cli.format import format_json, format_table, format_time, print_note
from interlock.client.app import Interlock
from interlock.store.access import Scope, Token, create_token, list_tokens, revoke_token

app = typer.Typer(help="Tokens of the API: make, list and revoke them.", no_args_is_help=True)

HEADER = ("name", "scope", "made (UTC)", "by", "expires", "last used", "revoked")

Name = Annotated[str, typer.Argument(help="The name under which its acts are recorded.", metavar="NAME")]
InJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def create(
    context: typer.Context,
    name: Name,
    scope: Annotated[
        Scope, typer.Option(help="What it allows: read, operate (and read), or admin (everything).")
    ] = Scope.READ,
    days: Annotated[int | None, typer.Option(min=1, max=36_500, help="Days after which it expires.")] = None,
    in_json: InJson = False,
) -> None:
    """Make a token and print it. It cannot be shown again: only its hash is stored."""

    async def work(used: Interlock) -> tuple[Token, str]:
        lifetime = None if days is None else timedelta(days=days)
        async with used.connection() as connection:
            return await create_token(connection, name, scope, actor=used.actor, lifetime=lifetime, now=used.now())

    token, secret = run_with_app(Interlock(config=context.obj), work)
    if not in_json:
        print_note(f"token {name} with scope {scope}; keep it, it is not shown again")
    typer.echo(format_json({**asdict(token), "token": secret}) if in_json else secret)


@app.command("list")
def list_(
    context: typer.Context,
    revoked: Annotated[bool, typer.Option("--all", help="Those that were revoked, too.")] = False,
    in_json: InJson = False,
) -> None:
    """List tokens; never what they are."""

    async def work(used: Interlock) -> list[Token]:
        async with used.connection() as connection:
            return await list_tokens(connection, revoked=revoked)

    found = run_with_app(Interlock(config=context.obj), work)
    if in_json:
        typer.echo(format_json([asdict(token) for token in found]))
        return
    rows = (
        (
            t.name,
            t.scope,
            format_time(t.created_at),
            t.created_by,
            format_time(t.expires_at),
            format_time(t.last_used_at),
            format_time(t.revoked_at),
        )
        for t in found
    )
    typer.echo(format_table(HEADER, rows))


@app.command()
def revoke(context: typer.Context, name: Name) -> None:
    """Let a token open nothing from now on."""

    async def work(used: Interlock) -> bool:
        async with used.connection() as connection:
            return await revoke_token(connection, name, actor=used.actor, now=used.now())

    if not run_with_app(Interlock(config=context.obj), work):
        print_note(f"there is no token {name} in use; `interlock token list` shows them")
        raise typer.Exit(1)
    print_note(f"token {name} is revoked")
