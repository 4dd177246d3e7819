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
