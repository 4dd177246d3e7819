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


def test_each_test_has_a_database_of_its_own_and_the_app_is_restored(tmp_path: Path) -> None:
    test = """
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
"""
    write_project(tmp_path, test)
    done = run_pytest(tmp_path)
    assert outcomes(done) == "3 passed", done.stdout


def databases(server: EmbeddedServer) -> Sequence[str]:
    with psycopg.connect(server.url("postgres")) as connection:
        return [name for (name,) in connection.execute("select datname from pg_database where datname ~ 'interlock_t'")]


def test_a_given_server_is_used_and_left_clean(tmp_path: Path, server: EmbeddedServer) -> None:
    test = """
from interlock_server_url import url
from shop import double

def test_the_worker_runs_where_it_was_told(interlock_worker, interlock_app):
    assert interlock_app.config.database_url.partition("?")[2] == url.partition("?")[2]
    assert double.enqueue_sync(n=4).wait(60) == 8
"""
    write_project(tmp_path, test)
    (tmp_path / "interlock_server_url.py").write_text(f"url = {server.url('postgres')!r}\n")
    done = run_pytest(tmp_path, "--interlock-server", server.url("postgres"))
    assert outcomes(done) == "1 passed", done.stdout
    assert databases(server) == []


def test_mistakes_are_named_with_the_remedy(tmp_path: Path) -> None:
    test = """
def test_clock(interlock_clock, interlock_worker): ...
"""
    write_project(tmp_path, test)
    done = run_pytest(tmp_path)
    assert "with interlock_clock, run the tasks with `await drain(app)`" in done.stdout
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_shop.py").write_text("def test_app(interlock_app): ...\n")
    assert "Set `interlock_app` to package.module:app in the configuration of pytest" in run_pytest(tmp_path).stdout


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
