"""The command `interlock`: shared flags, exit codes, and its subcommands.

Only the module of the requested command is imported, because imports take most of the time of a short command. Without
a known command (help, a typing error) all modules are imported.

Invariant: a mistake of the user exits with 2 and a failure of the system with 1; neither prints a traceback.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.config import Config
from interlock.errors import (
    AppImportError,
    ConfigError,
    InputError,
    InterlockError,
    SortInputError,
    UnknownJobError,
    UnknownNameError,
    UnknownTaskError,
    UnknownWorkerError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

HELP = "Durable tasks and workflows on PostgreSQL. Every lifecycle is a state machine that the database enforces."
EPILOG = (
    "Settings come from flags, else INTERLOCK_* variables, else interlock.toml. Without a database URL the commands "
    "start an embedded PostgreSQL server; it stops when its last user ends. "
    "Start with `interlock demo`, or with `interlock up --app package.module:app`. "
    "The database and log options can also stand after the command: `interlock status --database-url URL`."
)
USER_ERRORS = (
    AppImportError,
    ConfigError,
    InputError,
    SortInputError,
    UnknownTaskError,
    UnknownJobError,
    UnknownWorkerError,
    UnknownNameError,
)
SHARED_FLAGS_WITH_VALUE = frozenset({"--database-url", "--data-dir", "--log-level", "--log-format"})

# In the order of the help. A command is a function of its name in the module; a group is the module's `app`.
COMMANDS = {
    "demo": "demo.command",
    "up": "run",
    "migrate": "database",
    "diagram": "diagram",
    "metrics": "metrics",
    "worker": "run",
    "orchestrator": "run",
    "supervisor": "run",
    "dashboard": "dashboard",
    "enqueue": "enqueue",
    "submit": "submit",
    "status": "status",
    "history": "history",
    "explain": "explain",
    "top": "top.command",
    "doctor": "inspect",
    "mcp": "mcp",
}
GROUPS = {
    "tasks": "tasks",
    "jobs": "jobs",
    "workflows": "workflows",
    "workers": "workers",
    "schedules": "schedules",
    "limits": "limits",
    "namespaces": "namespaces",
    "webhooks": "webhooks",
    "token": "tokens",
    "db": "database",
    "sort": "sort.command",
}


def _print_version(value: bool) -> None:
    if value:
        typer.echo(version("interlock"))
        raise typer.Exit


# Global options, which `interlock-sort` has too.
DatabaseUrl = Annotated[
    str | None,
    typer.Option(help="The PostgreSQL server, as postgresql://…; the embedded server unless given.", metavar="URL"),
]
DataDir = Annotated[  # a str: typer would read an empty Path as the current directory
    str | None, typer.Option(help="The data directory of the embedded server.", metavar="DIR")
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
LogFormat = Annotated[str | None, typer.Option(help="console for people, json for programs.")]
ShowVersion = Annotated[
    bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
]


def run() -> None:
    """Run the command line and exit with its code."""
    names = (*COMMANDS, *GROUPS)
    requested = requested_command(sys.argv[1:])
    run_app(create_app([requested] if requested in names else names))


def requested_command(arguments: Sequence[str]) -> str | None:
    """Find the name of the command among the arguments."""
    rest = iter(arguments)
    for argument in rest:
        if argument in SHARED_FLAGS_WITH_VALUE:
            next(rest, None)
        elif not argument.startswith("-"):
            return argument
    return None


def hoist_shared_flags(arguments: Sequence[str]) -> list[str]:
    """Move shared flags that stand after the command before it, where they are declared; not those after `--`."""
    before: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            others.append(argument)
            break
        if argument in SHARED_FLAGS_WITH_VALUE:
            before += [argument, *islice(rest, 1)]
        elif argument.partition("=")[0] in SHARED_FLAGS_WITH_VALUE:
            before.append(argument)
        else:
            others.append(argument)
    return [*before, *others, *rest]


def create_app(names: Iterable[str]) -> typer.Typer:
    """Create the command `interlock` with these subcommands."""
    app = create_root_app()
    for name in names:
        if name in COMMANDS:
            app.command()(getattr(import_module(f"interlock.cli.{COMMANDS[name]}"), name))
        else:
            app.add_typer(import_module(f"interlock.cli.{GROUPS[name]}").app, name=name)
    return app


def create_root_app(
    name: str = "interlock", help_: str | None = HELP, callback: Callable[..., None] | None = None
) -> typer.Typer:
    """Create a root command without subcommands; `callback` declares and reads its global options."""
    app = typer.Typer(
        name=name,
        help=help_,
        epilog=EPILOG,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(callback or read_global_options)
    return app


def read_global_options(
    context: typer.Context,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    show_version: ShowVersion = False,
) -> None:
    """Read the global options into a Config, and set up logging."""
    del show_version
    config = Config.load(
        {"database_url": database_url, "data_dir": data_dir, "log_level": log_level, "log_format": log_format}
    )
    context.obj = config
    set_up_logging(config.log_level, config.log_format)


def run_app(app: typer.Typer) -> None:
    """Run a command line; print an error as one line and exit with its code."""
    try:
        app(hoist_shared_flags(sys.argv[1:]), prog_name=app.info.name)
    except InterlockError as error:
        typer.secho(f"interlock: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2 if isinstance(error, USER_ERRORS) else 1)


def set_up_logging(level: str, form: str) -> None:
    """Configure the log of this process."""
    from interlock.telemetry import configure_logging  # noqa: PLC0415 - structlog is slow to import

    configure_logging(level, "json" if form == "json" else "console")
