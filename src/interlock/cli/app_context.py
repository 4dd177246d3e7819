"""Shared parts of the commands: settings, the app in use, its database, and the actor that records name.

Invariant: a flag on the command line overrides what an app sets itself; every other setting of an app overrides the
environment, as in the app's own processes.
"""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from interlock.cli.format import print_note
from interlock.client.app import Interlock, load_app
from interlock.config import Config
from interlock.postgres.connection import database_url

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

T = TypeVar("T")

SHARED_FLAGS = ("database_url", "data_dir", "log_level", "log_format")
DATABASE_FLAGS = ("database_url", "data_dir")

InJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Reason = Annotated[str | None, typer.Option(help="The reason, which the records show.")]
Dev = Annotated[
    bool | None,
    typer.Option("--dev", help="For development: replace changed workflow definitions that no unfinished job uses."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not show a preview and do not ask.")]


def command_config(context: typer.Context, **flags: Any) -> Config:
    """Read the settings with the flags of one command over the shared flags."""
    return Config.load({**_shared_flags(context), **flags})


def load_command_app(context: typer.Context, reference: str, *, dev: bool = False) -> Interlock:
    """Import an app; database flags on the command line override the app's own database, and `dev` its setting."""
    app = load_app(reference)
    given = {
        name: value for name, value in _shared_flags(context).items() if name in DATABASE_FLAGS and value is not None
    }
    config = Config.load(given)
    database = {name: getattr(config, name) for name in given}
    app.config = replace(app.config, dev=dev or app.config.dev, **database)
    return app


@contextmanager
def database_running(app: Interlock) -> Iterator[None]:
    """Keep the database of an app running, and report the start of the embedded server on standard error."""
    with database_url(app.config, print_note):
        yield


def run_with_app(app: Interlock, work: Callable[[Interlock], Awaitable[T]]) -> T:
    """Open an app, run `work` with it under the name of the current user, and close it."""

    async def opened() -> T:
        async with app:
            return await work(app)

    app.actor = current_actor()
    with database_running(app):
        return asyncio.run(opened())


def run_with_connection(context: typer.Context, work: Callable[[Connection, Interlock], Awaitable[T]]) -> T:
    """Run `work` with a connection to the database of the settings."""

    async def connected(app: Interlock) -> T:
        async with app.connection() as connection:
            return await work(connection, app)

    return run_with_app(Interlock(config=context.obj), connected)


def current_actor() -> str:
    """Return the actor of this command: `cli:` and the name of the operating-system user."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # an account without a name
        return "cli"


def _shared_flags(context: typer.Context) -> dict[str, Any]:
    given = context.find_root().params
    return {name: given.get(name) for name in SHARED_FLAGS}
