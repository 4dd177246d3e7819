"""`interlock mcp`: a Model Context Protocol server on standard input and output, for agents."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, Literal

import typer

from interlock.cli.app_context import run_with_app
from interlock.client.app import Interlock
from interlock.errors import ConfigError


def mcp(
    context: typer.Context,
    scope: Annotated[
        Literal["read", "operate"],
        typer.Option(help="read: status, explain, history, doctor, find. operate: also cancel, requeue, approve."),
    ] = "read",
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="Only tasks and jobs of this namespace; may be repeated.", metavar="NAMESPACE"),
    ] = None,
) -> None:
    r"""Serve the Model Context Protocol on standard input and output, so that an agent can look after the queue.

    An agent starts it by itself. Register the command `interlock mcp` with the agent, with an absolute path if its PATH
    differs, and the database as a flag or a variable. Most agents read JSON such as this:

    {"mcpServers": {"interlock": {"command": "interlock", "args": ["mcp", "--scope", "read"],
    "env": {"INTERLOCK_DATABASE_URL": "postgresql://…"}}}}

    What the agent changes is recorded under the actor `mcp:USER`. Needs the extra: `pip install 'interlock\[mcp]'`.

    Examples: `interlock mcp`, `interlock mcp --scope operate --namespace mail`.
    """
    try:
        from interlock.cli.mcp_tools import create_server  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"mcp", "mcp_types"}:
            raise
        raise ConfigError("`interlock mcp` needs the extra `mcp`: pip install 'interlock[mcp]'") from None

    async def serve(app: Interlock) -> None:
        app.actor = f"mcp{app.actor.removeprefix('cli')}"
        server = create_server(
            app, version=version("interlock"), operates=scope == "operate", namespaces=namespace or None
        )
        await server.run_stdio_async()

    with suppress(KeyboardInterrupt):  # the agent ends it by closing its input, a person with Ctrl-C
        run_with_app(Interlock(config=context.obj), serve)
