"""Fixtures of all tests: one real embedded PostgreSQL per test process, a fresh migrated database per test."""

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

from api_support import api_at
from cli_support import Shell
from embedded_servers import embedded_directory
from factories import add_live_worker, run_sql
from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.migrate import migrate
from interlock.testing import Clock
from job_driver import JobDriver
from jobs_support import app_at as jobs_at
from pool_support import Fleet, fleet_at
from warm_processes import warm_processes
from workflow_case import START, WorkflowCase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    import httpx

    from interlock import Interlock
    from interlock.postgres.connection import Connection

# A suite started in the background ignores SIGINT, and its child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Let child processes reuse compiled modules, even if the caller's environment disables bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Without durability, which costs time: the tests of crash recovery use servers of their own.
FAST = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",  # the data directory may be in memory
}


# The same examples every time unless INTERLOCK_TEST_EXAMPLES is set; no deadline, as the machine may be busy.
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
    "test_interpreter_agreement.py",
)
KINDS = ("chaos", "flow", "store")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no test process runs one of them alone at the end.

    xdist gives each process an equal run of consecutive tests; each run begins with its share of the longest ones.
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


@pytest.fixture(autouse=True)
def warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start Python processes of tests by a fork of a warm one, unless they are marked as cold."""
    if request.node.get_closest_marker("cold"):
        yield
        return
    with warm_processes():
        yield


@pytest.fixture
def embedded_dir() -> Iterator[Path]:
    """Return a directory in which an embedded server can live."""
    with embedded_directory() as place:
        yield place


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """Run the server of this test process."""
    with embedded_directory() as place:
        embedded = EmbeddedServer(place / "db", settings=FAST)
        embedded.acquire()
        yield embedded
        embedded.stop()


@pytest.fixture(scope="session")
def template(server: EmbeddedServer) -> str:
    """Migrate the database from which those of the tests are cloned."""
    run_sql(server.url("postgres"), "create database migrated")

    async def prepare() -> None:
        async with connect(server.url("migrated")) as connection:
            await migrate(connection)

    asyncio.run(prepare())
    return "migrated"


class Clones:
    """Makes the next databases and drops used ones in a thread, while tests run."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = itertools.count(1)
        self._ahead: dict[str, deque[Future[str]]] = defaultdict(deque)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clones")

    def take(self, template: str) -> str:
        """Return a database made from a template; start making the next one."""
        ahead = self._ahead[template]
        while len(ahead) < 2:
            ahead.append(self._thread.submit(self._make, template))
        return ahead.popleft().result()

    def drop(self, name: str) -> None:
        """Drop a database in the background, open connections included."""
        self._thread.submit(run_sql, self._url, f"drop database {name} with (force)")

    def end(self) -> None:
        """Wait for running statements and cancel queued ones."""
        self._thread.shutdown(cancel_futures=True)

    def _make(self, template: str) -> str:
        name = f"test_{next(self._numbers)}"
        run_sql(self._url, f"create database {name} template {template} strategy file_copy")
        return name


@pytest.fixture(scope="session")
def clones(server: EmbeddedServer) -> Iterator[Clones]:
    """Return the database maker of this test process."""
    clones = Clones(server.url("postgres"))
    yield clones
    clones.end()


@pytest.fixture
def make_database(server: EmbeddedServer, clones: Clones) -> Iterator[Callable[[str], str]]:
    """Return a function that makes a database from a template and returns its URL."""
    made: list[str] = []

    def make(template: str = "template0") -> str:
        made.append(clones.take(template))
        return server.url(made[-1])

    yield make
    for name in made:
        clones.drop(name)


@pytest.fixture
def url(make_database: Callable[[str], str], template: str) -> str:
    """Return the URL of a fresh, migrated, empty database."""
    return make_database(template)


@pytest.fixture
async def database(url: str) -> AsyncIterator[Connection]:
    """Connect to a fresh, migrated, empty database."""
    async with connect(url) as connection:
        yield connection


@pytest.fixture
async def driver(database: Connection) -> JobDriver:
    """Return a driver of jobs on a database with a live worker."""
    await add_live_worker(database)
    return JobDriver(database)


@pytest.fixture
async def jobs(url: str) -> AsyncIterator[Interlock]:
    """Open the app of jobs_app on a fresh database."""
    async with jobs_at(url) as opened:
        yield opened


@pytest.fixture
async def case(url: str) -> AsyncIterator[WorkflowCase]:
    """Return a workflow without steps on a fresh database, with a clock that the test advances."""
    case = WorkflowCase(url, clock=Clock(START))
    yield case
    await case.close()


@pytest.fixture
async def live_case(url: str) -> AsyncIterator[WorkflowCase]:
    """Return a workflow without steps on a fresh database, for real processes and the real clock."""
    case = WorkflowCase(url, clock=None)
    yield case
    await case.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Return an HTTP client of the supervisor's API on a fresh database."""
    async with api_at(url) as client:
        yield client


@pytest.fixture
def shell(url: str) -> Shell:
    """Return a shell whose commands use a fresh, migrated, empty database."""
    return Shell(url)


@pytest.fixture
def fleet(url: str) -> Iterator[Fleet]:
    """Return the supervised worker rows of a fresh database; kill their processes at the end."""
    with fleet_at(url) as rows:
        yield rows
