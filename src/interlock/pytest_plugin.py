"""The pytest plugin: fixtures for a temporary database, the app on it, a worker, an orchestrator and a clock.

pytest loads it in every project where Interlock is installed, so it imports nothing until a fixture is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.client.app import Interlock
    from interlock.orchestrator.process import Orchestrator
    from interlock.testing.fixtures import DatabaseMaker
    from interlock.testing.inline import Clock
    from interlock.worker.process import WorkerStateMachine


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    help_ = "A PostgreSQL server on which Interlock's fixtures may create databases; an embedded one unless given."
    group = parser.getgroup("interlock")
    group.addoption("--interlock-server", metavar="URL", default=None, help=help_)
    parser.addini("interlock_server", help_, default="")
    parser.addini("interlock_app", "The app of the fixture interlock_app, as package.module:app.", default="")


def _kit() -> Any:
    return import_module("interlock.testing.fixtures")


@pytest.fixture(scope="session")
def interlock_server(pytestconfig: pytest.Config) -> Iterator[DatabaseMaker]:
    """Run the server of the test session: an embedded one that no other process uses, or that of --interlock-server."""
    url = pytestconfig.getoption("--interlock-server") or pytestconfig.getini("interlock_server") or None
    with _kit().server_for_tests(url) as maker:
        yield maker


@pytest.fixture
def interlock_database(interlock_server: DatabaseMaker) -> Iterator[str]:
    """Return the URL of a fresh, migrated, empty database; it is dropped after the test."""
    name = interlock_server.make()
    yield interlock_server.url(name)
    interlock_server.drop(name)


@pytest.fixture
def interlock_clock() -> Clock:
    """Return a clock that moves only when the test advances it; interlock_app uses it if the test does."""
    clock: Clock = import_module("interlock.testing").Clock()
    return clock


@pytest.fixture
def interlock_app(
    request: pytest.FixtureRequest, interlock_database: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Interlock]:
    """Bind the app that the ini option interlock_app names to a fresh database for the time of the test.

    Processes that the test starts use the same database.
    """
    monkeypatch.setenv("INTERLOCK_DATABASE_URL", interlock_database)
    clock = request.getfixturevalue("interlock_clock") if "interlock_clock" in request.fixturenames else None
    app = _kit().find_app(request.config.getini("interlock_app"))
    with _kit().app_on(app, interlock_database, clock) as bound:
        yield bound


@pytest.fixture
def interlock_worker(request: pytest.FixtureRequest, interlock_app: Interlock) -> Iterator[WorkerStateMachine]:
    """Run a worker for all tasks of interlock_app, in a thread of the test process."""
    reference = request.config.getini("interlock_app") or None
    with _kit().running_in_thread(lambda: _kit().worker_for(interlock_app, reference)) as worker:
        yield worker


@pytest.fixture
def interlock_orchestrator(interlock_app: Interlock) -> Iterator[Orchestrator]:
    """Run an orchestrator for the jobs of interlock_app, in a thread of the test process."""
    with _kit().running_in_thread(lambda: _kit().orchestrator_for(interlock_app)) as orchestrator:
        yield orchestrator
