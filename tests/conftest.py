"""The fixtures of all tests: one real embedded PostgreSQL per test process, a fresh migrated database per test."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from embedded_processes import directory
from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.migrate import migrate
from support import run_sql

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from interlock.postgres.connection import Connection

# A suite that is started in the background ignores SIGINT, and so would every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Nor need each of those compile the modules anew, though the person may not want them compiled in general.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Durability costs time and proves nothing here: the tests of crash recovery use servers of their own.
FAST = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",  # it may be kept in memory
}


# The same examples every time, unless others are asked for; and however long one takes on a busy machine.
settings.register_profile(
    "steady",
    derandomize=not os.environ.get("INTERLOCK_TEST_EXAMPLES"),
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")

# Files whose tests take longest, the longest first.
LONGEST = (
    "test_random_workflows.py",
    "test_workflow_chaos.py",
    "test_api_schema.py",
    "test_jobs_end_to_end.py",
    "test_cli_demo.py",
    "test_sort_engine.py",
    "test_sort_restart.py",
    "test_agreement.py",
)
KINDS = ("chaos", "flow", "store")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the long ones begin, so that no process is left alone with one of them at the end.

    Each process is given as many tests in a row, the last ones one more if need be; so each row begins with its share.
    """
    items.sort(key=lambda item: next((at for at, kind in enumerate(KINDS) if item.get_closest_marker(kind)), 3))
    long = sorted((item for item in items if item.path.name in LONGEST), key=lambda item: LONGEST.index(item.path.name))
    others = iter([item for item in items if item.path.name not in LONGEST])
    processes: int = getattr(config, "workerinput", {}).get("workercount", 1)
    sizes = [(len(items) + number) // processes for number in range(processes)]
    shares = [long[processes - 1 - number :: processes] for number in range(processes)]
    items[:] = [
        item
        for share, size in zip(shares, sizes, strict=True)
        for item in (*share, *itertools.islice(others, size - len(share)))
    ]


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Give a directory in which an embedded server can live."""
    with directory() as place:
        yield place


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """Run a server for this test process alone."""
    with directory() as place:
        embedded = EmbeddedServer(place / "db", settings=FAST)
        embedded.acquire()
        yield embedded
        embedded.stop()


@pytest.fixture(scope="session")
def template(server: EmbeddedServer) -> str:
    """Migrate one database, from which those of the tests are cloned."""
    run_sql(server.url("postgres"), "create database migrated")

    async def prepare() -> None:
        async with connect(server.url("migrated")) as connection:
            await migrate(connection)

    asyncio.run(prepare())
    return "migrated"


class Clones:
    """Databases of the tests: the next one is made, and the last one dropped, while a test runs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = itertools.count(1)
        self._ahead: dict[str, deque[Future[str]]] = defaultdict(deque)
        self._hand = ThreadPoolExecutor(1, thread_name_prefix="clones")

    def take(self, template: str) -> str:
        """Give the name of a database that is made from a template, and have the next one made."""
        ahead = self._ahead[template]
        while len(ahead) < 2:
            ahead.append(self._hand.submit(self._make, template))
        return ahead.popleft().result()

    def drop(self, name: str) -> None:
        """Have a database dropped, whoever is still connected to it."""
        self._hand.submit(run_sql, self._url, f"drop database {name} with (force)")

    def end(self) -> None:
        """Wait for what is under way, and do no more."""
        self._hand.shutdown(cancel_futures=True)

    def _make(self, template: str) -> str:
        name = f"test_{next(self._numbers)}"
        run_sql(self._url, f"create database {name} template {template} strategy file_copy")
        return name


@pytest.fixture(scope="session")
def clones(server: EmbeddedServer) -> Iterator[Clones]:
    """Give the databases of this test process."""
    clones = Clones(server.url("postgres"))
    yield clones
    clones.end()


@pytest.fixture
def make_database(server: EmbeddedServer, clones: Clones) -> Iterator[Callable[[str], str]]:
    """Give a function that makes a database from a template and returns its URL."""
    made: list[str] = []

    def make(template: str = "template0") -> str:
        made.append(clones.take(template))
        return server.url(made[-1])

    yield make
    for name in made:
        clones.drop(name)


@pytest.fixture
def url(make_database: Callable[[str], str], template: str) -> str:
    """Give the URL of a fresh, migrated, empty database."""
    return make_database(template)


@pytest.fixture
async def database(url: str) -> AsyncIterator[Connection]:
    """Connect to a fresh, migrated, empty database."""
    async with connect(url) as connection:
        yield connection
