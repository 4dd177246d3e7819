"""The audit feed: all three tables of records, newest first, in bounded pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from api_support import ADMIN_ACTOR, api_at
from factories import enqueue_by_sql
from interlock.store import audit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with api_at(url) as opened:
        yield opened


async def found(client: httpx.AsyncClient, **conditions: Any) -> list[dict[str, Any]]:
    """Read all pages."""
    items: list[dict[str, Any]] = []
    cursor: dict[str, Any] = {}
    while True:
        answer = await client.get("/api/audit", params={**conditions, **cursor})
        assert answer.status_code == 200, answer.text
        items += answer.json()["items"]
        if answer.json()["next"] is None:
            return items
        cursor = {"cursor": answer.json()["next"]}


async def test_the_feed_has_the_records_that_meet_all_conditions(
    client: httpx.AsyncClient, database: Connection
) -> None:
    first = str(await enqueue_by_sql(database, type="x"))
    second = str(await enqueue_by_sql(database, type="x"))
    worker = (await client.post("/api/workers", json={})).json()["id"]
    await client.post(f"/api/tasks/{first}/cancel", json={"reason": "enough"})
    moves = [(item["kind"], item["id"], item["event"]) for item in await found(client, limit=1)]
    assert moves == [
        ("task", first, "cancel"),
        ("worker", worker, "create"),
        ("task", second, "create"),
        ("task", first, "create"),
    ]
    assert [item["event"] for item in await found(client, id=first)] == ["cancel", "create"]
    assert [item["kind"] for item in await found(client, id=worker, kind="worker")] == ["worker"]
    assert [item["id"] for item in await found(client, actor=ADMIN_ACTOR, kind="task")] == [first]
    assert [item["reason"] for item in await found(client, to_state="canceled", from_state="pending")] == ["enough"]
    assert len(await found(client, event="create", kind=["task", "worker"])) == 3
    assert len(await found(client, database_role="interlock")) == 4
    assert await found(client, database_role="other") == []
    newest = (await found(client))[0]["recorded_at"]
    assert len(await found(client, recorded_before=newest)) == 3
    assert len(await found(client, recorded_after=newest)) == 1
    assert await found(client, recorded_before="2020-01-01T00:00:00Z") == []
    wrong = await client.get("/api/audit", params={"recorded_after": newest, "recorded_before": "2020-01-01T00:00:00Z"})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_input")


async def test_a_page_ends_after_a_bounded_number_of_records(
    client: httpx.AsyncClient, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_LOOKED_AT", 10)
    wanted = str(await enqueue_by_sql(database, type="x"))
    await client.post(f"/api/tasks/{wanted}/cancel")
    for _ in range(25):
        await enqueue_by_sql(database, type="x")
    page = (await client.get("/api/audit", params={"event": "cancel"})).json()
    assert len(page["items"]) <= 1
    assert [item["id"] for item in await found(client, event="cancel")] == [wanted], "the cursor goes on"
    assert len(await found(client, limit=3)) == 27, "each record on one page"


async def test_every_record_is_on_one_page_whatever_its_moment_and_its_id(
    client: httpx.AsyncClient, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many records of one moment, ids of transactions that were rolled back, and all kinds between each other."""
    monkeypatch.setattr(audit, "MAX_LOOKED_AT", 10)
    expected: list[tuple[str, str]] = []
    moments = []
    for round_ in range(4):
        insert = "insert into interlock.tasks (type) select 'x' from generate_series(1, 25) returning id"
        made = await database.execute(insert)
        expected += [("task", str(row["id"])) for row in await made.fetchall()]
        async with database.transaction(force_rollback=True):
            await database.execute("insert into interlock.tasks (type) select 'x' from generate_series(1, 45)")
        expected.append(("worker", (await client.post("/api/workers", json={})).json()["id"]))
        made = await database.execute("insert into interlock.jobs (task_description) values ('x') returning id")
        expected += [("job", str(row["id"])) for row in await made.fetchall()]
        await client.post(f"/api/tasks/{expected[-3 - round_][1]}/cancel")
        moments.append((await (await database.execute("select clock_timestamp() as at")).fetchone() or {})["at"])
    for limit in (1, 7, 200):
        items = await found(client, limit=limit, event="create")
        assert sorted((item["kind"], item["id"]) for item in items) == sorted(expected), limit
        for kind in audit.KINDS:
            records = [item["record"] for item in items if item["kind"] == kind]
            assert records == sorted(records, reverse=True), kind
    assert [item["kind"] for item in await found(client, kind=["job", "worker"])] == ["job", "worker"] * 4
    assert len(await found(client, event="cancel")) == 4
    for place, moment in enumerate(moments):
        earlier = await found(client, event="create", recorded_before=moment.isoformat())
        later = await found(client, event="create", recorded_after=moment.isoformat())
        assert (len(earlier), len(later)) == (27 * (place + 1), 27 * (3 - place))


async def test_a_list_that_ends_with_a_page_has_no_cursor(client: httpx.AsyncClient, database: Connection) -> None:
    for _ in range(3):
        await enqueue_by_sql(database, type="x")
    assert (await client.get("/api/audit", params={"limit": 3})).json()["next"] is None
    assert (await client.get("/api/audit", params={"limit": 2})).json()["next"] is not None
    assert (await client.get("/api/audit", params={"event": "none"})).json() == {"items": [], "next": None}
