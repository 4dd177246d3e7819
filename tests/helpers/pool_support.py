"""A supervisor pool in the process of the test, with real worker processes as its children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import dict_row

from interlock.config import Config
from interlock.lifecycle import SupervisedWorkerEvent
from interlock.model.options import NewTask
from interlock.postgres.connection import connect
from interlock.postgres.notifier import Notifier
from interlock.store.enqueue import enqueue_task
from interlock.store.remote_commands import Status, call_processes
from interlock.store.workers import WorkerSpec, create_worker, move_worker
from interlock.supervisor.pool.pool import Pool
from interlock.supervisor.pool.process_info import read_start_time
from interlock.supervisor.pool.settings import PoolSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from datetime import datetime
    from uuid import UUID

os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where child processes find their app

Event = SupervisedWorkerEvent
QUICK = {"poll_interval": 0.1, "lease": 1.0, "restart_backoff": 0.05, "grace": 1.0, "stop_margin": 7.0}


def config_at(url: str, **settings: Any) -> Config:
    """Return a configuration for the tasks of worker_app on a database."""
    given = {"app": "worker_app:app", "log_level": "warning", "grace": 1.0, **settings}
    return Config(database_url=url, **given)


@asynccontextmanager
async def pooling(
    url: str, config: Config | None = None, *, clock: Callable[[], datetime | None] = lambda: None, **settings: Any
) -> AsyncIterator[Pool]:
    """Run a pool in this process until the block ends."""
    notifier = Notifier(url)
    await notifier.start()
    chosen = PoolSettings(**{**QUICK, **settings})
    pool = Pool(url, config or config_at(url), chosen, notifier=notifier, clock=clock)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()
        await notifier.stop()


@contextmanager
def supervisor_process(url: str, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a pool in a process of its own that the test may kill."""
    script = Path(__file__).with_name("supervisor_process.py")
    process = subprocess.Popen([sys.executable, str(script), url, *settings])
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class Fleet:
    """The supervised worker rows of a database: moves them like the API and reads them."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def add(self, **spec: Any) -> str:
        """Create and start a worker row; return its id."""
        async with connect(self.url) as connection:
            made = await create_worker(connection, spec=WorkerSpec(**spec), actor="ada")
        await self.move(made, Event.START_TASK)
        return made

    async def move(self, worker_id: str, event: Event, reason: str = "for a test") -> None:
        """Move a row as the API does."""
        async with connect(self.url) as connection:
            await move_worker(connection, worker_id, event, actor="ada", reason=reason)

    def row(self, worker_id: str) -> dict[str, Any]:
        """Read a row."""
        return self.rows("select * from interlock.workers where id = %s", worker_id)[0]

    def rows(self, statement: str, *parameters: Any) -> list[dict[str, Any]]:
        """Run a query and return its rows."""
        with psycopg.connect(self.url, row_factory=dict_row) as connection:
            return connection.execute(statement.encode(), parameters).fetchall()

    def history(self, worker_id: str) -> list[tuple[str, str]]:
        """Return the states of a worker with their reasons, oldest first."""
        query = "select to_state, reason from interlock.worker_state_transitions where worker_id = %s order by id"
        return [(row["to_state"], row["reason"]) for row in self.rows(query, worker_id)]

    async def seen(
        self, worker_id: str, look: Callable[[dict[str, Any]], object], within: float = 60
    ) -> dict[str, Any]:
        """Wait until a row fulfils a condition; return it."""
        async with asyncio.timeout(within):
            while not look(row := self.row(worker_id)):
                await asyncio.sleep(0.02)
        return row

    async def alive(self, worker_id: str, generation: int = 1) -> dict[str, Any]:
        """Wait until the process of a generation has sent a heartbeat."""
        return await self.seen(worker_id, lambda row: is_here(row, generation))

    async def enqueue(self, type_: str, **arguments: Any) -> UUID:
        """Enqueue a task of worker_app; return its id."""
        async with connect(self.url) as connection:
            return (await enqueue_task(connection, NewTask(type_, arguments), actor="me")).id

    async def obeys(self, worker_id: str, *, paused: bool, within: float = 60) -> None:
        """Wait until a process reports that it is paused, or is not."""
        async with asyncio.timeout(within):
            while (await call_processes(self.url, Status(), worker_id))[worker_id]["paused"] is not paused:
                await asyncio.sleep(0.02)

    async def state_of(self, task_id: Any, *states: str) -> dict[str, Any]:
        """Wait until a task is in one of these states; return its row."""
        async with asyncio.timeout(60):
            while (row := self.rows("select * from interlock.tasks where id = %s", task_id)[0])["state"] not in states:
                await asyncio.sleep(0.02)
        return row


@contextmanager
def fleet_at(url: str) -> Iterator[Fleet]:
    """Return the worker rows of a database; kill their processes at the end."""
    fleet = Fleet(url)
    yield fleet
    for row in fleet.rows("select pid, birth from interlock.workers where pid is not null"):
        if read_start_time(row["pid"]) == row["birth"]:
            kill(row["pid"])


def is_here(row: dict[str, Any], generation: int = 1) -> bool:
    """Return whether the process of a generation has sent a heartbeat."""
    heard, began = row["heartbeat_at"], row["process_started_at"]
    return row["generation"] == generation and row["pid"] is not None and heard is not None and heard >= began


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
