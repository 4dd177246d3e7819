"""The pytest plugin in projects of users: pytest runs as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from processes import clean_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.postgres.embedded.server import EmbeddedServer

pytestmark = pytest.mark.flow

GUIDE = Path(__file__).parents[2] / "docs" / "testing.md"
APP = "from interlock import Interlock\napp = Interlock()\n\n@app.task\ndef double(n: int) -> int:\n    return n * 2\n"
INI = """[pytest]
interlock_app = shop:app
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
filterwarnings = error
"""


def run_pytest(
    directory: Path, *arguments: str, url: str = "postgresql://127.0.0.1:1/of_the_developer"
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a user's project; the environment names the developer's own database, which must not be used."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = clean_environment(url, PYTHONPATH=str(directory))
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=110
    )


def write_project(directory: Path, test: str) -> None:
    (directory / "pytest.ini").write_text(INI)
    (directory / "shop.py").write_text(APP)
    (directory / "test_shop.py").write_text(test)


def outcomes(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout, done.stderr
    return done.stdout.strip().splitlines()[-1].partition(" in ")[0]


def test_the_project_of_the_guide_passes(tmp_path: Path) -> None:
    blocks = re.findall(r"```(?:python|toml)\n# (\S+)\n(.+?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    done = run_pytest(tmp_path)
    assert outcomes(done) == "9 passed", done.stdout


PROJECT = """
import os
import pytest
from shop import app, double

before = app.config

@pytest.mark.parametrize("n", [1, 2])
def test_nothing_is_left_of_other_tests(interlock_app, interlock_database, n):
    assert interlock_app is app
    assert os.environ["INTERLOCK_DATABASE_URL"] == interlock_database == app.config.database_url
    assert app.sync.find() == []
    double.enqueue_sync(n=n)
    assert len(app.sync.find()) == 1

def test_afterwards_the_settings_are_those_of_before():
    assert app.config is before
    assert os.environ["INTERLOCK_DATABASE_URL"].endswith("of_the_developer")
    assert not app.is_open

def test_the_worker_runs_where_it_was_told(interlock_worker, interlock_app, pytestconfig):
    url = pytestconfig.getoption("--interlock-server")
    assert interlock_app.config.database_url.partition("?")[2] == url.partition("?")[2]
    assert double.enqueue_sync(n=4).wait(60) == 8

def test_clock(interlock_clock, interlock_worker): ...

def test_no_app_is_configured(request, monkeypatch):
    config = request.config
    without_app = lambda name, getini=config.getini: "" if name == "interlock_app" else getini(name)
    monkeypatch.setattr(config, "getini", without_app)
    request.getfixturevalue("interlock_app")
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> subprocess.CompletedProcess[str]:
    """Run the tests of a user's project once, on a given server."""
    directory = tmp_path_factory.mktemp("project")
    write_project(directory, PROJECT)
    return run_pytest(directory, "-vv", "--interlock-server", server.url("postgres"))


def outcome(project: subprocess.CompletedProcess[str], test: str) -> list[str]:
    """Return the outcome of a test, of each of its parameters."""
    return re.findall(rf"^test_shop\.py::{test}(?:\[.+\])? ([A-Z]+)", project.stdout, re.MULTILINE)


def test_each_test_has_a_database_of_its_own_and_the_app_is_restored(
    project: subprocess.CompletedProcess[str],
) -> None:
    assert outcome(project, "test_nothing_is_left_of_other_tests") == ["PASSED"] * 2, project.stdout
    assert outcome(project, "test_afterwards_the_settings_are_those_of_before") == ["PASSED"], project.stdout


def databases(server: EmbeddedServer) -> Sequence[str]:
    with psycopg.connect(server.url("postgres")) as connection:
        return [name for (name,) in connection.execute("select datname from pg_database where datname ~ 'interlock_t'")]


def test_a_given_server_is_used_and_left_clean(
    project: subprocess.CompletedProcess[str], server: EmbeddedServer
) -> None:
    assert outcome(project, "test_the_worker_runs_where_it_was_told") == ["PASSED"], project.stdout
    assert databases(server) == []


def test_mistakes_are_named_with_the_remedy(project: subprocess.CompletedProcess[str]) -> None:
    assert outcome(project, "test_clock") == ["ERROR"], project.stdout
    assert "with interlock_clock, run the tasks with `await drain(app)`" in project.stdout
    assert outcome(project, "test_no_app_is_configured") == ["FAILED"], project.stdout
    assert "Set `interlock_app` to package.module:app in the configuration of pytest" in project.stdout
    assert outcomes(project).strip("= ") == "1 failed, 4 passed, 1 error"


def test_the_plugin_imports_nothing_until_a_fixture_is_used(tmp_path: Path) -> None:
    test = """
import sys

def test_it_is_light():
    assert "interlock.pytest_plugin" in sys.modules
    heavy = {"interlock.client", "interlock.postgres", "psycopg", "structlog", "orjson", "interlock.testing"}
    assert not heavy & set(sys.modules)
"""
    write_project(tmp_path, test)
    done = run_pytest(tmp_path, "-p", "no:schemathesis", "-p", "no:hypothesispytest")
    assert outcomes(done) == "1 passed", done.stdout
