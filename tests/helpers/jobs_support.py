"""The workflows of jobs_app on the database of a test, and a worker that the test drives."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from factories import claim_tasks
from interlock import Interlock
from interlock.config import Config
from interlock.lifecycle import TaskRowEvent
from interlock.orchestrator.run import orchestrating
from interlock.orchestrator.settings import OrchestratorSettings
from interlock.store.tasks import Outcome, settle_running_tasks
from interlock.store.workers import RegisteredProcess, register_worker
from jobs_app import app
from processes import clean_environment, running_process

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Iterator, Mapping
    from uuid import UUID

    from interlock.orchestrator.process import Orchestrator
    from interlock.postgres.connection import Connection


def app_at(url: str, *, declared: Interlock = app, **settings: Any) -> Interlock:
    """Return an app with the tasks and workflows of jobs_app, or of another app, on another database."""
    here = Interlock(config=Config(database_url=url, **settings), actor="ada")
    here._tasks.update(declared.tasks)  # noqa: SLF001 - the same tasks, another place
    here._workflows.update(declared._workflows)  # noqa: SLF001 - the same workflows, another place
    return here


@asynccontextmanager
async def orchestrator_at(url: str, **settings: Any) -> AsyncIterator[Orchestrator]:
    """Run an orchestrator in this process until the block ends."""
    async with orchestrating(Interlock(config=Config(database_url=url)), OrchestratorSettings(**settings)) as running:
        yield running


async def register_idle_worker(database: Connection, *namespaces: str, id_: str = "manual") -> None:
    """Register a worker that does nothing by itself."""
    process = RegisteredProcess(id_, namespaces=namespaces or ("default",), types=("any",))
    await register_worker(database, process, lease=timedelta(minutes=5))


class ManualWorker:
    """Claims pending steps of jobs_app and settles them with the results that the test gives."""

    def __init__(self, database: Connection, results: Mapping[str, Any] | None = None) -> None:
        self._database = database
        self._results = results or {}
        self.done: list[str] = []

    async def work_once(self) -> int:
        """Claim and settle all pending steps; return how many."""
        types = list(app.tasks)
        claimed = await claim_tasks(self._database, actor="manual", types=types, limit=100)
        outcomes = [self._outcome(task.id, task.attempt, str(task.step)) for task in claimed]
        if outcomes:
            self.done += [str(task.step) for task in claimed]  # before others can see that the job is done
            await settle_running_tasks(self._database, outcomes, actor="manual")
        return len(outcomes)

    async def work(self) -> None:
        """Claim and settle until this asyncio task is canceled."""
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
async def manual_worker_at(
    database: Connection, results: Mapping[str, Any] | None = None
) -> AsyncIterator[ManualWorker]:
    """Run a manual worker until the block ends; it has the connection for itself."""
    await register_idle_worker(database)
    worker = ManualWorker(database, results)
    working = asyncio.create_task(worker.work())
    try:
        yield worker
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


@contextmanager
def process_of(module: str, url: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m module` on the workflows of jobs_app until the block ends."""
    own = {"INTERLOCK_APP": "jobs_app:app", "INTERLOCK_LOG_FORMAT": "json", **variables}
    with running_process([sys.executable, "-m", module], clean_environment(url, **own)) as process:
        yield process
