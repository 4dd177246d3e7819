"""Jobs for tests: the workflows of jobs_app on a test's database, and a worker that is only said to be there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock import Interlock
from interlock.config import Config
from interlock.lifecycle import TaskRowEvent
from interlock.orchestrator.run import orchestrating
from interlock.orchestrator.settings import OrchestratorSettings
from interlock.store.tasks import Outcome, claim_pending_tasks, settle_running_tasks
from interlock.store.workers import RegisteredProcess, register_worker
from jobs_app import app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from uuid import UUID

    from interlock.orchestrator.process import Orchestrator
    from interlock.postgres.connection import Connection

TESTS = Path(__file__).parent


def app_at(url: str, **settings: Any) -> Interlock:
    """Give the workflows of jobs_app on another database."""
    here = Interlock(config=Config(database_url=url, **settings), actor="ada")
    here._tasks.update(app.tasks)  # noqa: SLF001 - the same tasks, another place
    here._workflows.update(app.workflows)  # noqa: SLF001 - the same workflows, another place
    return here


@asynccontextmanager
async def orchestrator_at(url: str, **settings: Any) -> AsyncIterator[Orchestrator]:
    """Run an orchestrator in this process until the block ends."""
    async with orchestrating(Interlock(config=Config(database_url=url)), OrchestratorSettings(**settings)) as running:
        yield running


async def say_that_a_worker_is_here(database: Connection, *namespaces: str, id_: str = "hands") -> None:
    """Register a worker that does nothing by itself."""
    process = RegisteredProcess(id_, namespaces=namespaces or ("default",), types=("any",))
    await register_worker(database, process, lease=timedelta(minutes=5))


class Hands:
    """A worker by hand: claims what is pending, and settles it with the results that the test says."""

    def __init__(self, database: Connection, results: Mapping[str, Any] | None = None) -> None:
        self._database = database
        self._results = results or {}
        self.done: list[str] = []

    async def work_once(self) -> int:
        """Claim and settle what is pending now."""
        types = [*app.tasks, "interlock.pass"]
        claimed = await claim_pending_tasks(self._database, actor="hands", types=types, limit=100)
        outcomes = [self._outcome(task.id, task.attempt, str(task.step)) for task in claimed]
        if outcomes:
            self.done += [str(task.step) for task in claimed]  # before others can see that the job is done
            await settle_running_tasks(self._database, outcomes, actor="hands")
        return len(outcomes)

    async def work(self) -> None:
        """Do so until this task is canceled."""
        while True:
            await self.work_once()
            await asyncio.sleep(0.005)

    def _outcome(self, id_: UUID, attempt: int, step: str) -> Outcome:
        result = self._results.get(step, step)
        if not isinstance(result, Exception):
            return Outcome(id_, attempt, TaskRowEvent.SUCCEED, _document(step, result, None))
        error = {"type": type(result).__name__, "message": str(result), "retryable": False}
        return Outcome(id_, attempt, TaskRowEvent.FAIL, _document(step, None, error), error, str(result))


def _document(step: str, result: Any, error: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "step": step,
        "success": error is None,
        "result": result,
        "status": "completed" if error is None else "failed",
        "error": error,
        "metadata": {},
        "orchestration_metadata": {},
    }


@asynccontextmanager
async def hands_at(database: Connection, results: Mapping[str, Any] | None = None) -> AsyncIterator[Hands]:
    """Have a worker by hand work until the block ends; the connection is its alone meanwhile."""
    await say_that_a_worker_is_here(database)
    hands = Hands(database, results)
    working = asyncio.create_task(hands.work())
    try:
        yield hands
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


@contextmanager
def process_of(module: str, url: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m module` on the workflows of jobs_app, and kill what is left of it at the end."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("INTERLOCK_")}
    environment |= {
        "INTERLOCK_DATABASE_URL": url,
        "INTERLOCK_APP": "jobs_app:app",
        "INTERLOCK_LOG_FORMAT": "json",
        "PYTHONPATH": str(TESTS),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
