"""The commands as real processes on a real server: output, exit codes, and no traceback for usage errors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from interlock.cli.main import COMMANDS, GROUPS, requested_command
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.migrate import known_migrations
from processes import COMMAND, Result, eventually, run_interlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.flow


ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("INTERLOCK_")} | {"COLUMNS": "150"}


def interlock(*arguments: str, **variables: str) -> Result:
    return run_interlock(*arguments, environment=ENVIRONMENT | variables)


def begin(*command: str, **variables: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT | variables, bufsize=1
    )


def waiting(url: str, event: str) -> list[object]:
    """Return the sessions that wait for a lock; none while there is no server."""
    try:
        with psycopg.connect(url) as connection:
            found = connection.execute("select pid from pg_stat_activity where wait_event = %s", [event])
            return list(found.fetchall())
    except psycopg.OperationalError:
        return []


@pytest.fixture
def data_dir(embedded_dir: Path) -> Iterator[str]:
    place = str(embedded_dir / "db")
    yield place
    interlock("--data-dir", place, "db", "stop")


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


def test_ctrl_c_in_psql_ends_the_query_and_not_the_session(data_dir: str) -> None:
    url = EmbeddedServer(Path(data_dir)).url()
    terminal = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    psql = ["--data-dir", data_dir, "db", "psql", "--", "-X", "-P", "pager=off"]
    process = begin(sys.executable, "-c", terminal, *COMMAND, *psql)
    try:
        assert process.stdin is not None
        process.stdin.write("select pg_sleep(60);\n")
        eventually(lambda: waiting(url, "PgSleep"))
        process.stdin.write("\x03")
        process.stdin.flush()
        eventually(lambda: not waiting(url, "PgSleep"))
        process.stdin.write("select 6 * 7 as answer;\n\\q\n")
        process.stdin.flush()
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "canceling statement due to user request" in said
    assert "42" in said
    assert process.returncode == 0
    eventually(lambda: not EmbeddedServer(Path(data_dir)).status().running)


def test_psql_of_the_package_serves_where_the_system_has_none(url: str) -> None:
    done = interlock("--database-url", url, "db", "psql", "--", "-Atc", "select 6 * 7", PATH="/nowhere")
    assert done.stdout == "42\n", done.stderr


def test_a_server_stopped_during_a_command_is_one_message(data_dir: str) -> None:
    url = interlock("--data-dir", data_dir, "db", "start").stdout.strip()
    assert interlock("--data-dir", data_dir, "migrate").returncode == 0
    with closing(psycopg.connect(url)) as connection:
        connection.execute("lock table interlock.tasks")
        demo = begin(*COMMAND, "--data-dir", data_dir, "demo")
        eventually(lambda: waiting(url, "relation"))
        assert interlock("--data-dir", data_dir, "db", "stop").returncode == 0
    _, wrong = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert wrong == "interlock: terminating connection due to administrator command\n"


@pytest.mark.cold
def test_ctrl_c_while_the_command_is_being_loaded_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    process = begin(*COMMAND, "demo", PYTHONPATH=str(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, wrong = process.communicate(timeout=60)
    assert (process.returncode, wrong) == (130, "interrupted\n")


def test_ctrl_c_while_a_command_works_is_no_traceback(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("lock table interlock.tasks")
        process = begin(*COMMAND, "--database-url", url, "demo")
        eventually(lambda: waiting(url, "relation"))
        process.send_signal(signal.SIGINT)
        _, wrong = process.communicate(timeout=60)
    assert (process.returncode, wrong) == (130, "interrupted\n")


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
        (["db", "stop"], {"INTERLOCK_DATABASE_URL": "postgresql://h/d"}, 2, "embedded server is not in use"),
        (["--database-url", "postgresql://u:hunter2@[bad/x", "demo"], {}, 2, "database_url is not a valid URL"),
        (["demo"], {"INTERLOCK_DATABASE_URL": "postgresql://u:hunter2 x@h/d"}, 2, "database_url is not a valid URL"),
        (["--database-url", "postgresql://u:hunter2@h/d?hunter2", "demo"], {}, 2, "the database URL is not valid"),
        (["--database-url", "postgresql://u:hunter2", "db", "psql"], {}, 2, "the database URL is not valid"),
        (["--data-dir", "~nosuch/x", "db", "status"], {}, 2, "names an unknown home directory"),
        (["--data-dir", "", "db", "status"], {}, 2, "--data-dir: data_dir must not be empty"),
        (["--data-dir", "/dev/null/x", "db", "start"], {}, 1, "/dev/null is not a directory"),
        (["frobnicate"], {}, 2, "No such command"),
        (["diagram", "tusk"], {}, 2, "task"),
    ],
)
def test_usage_errors_are_one_message(arguments: list[str], variables: dict[str, str], code: int, message: str) -> None:
    done = interlock(*arguments, **variables)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr + done.stdout


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("db status", "db"),
        ("--log-level tasks --data-dir=x db status", "db"),
        ("--log-format json worker --app demo", "worker"),
        ("frobnicate", "frobnicate"),
        ("--help", None),
        ("--log-level", None),
        ("", None),
    ],
)
def test_the_command_is_found_behind_the_options_that_all_share(arguments: str, command: str | None) -> None:
    assert requested_command(arguments.split()) == command


def test_help_and_version() -> None:
    shown = interlock("--help").stdout
    assert "embedded PostgreSQL" in shown
    for name in (*COMMANDS, *GROUPS):
        assert re.search(rf"^\W+{name} ", shown, re.MULTILINE), name
    assert interlock("--version").stdout.startswith("0.")
