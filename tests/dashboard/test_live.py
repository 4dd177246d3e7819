"""Live updates: one statement per second for all viewers, none without; newest versions only; sessions that end."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest

from dashboard_support import dashboard_at, served_dashboard, sign_in
from factories import claim_tasks, enqueue
from interlock.dashboard import live
from interlock.dashboard.live import LiveHub
from interlock.dashboard.stream import EventStream, decode_row_ids
from interlock.dashboard.topics import Topic, topics
from interlock.errors import StoreError
from interlock.store.access import hash_token, revoke_token
from interlock.supervisor.http.system import SharedExamination
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock import Interlock
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store


@pytest.fixture
async def hub(jobs: Interlock) -> AsyncIterator[LiveHub]:
    found = LiveHub(jobs, SharedExamination(jobs))
    yield found
    for viewer in list(found._viewers):  # noqa: SLF001 - a failed test leaves viewers behind
        found.leave(viewer)


@pytest.fixture(scope="session")  # topics are registered once in a process
def numbers() -> list[int]:
    """Register a topic whose fragment is the number of its renderings."""
    rendered: list[int] = []

    def render(_: Any) -> dict[str, str]:
        rendered.append(len(rendered))
        return {"changing": f'<b id="changing">{len(rendered)}</b>', "steady": '<b id="steady">same</b>'}

    topics.add(Topic(name="test-numbers", render=render))
    return rendered


async def test_no_viewer_no_query(hub: LiveHub) -> None:
    viewer = hub.join(["overview"], None)
    await until(lambda: hub.statements >= 2)
    hub.leave(viewer)
    await asyncio.sleep(0)
    before = hub.statements
    await asyncio.sleep(1.3)  # longer than a tick
    assert hub.statements == before


async def test_two_hundred_viewers_cost_one_query_a_second(hub: LiveHub, database: Connection) -> None:
    viewers = [hub.join(["nav", "overview"], None) for _ in range(200)]
    await until(lambda: hub.tick >= 3)
    assert hub.statements <= hub.tick + 1
    taken = [viewer.take()[0] for viewer in viewers]
    assert taken[0]
    assert all(one is other for one, other in zip(taken[0], taken[199], strict=True)), "bytes are not shared"
    for viewer in viewers:
        hub.leave(viewer)
    assert database is not None


async def test_slow_viewer_gets_newest_only(hub: LiveHub, numbers: list[int]) -> None:
    slow = hub.join(["test-numbers"], None)
    first = len(numbers)
    await until(lambda: len(numbers) >= first + 3)
    patches, _ = slow.take()
    found = dict(orjson.loads(patch) for patch in patches)
    assert set(found) == {"changing", "steady"}
    assert found["changing"] == f'<b id="changing">{len(numbers)}</b>'
    assert len(slow.sent) == 2
    hub.leave(slow)


async def test_the_first_fragment_of_a_topic_has_what_another_topic_reads(hub: LiveHub) -> None:
    """As a diagram has the refused moves, which the topic of moves reads."""

    async def read(*_: Any) -> str:
        return "refused: 6"

    def show(moment: Any) -> dict[str, str]:
        return {"shown": f"<b>{moment.known.get('test-read')}</b>"}

    topics.add(Topic(name="test-shown", render=show))
    topics.add(Topic(name="test-read", render=lambda _: {}, read=read, every_s=10))
    viewer = hub.join(["test-shown", "test-read"], None)
    await until(lambda: hub.tick >= 1)
    assert [orjson.loads(patch)[1] for patch in viewer.take()[0]] == ["<b>refused: 6</b>"]
    hub.leave(viewer)


async def test_reconnect_sends_only_what_changed(hub: LiveHub, numbers: list[int]) -> None:
    stays = hub.join(["test-numbers"], None)
    viewer = hub.join(["test-numbers"], None)
    await until(lambda: hub.tick >= 1)
    viewer.take()
    last = hub.event_id()
    hub.leave(viewer)
    seen = len(numbers)
    await until(lambda: len(numbers) > seen)
    again = hub.join(["test-numbers"], None, last=last)
    assert [orjson.loads(patch)[0] for patch in again.take()[0]] == ["changing"]
    other = hub.join(["test-numbers"], None, last="00000000.99")
    assert len(other.take()[0]) == 2
    for one in (stays, again, other):
        hub.leave(one)


async def test_counts_equal_the_database_within_2_s(hub: LiveHub, database: Connection) -> None:
    """There is a tick per second: two of them after the last move, the numbers of the first are shown."""
    for _ in range(5):
        await enqueue(database)
    viewer = hub.join(["overview"], None)
    await until(lambda: hub.counts.states("task")["pending"] == 5)
    await enqueue(database, namespace="other")
    await claim_tasks(database, limit=3, actor="w", types=["x"])
    moved = hub.tick
    await until(lambda: hub.tick >= moved + 2)
    stored = await database.execute("select state, count(*) as n from interlock.tasks group by state")
    assert {state: count for state, count in hub.counts.states("task").items() if count} == {
        row["state"]: row["n"] for row in await stored.fetchall()
    }
    hub.leave(viewer)


async def test_edge_rates_equal_the_records(hub: LiveHub, database: Connection) -> None:
    for _ in range(5):
        await enqueue(database)
    viewer = hub.join(["overview"], None)
    await until(lambda: hub.counts.states("task")["pending"] == 5)
    await claim_tasks(database, limit=3, actor="w", types=["x"])
    claimed = await database.execute("select max(recorded_at) as at from interlock.audit_logs where event = 'claim'")
    row = await claimed.fetchone()
    assert row is not None
    second = int(row["at"].timestamp())
    await until(lambda: hub.counts.second > second)
    rates = hub.counts.machines["task"].rates(second + 1)
    (claims,) = [value for move, value in rates.items() if move.event == "claim"]
    assert claims * 5 == 3
    hub.leave(viewer)


async def test_counts_by_namespace(hub: LiveHub, database: Connection) -> None:
    await enqueue(database)
    await enqueue(database, namespace="other")
    viewer = hub.join(["overview"], frozenset({"other"}))
    await until(lambda: hub.counts.states("task", frozenset({"other"}))["pending"] == 1)
    await enqueue(database, namespace="other")
    await until(lambda: hub.counts.states("task", frozenset({"other"}))["pending"] == 2)
    assert hub.counts.states("task")["pending"] == 3
    hub.leave(viewer)


class Wire:
    """The client's end of a stream: what was sent, and an end that the test decides."""

    def __init__(self) -> None:
        self.sent = b""
        self.gone = asyncio.Event()
        self.ended = False

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent += message.get("body", b"")
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.ended = True

    def events(self) -> list[str]:
        return [line.removeprefix("event: ") for line in self.sent.decode().splitlines() if line.startswith("event: ")]


