"""What the commands about tasks have in common: the settings, the app in use, and who is at the keyboard.

Invariant: a flag of the command line wins over what an app says of itself; everything else an app says wins over the
environment, exactly as it does in the app's own processes.
"""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import typer

from interlock.cli.format import print_note
from interlock.client.app import Interlock, load_app
from interlock.config import Config
from interlock.postgres.connection import database_url

T = TypeVar("T")

SHARED_FLAGS = ("database_url", "data_dir", "log_level", "log_format")
DATABASE_FLAGS = ("database_url", "data_dir")


def command_config(context: typer.Context, **flags: Any) -> Config:
    """Read the settings anew, with the flags of one command over those that all commands share."""
    return Config.load({**_shared(context), **flags})


def load_command_app(context: typer.Context, reference: str) -> Interlock:
    """Import an app; the flags of the command line say where its database is, if they say so."""
    app = load_app(reference)
    given = {name: value for name, value in _shared(context).items() if name in DATABASE_FLAGS and value is not None}
    read = Config.load(given)
    app.config = replace(app.config, **{name: getattr(read, name) for name in given})
    return app


@contextmanager
def database_running(app: Interlock) -> Iterator[None]:
    """Keep the database of an app up; the app would start the embedded server too, but without a word."""
    with database_url(app.config, print_note):
        yield


def run_with_app(app: Interlock, work: Callable[[Interlock], Awaitable[T]]) -> T:
    """Open an app, do some work with it in the name of the person who typed the command, and close it."""
    app.actor = current_actor()
    with database_running(app):
        return asyncio.run(_within(app, work))


def current_actor() -> str:
    """Name the person at the keyboard, for the records."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # an account without a name
        return "cli"


async def _within(app: Interlock, work: Callable[[Interlock], Awaitable[T]]) -> T:
    async with app:
        return await work(app)


def _shared(context: typer.Context) -> dict[str, Any]:
    given = context.find_root().params
    return {name: given.get(name) for name in SHARED_FLAGS}
