"""The `interlock` command against the database of a test and the tasks of worker_app."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg

from processes import COMMAND, Result, clean_environment, run_interlock, running_process

if TYPE_CHECKING:
    from collections.abc import Iterator

APP = ("--app", "worker_app:app")
UNKNOWN = "01a1e2cf-6c0c-75b3-83a4-94f638565840"


def environment(url: str, **variables: str) -> dict[str, str]:
    """Return the environment of a command: this database, 150 columns, no INTERLOCK_ variables of the caller."""
    return clean_environment(url, **{"COLUMNS": "150", **variables})


class Shell:
    """Runs commands and reads their effects from the database."""

    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, *arguments: str, **variables: str) -> Result:
        """Run a command to its end with an empty standard input."""
        return run_interlock(*arguments, environment=environment(self.url, **variables))

    def answer(self, *arguments: str, **variables: str) -> str:
        """Run a command that must succeed; return its output."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @contextmanager
    def begun(
        self, *arguments: str, stdin: int = subprocess.DEVNULL, **variables: str
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a command in the background until the block ends."""
        command, variables = [*COMMAND, *arguments], environment(self.url, **variables)
        with running_process(command, variables, stdin=stdin, stderr=subprocess.PIPE) as process:
            yield process

    def rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def state_of(self, task_id: str) -> str:
        """Return the state of a task."""
        ((state,),) = self.rows("select state from interlock.tasks where id = %s", task_id)
        return str(state)
