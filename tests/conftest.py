"""The fixtures of all tests: one real embedded PostgreSQL per test process, a fresh migrated database per test."""

from __future__ import annotations

import asyncio
import itertools
import signal
from typing import TYPE_CHECKING

import pytest

from embedded_processes import directory
from interlock.store.database import connect
from interlock.store.embedded import EmbeddedServer
from interlock.store.migrate import migrate
from support import run_sql

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from interlock.store.database import Connection

_numbers = itertools.count(1)

# A suite that is started in the background ignores SIGINT, and so would every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Durability costs time and proves nothing here: the tests of crash recovery use servers of their own.
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "shared_buffers": "64MB"}


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


@pytest.fixture
def make_database(server: EmbeddedServer) -> Iterator[Callable[[str], str]]:
    """Give a function that makes a database from a template and returns its URL."""
    made: list[str] = []

    def make(template: str = "template0") -> str:
        name = f"test_{next(_numbers)}"
        run_sql(server.url("postgres"), f"create database {name} template {template}")
        made.append(name)
        return server.url(name)

    yield make
    for name in made:
        run_sql(server.url("postgres"), f"drop database {name} with (force)")


@pytest.fixture
def url(make_database: Callable[[str], str], template: str) -> str:
    """Give the URL of a fresh, migrated, empty database."""
    return make_database(template)


@pytest.fixture
async def database(url: str) -> AsyncIterator[Connection]:
    """Connect to a fresh, migrated, empty database."""
    async with connect(url) as connection:
        yield connection
