"""The command as a person types it, against the database of a test and the tasks of worker_app."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from cli_forks import Result, forks

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = (sys.executable, "-m", "interlock")
APP = ("--app", "worker_app:app")
UNKNOWN = "01a1e2cf-6c0c-75b3-83a4-94f638565840"


def environment(url: str, **variables: str) -> dict[str, str]:
    """Give the environment of a process that uses this database and nothing of the person's own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    own = {"INTERLOCK_DATABASE_URL": url, "PYTHONPATH": str(Path(__file__).parent), "COLUMNS": "150"}
    return inherited | own | variables


class Shell:
    """Types commands."""

    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, *arguments: str, **variables: str) -> Result:
        """Run a command to its end, with nobody at the keyboard."""
        return forks().run(list(arguments), environment(self.url, **variables), 100)

    def answer(self, *arguments: str, **variables: str) -> str:
        """Run a command that must go well, and give what it printed."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @contextmanager
    def begun(
        self, *arguments: str, stdin: int = subprocess.DEVNULL, **variables: str
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a command beside the test, and kill what is left of it at the end."""
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(self.url, **variables),
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Look into the database."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def state_of(self, task_id: str) -> str:
        """Tell the state of a task."""
        ((state,),) = self.rows("select state from interlock.tasks where id = %s", task_id)
        return str(state)
