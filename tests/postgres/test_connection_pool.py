"""The pool of an app: cancellations while a task waits for a connection, and the connection that is kept at hand."""

from __future__ import annotations

import asyncio

import pytest

from fault_injection import FaultyProxy, NetworkMode
from interlock.postgres.connection import ConnectionPool, connect

pytestmark = pytest.mark.flow

STEPS = 40  # of the event loop, more than handing over a returned connection takes


@pytest.mark.usefixtures("database")
async def test_a_cancellation_that_arrives_together_with_the_connection_is_raised(url: str) -> None:
    pool = ConnectionPool(url, max_size=1)
    await pool.open()

    async def use() -> None:
        async with pool.connection() as connection:
            await connection.execute("select 1")

    try:
        async with asyncio.timeout(60):
            for steps in range(STEPS):
                async with pool.connection():
                    waiter = asyncio.create_task(use())
                    await asyncio.sleep(0.001)  # until it waits in the queue of the pool
                for _ in range(steps):
                    await asyncio.sleep(0)
                asked = waiter.cancel()
                await asyncio.wait([waiter])
                assert waiter.cancelled() == asked, f"cancelled after {steps} steps"
                await use()  # the only connection was given back
    finally:
        await pool.close()


@pytest.mark.usefixtures("database")
async def test_cleanup_code_of_a_cancelled_task_gets_a_connection(url: str) -> None:
    pool = ConnectionPool(url, max_size=1)
    await pool.open()
    cleaned_up: list[object] = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            async with pool.connection() as connection:
                cleaned_up.append(await (await connection.execute("select 1 as one")).fetchone())

    try:
        async with asyncio.timeout(60):
            worker = asyncio.create_task(work())
            await asyncio.sleep(0)
            worker.cancel()
            await asyncio.wait([worker])
    finally:
        await pool.close()
    assert worker.cancelled()
    assert cleaned_up == [{"one": 1}]


async def pid_of(pool: ConnectionPool) -> int:
    """Return the server process of the connection that the pool hands out."""
    async with pool.connection() as connection:
        return connection.info.backend_pid


@pytest.mark.usefixtures("database")
async def test_a_caller_gets_the_connection_that_was_used_last(url: str) -> None:
    pool = ConnectionPool(url)
    await pool.open()
    try:
        async with asyncio.timeout(60), pool.connection() as first, pool.connection() as second:
            used = [second.info.backend_pid, first.info.backend_pid]
        assert used[0] != used[1]
        assert {await pid_of(pool) for _ in range(5)} == {used[0]}
    finally:
        await pool.close()


@pytest.mark.usefixtures("database")
async def test_nobody_waits_for_the_pool_while_a_connection_is_kept_at_hand(url: str) -> None:
    pool = ConnectionPool(url, max_size=2)
    await pool.open()
    try:
        async with asyncio.timeout(60):
            assert await asyncio.gather(*(pid_of(pool) for _ in range(50)))
            async with pool.connection(), pool.connection():  # the one at hand is one of the two
                pass
    finally:
        await pool.close()


@pytest.mark.usefixtures("database")
async def test_an_open_transaction_is_not_kept_at_hand(url: str) -> None:
    pool = ConnectionPool(url, max_size=1)
    await pool.open()
    try:
        async with asyncio.timeout(60):
            async with pool.connection() as connection:
                await connection.execute("begin")
            async with pool.connection() as connection:
                rows = await (await connection.execute("select pg_current_xact_id_if_assigned() as id")).fetchall()
                assert rows == [{"id": None}]
                assert connection.info.transaction_status.name == "IDLE"
    finally:
        await pool.close()


@pytest.mark.usefixtures("database")
async def test_a_connection_at_hand_goes_back_to_the_pool_when_it_is_idle_and_when_the_pool_closes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.postgres.connection.CHECK_AFTER_IDLE_S", 0.01)
    monkeypatch.setattr("interlock.postgres.connection.KEEP_IDLE_S", 0.01)  # of the pool itself
    async with connect(url) as observer:

        async def gone(pid: int) -> None:
            query = "select exists (select from pg_stat_activity where pid = %s) as alive"
            while (await (await observer.execute(query, [pid])).fetchall())[0]["alive"]:
                await asyncio.sleep(0.01)

        async with asyncio.timeout(60):
            pool = ConnectionPool(url, keep_one=False)
            await pool.open()
            await gone(await pid_of(pool))
            await pool.close()
            pool = ConnectionPool(url)
            await pool.open()
            pid = await pid_of(pool)
            await pool.close()
            await gone(pid)


@pytest.mark.usefixtures("database")
async def test_a_long_outage_does_not_lengthen_the_wait_for_a_connection(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.postgres.connection.RECONNECT_WINDOW_S", 0.01)
    async with asyncio.timeout(60), FaultyProxy(url) as network:
        network.mode = NetworkMode.REFUSING
        pool = ConnectionPool(network.url, max_size=3)
        await pool.open()
        try:
            waiting = [asyncio.create_task(pid_of(pool)) for _ in range(2)]
            while network.refused < 20:  # with pauses that double, this would take days
                await asyncio.sleep(0.001)
            network.mode = NetworkMode.PASSING
            assert await asyncio.gather(*waiting)
        finally:
            await pool.close()
