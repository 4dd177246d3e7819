"""Parts of the pytest plugin: databases of tests, the user's app on them, and services in a thread.

Invariant: a test that uses an app of these fixtures reads and writes a database of its own, which no other process
knows; the settings of the developer are restored at its end.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from interlock.client.app import load_app
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.orchestrator.run import orchestrating
from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.migrate import migrate
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from contextlib import AbstractAsyncContextManager

    from interlock.client.app import Interlock
    from interlock.orchestrator.process import Orchestrator
    from interlock.testing.inline import Clock
    from interlock.worker.process import WorkerStateMachine

T = TypeVar("T")

CONCURRENCY = 8  # of the worker: a task may wait for another one
# The data of a test server is not worth a disk flush.
SERVER_SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
}


class DatabaseMaker:
    """Makes fresh migrated databases on one server, each a copy of a template."""

    def __init__(self, server_url: str) -> None:
        self._url = server_url
        self._template = f"interlock_test_{secrets.token_hex(4)}"
        self._made = 0

    def prepare(self) -> None:
        """Make the template."""
        self._run(f"create database {self._template}")
        _run_in_thread(_migrate(with_database(self._url, self._template)))

    def make(self) -> str:
        """Make a database; return its name."""
        self._made += 1
        name = f"{self._template}_{self._made}"
        self._run(f"create database {name} template {self._template} strategy file_copy")
        return name

    def url(self, name: str) -> str:
        """Return the URL of a database."""
        return with_database(self._url, name)

    def drop(self, name: str | None = None) -> None:
        """Drop a database, or the template, also while it is in use."""
        self._run(f"drop database if exists {name or self._template} with (force)")

    def _run(self, statement: str) -> None:
        async def run() -> None:
            async with connect(self._url) as connection:
                await connection.execute(statement.encode())

        _run_in_thread(run())


async def _migrate(url: str) -> None:
    async with connect(url) as connection:
        await migrate(connection)


@contextmanager
def server_for_tests(url: str | None) -> Iterator[DatabaseMaker]:
    """Give the maker of databases on a given server, or on an embedded one that ends with the block."""
    if url is not None:
        with _template_on(url) as maker:
            yield maker
        return
    # Not in pytest's directory: a socket's path must be short, and a server that root starts runs as another user.
    place = Path(tempfile.mkdtemp(prefix="interlock-"))
    place.chmod(0o711)
    server = EmbeddedServer(place / "db", settings=SERVER_SETTINGS)
    try:
        server.acquire()
        with _template_on(server.url("postgres")) as maker:
            yield maker
    finally:
        server.stop()
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _template_on(url: str) -> Iterator[DatabaseMaker]:
    maker = DatabaseMaker(url)
    maker.prepare()
    try:
        yield maker
    finally:
        maker.drop()


def with_database(url: str, name: str) -> str:
    """Return a URL with another database."""
    place, mark, parameters = url.partition("?")
    scheme, _, rest = place.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/{name}{mark}{parameters}"


def find_app(reference: str | None) -> Interlock:
    """Import the app under test: that of the ini option `interlock_app`, else that of the settings."""
    named = reference or Config.load().app
    if named is None:
        raise ConfigError("which app? Set `interlock_app` to package.module:app in the configuration of pytest")
    return load_app(named)


@contextmanager
def app_on(app: Interlock, url: str, clock: Clock | None) -> Iterator[Interlock]:
    """Bind an app to a database, and to a clock if there is one, until the block ends."""
    if app.is_open:
        raise ConfigError(
            "the app is open already, on the database of its settings: open it in the test, after the fixture"
        )
    config, app.config = app.config, replace(app.config, database_url=url, data_dir=None)
    app.clock, original_clock = clock, app.clock
    try:
        yield app
    finally:
        app.sync.close()
        app.config, app.clock = config, original_clock


def worker_for(app: Interlock, reference: str | None) -> AbstractAsyncContextManager[WorkerStateMachine]:
    """Run a worker for all tasks of an app."""
    if app.clock is not None:
        raise ConfigError(
            "a worker uses the clock of the server: with interlock_clock, run the tasks with `await drain(app)`"
        )
    of_steps = {step["namespace"] for workflow in app.workflows.values() for step in workflow.document["steps"]}
    namespaces = {"default", *(task.namespace for task in app.tasks.values()), *of_steps}
    settings = WorkerSettings.of(replace(app.config, app=reference, metrics_port=None))
    settings = replace(settings, namespaces=tuple(sorted(namespaces)), concurrency=CONCURRENCY, grace=1.0)
    return serving(app, settings)


def orchestrator_for(app: Interlock) -> AbstractAsyncContextManager[Orchestrator]:
    """Run an orchestrator on the database of an app."""
    return orchestrating(app)


@contextmanager
def running_in_thread(make: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """Run an async context manager in the event loop of a thread of its own, until the block ends."""
    entered: Future[tuple[T, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        stopping = asyncio.Event()
        async with make() as made:
            entered.set_result((made, asyncio.get_running_loop(), stopping))
            await stopping.wait()

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            if entered.done():
                raise
            entered.set_exception(error)

    with ThreadPoolExecutor(1, thread_name_prefix="interlock-test") as pool:
        running = pool.submit(main)
        made, loop, stopping = entered.result()
        try:
            yield made
        finally:
            loop.call_soon_threadsafe(stopping.set)
            running.result()


def _run_in_thread(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, also while an event loop runs in the calling thread."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(coroutine)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
