"""Server-sent events: each recorded transition once, in one order, also across reconnects and late commits."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import httpx
import psycopg
import pytest
import uvicorn

from api_support import ADMIN_ACTOR, add_admin_token
from factories import enqueue_by_sql
from interlock import Interlock
from interlock.config import Config
from interlock.postgres.connection import connect
from interlock.store import events as store_events
from interlock.store.access import TokenScope, create_token, revoke_token
from interlock.supervisor.http import events as api_events
from interlock.supervisor.http.app import create_api
from interlock.supervisor.http.server import bind_socket, socket_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store


@asynccontextmanager
async def served(url: str) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """Serve an API on a socket: a stream needs one."""
    config = Config(database_url=url)
    async with Interlock(config=config) as app:
        api = create_api(app, config)
        async with app.connection() as connection:
            headers = await add_admin_token(connection)
        api.state.events.tick_s = 0.02
        with bind_socket("127.0.0.1", 0) as listener:
            server = uvicorn.Server(uvicorn.Config(api, lifespan="off", log_config=None))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                async with httpx.AsyncClient(base_url=socket_url(listener), timeout=60, headers=headers) as client:
                    yield api, client
            finally:
                api.state.stopping.set()
                server.should_exit = True
                await serving


class Stream:
    """The events of one response."""

    def __init__(self, response: httpx.Response) -> None:
        self.lines = response.aiter_lines()

    async def next(self) -> tuple[str, str, dict[str, Any]]:
        """Wait for the next event: its kind, its id and its data."""
        found: dict[str, str] = {}
        async with asyncio.timeout(60):
            async for line in self.lines:
                if line and not line.startswith(":"):
                    name, _, value = line.partition(": ")
                    found[name] = value
                elif not line and "data" in found:
                    return found["event"], found["id"], json.loads(found["data"])
        raise EOFError

    async def take(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many events."""
        return [(await self.next())[2] for _ in range(count)]


