"""`--reload` as a real process: an edited handler runs its new code, and a mistake in an edit is survived."""

from __future__ import annotations

import signal
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from cli_support import Shell, environment
from interlock.cli.reload import source_files
from processes import COMMAND, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.flow

MODULE = """
from interlock import Interlock

app = Interlock()


@app.task
async def greet() -> str:
    return {answer!r}
"""


@contextmanager
def reloading(shell: Shell, project: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run a command with --reload in the directory of a project; collect its output."""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--app", "shop:app", "--reload"],
        env=environment(shell.url, PYTHONDONTWRITEBYTECODE="1"),
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    reading = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reading.start()
    try:
        yield process, lines
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "".join(lines)
    finally:
        process.kill()  # its child ends with it
        process.wait()
        reading.join(60)
        if process.stdout is not None:
            process.stdout.close()


def result_of(shell: Shell, task_id: str) -> object:
    eventually(lambda: shell.state_of(task_id) == "done")
    ((output,),) = shell.rows("select output from interlock.tasks where id = %s", task_id)
    return output


def test_a_worker_runs_the_edited_handler_and_survives_a_mistake_in_an_edit(shell: Shell, tmp_path: Path) -> None:
    module = tmp_path / "shop.py"
    module.write_text(MODULE.format(answer="before"), encoding="utf-8")
    with reloading(shell, tmp_path, "worker") as (_, lines):
        assert result_of(shell, shell.answer("enqueue", "greet")) == "before"
        module.write_text("this is a mistake\n", encoding="utf-8")
        eventually(lambda: any("it starts again when a file changes" in line for line in lines))
        assert any("SyntaxError" in line or "invalid syntax" in line for line in lines)
        module.write_text(MODULE.format(answer="after the edit"), encoding="utf-8")
        assert result_of(shell, shell.answer("enqueue", "greet")) == "after the edit"
    assert sum("shop.py changed: restarting" in line for line in lines) == 2
    assert any("worker_stopped" in line for line in lines)


def test_up_restarts_its_workers_when_a_handler_is_edited(shell: Shell, tmp_path: Path) -> None:
    module = tmp_path / "shop.py"
    module.write_text(MODULE.format(answer="before"), encoding="utf-8")
    with reloading(shell, tmp_path, "up", "--workers", "1", "--port", "0"):
        assert result_of(shell, shell.answer("enqueue", "greet")) == "before"
        module.write_text(MODULE.format(answer="after the edit"), encoding="utf-8")

        def ran_new_code() -> bool:
            return result_of(shell, shell.answer("enqueue", "greet")) == "after the edit"

        eventually(ran_new_code)


def test_a_killed_reloader_takes_its_worker_with_it(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(MODULE.format(answer="x"), encoding="utf-8")
    live = "select count(*) from interlock.workers where status = 'RUNNING'"
    with reloading(shell, tmp_path, "worker") as (process, lines):
        eventually(lambda: shell.rows(live) == [(1,)])
        process.kill()
        process.wait()
        eventually(lambda: shell.rows(live) == [(0,)])
        eventually(lambda: any("worker_stopped" in line for line in lines))


def test_hidden_directories_and_virtual_environments_are_not_watched(tmp_path: Path) -> None:
    for name in ("shop/tasks.py", ".venv/lib/x.py", "env/lib/y.py", "__pycache__/z.py", "shop/flow.yaml", "notes.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert {path.removeprefix(f"{tmp_path}/") for path in source_files(tmp_path)} == {"shop/tasks.py", "shop/flow.yaml"}
