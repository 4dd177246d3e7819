"""Concurrent enqueues share statements, and each call keeps the outcome of its own task."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from interlock import Interlock
from interlock.errors import DisconnectedError, InputError, InterlockError
from interlock.postgres.connection import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from interlock.client.task import AsyncTask
    from interlock.client.task_handle import TaskHandle
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

LIMIT_S = 60


@pytest.fixture
async def app(url: str) -> AsyncIterator[Interlock]:
    async with Interlock(url, actor="shop") as opened:
        yield opened


@pytest.fixture
def note(app: Interlock) -> AsyncTask[[int], None]:
    @app.task
    async def note(number: int) -> None: ...

    return note


async def stored(database: Connection) -> list[dict[str, Any]]:
    statement = "select *, input -> 'number' as number, xmin::text as transaction from interlock.tasks order by id"
    return await (await database.execute(statement)).fetchall()


@asynccontextmanager
async def inserts_blocked(url: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Let every insert of a task wait, until the block ends; yield a function that waits until one does."""
    async with connect(url) as blocker, connect(url) as watcher, asyncio.timeout(LIMIT_S):

        async def wait_for_insert() -> None:
            query = (
                "select count(*) as waiting from pg_locks where relation = 'interlock.tasks'::regclass and not granted"
            )
            while (await (await watcher.execute(query)).fetchone() or {})["waiting"] == 0:
                await asyncio.sleep(0.01)

        async with blocker.transaction():
            await blocker.execute("lock table interlock.tasks in share mode")
            yield wait_for_insert


async def test_calls_that_arrive_during_a_statement_share_the_next_one(
    note: AsyncTask[[int], None], database: Connection
) -> None:
    handles = await asyncio.gather(*(note.enqueue(number) for number in range(100)))
    rows = await stored(database)
    assert [(row["id"], row["number"]) for row in rows] == [(handle.id, n) for n, handle in enumerate(handles)]
    assert all(handle.created for handle in handles)
    assert list(Counter(row["transaction"] for row in rows).values()) == [1, 99]


async def test_a_lone_call_starts_no_asyncio_task(note: AsyncTask[[int], None], database: Connection) -> None:
    await note.enqueue(0)
    loop = asyncio.get_running_loop()
    created: list[str] = []

    def create(loop: asyncio.AbstractEventLoop, coroutine: Any, **given: Any) -> asyncio.Task[Any]:
        created.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **given)

    loop.set_task_factory(create)
    try:
        await note.enqueue(1)
        assert created == []
        await asyncio.gather(note.enqueue(2), note.enqueue(3))
        assert [name for name in created if name != "Enqueuer.enqueue"] == ["_Lane._flush"]
    finally:
        loop.set_task_factory(None)
    assert len(await stored(database)) == 4