@asynccontextmanager
async def streaming(
    client: httpx.AsyncClient, after: str | None = None, token: str | None = None, **conditions: Any
) -> AsyncIterator[tuple[Stream, str]]:
    """Open a stream; return it and the id of its first event, `ready`."""
    headers = {} if after is None else {"Last-Event-ID": after}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    async with client.stream("GET", "/api/events", params=conditions, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = Stream(response)
        kind, id_, _ = await stream.next()
        assert kind == "ready"
        yield stream, id_


async def test_a_stream_has_the_moves_that_meet_its_conditions(url: str, database: Connection) -> None:
    states = ["pending", "canceled"]
    async with (
        served(url) as (_, client),
        streaming(client, kind="task", to_state=states) as (stream, _),
        streaming(client, namespace="b") as (other, _),
    ):
        first = await enqueue_by_sql(database, type="x")
        second = await enqueue_by_sql(database, type="y", namespace="b")
        assert (await client.post(f"/api/tasks/{first}/cancel")).status_code == 200
        found = await stream.take(3)
        (of_other,) = await other.take(1)
    assert [(event["id"], event["from_state"], event["to_state"]) for event in found] == [
        (str(first), None, "pending"),
        (str(second), None, "pending"),
        (str(first), "pending", "canceled"),
    ]
    assert found[2] | {"recorded_at": "", "record": 0} == {
        "kind": "task",
        "id": str(first),
        "from_state": "pending",
        "to_state": "canceled",
        "event": "cancel",
        "reason": f"canceled by {ADMIN_ACTOR}",
        "actor": ADMIN_ACTOR,
        "database_role": "interlock",
        "attempt": 0,
        "namespace": "default",
        "type": "x",
        "workflow": None,
        "job_id": None,
        "step": None,
        "recorded_at": "",
        "record": 0,
    }
    assert of_other["id"] == str(second)


async def test_records_that_commit_out_of_order_are_sent_once_across_reconnects(url: str) -> None:
    """A later transaction commits first, a reader reconnects, and a savepoint has a transaction id of its own."""
    insert = "insert into interlock.tasks (type) values ('x') returning id"
    async with served(url) as (_, client):
        early = await psycopg.AsyncConnection.connect(url)
        late = await psycopg.AsyncConnection.connect(url)
        other = await psycopg.AsyncConnection.connect(url, autocommit=True)
        async with early, late, other, streaming(client) as (stream, start):
            expected = []

            async def put(connection: Any) -> None:
                row = await (await connection.execute(insert)).fetchone()
                expected.append(str(row[0]))

            await put(early)
            await put(late)
            async with late.transaction():
                await put(late)
            await put(other)
            await late.commit()  # its records have higher ids than the first one of `early`, which is not visible yet
            async with streaming(client, after=start) as (resumed, _):
                await put(early)
                await early.commit()
                found = [await resumed.next() for _ in range(3)]
            async with streaming(client, after=found[-1][1]) as (again, _):
                rest = await again.take(2)
            both = [*(event["id"] for _, _, event in found), *(event["id"] for event in rest)]
            assert sorted(both) == sorted(expected), "each once"
            assert [event["id"] for event in await stream.take(5)] == both, "in the same order for all"


async def test_the_events_of_a_transaction_that_outlasts_an_earlier_one_are_sent(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_events, "CLOCK_TOLERANCE", timedelta())
    async with served(url) as (api, client), streaming(client, kind="task") as (stream, _):
        feed = api.state.events

        async def read_twice() -> None:
            reads = feed.reads
            while feed.reads < reads + 3:
                await asyncio.sleep(0.01)

        async with asyncio.timeout(60), connect(url) as first, connect(url) as second, second.transaction():
            async with first.transaction():
                tasks = [await enqueue_by_sql(holder, type="x") for holder in (first, second)]
                await read_twice()
            await read_twice()
        assert [event["id"] for event in await stream.take(2)] == [str(task) for task in tasks]


async def test_one_reader_serves_all_subscribers_and_ends_with_the_last(url: str, database: Connection) -> None:
    async with served(url) as (api, client):
        feed = api.state.events
        assert feed.reads == 0, "nobody subscribes"
        async with streaming(client) as (first, _), streaming(client) as (second, _), streaming(client) as (third, _):
            task = await enqueue_by_sql(database, type="x")
            for stream in (first, second, third):
                assert (await stream.take(1))[0]["id"] == str(task)
            assert len({id(each) for each in asyncio.all_tasks() if each.get_name() == "interlock event feed"}) == 1
        async with asyncio.timeout(60):
            while feed.cursor is not None:
                await asyncio.sleep(0.01)
        assert not [each for each in asyncio.all_tasks() if each.get_name() == "interlock event feed"]


async def test_a_slow_consumer_is_cut_off_and_goes_on_where_it_stopped(
    url: str, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_events, "MAX_BUFFERED_EVENTS", 20)
    async with served(url) as (_, client):
        async with streaming(client) as (stream, _):
            # one batch is larger than the buffer
            await database.execute("insert into interlock.tasks (type) select 'x' from generate_series(1, 50)")
            found = await stream.take(20)
            kind, id_, data = await stream.next()
            assert (kind, data) == ("end", {"reason": "overflow"})
        async with streaming(client, after=id_) as (stream, _):
            found += await stream.take(30)
    assert len({event["record"] for event in found}) == 50


async def test_a_stream_ends_with_its_token_and_with_the_server(url: str, database: Connection) -> None:
    _, secret = await create_token(database, "ci", TokenScope.READ, actor="ada")
    async with served(url) as (api, client):
        _, other = await create_token(database, "other", TokenScope.READ, actor="ada")
        async with (
            streaming(client, token=secret) as (stream, _),
            streaming(client, token=other) as (going_on, _),
        ):
            await revoke_token(database, "ci", actor="ada")
            assert (await stream.next())[2] == {"reason": "revoked"}
            await enqueue_by_sql(database, type="x")
            assert (await going_on.next())[0] == "task"
            api.state.stopping.set()
            with pytest.raises(EOFError):
                await going_on.next()


async def test_a_quiet_stream_sends_heartbeats_with_a_position_to_go_on_from(
    url: str, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_events, "HEARTBEAT_INTERVAL_S", 0.01)
    async with served(url) as (_, client), streaming(client) as (stream, start):
        await database.execute("select pg_current_xact_id()")
        position = start
        async with asyncio.timeout(60):
            async for line in stream.lines:
                if line.startswith("id: ") and line != f"id: {start}":
                    position = line.removeprefix("id: ")
                    break
        task = await enqueue_by_sql(database, type="x")
        async with streaming(client, after=position) as (resumed, _):
            assert (await resumed.take(1))[0]["id"] == str(task)


async def test_a_resumed_stream_that_an_open_transaction_holds_back_has_heartbeats_and_ends_with_its_token(
    url: str, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_events, "HEARTBEAT_INTERVAL_S", 0.01)
    _, secret = await create_token(database, "ci", TokenScope.READ, actor="ada")
    async with served(url) as (api, client), connect(url) as holder, asyncio.timeout(60):
        async with streaming(client, token=secret) as (_, position):
            pass
        while api.state.events.cursor is not None:  # the next stream begins after the open transaction
            await asyncio.sleep(0.01)
        async with holder.transaction():
            await enqueue_by_sql(holder, type="x")
            async with streaming(client, after=position, token=secret) as (stream, _):
                async for line in stream.lines:
                    if line == ": heartbeat":
                        break
                await revoke_token(database, "ci", actor="ada")
                assert await stream.next() == ("end", position, {"reason": "revoked"})


async def test_a_heartbeat_amid_a_batch_of_events_skips_none_of_them(
    url: str, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_events, "HEARTBEAT_INTERVAL_S", 0.0001)
    monkeypatch.setattr(api_events, "EVENTS_PER_CHUNK", 1)
    async with served(url) as (api, client):
        api.state.events.tick_s = 0.0001
        async with streaming(client, type="x") as (stream, _):
            types = "select case when n in (1, 600) then 'x' else 'y' end from generate_series(1, 600) as n"
            await database.execute(f"insert into interlock.tasks (type) {types}")
            records = [event["record"] for event in await stream.take(2)]
            assert records[1] - records[0] == 599


async def test_a_stream_ends_when_the_database_has_been_set_back(url: str, database: Connection) -> None:
    async with served(url) as (api, client), streaming(client) as (stream, _):
        position = api.state.events.cursor.position
        ahead = replace(api.state.events.cursor, position=position._replace(xid=position.xid + 1_000_000))
        api.state.events.cursor = ahead  # as if earlier reads had been made before a restore
        assert await stream.next() == ("end", ANY, {"reason": "restored"})
        answer = await client.get("/api/events", headers={"Last-Event-ID": ahead.encode()})
        assert (answer.status_code, answer.json()["code"]) == (410, "event_expired")
        async with streaming(client) as (new, _):
            task = await enqueue_by_sql(database, type="x")
            assert (await new.take(1))[0]["id"] == str(task)


@pytest.mark.parametrize(
    ("after", "status", "code"),
    [("nonsense", 422, "invalid_request"), ("1-2-3", 422, "invalid_request"), ("1-1-1-1", 410, "event_expired")],
)
async def test_a_position_that_cannot_be_resumed_is_refused(url: str, after: str, status: int, code: str) -> None:
    async with served(url) as (_, client):
        answer = await client.get("/api/events", headers={"Last-Event-ID": after})
    assert (answer.status_code, answer.json()["code"]) == (status, code)
