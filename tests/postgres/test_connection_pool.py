"""The pool of an app: cancellations while a task waits for a connection."""

from __future__ import annotations

import asyncio

import pytest

from interlock.postgres.connection import ConnectionPool

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
