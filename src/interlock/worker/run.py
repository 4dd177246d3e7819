"""The ways to run a worker: as a process of its own, or beside other work in one event loop."""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from interlock.client.app import load_app
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.process_groups import terminate_at_stdin_eof
from interlock.worker.process import WorkerStateMachine
from interlock.worker.settings import WorkerSettings, get_instance_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from interlock.client.app import Interlock


# SECTION worker/settings
# How a worker process is set up; the defaults are those of one careful worker.


def run_worker(config: Config | None = None, assignment: Assignment | None = None) -> None:
    """Run a worker named after this instance, or for the row of a supervisor, until it is asked to stop."""
    _worker(config or Config.load(), assignment).run()


def _worker(settings: Config, assignment: Assignment | None) -> WorkerStateMachine:
    if assignment is None:
        app = _app_of(settings)
        return WorkerStateMachine(get_instance_name(settings.worker_name), app, WorkerSettings.of(settings))
    settings = replace(settings, metrics_port=None)  # one of many that are set up alike: they cannot share a port
    app = _app_of(settings)
    # the row is in the supervisor's database, whatever the app says of itself
    app.config = replace(app.config, database_url=settings.database_url, data_dir=settings.data_dir)
    wanted = replace(WorkerSettings.of(settings), row=assignment.row, generation=assignment.generation)
    return WorkerStateMachine(assignment.instance, app, wanted)


@asynccontextmanager
async def serving(app: Interlock, settings: WorkerSettings | None = None) -> AsyncIterator[WorkerStateMachine]:
    """Run a worker beside the caller's own work, until the block ends; it is then shut down in good order."""
    worker = WorkerStateMachine(
        get_instance_name(app.config.worker_name), app, settings or WorkerSettings.of(app.config)
    )
    running = asyncio.create_task(worker.serve(signals=False))
    try:
        yield worker
    finally:
        if worker.is_running() and not worker.context.shutdown_requested:
            worker.request_shutdown()
        await running


def _app_of(config: Config) -> Interlock:
    """Load the app that the settings name, and serve its metrics if they say where."""
    if config.app is None:
        raise ConfigError("which app? Set --app, INTERLOCK_APP or `app` in interlock.toml to package.module:app")
    if config.metrics_port is not None:
        try:
            start_http_server(config.metrics_port, addr=config.metrics_host)
        except OSError as error:
            place = f"{config.metrics_host}:{config.metrics_port}"
            raise ConfigError(f"metrics cannot be served on {place}: {error.strerror}") from None
    return load_app(config.app)


# SECTION worker/assignment
# What a supervisor tells a worker process that it starts: for which row it works, and how both stay in touch.
#
# Invariant: the process holds tasks under a name that no other process ever had, whatever row it works for; a tied one
# ends when whoever started it does, however that ends, because the kernel closes the pipe on standard input.

UNRECOVERABLE = 2  # the exit code of what no restart can mend: a setting that is wrong, a schema that is too old
LONGEST_WORD = 2_000


@dataclass(frozen=True, slots=True)
class Assignment:
    """One process for one generation of a supervised row."""

    row: str
    generation: int
    instance: str  # the worker's id, under which it holds tasks
    tied: bool = False
    last_words: int | None = None  # a descriptor, for the reason of an end that nobody asked for

    @property
    def arguments(self) -> list[str]:
        """Give the command line that `read_assignment` reads."""
        said = ["--row", self.row, "--generation", str(self.generation), "--instance", self.instance]
        return [
            *said,
            *(["--tied"] if self.tied else []),
            *([] if self.last_words is None else ["--last-words", str(self.last_words)]),
        ]

    def take_up(self) -> None:
        """Begin to watch over the tie; keep what is the supervisor's from the programs that handlers start."""
        if self.last_words is not None:
            os.set_inheritable(self.last_words, False)  # noqa: FBT003 - its signature
        if self.tied:
            terminate_at_stdin_eof()

    def say_why(self, reason: str) -> None:
        """Tell the supervisor why this process ends, if it is still there to hear it."""
        if self.last_words is not None:
            with suppress(OSError):
                os.write(self.last_words, reason.encode(errors="replace")[:LONGEST_WORD])


def read_assignment(arguments: Sequence[str]) -> Assignment | None:
    """Read the command line of `python -m interlock.worker`; None when no supervisor has written it."""
    parser = argparse.ArgumentParser(
        prog="python -m interlock.worker",
        description="A worker process, set up by INTERLOCK_* and interlock.toml. The options are a supervisor's: "
        "people use `interlock worker`.",
    )
    parser.add_argument("--row", metavar="ID", help="the row of `workers` that this process works for")
    parser.add_argument("--generation", type=int, metavar="N", help="which process of that row it is")
    parser.add_argument("--instance", metavar="NAME", help="the name under which it holds tasks")
    parser.add_argument("--tied", action="store_true", help="end when standard input does")
    parser.add_argument("--last-words", type=int, metavar="FD", help="where to say why it ends")
    given = parser.parse_args(arguments)
    needed = (given.row, given.generation, given.instance)
    if needed == (None, None, None) and not given.tied and given.last_words is None:
        return None
    if None in needed:
        parser.error("--row, --generation and --instance belong together")
    return Assignment(given.row, given.generation, given.instance, tied=given.tied, last_words=given.last_words)
