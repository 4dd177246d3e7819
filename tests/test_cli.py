"""The commands as a person types them: real processes, a real server, and no traceback for a mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest

from interlock.store.migrate import known_migrations
from support import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.flow


def interlock(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("INTERLOCK_")} | {"COLUMNS": "150"}
    return subprocess.run(
        [sys.executable, "-m", "interlock", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment | variables,
    )


@pytest.fixture
def data_dir(open_directory: Path) -> Iterator[str]:
    place = str(open_directory / "db")
    yield place
    interlock("--data-dir", place, "db", "stop")


def test_the_demo_tells_a_tasks_life_and_leaves_no_server_behind(data_dir: str) -> None:
    for _ in range(2):
        done = interlock("--data-dir", data_dir, "demo")
        assert done.returncode == 0, done.stderr
        for word in ("enqueued", "crashed", "recovered", "fenced", "IllegalTransition", "ImmutableRecordError"):
            assert word in done.stdout
        assert done.stdout.count("claim ") == 2
    eventually(lambda: "running         no" in interlock("--data-dir", data_dir, "db", "status").stdout)


def test_db_start_url_psql_and_stop(data_dir: str) -> None:
    started = interlock("--data-dir", data_dir, "db", "start")
    assert started.returncode == 0, started.stderr
    url = started.stdout.strip()
    assert interlock("--data-dir", data_dir, "db", "url").stdout.strip() == url
    with psycopg.connect(url) as connection:
        assert connection.execute("select current_database()").fetchone() == ("interlock",)
    shown = interlock("--data-dir", data_dir, "db", "status").stdout
    assert "running         yes" in shown
    assert "stops           on interlock db stop" in shown
    typed = interlock("--data-dir", data_dir, "db", "psql", "--", "-Atc", "select 6 * 7")
    assert typed.stdout == "42\n", typed.stderr
    assert "stopped" in interlock("--data-dir", data_dir, "db", "stop").stderr
    assert "it was not running" in interlock("--data-dir", data_dir, "db", "stop").stderr


def test_migrate_shows_what_would_run_then_runs_it_then_has_nothing_to_do(make_database: Callable[[], str]) -> None:
    url = make_database()
    newest = known_migrations()[-1].name
    assert f"pending  {newest}" in interlock("--database-url", url, "migrate", "--status").stdout
    assert "create table interlock.tasks" in interlock("--database-url", url, "migrate", "--dry-run").stdout
    assert f"applied {newest}" in interlock("migrate", INTERLOCK_DATABASE_URL=url).stderr
    assert f"applied  {newest}" in interlock("migrate", "--status", INTERLOCK_DATABASE_URL=url).stdout
    assert "up to date" in interlock("migrate", INTERLOCK_DATABASE_URL=url).stderr
    assert "the guards are up to date" in interlock("migrate", "--generate").stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "message"),
    [
        (["--database-url", "mysql://x", "demo"], {}, 2, "must begin with postgresql://"),
        (["demo"], {"INTERLOCK_LOG_LEVEL": "loud"}, 2, "INTERLOCK_LOG_LEVEL"),
        (["demo"], {"INTERLOCK_CONFIG": "/nowhere/interlock.toml"}, 2, "does not exist"),
        (
            ["--database-url", "postgresql://u:hunter2@127.0.0.1:1/d", "demo"],
            {},
            1,
            "cannot connect to d at 127.0.0.1:1",
        ),
        (["db", "stop"], {"INTERLOCK_DATABASE_URL": "postgresql://h/d"}, 2, "no embedded server"),
        (["frobnicate"], {}, 2, "No such command"),
        (["diagram", "tusk"], {}, 2, "task"),
    ],
)
def test_a_mistake_gets_one_clear_message(
    arguments: list[str], variables: dict[str, str], code: int, message: str
) -> None:
    done = interlock(*arguments, **variables)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr + done.stdout


def test_help_and_version() -> None:
    assert "embedded PostgreSQL" in interlock("--help").stdout
    assert interlock("--version").stdout.startswith("0.")
