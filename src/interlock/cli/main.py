"""The command `interlock`: shared flags, exit codes, and its subcommands.

Only the module of the requested command is imported, because imports take most of the time of a short command; without
a known command (help, a typing error) none is.

Invariant: a mistake of the user exits with 2 and a failure of the system with 1; neither prints a traceback.
"""

from __future__ import annotations

import os
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
COMPLETION_VARIABLE = "_INTERLOCK_COMPLETE"  # set by the completion of a shell
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


# The first sentences of their docstrings, for a help that imports none of them; a test compares both.
SUMMARIES = {
    "demo": "Show a task that survives a crash, moves that the database refuses, and a workflow that loses a worker.",
    "up": "Run everything on this machine: database, orchestrator, API and workers. "
    "Ctrl-C stops all, a second one at once.",
    "migrate": "Migrate the database to the schema of this release. "
    "Safe at any time, and from several processes at once.",
    "diagram": "Draw a lifecycle, a workflow, or a job with the states of its steps.",
    "metrics": "List all Prometheus metrics: type, labels, the processes that export them, and their meaning.",
    "worker": "Run the tasks of an app. "
    "Ctrl-C or SIGTERM waits for running tasks up to the grace period; a second one does not.",
    "orchestrator": "Advance jobs as their steps end; any number can run. "
    "Ctrl-C or SIGTERM finishes the current batch.",
    "supervisor": "Serve the API and run the worker processes that are created with it. Ctrl-C stops both in order.",
    "dashboard": "Print a link that signs a browser in. It works once, within two minutes.",
    "enqueue": "Enqueue a task and print its id; with --wait, print its result, or fail as it did.",
    "submit": "Submit a job and print its id; with --wait, print its output, or exit with 1 when it fails.",
    "status": "Show the overview of the installation, or one task: its state, progress and result, and why it waits.",
    "history": "Show the recorded moves of a task, a job or a worker, oldest first, checked against its lifecycle.",
    "explain": "Explain why a task, job, worker, namespace, schedule or limit does not move, and how to unblock it.",
    "top": "Watch the installation live: namespaces, rates, latencies, workers, running tasks and jobs.",
    "doctor": "Examine the database and the processes: "
    "whether the engine's rules hold, and what to do where they do not.",
    "mcp": "Serve the Model Context Protocol on standard input and output, so that an agent can look after the queue.",
    "tasks": "List tasks; cancel or requeue them, by id or by filter.",
    "jobs": "List and show jobs and what waits for an answer; cancel, signal, approve, retry or replay one.",
    "workflows": "List and show workflows, and check templates. An app stores its workflows when it opens.",
    "workers": "List and show workers and orchestrators; pause, resume or terminate one, or send it a command.",
    "schedules": "List, run, pause, resume and delete schedules. "
    "An app declares them with `app.periodic` and `app.schedule`.",
    "limits": "List and change limits on concurrency, starts, weight and cost. Tasks name theirs with `limit_key`.",
    "namespaces": "List, pause and resume namespaces.",
    "webhooks": "List, retry and discard dead letters: webhooks that were given up after repeated failures.",
    "token": "Create, list and revoke tokens of the API; print the local one.",
    "db": "Control the embedded PostgreSQL server. Other commands start and stop it by themselves.",
    "sort": "Sort lines or records spread over many files: sample, sort, shuffle and merge, on one machine or on many.",
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
    if requested in names:
        app = create_app([requested])
    elif COMPLETION_VARIABLE in os.environ:  # completes the options of every command
        app = create_app(names)
    else:
        app = create_summary()
    run_app(app)


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


def create_summary() -> typer.Typer:
    """Create the command `interlock` with the names and summaries of its subcommands: for the help and for errors."""

    def run_command(context: typer.Context) -> None:
        run_app(create_app([str(context.info_name)]))

    app = create_root_app()
    for name, summary in SUMMARIES.items():
        if name in COMMANDS:
            app.command(name, help=summary)(run_command)
        else:
            app.add_typer(typer.Typer(help=summary, callback=run_command), name=name)
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
