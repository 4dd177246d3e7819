"""All commands under one, of which only the one that was asked for is loaded: that takes most of the time.

Invariant: without a command that is known, as for help or for a mistake, all are there.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from interlock.cli.root import rooted, run_app

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import typer

# by name, in the order of the help: the module that has the function of that name, or the commands of that group
COMMANDS = {
    "demo": "demo",
    "up": "up",
    "migrate": "migrate",
    "diagram": "diagram",
    "worker": "worker",
    "orchestrator": "orchestrator",
    "supervisor": "supervisor",
    "enqueue": "enqueue",
    "submit": "submit",
    "status": "status",
    "history": "status",
    "explain": "explain",
    "doctor": "doctor",
}
GROUPS = ("tasks", "jobs", "namespaces", "token", "db", "sort")
VALUED = frozenset({"--database-url", "--data-dir", "--log-level", "--log-format"})  # options before the command


def asked_for(arguments: Sequence[str]) -> str | None:
    """Find the command in a command line."""
    rest = iter(arguments)
    for argument in rest:
        if argument in VALUED:
            next(rest, None)
        elif not argument.startswith("-"):
            return argument
    return None


def with_commands(names: Iterable[str]) -> typer.Typer:
    """Make the command `interlock` with some of its subcommands."""
    app = rooted()
    for name in names:
        if name in COMMANDS:
            app.command()(getattr(import_module(f"interlock.cli.{COMMANDS[name]}"), name))
        else:
            app.add_typer(import_module(f"interlock.cli.{name}").app, name=name)
    return app


def run() -> None:
    """Run the command line and end with its exit code."""
    everything = (*COMMANDS, *GROUPS)
    name = asked_for(sys.argv[1:])
    run_app(with_commands([name] if name in everything else everything))
