"""A worker for tests: in this process on its own task, or a real process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock import Interlock
from interlock.config import Config
from interlock.worker.run import serving as serve_app
from interlock.worker.settings import WorkerSettings
from worker_app import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from interlock.worker.process import WorkerStateMachine

TESTS = Path(__file__).parent


def app_at(url: str, **settings: Any) -> Interlock:
    """Return an app with the tasks of worker_app on another database."""
    here = Interlock(config=Config(database_url=url, **settings))
    here._tasks.update(app.tasks)  # noqa: SLF001 - the same tasks, another place
    return here


async def until(seen: Callable[[], Any], within: float = 60) -> None:
    """Wait for a condition that another task of this process fulfils."""
    async with asyncio.timeout(within):
        while not seen():
            await asyncio.sleep(0.002)


def serving(url: str, **settings: Any) -> AbstractAsyncContextManager[WorkerStateMachine]:
    """Run a worker in this process until the block ends, by default without maintenance."""
    app = app_at(url, worker_name="test-worker")
    return serve_app(app, WorkerSettings(**{"duties": False, **settings}))


@contextmanager
def worker_process(url: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m interlock.worker` on the tasks of worker_app; kill it at the end if it still runs."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("INTERLOCK_")}
    environment |= {
        "INTERLOCK_DATABASE_URL": url,
        "INTERLOCK_APP": "worker_app:app",
        "INTERLOCK_LOG_FORMAT": "json",
        "PYTHONPATH": str(TESTS),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "interlock.worker"],
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
