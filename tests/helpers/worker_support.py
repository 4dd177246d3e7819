"""A worker on the tasks of worker_app: in this process as an asyncio task, or as a process of its own."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from interlock import Interlock
from interlock.config import Config
from interlock.worker.run import serving as serve_app
from interlock.worker.settings import WorkerSettings
from processes import clean_environment, running_process
from worker_app import app

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from interlock.worker.process import WorkerStateMachine


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
    own = {"INTERLOCK_APP": "worker_app:app", "INTERLOCK_LOG_FORMAT": "json", **variables}
    with running_process([sys.executable, "-m", "interlock.worker"], clean_environment(url, **own)) as process:
        yield process
