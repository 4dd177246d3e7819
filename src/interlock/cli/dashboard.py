"""`interlock dashboard`: prints a link that signs a browser in once."""

from __future__ import annotations

import webbrowser
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.app_context import run_with_connection
from interlock.cli.format import print_note
from interlock.config import Config, is_loopback
from interlock.errors import ConfigError
from interlock.supervisor.local_token import ensure_local_token, sign_in_url, write_sign_in_page

if TYPE_CHECKING:
    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection


def dashboard(
    context: typer.Context,
    token_name: Annotated[
        str | None, typer.Option(help="Sign in as this token; the local one unless given.", metavar="NAME")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Where browsers reach the supervisor; the address of the settings unless given."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the link in a browser.")] = False,
) -> None:
    """Print a link that signs a browser in. It works once, within two minutes.

    Example: `interlock dashboard --open`.
    """
    config: Config = context.obj
    address = url or _address(config)

    async def make(connection: Connection, used: Interlock) -> str:
        name = token_name
        if name is None:
            token = await ensure_local_token(connection, used.config, actor=used.actor, now=used.now())
            name = token.name
        return await sign_in_url(connection, address, name, now=used.now())

    link = run_with_connection(context, make)
    typer.echo(link)
    if open_ and not webbrowser.open(write_sign_in_page(config, link).as_uri()):
        print_note("no browser was found; open the link by hand")
    print_note("it works once, within two minutes")


def _address(config: Config) -> str:
    host, port = config.supervisor_host, config.supervisor_port
    if not port or not is_loopback(host):
        raise ConfigError(
            "which address do browsers use? Give it with --url, such as --url https://interlock.example.com: "
            f"the settings say {host or 'every address'} and port {port or 'any'}"
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
