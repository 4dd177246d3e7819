"""The program `interlock-sort`: prefork, global options, exit codes and Ctrl-C; and a plain `interlock` beside it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sort_cli import ENVIRONMENT, OWN_PROGRAM, make_input, names, started

pytestmark = pytest.mark.flow


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `interlock-sort` to its end; check that no process of it is left."""
    with started(*arguments, command=OWN_PROGRAM) as process:
        output, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def test_the_package_declares_both_programs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["interlock-sort"] == "interlock.cli.sort.main:main"
    assert set(project["scripts"]) == {"interlock", "interlock-sort"}


def test_help_shows_the_commands_and_the_global_options() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for shown in ("interlock-sort", "generate", "run", "master", "worker", "validate", "--log-level", "--database-url"):
        assert shown in done.stdout
    usage = run("run", "--help")
    assert usage.returncode == 0
    assert "interlock-sort run" in usage.stdout
    assert run("--version").stdout.strip() != ""


def test_generate_run_and_validate(tmp_path: Path) -> None:
    assert run("generate", tmp_path / "in", "--records", 5_000).returncode == 0
    done = run("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--quiet", "--history")
    assert done.returncode == 0, done.stderr
    assert "State history" in done.stdout, "the output is flushed before the quick exit"
    assert names(tmp_path / "out") == ["partition.0", "partition.1"]
    checked = run("validate", tmp_path / "out", "--input", tmp_path / "in")
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.endswith("valid\n")


def test_global_options_come_before_the_command(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 1_000)
    done = run("--log-level", "info", "--log-format", "json", "run", tmp_path / "in", "-O", tmp_path / "out", "-q")
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("{") for line in done.stderr.splitlines())
    assert "sort master: Registering -> Sampling" in done.stderr


def test_errors_have_exit_codes_and_leave_no_preforked_worker(tmp_path: Path) -> None:
    missing = run("run", tmp_path / "none", "-O", tmp_path / "out", "-w", 3)
    assert missing.returncode == 2
    assert missing.stderr == f"interlock: input {tmp_path}/none does not exist\n"
    assert run("run", "--workers", "many").returncode == 2
    assert run("unknown").returncode == 2
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "partition.0").write_bytes(b"b" * 100 + b"a" * 100)
    assert run("validate", tmp_path / "out").returncode == 1


def test_an_interrupt_exits_with_130_and_leaves_no_partition(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 600_000)
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--memory", "256MB")
    with started(*arguments, command=OWN_PROGRAM) as process:
        assert process.stderr is not None
        while "Sorting" not in (line := process.stderr.readline()):
            assert line, "it ended before it was interrupted"
        process.send_signal(2)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("interrupted\n")
    assert "Traceback" not in errors
    assert names(tmp_path / "out") == []


@pytest.mark.cold
def test_the_plain_program_loads_nothing_of_the_sort() -> None:
    code = (
        "import sys; from interlock.__main__ import main\n"
        "sys.argv = ['interlock', 'status', '--help']\n"
        "try: main()\n"
        "except SystemExit: print([name for name in sys.modules if name.startswith('interlock.sort')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
