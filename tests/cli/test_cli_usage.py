"""The command line in daily use: shared flags anywhere, errors in the user's own module, the database in use."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

import interlock
from interlock.cli.main import COMMANDS, GROUPS, hoist_shared_flags
from processes import Result, clean_environment, run_interlock

if TYPE_CHECKING:
    from pathlib import Path

    from cli_support import Shell

pytestmark = pytest.mark.flow

ALL_COMMANDS = [
    *((name,) for name in COMMANDS),
    *(
        (group, command.name or command.callback.__name__)
        for group, module in GROUPS.items()
        for command in import_module(f"interlock.cli.{module}").app.registered_commands
        if command.callback is not None
    ),
]


def run(*arguments: str, **variables: str) -> Result:
    """Run a command without any setting of the caller."""
    environment = clean_environment("", **{"COLUMNS": "150", **variables})
    del environment["INTERLOCK_DATABASE_URL"]
    return run_interlock(*arguments, environment=environment)


def run_in(directory: Path, *arguments: str) -> Result:
    """Run a command in the directory of a user's module."""
    environment = clean_environment("postgresql://x", PYTHONPATH="", COLUMNS="150")
    return run_interlock(*arguments, environment=environment, directory=directory)


# --- shared flags


@pytest.mark.unit
@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("status --database-url x --json", "--database-url x status --json"),
        ("--log-level info tasks list --log-level=debug", "--log-level info --log-level=debug tasks list"),
        ("db psql --data-dir d -- --database-url y", "--data-dir d db psql -- --database-url y"),
        ("status --database-url", "--database-url status"),
        ("", ""),
    ],
)
def test_shared_flags_move_before_the_command(given: str, parsed: str) -> None:
    assert hoist_shared_flags(given.split()) == parsed.split()


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=" ".join)
def test_every_command_takes_the_shared_flags_after_it(command: tuple[str, ...]) -> None:
    done = run(*command, "--log-level", "loud")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--log-level: log_level must be one of debug, info, warning, error, not 'loud'" in done.stderr


def test_the_database_can_be_named_before_and_after_the_command(shell: Shell) -> None:
    task_id = shell.answer("enqueue", "anything")
    before = run("--database-url", shell.url, "tasks", "list", "--json")
    after = run("tasks", "list", "--json", "--database-url", shell.url)
    assert json.loads(before.stdout) == json.loads(after.stdout)
    assert task_id in after.stdout


def test_help_shows_the_shared_flags_once() -> None:
    assert run("--help").stdout.count("--data-dir") == 1
    assert "--data-dir" not in run("tasks", "list", "--help").stdout


@pytest.mark.parametrize("group", GROUPS)
def test_the_help_of_every_group_has_an_example(group: str) -> None:
    assert "Example" in run(group, "--help").stdout


# --- the user's own module


BROKEN = {
    "syntax": ("x = (1\n", "SyntaxError: '(' was never closed", "broken.py:1\n    x = (1"),
    "raises": ("def f():\n    return 1 / 0\n\nf()\n", "ZeroDivisionError: division by zero", "broken.py:2, in f\n"),
    "imports": ("import no_such_module\n", "No module named 'no_such_module'", "broken.py:1, in <module>\n"),
    "imports itself": ("import broken.part\n", "No module named 'broken.part'", "broken.py:1, in <module>\n"),
    "name": ("from json import lods\n", "ImportError: cannot import name 'lods'", "broken.py:1, in <module>\n"),
    "definition": (
        "from interlock import Interlock\napp = Interlock()\n\n@app.task(max_tires=3)\ndef f(): ...\n",
        "DefinitionError: task f: unknown option 'max_tires'",
        "broken.py:4, in <module>\n",
    ),
    "setting": (
        "from interlock import Interlock\napp = Interlock('mysql://x')\n",
        "ConfigError: --database-url: database_url must begin with postgresql://",
        "broken.py:2, in <module>\n",
    ),
    "exits": ("import sys\nsys.exit(3)\n", "SystemExit: 3", "broken.py:2, in <module>\n    sys.exit(3)"),
}
USERS_OF_AN_APP = (
    ("worker",),
    ("up",),
    ("supervisor",),
    ("enqueue", "f"),
    ("submit", "w"),
    ("workflows", "list"),
)


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_mistake_in_the_module_of_the_app_gives_its_file_and_line(mistake: str, tmp_path: Path) -> None:
    text, error, place = BROKEN[mistake]
    (tmp_path / "broken.py").write_text(text)
    done = run_in(tmp_path, "worker", "--app", "broken:app")
    assert done.returncode == 2
    assert error in done.stderr
    assert place in done.stderr
    assert "Traceback" not in done.stderr
    assert "interlock/" not in done.stderr
    assert "importlib" not in done.stderr
    assert len(done.stderr.splitlines()) < 10


@pytest.mark.parametrize("command", USERS_OF_AN_APP, ids=" ".join)
def test_every_command_that_imports_an_app_says_the_same(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    done = run_in(tmp_path, *command, "--app", "broken:app")
    assert done.returncode == 2
    assert done.stderr.startswith("interlock: cannot import broken: ModuleNotFoundError: No module named 'no_such_")
    assert "broken.py:1, in <module>" in done.stderr


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("fine:ap", "fine.py) has no 'ap'; did you mean fine:app?"),
        ("fine:n", "fine:n is a int, not an Interlock app; did you mean fine:app?"),
        ("absent:app", "there is no module 'absent'"),
        ("fine.part:app", "there is no module 'fine.part'"),
        ("fine.py", "there is no module 'fine.py'"),
    ],
)
def test_a_wrong_reference_says_what_would_be_right(reference: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "fine.py").write_text("from interlock import Interlock\napp = Interlock()\nn = 3\n")
    done = run_in(tmp_path, "worker", "--app", reference)
    assert done.returncode == 2
    assert message in done.stderr


# --- the database in use


@pytest.fixture
def data_dir(embedded_dir: Path) -> Path:
    return embedded_dir / "db"


def test_a_command_on_the_embedded_server_says_so_once_on_standard_error(data_dir: Path) -> None:
    done = run("status", "--json", "--data-dir", str(data_dir))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert done.stderr.count(f"database: the embedded server in {data_dir}") == 1


def test_a_command_on_a_named_server_says_nothing(shell: Shell) -> None:
    assert shell.run("status", "--json").stderr == ""


@pytest.mark.parametrize("variables", [{"INTERLOCK_PROFILE": "production"}, {"INTERLOCK_EMBEDDED": "false"}])
@pytest.mark.parametrize("command", [("status",), ("worker", "--app", "worker_app:app"), ("db", "start"), ("migrate",)])
def test_where_the_embedded_server_is_forbidden_every_command_says_what_to_set(
    command: tuple[str, ...], variables: dict[str, str], data_dir: Path
) -> None:
    done = run(*command, "--data-dir", str(data_dir), **variables)
    assert done.returncode == 2
    assert "set INTERLOCK_DATABASE_URL to postgresql://USER:PASSWORD@HOST/DATABASE" in done.stderr
    assert not data_dir.exists()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"INTERLOCK_DATABASE_ULR": "postgresql://x"}, "did you mean INTERLOCK_DATABASE_URL?"),
        ({"INTERLOCK_PROFILE": ""}, "INTERLOCK_PROFILE is empty"),
    ],
)
def test_a_misspelled_or_empty_variable_stops_every_command(variables: dict[str, str], message: str) -> None:
    done = run("status", **variables)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout.strip() == interlock.__version__ == version("interlock")
