"""Registration of processes: heartbeat, expiry, end, and recovery of a deleted row."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from interlock.postgres.connection import connect, transaction
from interlock.postgres.query import run
from interlock.service import cancel_and_wait
from interlock.store.figures import Figure
from interlock.store.workers import (
    WORKERS,
    RegisteredProcess,
    deregister_worker,
    ensure_registered,
    list_live_workers,
    read_worker_status,
    record_heartbeat,
    register_worker,
)
from interlock.worker.registration import Heartbeat
from notifier_support import notifier_at, record
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NOW = datetime(2030, 1, 1, tzinfo=UTC)
WORKER = RegisteredProcess("w1", namespaces=("mail", "default"), types=("send",))


async def moves(database: Connection, worker: str = "w1") -> list[str]:
    rows = await run(database, WORKERS["read_worker_moves"], {"id": worker, "after": 0, "limit": 100})
    return [row["event"] for row in rows]


async def test_a_process_is_live_until_its_heartbeat_expires(database: Connection) -> None:
    assert await register_worker(database, WORKER, now=NOW)
    assert not await register_worker(database, WORKER, now=NOW)
    (found,) = await list_live_workers(database, now=NOW)
    assert (found.id, found.status, found.role) == ("w1", "RUNNING", "worker")
    assert (found.namespaces, found.types) == (["mail", "default"], ["send"])
    assert await list_live_workers(database, now=NOW + timedelta(seconds=15)) == []
    said = RegisteredProcess("w1", namespaces=("mail",), statistics={"handlers": {"dispatched": 2}})
    assert await record_heartbeat(database, said, now=NOW + timedelta(seconds=14)) == "RUNNING"
    (found,) = await list_live_workers(database, now=NOW + timedelta(seconds=28))
    assert (found.namespaces, found.statistics) == (["mail"], {"handlers": {"dispatched": 2}})
    assert await moves(database) == ["create", "start_task"]


async def test_deregistering_ends_the_row_in_any_state(database: Connection) -> None:
    await deregister_worker(database, "nobody")
    await register_worker(database, WORKER)
    await deregister_worker(database, "w1")
    await deregister_worker(database, "w1")
    assert await read_worker_status(database, "w1") == "COMPLETED"
    assert await moves(database) == ["create", "start_task", "complete_tasks"]
    await register_worker(database, RegisteredProcess("w2"))
    paused = {"id": "w2", "reason": "lunch", "actor": "ada", "now": None}
    await run(database, WORKERS["pause_running_worker"], paused)
    assert await record_heartbeat(database, RegisteredProcess("w2")) == "PAUSED"
    await deregister_worker(database, "w2")
    assert await read_worker_status(database, "w2") == "TERMINATED"
    assert await list_live_workers(database) == []


async def test_a_heartbeat_recreates_a_deleted_row_but_not_an_ended_one(database: Connection) -> None:
    assert await ensure_registered(database, WORKER) == "RUNNING"
    await deregister_worker(database, "w1")
    assert await ensure_registered(database, WORKER) == "COMPLETED"
    await database.execute("delete from interlock.workers")
    assert await record_heartbeat(database, WORKER) is None
    assert await ensure_registered(database, WORKER) == "RUNNING"


async def test_a_new_worker_wakes_the_orchestrators(url: str, database: Connection) -> None:
    async with notifier_at(url) as notifier:
        received, _ = record(notifier, "interlock_orchestration")
        await until(lambda: notifier.is_listening)
        await register_worker(database, WORKER)
        await until(lambda: received == ["catch-up", "workers"])


class Owner:
    """A heartbeat's owner that records every status it receives."""

    def __init__(self) -> None:
        self.statuses: list[str] = []

    def now(self) -> None:
        return None

    def statistics_document(self) -> dict[str, Any]:
        return {"handlers": {"dispatched": 7}}

    def take_figures(self) -> list[Figure]:
        return []

    def on_status(self, status: str) -> None:
        self.statuses.append(status)


async def test_a_worker_keeps_its_row_until_it_stops(url: str, database: Connection) -> None:
    owner = Owner()
    heartbeat = Heartbeat(url, WORKER, owner, lease=timedelta(seconds=30))
    await heartbeat.start()
    await until(lambda: owner.statuses == ["RUNNING"])
    heartbeat.serve(("other",))

    async def namespaces() -> list[list[str]]:
        return [process.namespaces for process in await list_live_workers(database)]

    while await namespaces() != [["other"]]:
        await asyncio.sleep(0.01)
    (found,) = await list_live_workers(database)
    assert found.statistics == {"handlers": {"dispatched": 7}}
    await run(database, WORKERS["pause_running_worker"], {"id": "w1", "reason": "x", "actor": "ada", "now": None})
    heartbeat.beat_now()
    await until(lambda: owner.statuses == ["RUNNING", "PAUSED"])
    await run(database, WORKERS["resume_paused_worker"], {"id": "w1", "reason": "x", "actor": "ada", "now": None})
    await heartbeat.stop()
    assert await read_worker_status(database, "w1") == "COMPLETED"


async def test_figures_of_a_heartbeat_that_is_cut_short_are_written_by_the_next_one(
    url: str, database: Connection
) -> None:
    """A beat over the worker's own connection is canceled when that is not free in time, and goes over a new one."""
    left = [[Figure("run", "task", 3, "default", "add", positions=[1], counts=[3])]]

    class Counting(Owner):
        def take_figures(self) -> list[Figure]:
            return left.pop() if left else []

    cut = asyncio.Event()
    async with connect(url) as own, connect(url) as other:

        async def lend(work: Callable[[Connection], Awaitable[None]]) -> None:
            beat = asyncio.ensure_future(work(own))
            while left and not beat.done():
                await asyncio.sleep(0.01)
            if not beat.done():
                await cancel_and_wait([beat])
                cut.set()
                raise TimeoutError
            await beat

        heartbeat = Heartbeat(url, WORKER, Counting(), lease=timedelta(seconds=30), lend=lend)
        async with transaction(other):
            await other.execute("lock table interlock.figures")
            await heartbeat.start()
            while not cut.is_set():
                heartbeat.beat_now()
                await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while not await (await database.execute("select from interlock.figures where total = 3")).fetchall():
                await asyncio.sleep(0.01)
        await heartbeat.stop()


async def test_a_worker_whose_connection_dies_registers_again(url: str, database: Connection) -> None:
    owner = Owner()
    heartbeat = Heartbeat(url, WORKER, owner, lease=timedelta(seconds=0.3))
    await heartbeat.start()
    await until(lambda: owner.statuses == ["RUNNING"])
    await deregister_worker(database, "w1")
    await database.execute("delete from interlock.workers")
    await database.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid()"
    )
    while not await list_live_workers(database):
        await asyncio.sleep(0.01)
    await heartbeat.stop()
    assert await read_worker_status(database, "w1") == "COMPLETED"


async def test_a_heartbeat_that_never_reached_the_database_stops_all_the_same() -> None:
    heartbeat = Heartbeat("postgresql://nobody@127.0.0.1:1/nowhere", WORKER, Owner())
    await heartbeat.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await heartbeat.stop()
