"""Sessions of transactional tasks are used again, and no handler sees what another one left in its session."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.rows import tuple_row

from factories import enqueue, task_events, task_row
from interlock import Interlock, TaskContext, WorkerSettings, serving
from worker_support import until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = [pytest.mark.flow, pytest.mark.chaos]

QUICK = WorkerSettings(duties=False, poll_base=0.01, poll_cap=0.05)
STATE = """
select (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()) as locks,
    to_regclass('pg_temp.scratch')::text as scratch, current_setting('work_mem') as work_mem,
    current_setting('default_transaction_isolation') as isolation, current_user::text as role,
    current_setting('TimeZone') as zone, (select count(*) from pg_cursors) as cursors,
    (select count(*) from pg_listening_channels()) as channels
"""


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "rolled back"])
async def test_a_session_is_used_again_and_left_clean(url: str, database: Connection, fails: bool) -> None:  # noqa: FBT001
    app = Interlock(url)
    seen: list[dict[str, Any]] = []
    pids: set[int] = set()
    kept: list[Connection] = []

    @app.task(transactional=True, max_tries=1)
    async def look(ctx: TaskContext) -> None:
        connection = ctx.connection
        pids.add(connection.info.backend_pid)
        seen.append(dict(await (await connection.execute(STATE)).fetchone() or {}))

    @app.task(transactional=True, max_tries=1)
    async def litter(ctx: TaskContext) -> None:
        connection = ctx.connection
        pids.add(connection.info.backend_pid)
        kept.append(connection)
        for statement in (
            "select pg_advisory_lock(1)",
            "create temp table scratch (n int)",
            "set work_mem = '77MB'",
            "set default_transaction_isolation = 'serializable'",
            "set time zone 'Asia/Kathmandu'",
            "declare cursor_left cursor with hold for select 1",
            "listen litter",
        ):
            await connection.execute(statement.encode())
        for _ in range(7):  # psycopg prepares what is repeated
            await connection.execute("select %s::int", [1])
        connection.row_factory = tuple_row
        if fails:
            raise ValueError

    async with serving(app, QUICK) as worker:
        for count, name in enumerate(("look", "litter", "look", "litter", "look"), 1):
            await enqueue(database, name, max_tries=1)
            await until(lambda count=count: worker.context.tasks_processed == count)  # type: ignore[misc]
        assert len(pids) == 1
        assert seen[1:] == seen[:1] * 2
        assert (seen[0]["locks"], seen[0]["scratch"], seen[0]["isolation"]) == (0, None, "read committed")
        for connection in kept:
            with pytest.raises(psycopg.OperationalError, match="closed"):
                await connection.execute("select 1")


async def test_an_idle_session_that_has_died_costs_no_try(url: str, database: Connection) -> None:
    app = Interlock(url)
    pids: list[int] = []

    @app.task(transactional=True, max_tries=1)
    async def look(ctx: TaskContext) -> None:
        pids.append(ctx.connection.info.backend_pid)
        await ctx.connection.execute("select 1")

    async with serving(app, QUICK) as worker:
        await enqueue(database, "look", max_tries=1)
        await until(lambda: worker.context.tasks_processed == 1)
        await database.execute("select pg_terminate_backend(%s, 10000)", [pids[0]])
        task = await enqueue(database, "look", max_tries=1)
        await until(lambda: worker.context.tasks_processed == 2)
    assert await task_events(database, task) == ["create", "claim", "succeed"]
    assert len(set(pids)) == 2


async def test_a_handler_that_removes_the_prepared_statements_is_settled_without_them(
    url: str, database: Connection
) -> None:
    await database.execute("create table public.written (n int)")
    app = Interlock(url)

    @app.task(transactional=True, max_tries=1)
    async def forget(ctx: TaskContext) -> None:
        await ctx.connection.execute("insert into public.written values (1)")
        await ctx.connection.execute("deallocate all")

    @app.task(transactional=True, max_tries=1)
    async def drop(ctx: TaskContext) -> None:
        """Make psycopg remove all prepared statements: some are its own."""
        for _ in range(7):
            await ctx.connection.execute("select %s::int", [1])
        await ctx.connection.execute("drop table if exists public.no_table")

    async with serving(app, QUICK) as worker:
        for count in (1, 2):
            task = await enqueue(database, "drop", max_tries=1)
            await until(lambda count=count: worker.context.tasks_processed == count)  # type: ignore[misc]
            assert await task_events(database, task) == ["create", "claim", "succeed"]
        task = await enqueue(database, "forget", max_tries=1)
        await until(lambda: worker.context.tasks_processed >= 4)
    assert await task_events(database, task) == ["create", "claim", "return", "claim", "succeed"]
    assert (await task_row(database, task))["tries"] == 1
    assert len(await (await database.execute("select from public.written")).fetchall()) == 1


async def test_concurrent_handlers_have_sessions_of_their_own(url: str, database: Connection) -> None:
    app = Interlock(url)
    pids: list[int] = []
    together = asyncio.Barrier(3)

    @app.task(transactional=True)
    async def meet(ctx: TaskContext) -> None:
        pids.append(ctx.connection.info.backend_pid)
        await ctx.connection.execute("select 1")
        await together.wait()

    for _ in range(6):
        await enqueue(database, "meet")
    async with serving(app, WorkerSettings(duties=False, concurrency=3)) as worker:
        await until(lambda: worker.context.tasks_processed == 6)
    assert len(set(pids[:3])) == len(set(pids[3:])) == 3
    assert len(set(pids)) < 6


async def test_an_error_of_the_reset_after_the_commit_does_not_make_a_written_outcome_count_as_lost(
    url: str, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.postgres.transactions._RESET", b"select 1/0")
    app = Interlock(url)

    @app.task(transactional=True, max_tries=1)
    async def write(ctx: TaskContext) -> None:
        await ctx.connection.execute("create table written as select 1 as one")

    task = await enqueue(database, "write")
    async with serving(app, QUICK) as worker:
        statistics = worker.components.statistics.tasks
        await until(lambda: statistics.completed + statistics.mismatched)
        assert (statistics.completed, statistics.mismatched) == (1, 0)
        await until(lambda: not worker.context.active)
    assert await task_events(database, task) == ["create", "claim", "succeed"]
    assert await (await database.execute("select one from written")).fetchall() == [{"one": 1}]