async def test_a_stream_ends_when_the_server_stops(hub: LiveHub) -> None:
    stopping, ends = asyncio.Event(), Wire()
    stream = EventStream(hub, hub.join(["nav"], None), stopping)
    running = asyncio.create_task(stream({}, ends.receive, ends.send))
    await until(lambda: "patch" in ends.events())
    stopping.set()
    await asyncio.wait_for(running, 30)
    assert ends.ended
    assert ends.events()[0] == "hello"
    assert ends.events()[-1] == "bye"
    assert hub.viewers == 0
    hello = json.loads(ends.sent.decode().split("data: ")[1].split("\n")[0])
    assert set(hello) == {"build", "epoch", "tick"}


async def test_a_stream_ends_when_the_page_is_closed(hub: LiveHub) -> None:
    ends = Wire()
    running = asyncio.create_task(
        EventStream(hub, hub.join(["nav"], None), asyncio.Event())({}, ends.receive, ends.send)
    )
    await until(lambda: "patch" in ends.events())
    ends.gone.set()
    await asyncio.wait_for(running, 30)
    assert hub.viewers == 0


async def test_a_stream_says_that_the_database_is_away_and_is_back(
    hub: LiveHub, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are not read again are not shown as live."""
    assert database is not None
    monkeypatch.setattr(live, "ERROR_PAUSE_S", 0.0)
    ends = Wire()
    stream = EventStream(hub, hub.join(["nav"], None), asyncio.Event())
    running = asyncio.create_task(stream({}, ends.receive, ends.send))
    await until(lambda: "patch" in ends.events())
    read = hub._read  # noqa: SLF001 - the statement of a tick, which fails as if the server were gone

    async def fail(*_: Any) -> None:
        raise StoreError("the server is gone")

    monkeypatch.setattr(hub, "_read", fail)
    await until(lambda: "stale" in ends.events())
    assert b"event: stale\ndata: true\n\n" in ends.sent
    monkeypatch.setattr(hub, "_read", read)
    await until(lambda: ends.events().count("stale") == 2)
    assert b"event: stale\ndata: false\n\n" in ends.sent
    ends.gone.set()
    await asyncio.wait_for(running, 30)


async def test_stream_outlives_the_request_timeout(url: str, database: Connection) -> None:
    """A request that takes longer than the timeout of a second is ended; an open stream goes on."""
    with served_dashboard(url, supervisor_timeout=1.0) as address:
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            await sign_in(client, database, "admin")
            async with client.stream("GET", "/ui/events", params={"t": "nav,overview"}) as answer:
                assert answer.status_code == 200
                began = asyncio.get_running_loop().time()
                ids = set()
                async for line in answer.aiter_lines():
                    if line.startswith("id: "):
                        ids.add(line)
                        await enqueue(database)  # so that the next tick has something to send
                    if len(ids) > 1 and asyncio.get_running_loop().time() > began + 3:
                        break
                else:
                    pytest.fail("the stream ended")


async def test_revoked_token_closes_streams(url: str, database: Connection) -> None:
    async with dashboard_at(url) as (client, dashboard):
        await sign_in(client, database, "read")
        (session,) = client.cookies.values()
        ends = Wire()
        viewer = dashboard.hub.join(["nav"], None, session=hash_token(session))
        running = asyncio.create_task(
            EventStream(dashboard.hub, viewer, dashboard.stopping)({}, ends.receive, ends.send)
        )
        await until(lambda: dashboard.hub.tick >= 2)
        assert "session" not in ends.events()
        await revoke_token(database, "viewer-read", actor="test")
        await asyncio.wait_for(running, 30)
        assert ends.events()[-1] == "session"


@pytest.mark.unit
def test_row_ids_are_bounded_and_never_an_error() -> None:
    assert decode_row_ids("") == frozenset()
    assert decode_row_ids("%%%") == frozenset()
    assert decode_row_ids("AAAAAAAAAAAAAAAAAAAAAQ") == {"00000000-0000-0000-0000-000000000001"}
    assert len(decode_row_ids("A" * 2000)) <= 50
