"""Failures of the engine around a handler use up no try: the task is returned, and runs when the engine can run it."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from executor_handlers import add
from factories import enqueue, task_events, task_row
from fault_injection import FaultyProxy, NetworkMode
from interlock import Interlock, TaskContext
from interlock.config import Config
from interlock.store.tasks import ClaimedTask, read_task_history
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.outcome import engine_failed
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.postgres.connection import Connection

pytestmark = [pytest.mark.flow, pytest.mark.chaos]

QUICK = WorkerSettings(duties=False, poll_base=0.01, poll_cap=0.05, shutdown_limit=5)


async def test_no_connection_for_a_transactional_task_uses_up_no_try(url: str, database: Connection) -> None:
    await database.execute("create table public.written (n int)")
    async with FaultyProxy(url) as network:
        app = Interlock(config=Config(database_url=network.url))

        @app.task(transactional=True, max_tries=1)
        async def write(ctx: TaskContext) -> None:
            await ctx.connection.execute("insert into public.written values (1)")

        async with serving(app, QUICK) as worker:
            await until(lambda: worker.context.backoff_count > 0)
            network.mode = NetworkMode.REFUSING
            task = await enqueue(database, "write", max_tries=1)
            await until(lambda: worker.context.tasks_processed >= 2)
            returned = await read_task_history(database, task)
            network.mode = NetworkMode.PASSING
            await until(lambda: worker.context.tasks_processed >= 3)
    assert [line.event for line in returned[:5]] == ["create", "claim", "return", "claim", "return"]
    assert "no connection for its transaction" in (returned[2].reason or "")
    row = await task_row(database, task)
    assert (row["state"], row["tries"]) == ("done", 1)


async def test_a_connection_lost_at_the_commit_uses_up_no_try(url: str, database: Connection) -> None:
    await database.execute("create table public.written (n int)")
    app = Interlock(config=Config(database_url=url))

    @app.task(transactional=True, max_tries=1)
    async def write(ctx: TaskContext) -> None:
        await ctx.connection.execute("insert into public.written values (1)")
        if ctx.attempt == 1:
            pid = ctx.connection.info.backend_pid
            await database.execute("select pg_terminate_backend(%s)", [pid])

    task = await enqueue(database, "write", max_tries=1)
    async with serving(app, QUICK) as worker:
        await until(lambda: worker.context.tasks_processed == 2)
    assert await task_events(database, task) == ["create", "claim", "return", "claim", "succeed"]
    assert (await task_row(database, task))["tries"] == 1


async def test_a_commit_whose_reply_was_lost_is_not_taken_for_a_lost_attempt(url: str, database: Connection) -> None:
    await database.execute("create table public.written (n int)")
    async with FaultyProxy(url) as network:
        app = Interlock(config=Config(database_url=network.url))

        @app.task(transactional=True, max_tries=1)
        async def write(ctx: TaskContext) -> None:
            await ctx.connection.execute("insert into public.written values (1)")
            network.fatal = b"COMMIT"

        task = await enqueue(database, "write", max_tries=1)
        async with serving(app, QUICK) as worker:
            await until(lambda: worker.context.tasks_processed == 1)
            assert worker.components.statistics.tasks.mismatched == 0
    assert await task_events(database, task) == ["create", "claim", "succeed"]


@contextmanager
def no_file_descriptor_left() -> Iterator[None]:
    """Use up the file descriptors of this process, so that no child process can be started."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    taken: list[int] = []
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_an_executor_that_cannot_start_uses_up_no_try(url: str, database: Connection) -> None:
    app = Interlock(config=Config(database_url=url))
    app.task(executor="process", name="add", max_tries=1)(add)
    async with serving(app, QUICK) as worker:
        await until(lambda: worker.context.backoff_count > 0)
        with no_file_descriptor_left():
            task = await enqueue(database, "add", {"first": 1, "second": 2}, max_tries=1)
            await until(lambda: worker.context.tasks_processed >= 1)
        await until(lambda: worker.context.tasks_processed >= 2)
    row = await task_row(database, task)
    assert (row["state"], row["tries"], row["output"]) == ("done", 1, 3)
    assert "no process for the handler" in ((await read_task_history(database, task))[2].reason or "")


@pytest.mark.unit
def test_the_delay_grows_with_the_failures_of_the_engine_up_to_a_minute() -> None:
    delays = []
    for number in range(1, 12):
        claimed = ClaimedTask(uuid4(), "x", "default", attempt=number, tries=1, max_tries=1)
        outcome = engine_failed(TaskStateMachine(claimed.id, "x", "w", claimed=claimed), OSError("no"))
        delays.append(outcome.delay or 0.0)
    assert delays[0] <= 1 < delays[2] <= 4 < delays[4]
    assert max(delays) <= 60
