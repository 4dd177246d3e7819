"""The statements on which everything waits go a shorter way than over a cursor, and answer the same."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from interlock.errors import DisconnectedError, StatementError
from interlock.postgres.connection import PGBOUNCER_FLAG, connect
from interlock.postgres.notifier import listen, receive
from interlock.postgres.pgmq import use_queue
from interlock.postgres.query import Statement, array_literal, run, run_prepared

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

ECHO = Statement("echo", "select %(a)s::int + 1, %(b)s::text, %(a)s::int %% 2, %(c)s::jsonb, %(d)s::uuid", ())
DIVIDE = Statement("divide", "select 1 / %(by)s::int", ())
SLEEP = Statement("sleep", "select pg_sleep(%(seconds)s::float8)", ())
PREPARED = Statement("prepared", "select count(*)::int from pg_prepared_statements where name like 'interlock%%'", ())


async def echoed(connection: Connection, a: int = 4, b: str | None = "x") -> tuple[Any, ...]:
    """Return values that the server received as parameters."""
    (row,) = await run_prepared(connection, ECHO, {"a": a, "b": b, "c": '{"k": [1.5, null]}', "d": None}, tuple)
    return row


async def test_values_come_back_as_over_a_cursor(database: Connection) -> None:
    assert await echoed(database) == (5, "x", 0, {"k": [1.5, None]}, None)
    assert await echoed(database, b=None) == (5, None, 0, {"k": [1.5, None]}, None)
    assert await echoed(database, a=100_000, b="ö\n'\\%s") == (100_001, "ö\n'\\%s", 0, {"k": [1.5, None]}, None)


async def test_a_dropped_prepared_statement_is_prepared_again(database: Connection) -> None:
    await echoed(database)
    await database.execute("deallocate all")
    assert (await echoed(database))[0] == 5


async def test_within_a_transaction_nothing_is_prepared(database: Connection) -> None:
    async with database.transaction():
        assert (await echoed(database))[0] == 5
        (row,) = await run_prepared(database, PREPARED, {}, tuple)
        assert row == (0,)


async def test_behind_a_pooler_nothing_is_prepared(url: str) -> None:
    async with connect(f"{url}{'&' if '?' in url else '?'}{PGBOUNCER_FLAG}") as connection:
        await echoed(connection)
        (row,) = await run_prepared(connection, PREPARED, {}, tuple)
        assert row == (0,)


async def test_a_refusal_is_raised_and_the_next_one_is_answered(database: Connection) -> None:
    for _ in range(2):
        with pytest.raises(StatementError, match="division by zero"):
            await run_prepared(database, DIVIDE, {"by": 0}, tuple)
        assert await run_prepared(database, DIVIDE, {"by": 1}, tuple) == [(1,)]


async def test_more_than_the_server_takes_at_once_arrives(database: Connection) -> None:
    much = "x" * 20_000_000
    assert (await echoed(database, b=much))[1] == much


async def test_a_lost_connection_is_reported(database: Connection, url: str) -> None:
    async with connect(url) as connection:
        pid = connection.info.backend_pid
        asked = asyncio.create_task(run_prepared(connection, SLEEP, {"seconds": 600}, tuple))
        ended = "select pg_terminate_backend(pid) from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
        while not await (await database.execute(ended, [pid])).fetchall():
            await asyncio.sleep(0.01)
        with pytest.raises(DisconnectedError):
            await asked
        with pytest.raises(DisconnectedError):
            await echoed(connection)


async def test_a_cancelled_caller_leaves_a_working_connection(database: Connection, url: str) -> None:
    async with connect(url) as connection:
        pid = connection.info.backend_pid
        asked = asyncio.create_task(run_prepared(connection, SLEEP, {"seconds": 600}, tuple))
        sleeps = "select from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
        while not await (await database.execute(sleeps, [pid])).fetchall():
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert (await echoed(connection))[0] == 5


async def test_texts_in_arrays_keep_their_signs(database: Connection) -> None:
    texts = ("plain", 'a"b', "a\\b", "a,b", "{}", "", "null", "ö\n\t", "a b")
    (row,) = await run(database, Statement("x", "select %(a)s::text[] as a", ()), {"a": array_literal(texts)})
    assert row["a"] == list(texts)
    (row,) = await run(database, Statement("x", "select %(a)s::text[] as a", ()), {"a": array_literal(())})
    assert row["a"] == []


async def test_notifications_that_arrive_with_a_reply_are_delivered(database: Connection) -> None:
    await listen(database, ("here",))
    await database.execute("select pg_notify('here', 'early')")
    heard: list[str] = []

    def note(channel: str, payload: str) -> bool:
        heard.append(f"{channel} {payload}")
        return True

    assert await receive(database, 60, note)
    assert heard == ["here early"]
    assert not await receive(database, 0.01, note)


async def test_a_listener_is_notified_of_a_lost_connection(database: Connection, url: str) -> None:
    async with connect(url) as connection:
        await listen(connection, ("here",))
        waiting = asyncio.create_task(receive(connection, 600, lambda *_: True))
        await asyncio.sleep(0)
        await database.execute("select pg_terminate_backend(%s)", [connection.info.backend_pid])
        with pytest.raises(DisconnectedError):
            await waiting


async def test_messages_go_over_the_queue_that_the_settings_name(database: Connection) -> None:
    await use_queue(database, "another")
    found = await database.execute("select pg_get_viewdef('interlock.orchestration_messages') as definition")
    (row,) = await found.fetchall()
    assert "pgmq.q_another" in row["definition"]
    with pytest.raises(psycopg.errors.CheckViolation, match="settings_orchestration_queue"):
        await database.execute("update interlock.settings set orchestration_queue = 'x; drop'")
