"""The ways to run a worker: as a process of its own, in the caller's event loop, or for a supervisor.

Invariant: a supervised process holds tasks under a worker id that no other process ever had, whatever row it works
for. A tied process ends when its supervisor does, however that ends: the kernel closes the pipe on standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from prometheus_client import start_http_server

from interlock.client.app import load_app
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.process_groups import terminate_at_stdin_eof
from interlock.telemetry import forward_standard_logging, served_registry
from interlock.worker.process import WorkerStateMachine
from interlock.worker.settings import WorkerOptions, WorkerSettings, get_instance_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from interlock.client.app import Interlock

UNRECOVERABLE = 2  # exit code of errors that no restart mends: a wrong setting, a schema that is too old
MAX_EXIT_REASON_BYTES = 2_000


def run_worker(config: Config | None = None, assignment: Assignment | None = None) -> None:
    """Run a worker until it is asked to stop: named after this instance, or for a supervisor's row."""
    _make_worker(config or Config.load(), assignment).run()


def _make_worker(config: Config, assignment: Assignment | None) -> WorkerStateMachine:
    if assignment is None:
        app = _load_app_and_serve_metrics(config)
        return WorkerStateMachine(get_instance_name(config.worker_name), app, WorkerSettings.of(config))
    config = replace(config, metrics_port=None)  # the processes of one supervisor cannot share a port
    app = _load_app_and_serve_metrics(config)
    # The row is in the supervisor's database, whatever the app's own configuration says.
    dev = config.dev or app.config.dev
    app.config = replace(app.config, database_url=config.database_url, data_dir=config.data_dir, dev=dev)
    settings = replace(WorkerSettings.of(config), row=assignment.row, generation=assignment.generation)
    return WorkerStateMachine(assignment.instance, app, settings)


def _load_app_and_serve_metrics(config: Config) -> Interlock:
    """Load the configured app, and serve its metrics if a port is configured."""
    if config.app is None:
        raise ConfigError("which app? Set --app, INTERLOCK_APP or `app` in interlock.toml to package.module:app")
    if config.metrics_port is not None:
        try:
            start_http_server(config.metrics_port, addr=config.metrics_host, registry=served_registry())
        except OSError as error:
            address = f"{config.metrics_host}:{config.metrics_port}"
            raise ConfigError(f"metrics cannot be served on {address}: {error.strerror}") from None
    app = load_app(config.app)
    forward_standard_logging()
    return app


@asynccontextmanager
async def serving(
    app: Interlock, settings: WorkerSettings | None = None, **options: Unpack[WorkerOptions]
) -> AsyncIterator[WorkerStateMachine]:
    """Run a worker in the caller's event loop until the block ends; then shut it down gracefully.

    The block begins when the worker is connected and the lifespan of the app has started. An error of the start is
    raised before the block; an unreachable database is none, but is waited for. A worker that fails later cancels the
    block, and its error is raised.
    Options such as `concurrency=8` replace the given settings, which are those of the app's configuration by default.
    """
    base = settings or WorkerSettings.of(app.config)
    worker = WorkerStateMachine(get_instance_name(app.config.worker_name), app, base.with_options(**options))
    running, block = asyncio.create_task(worker.serve(signals=False)), asyncio.current_task()
    await _wait_until_started(worker, running)
    is_interrupted = False

    def interrupt(ended: asyncio.Task[None]) -> None:
        nonlocal is_interrupted
        if not ended.cancelled() and ended.exception() is not None and block is not None:
            is_interrupted = block.cancel()

    running.add_done_callback(interrupt)
    try:
        yield worker
    except asyncio.CancelledError:
        if not is_interrupted or block is None or block.uncancel():
            raise
    finally:
        running.remove_done_callback(interrupt)
        if worker.is_running() and not worker.context.shutdown_requested:
            worker.request_shutdown()
        await running


async def _wait_until_started(worker: WorkerStateMachine, running: asyncio.Task[None]) -> None:
    """Wait for the worker's first connection; raise the error of a start that failed. Cancelling it ends the worker."""
    running.add_done_callback(lambda _: worker.started.set())
    try:
        await worker.started.wait()
    except asyncio.CancelledError:
        worker.request_shutdown()
        await running
        raise
    if running.done():
        running.result()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The command line by which a supervisor starts a process for one generation of a row of `workers`."""

    row: str
    generation: int
    instance: str  # the worker id, under which the process holds tasks
    tied: bool = False
    last_words: int | None = None  # descriptor to write the reason of an unexpected exit to

    @property
    def arguments(self) -> list[str]:
        """The command line that `read_assignment` parses."""
        required = ["--row", self.row, "--generation", str(self.generation), "--instance", self.instance]
        return [
            *required,
            *(["--tied"] if self.tied else []),
            *([] if self.last_words is None else ["--last-words", str(self.last_words)]),
        ]

    def accept(self) -> None:
        """Watch for the end of the supervisor, and keep its descriptor from programs that handlers start."""
        if self.last_words is not None:
            os.set_inheritable(self.last_words, False)  # noqa: FBT003 - its signature
        if self.tied:
            terminate_at_stdin_eof()

    def report_exit(self, reason: str) -> None:
        """Write the reason of this process's exit for the supervisor, if that still reads it."""
        if self.last_words is not None:
            with suppress(OSError):
                os.write(self.last_words, reason.encode(errors="replace")[:MAX_EXIT_REASON_BYTES])


def read_assignment(arguments: Sequence[str]) -> Assignment | None:
    """Parse the command line of `python -m interlock.worker`; None if no supervisor started the process."""
    parser = argparse.ArgumentParser(
        prog="python -m interlock.worker",
        description="A worker process, configured by INTERLOCK_* and interlock.toml. The options are for supervisors: "
        "people use `interlock worker`.",
    )
    parser.add_argument("--row", metavar="ID", help="the row of `workers` that this process works for")
    parser.add_argument("--generation", type=int, metavar="N", help="the generation of the row's process")
    parser.add_argument("--instance", metavar="NAME", help="the worker id, under which it holds tasks")
    parser.add_argument("--tied", action="store_true", help="end when standard input is closed")
    parser.add_argument("--last-words", type=int, metavar="FD", help="where to write the reason of an exit")
    given = parser.parse_args(arguments)
    required = (given.row, given.generation, given.instance)
    if required == (None, None, None) and not given.tied and given.last_words is None:
        return None
    if None in required:
        parser.error("--row, --generation and --instance belong together")
    return Assignment(given.row, given.generation, given.instance, tied=given.tied, last_words=given.last_words)
