"""The connections that workers and orchestrators hold at rest, counted by the server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from interlock import Interlock, WorkerSettings, serving
from interlock.orchestrator.process import Orchestrator
from worker_support import until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

HELD = """
select count(*) as held, (select array_agg(heartbeat_at order by id) from interlock.workers) as heartbeats
from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
"""


def app_of_its_own(url: str) -> Interlock:
    app = Interlock(url)

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    return app


async def held(database: Connection) -> tuple[int, list[object]]:
    (row,) = await (await database.execute(HELD)).fetchall()
    return row["held"], row["heartbeats"] or []


async def most_during_heartbeats(database: Connection, processes: int) -> int:
    """Return the most connections until each process has sent a heartbeat."""
    _, before = await held(database)
    while len(before) < processes:
        _, before = await held(database)
    after, most = before, 0
    while any(earlier == later for earlier, later in zip(before, after, strict=True)):
        now, after = await held(database)
        most = max(most, now)
        await asyncio.sleep(0.01)
    return most


async def test_workers_hold_three_connections_and_orchestrators_two_also_during_heartbeats(
    url: str, database: Connection
) -> None:
    apps = [app_of_its_own(url) for _ in range(3)]
    orchestrator = Orchestrator(apps[2])
    await orchestrator.start()
    async with (
        serving(apps[0], WorkerSettings(duties=False)) as first,
        serving(apps[1], WorkerSettings(duties=False)) as second,
        asyncio.timeout(120),
    ):
        await until(lambda: first.started.is_set() and second.started.is_set())
        async with app_of_its_own(url) as client:
            handle = await client.tasks["add"].enqueue(a=1, b=2)
            assert await handle.result(timeout=60) == 3
        while (await held(database))[0] > 8:
            await asyncio.sleep(0.05)
        while await most_during_heartbeats(database, 3) > 8:
            pass  # a process on a busy machine, which did not answer its own heartbeat within a second
    await orchestrator.stop()


async def test_a_leader_holds_one_connection_more(url: str, database: Connection) -> None:
    async with serving(app_of_its_own(url), WorkerSettings()) as worker, asyncio.timeout(120):
        await until(lambda: worker.started.is_set() and worker.components.is_listening)
        await database.execute("select 1")
        leader = "select from interlock.leaders where holder = %s"
        while not await (await database.execute(leader, [worker.worker_id])).fetchall():
            await asyncio.sleep(0.01)
        while (await held(database))[0] > 4:
            await asyncio.sleep(0.05)


async def test_a_blocked_loop_does_not_stop_the_heartbeat(url: str, database: Connection) -> None:
    """It connects by itself then."""
    app = app_of_its_own(url)
    async with serving(app, WorkerSettings(duties=False)) as worker, asyncio.timeout(120):
        await until(worker.started.is_set)
        _, before = await held(database)
        while not before:
            _, before = await held(database)
        async with worker.connections.in_use:  # as a claim that takes long
            worker.components.registration.reread()
            after = before
            while after == before:
                await asyncio.sleep(0.01)
                _, after = await held(database)


async def test_an_orchestrator_keeps_its_connection_open_while_it_is_lent_and_lends_none_that_is_gone(url: str) -> None:
    orchestrator = Orchestrator(app_of_its_own(url))

    async def borrow() -> int:
        async with orchestrator.between_batches() as connection:
            (row,) = await (await connection.execute("select 1 as one")).fetchall()
            one: int = row["one"]
            return one

    await orchestrator.start()
    # until the first batch has ended, a new connection is lent
    await until(lambda: orchestrator._connection and not orchestrator._has_more_messages)  # noqa: SLF001
    async with orchestrator.between_batches() as lent:
        stopping = asyncio.create_task(orchestrator.stop())
        for _ in range(20):  # round trips, in which the loop that owns the connection reaches its end
            await lent.execute("select")
        waiting = asyncio.create_task(borrow())
        await lent.execute("select")
    assert await waiting == 1
    await stopping
