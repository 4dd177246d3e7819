"""Pools as rows: the number of members is the desired one, with any number of supervisors and changes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from interlock.errors import UnknownPoolError
from interlock.lifecycle import SupervisedWorkerEvent as Event
from interlock.postgres.connection import connect
from interlock.store.pools import (
    NewPool,
    PoolConflictError,
    count_dead_pools,
    create_pool,
    delete_pool,
    even_out_pools,
    hold_bound_pool,
    read_pool,
    scale_pool,
)
from interlock.store.workers import WorkerSpec, find_workers, move_worker, read_worker

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LEASE = timedelta(seconds=10)


async def members(database: Connection, status: str | None = "RUNNING") -> list[str]:
    return [
        row["id"]
        for row in await find_workers(database, pool="mail", statuses=None if status is None else [status], limit=1000)
    ]


async def make(database: Connection, desired: int) -> None:
    await create_pool(database, NewPool("mail", desired, WorkerSpec(concurrency=2)), actor="ada", now=NOW)


async def test_supervisors_that_even_out_at_once_add_each_member_once(url: str, database: Connection) -> None:
    await make(database, 20)

    async def even_out(name: str) -> None:
        async with connect(url) as connection:
            await even_out_pools(connection, name)

    await asyncio.gather(*(even_out(f"s{number}") for number in range(4)))
    await even_out_pools(database, "last")
    assert len(await members(database)) == 20
    assert (await read_worker(database, (await members(database))[0]))["metadata"]["spec"] == {"concurrency": 2}


async def test_members_are_live_or_back_off_or_start(database: Connection) -> None:
    await make(database, 4)
    await even_out_pools(database, "s1", now=NOW)
    live, late, crashed, _ = await members(database)
    update = "update interlock.workers set seen_until = %s, restart_at = %s where id = %s"
    await database.execute(update, [NOW + LEASE, None, live])
    await database.execute(update, [NOW - LEASE, NOW - LEASE, late])
    await database.execute(update, [NOW, NOW + LEASE, crashed])
    pool = await read_pool(database, "mail", now=NOW)
    assert (pool["members"], pool["live"], pool["backing_off"], pool["starting"]) == (4, 1, 1, 2)


async def test_scaling_from_a_hundred_to_one_to_none_and_back(database: Connection) -> None:
    await make(database, 100)
    assert await even_out_pools(database, "one") == [("mail", 100)]
    await scale_pool(database, "mail", 1, actor="ada")
    assert await even_out_pools(database, "one") == [("mail", -99)]
    assert len(await members(database)) == 1
    assert len(await members(database, "COMPLETED")) == 99
    await scale_pool(database, "mail", 0, actor="ada")
    await even_out_pools(database, "one")
    assert await members(database) == []
    await scale_pool(database, "mail", 2, actor="bob")
    await even_out_pools(database, "one")
    assert len(await members(database)) == 2
    assert (await read_pool(database, "mail"))["actor"] == "bob"


async def test_two_scales_at_once_leave_one_of_the_numbers(url: str, database: Connection) -> None:
    await make(database, 1)

    async def scale(desired: int) -> None:
        async with connect(url) as connection:
            await scale_pool(connection, "mail", desired, actor="ada")
            await even_out_pools(connection, f"s{desired}")

    await asyncio.gather(*(scale(desired) for desired in (7, 3, 5)))
    await even_out_pools(database, "last")
    pool = await read_pool(database, "mail")
    assert pool["members"] == pool["desired"] == len(await members(database))


async def test_a_member_that_ended_is_replaced_and_a_busy_one_is_ended_last(database: Connection) -> None:
    await make(database, 3)
    await even_out_pools(database, "one")
    terminated, paused, busy = await members(database)
    await move_worker(database, terminated, Event.TERMINATE, actor="ada")
    await move_worker(database, paused, Event.PAUSE, actor="ada")
    assert await even_out_pools(database, "one") == [("mail", 1)]
    await database.execute("update interlock.workers set pid = 1, instance = id where id = %s", [busy])
    await scale_pool(database, "mail", 1, actor="ada")
    await even_out_pools(database, "one")
    assert await members(database) == [busy]
    assert (await read_worker(database, paused))["status"] == "TERMINATED"


async def test_a_pool_is_created_once_and_deleted_with_its_members(database: Connection) -> None:
    await make(database, 2)
    await even_out_pools(database, "one")
    with pytest.raises(PoolConflictError, match="there is a pool mail already"):
        await make(database, 3)
    await delete_pool(database, "mail", actor="ada")
    assert len(await members(database, "COMPLETED")) == 2
    with pytest.raises(UnknownPoolError, match="there is no pool mail"):
        await scale_pool(database, "mail", 1, actor="ada")
    await make(database, 1)
    assert await even_out_pools(database, "one") == [("mail", 1)]


async def test_a_bound_pool_is_its_supervisor_s_until_that_is_gone(database: Connection) -> None:
    def later(seconds: float) -> datetime:
        return NOW + timedelta(seconds=seconds)

    assert await hold_bound_pool(database, "mail", 1, supervisor="one", lease=LEASE, now=NOW)
    with pytest.raises(PoolConflictError, match="belongs to the supervisor one"):
        await delete_pool(database, "mail", actor="ada")
    assert not await hold_bound_pool(database, "mail", 2, supervisor="two", lease=LEASE, now=later(9))
    await scale_pool(database, "mail", 3, actor="ada", now=NOW)
    assert await hold_bound_pool(database, "mail", 1, supervisor="one", lease=LEASE, now=later(9))
    assert (await read_pool(database, "mail"))["desired"] == 3, "a renewal keeps what was scaled"
    assert await even_out_pools(database, "one", now=NOW) == [("mail", 3)]
    assert await hold_bound_pool(database, "mail", 2, supervisor="two", lease=LEASE, now=later(19))
    assert await even_out_pools(database, "two", now=NOW) == [("mail", 2)], "those of the dead one do not count"


async def test_a_pool_is_dead_when_it_has_had_no_live_member_for_the_start_time(database: Connection) -> None:
    async def dead(seconds: float) -> int:
        now = NOW + timedelta(seconds=seconds)
        return await count_dead_pools(database, supervisor=None, start_time=timedelta(seconds=30), now=now)

    await make(database, 1)
    assert (await dead(29), await dead(30)) == (0, 1)
    await even_out_pools(database, "one", now=NOW)
    await database.execute("update interlock.workers set seen_until = %s", [NOW + timedelta(seconds=20)])
    assert (await dead(49), await dead(50)) == (0, 1)
    await scale_pool(database, "mail", 0, actor="ada", now=NOW)
    assert await dead(50) == 0
    await hold_bound_pool(database, "up", 1, supervisor="one", lease=LEASE, now=NOW)
    assert await dead(50) == 0, "of another supervisor"
