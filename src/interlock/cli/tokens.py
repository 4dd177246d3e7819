"""`interlock token`: create, list and revoke the tokens of the supervisor's API, and print the local one.

Invariant: the secret of a token is printed once, when the token is created. The local token stands in a file of this
user, and can be printed again.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer

from interlock.cli.app_context import InJson, run_with_connection
from interlock.cli.format import format_json, format_table, format_time, print_note
from interlock.store.access import TokenScope, create_token, list_tokens, revoke_token
from interlock.supervisor.local_token import ensure_local_token

app = typer.Typer(
    help="Create, list and revoke tokens of the API; print the local one.",
    epilog="Example: interlock token create ci --scope operate --days 90",
    no_args_is_help=True,
)

HEADER = ("name", "scope", "namespaces", "made (UTC)", "by", "expires", "last used", "revoked")

Name = Annotated[str, typer.Argument(help="The name of the token, which records show as the actor.", metavar="NAME")]


@app.command()
def create(
    context: typer.Context,
    name: Name,
    scope: Annotated[
        TokenScope, typer.Option(help="The rights: read, operate (and read), or admin (everything).")
    ] = TokenScope.READ,
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="Limit it to this namespace; can be repeated. All namespaces unless given.", metavar="NAME"),
    ] = None,
    days: Annotated[int | None, typer.Option(min=1, max=36_500, help="Days until it expires.")] = None,
    in_json: InJson = False,
) -> None:
    """Create a token and print it. It cannot be shown again: only its hash is stored."""
    lifetime = None if days is None else timedelta(days=days)
    token, secret = run_with_connection(
        context,
        lambda connection, used: create_token(
            connection, name, scope, actor=used.actor, namespaces=namespace or None, lifetime=lifetime, now=used.now()
        ),
    )
    if not in_json:
        limited = f" in {', '.join(token.namespaces)}" if token.namespaces else ""
        print_note(f"token {name} with scope {scope}{limited}; keep it, it is not shown again")
    typer.echo(format_json({**asdict(token), "token": secret}) if in_json else secret)


@app.command("list")
def list_(
    context: typer.Context,
    revoked: Annotated[bool, typer.Option("--all", help="Include revoked tokens.")] = False,
    in_json: InJson = False,
) -> None:
    """List tokens, without their secrets."""
    found = run_with_connection(context, lambda connection, _: list_tokens(connection, revoked=revoked))
    if in_json:
        typer.echo(format_json([asdict(token) for token in found]))
        return
    rows = (
        (
            t.name,
            t.scope,
            ", ".join(t.namespaces) if t.namespaces else "all",
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
def local(
    context: typer.Context,
    path: Annotated[bool, typer.Option("--path", help="Print the path of its file instead.")] = False,
) -> None:
    """Print the token of this user and data directory; it is made if there is none.

    Example: `curl -H "Authorization: Bearer $(interlock token local)" http://127.0.0.1:8321/api/tasks`.
    """
    token = run_with_connection(
        context,
        lambda connection, used: ensure_local_token(connection, used.config, actor=used.actor, now=used.now()),
    )
    typer.echo(token.path if path else token.secret)


@app.command()
def revoke(context: typer.Context, name: Name) -> None:
    """Revoke a token: requests with it are refused from now on."""
    revoked = run_with_connection(
        context, lambda connection, used: revoke_token(connection, name, actor=used.actor, now=used.now())
    )
    if not revoked:
        print_note(f"there is no token {name} in use; `interlock token list` shows them")
        raise typer.Exit(1)
    print_note(f"token {name} is revoked")