async def test_each_call_keeps_its_options_and_its_actor(
    app: Interlock, note: AsyncTask[[int], None], database: Connection
) -> None:
    correlation_ids = [uuid4() for _ in range(6)]
    traces = [f"00-{number:032x}-{number:016x}-01" for number in range(1, 7)]
    calls = []
    for number in range(6):
        app.actor = f"actor {number // 3}"
        options = {"priority": number, "correlation_id": correlation_ids[number], "traceparent": traces[number]}
        calls.append(asyncio.ensure_future(note.options(**options).enqueue(number)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
    await asyncio.gather(*calls)
    rows = await stored(database)
    assert [row["priority"] for row in rows] == list(range(6))
    assert [row["correlation_id"] for row in rows] == correlation_ids
    assert [row["traceparent"] for row in rows] == traces
    records = await (await database.execute("select task_id, actor from interlock.audit_logs")).fetchall()
    actors = {record["task_id"]: record["actor"] for record in records}
    assert [actors[row["id"]] for row in rows] == ["actor 0"] * 3 + ["actor 1"] * 3


@pytest.mark.parametrize("option", ["unique_key", "request_id", "task_id"])
async def test_calls_with_one_key_get_one_task(note: AsyncTask[[int], None], database: Connection, option: str) -> None:
    key: Any = uuid4() if option == "task_id" else "k"
    with_key = note.options(**{option: key})
    found = await asyncio.gather(*(with_key.enqueue(number) for number in range(10)), note.enqueue(10))
    *same, other = found
    assert len({handle.id for handle in same}) == 1
    assert [handle.created for handle in same] == [True] + [False] * 9
    assert other.created
    assert {row["id"] for row in await stored(database)} == {same[0].id, other.id}


async def test_a_refused_task_fails_its_own_call_only(
    app: Interlock, note: AsyncTask[[int], None], database: Connection, url: str
) -> None:
    @app.task
    async def other(text: str) -> None: ...

    await other.options(unique_key="taken").enqueue("x")
    async with connect(url) as admin:
        name = admin.info.dbname
        await admin.execute(f'alter database "{name}" set interlock.largest_input = 1000'.encode())
    async with Interlock(url) as limited:  # new sessions know the limit
        task = limited.task(name="note")(note.function)
        large = limited.task(name="other")(other.function)
        calls = [
            task.enqueue(1),
            task.enqueue(2),
            large.enqueue("x" * 2000),
            task.options(limit_key="undeclared").enqueue(3),
            task.enqueue(4),
            task.options(unique_key="free").enqueue(5),
            task.options(unique_key="taken").enqueue(6),
            task.options(unique_key="free 2").enqueue(7),
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    errors = {place: str(each) for place, each in enumerate(outcomes) if isinstance(each, BaseException)}
    assert errors.keys() == {2, 3, 6}
    assert "at most 1000 are stored" in errors[2]
    assert "no limit is declared" in errors[3]
    assert "'taken' is taken by task" in errors[6]
    assert isinstance(outcomes[6], InputError)
    assert sorted(row["number"] for row in await stored(database) if row["type"] == "note") == [1, 2, 4, 5, 7]


async def test_a_canceled_call_stores_nothing_and_cancels_no_other(
    note: AsyncTask[[int], None], database: Connection, url: str
) -> None:
    async with inserts_blocked(url) as wait_for_insert:
        calls = [asyncio.ensure_future(note.enqueue(number)) for number in range(4)]
        await wait_for_insert()
        calls[0].cancel()  # its statement is in flight: the server cancels it
        calls[2].cancel()  # it is queued
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        await wait_for_insert()
        calls[3].cancel()  # its statement is in flight with that of another call, which it must not cancel
        with pytest.raises(asyncio.CancelledError):
            await calls[3]
    assert (await calls[1]).created
    assert calls[2].cancelled()
    numbers = [row["number"] for row in await stored(database)]
    assert 1 in numbers
    assert not {0, 2} & set(numbers)


async def test_a_key_of_an_open_transaction_holds_up_its_own_call_only(
    note: AsyncTask[[int], None], database: Connection, url: str
) -> None:
    async with connect(url) as holder, asyncio.timeout(LIMIT_S):
        async with holder.transaction():
            held = await note.options(unique_key="held").enqueue_with(holder, 0)
            waiting = [asyncio.ensure_future(note.options(unique_key="held").enqueue(n)) for n in (1, 2)]
            await asyncio.sleep(0)
            # the transaction stays open until these are stored
            await asyncio.gather(note.enqueue(3), *(note.options(unique_key=f"{n}").enqueue(n) for n in (4, 5, 6)))
            assert not any(call.done() for call in waiting)
        found: list[TaskHandle[None]] = await asyncio.gather(*waiting)
    assert [(handle.id, handle.created) for handle in found] == [(held.id, False)] * 2
    assert sorted(row["number"] for row in await stored(database)) == [0, 3, 4, 5, 6]


async def test_blocking_calls_of_threads_share_statements(
    note: AsyncTask[[int], None], database: Connection, url: str
) -> None:
    async with inserts_blocked(url) as wait_for_insert:
        first = asyncio.ensure_future(note.enqueue(0))
        await wait_for_insert()
        before = len(asyncio.all_tasks())
        calls = [asyncio.ensure_future(asyncio.to_thread(note.enqueue_sync, number)) for number in range(1, 5)]
        while len(asyncio.all_tasks()) < before + 2 * len(calls):  # a task for the thread, and one for its coroutine
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
    await first
    handles = await asyncio.gather(*calls)
    rows = await stored(database)
    assert {row["id"] for row in rows} == {(await first).id, *(handle.id for handle in handles)}
    assert sorted(Counter(row["transaction"] for row in rows).values()) == [1, 4]


async def test_close_stores_what_is_queued(database: Connection, url: str) -> None:
    app = Interlock(url)

    @app.task
    async def note(number: int) -> None: ...

    await app.open()
    async with inserts_blocked(url) as wait_for_insert:
        calls = [asyncio.ensure_future(note.options(unique_key=f"{n}").enqueue(n)) for n in range(2)]
        calls += [asyncio.ensure_future(note.enqueue(number)) for number in range(2, 5)]
        await wait_for_insert()
        closing = asyncio.ensure_future(app.close())
        await asyncio.sleep(0)
    await closing
    outcomes = await asyncio.gather(*calls)
    assert all(handle.created for handle in outcomes)
    assert sorted(row["number"] for row in await stored(database)) == [0, 1, 2, 3, 4]
    with pytest.raises(InterlockError, match="is not open"):
        await note.enqueue(5)


async def test_a_lost_connection_fails_the_calls_of_its_statement(
    note: AsyncTask[[int], None], database: Connection, url: str
) -> None:
    async with inserts_blocked(url) as wait_for_insert:
        first = asyncio.ensure_future(note.enqueue(0))
        await wait_for_insert()
        calls = [asyncio.ensure_future(note.enqueue(number)) for number in range(1, 4)]
        await asyncio.sleep(0)
        for expected in (first, *calls[:1]):
            await wait_for_insert()
            await database.execute(
                "select pg_terminate_backend(pid) from pg_locks "
                "where relation = 'interlock.tasks'::regclass and not granted"
            )
            with pytest.raises(DisconnectedError):
                await expected
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, DisconnectedError) for outcome in outcomes)
    assert (await note.enqueue(4)).created
    assert [row["number"] for row in await stored(database)] == [4]


async def test_of_calls_with_one_id_only_the_one_that_stored_its_task_created_it(
    url: str, note: AsyncTask[[int], None], database: Connection
) -> None:
    id_ = uuid4()
    async with inserts_blocked(url) as wait_for_insert:
        first = asyncio.create_task(note.options(unique_key="first").enqueue(0))
        await wait_for_insert()
        rest = [
            asyncio.create_task(note.options(task_id=id_, unique_key=key).enqueue(number))
            for number, key in enumerate(["z", "a"], 1)
        ]
        await asyncio.sleep(0)
    handles = await asyncio.gather(*rest)
    await first
    created = [number for number, handle in enumerate(handles, 1) if handle.created]
    rows = [row for row in await stored(database) if row["id"] == id_]
    assert [row["number"] for row in rows] == created, "not the one whose key comes first"
