"""The door of the `interlock` command, which a person can leave at any moment with Ctrl-C.

Invariant: importing this module costs nothing, so that an interruption finds `main` already there to take it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.config import Config
from interlock.errors import ConfigError, InputError, InterlockError, SortInputError, UnknownJobError, UnknownTaskError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


# SECTION cli/root
# What every command has around it: the settings that all share, and errors as one clear line.
#
# Invariant: a user's mistake never shows a traceback; it exits with 2, a failure of the system with 1.

HELP = "Durable tasks and workflows on PostgreSQL, every lifecycle a state machine that the database enforces."
MISTAKES = (ConfigError, InputError, SortInputError, UnknownTaskError, UnknownJobError)


# Global options, which `interlock-sort` has too.
DatabaseUrl = Annotated[
    str | None,
    typer.Option(help="The PostgreSQL server to use, as postgresql://…; the embedded one if unset.", metavar="URL"),
]
DataDir = Annotated[  # not Path, which turns an empty name into the current directory
    str | None, typer.Option(help="Where the embedded server keeps its data.", metavar="DIR")
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
LogFormat = Annotated[str | None, typer.Option(help="console for people, json for machines.")]


def _show_version(value: bool) -> None:
    if value:
        typer.echo(version("interlock"))
        raise typer.Exit


ShowVersion = Annotated[
    bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
]


def settings(
    context: typer.Context,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    show_version: ShowVersion = False,
) -> None:
    """Read the settings that all commands share, and set up logging."""
    del show_version
    config = Config.load(
        {"database_url": database_url, "data_dir": data_dir, "log_level": log_level, "log_format": log_format}
    )
    context.obj = config
    set_up_logging(config.log_level, config.log_format)


def create_root_app(
    name: str = "interlock", help_: str | None = HELP, callback: Callable[..., None] = settings
) -> typer.Typer:
    """Make a root command without subcommands; `callback` declares and reads its global options."""
    app = typer.Typer(
        name=name,
        help=help_,
        epilog="Settings come from flags, else INTERLOCK_* variables, else interlock.toml. "
        "Without a database URL an embedded PostgreSQL is started, and stopped when nobody uses it any more.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(callback)
    return app


def run_app(app: typer.Typer) -> None:
    """Run a command line and end with its exit code."""
    try:
        app(prog_name=app.info.name)
    except InterlockError as error:
        typer.secho(f"interlock: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2 if isinstance(error, MISTAKES) else 1)


def set_up_logging(level: str, form: str) -> None:
    """Have the engine log from a level on."""
    from interlock.telemetry import configure_logging  # noqa: PLC0415 - structlog takes long to load

    configure_logging(level, "json" if form == "json" else "console")


# SECTION cli/commands
# All commands under one, of which only the one that was asked for is loaded: that takes most of the time.
#
# Invariant: without a command that is known, as for help or for a mistake, all are there.

# by name, in the order of the help: the module that has the function of that name, or the commands of that group
COMMANDS = {
    "demo": "demo.command",
    "up": "run",
    "migrate": "database",
    "diagram": "inspect",
    "worker": "run",
    "orchestrator": "run",
    "supervisor": "run",
    "enqueue": "enqueue",
    "submit": "submit",
    "status": "status",
    "history": "status",
    "explain": "inspect",
    "doctor": "inspect",
}
GROUPS = {
    "tasks": "tasks",
    "jobs": "jobs",
    "namespaces": "namespaces",
    "token": "tokens",
    "db": "database",
    "sort": "sort",
}
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
    app = create_root_app()
    for name in names:
        if name in COMMANDS:
            app.command()(getattr(import_module(f"interlock.cli.{COMMANDS[name]}"), name))
        else:
            app.add_typer(import_module(f"interlock.cli.{GROUPS[name]}").app, name=name)
    return app


def run() -> None:
    """Run the command line and end with its exit code."""
    everything = (*COMMANDS, *GROUPS)
    name = asked_for(sys.argv[1:])
    run_app(with_commands([name] if name in everything else everything))
