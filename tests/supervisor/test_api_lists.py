"""Lists of the API: filters, pages of steps and histories, both names of a state, addresses of created things."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from api_support import api_at, api_document
from factories import claim_tasks, enqueue_by_sql
from interlock.store import lists
from jobs_support import app_at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with api_at(url) as opened:
        yield opened


async def found(client: httpx.AsyncClient, path: str, **conditions: Any) -> list[str]:
    answer = await client.get(path, params=conditions)
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["items"]]


async def test_tasks_are_found_by_each_condition(client: httpx.AsyncClient, database: Connection) -> None:
    correlation, later = uuid4(), datetime.now(UTC) + timedelta(hours=1)
    plain = str(await enqueue_by_sql(database, type="x"))
    made = str(
        await enqueue_by_sql(
            database, type="y", tags=["eu"], correlation_id=correlation, request_id="r-1", unique_key="k-1"
        )
    )
    (held,) = await claim_tasks(database, types=["x"], actor="w_1-3-ff")
    for conditions in (
        {"type": "y"},
        {"tag": "eu"},
        {"correlation_id": correlation},
        {"request_id": "r-1"},
        {"unique_key": "k-1", "state": ["pending", "running"]},
        {"state": "pending"},
        {"status": "pending"},
    ):
        assert await found(client, "/api/tasks", **conditions) == [made], conditions
    for worker in ("w_1", "w_1-3-ff"):
        assert await found(client, "/api/tasks", worker=worker) == [str(held.id)] == [plain]
    assert await found(client, "/api/tasks", worker="w") == []
    assert await found(client, "/api/tasks", state="running", worker="w_1") == [plain]
    assert await found(client, "/api/tasks", state=["pending", "running", "done"]) == [made, plain]
    assert await found(client, "/api/tasks", created_before=later.isoformat()) == [made, plain]
    assert await found(client, "/api/tasks", created_after=later.isoformat()) == []
    assert await found(client, "/api/tasks", job=uuid4()) == []


async def test_a_page_may_be_short_and_its_cursor_goes_on(
    client: httpx.AsyncClient, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "MAX_LOOKED_AT", 4)
    wanted = [str(await enqueue_by_sql(database, type="rare")) for _ in range(2)]
    for _ in range(10):
        await enqueue_by_sql(database, type="x")
    page = (await client.get("/api/tasks", params={"type": "rare"})).json()
    assert page["items"] == []
    assert page["next"] is not None
    seen = []
    while page["next"] is not None:
        page = (await client.get("/api/tasks", params={"type": "rare", "cursor": page["next"]})).json()
        seen += [task["id"] for task in page["items"]]
    assert seen == wanted[::-1]


async def test_workers_are_found_by_several_states_and_by_namespace(client: httpx.AsyncClient) -> None:
    idle = (await client.post("/api/workers", json={})).json()
    other = (await client.post("/api/workers", json={})).json()["id"]
    await client.post(f"/api/supervisor/workers/{other}/terminate")
    assert idle["state"] == idle["status"] == "IDLE"
    assert await found(client, "/api/workers", status=["IDLE", "TERMINATED"]) == [other, idle["id"]]
    assert await found(client, "/api/workers", state="IDLE") == [idle["id"]]
    assert await found(client, "/api/workers", namespace="nowhere") == []
    assert await found(client, "/api/workers", created_before="2020-01-01T00:00:00Z") == []


async def test_steps_histories_and_children_are_read_page_by_page(url: str) -> None:
    async with app_at(url) as app, api_at(url, app=app) as client:
        job = (await client.post("/api/jobs", json={"workflow": "chain", "input": {"n": 1}, "request_id": "r"})).json()
        assert job["state"] == job["status"]
        assert await found(client, "/api/jobs", request_id=job["request_id"], state=job["status"]) == [job["id"]]
        assert await found(client, "/api/jobs", correlation_id=job["correlation_id"]) == [job["id"]]
        steps = await found(client, "/api/tasks", job=job["id"])
        assert len(steps) == 3
        assert sorted(await found(client, "/api/tasks", correlation_id=job["id"])) == sorted(steps)
        for path, names in (
            (f"/api/jobs/{job['id']}/steps", ["first", "second", "third"]),
            (f"/api/jobs/{job['id']}/history", ["create", "validate"]),
        ):
            seen: list[str] = []
            cursor: dict[str, str] = {}
            while True:
                page = (await client.get(path, params={"limit": 1, **cursor})).json()
                seen += [item.get("step", item.get("event")) for item in page["items"]]
                if page["next"] is None:
                    break
                cursor = {"cursor": page["next"]}
            assert seen == names, path
        assert await found(client, f"/api/jobs/{job['id']}/children") == []


async def test_created_things_have_an_address_also_in_a_replayed_answer(client: httpx.AsyncClient) -> None:
    for path, body in (("/api/tasks", {"type": "x"}), ("/api/workers", {})):
        for _ in range(2):
            answer = await client.post(path, json=body, headers={"Idempotency-Key": f"key of {path}"})
            assert answer.status_code == 201
            assert answer.headers["Location"] == f"{path}/{answer.json()['id']}"
            assert (await client.get(answer.headers["Location"])).status_code == 200


async def test_a_misspelled_filter_is_refused_and_never_means_everything(client: httpx.AsyncClient) -> None:
    answer = await client.get("/api/tasks", params={"stat": "error"})
    assert (answer.status_code, answer.json()["errors"]) == (
        422,
        [{"field": "query.stat", "message": "there is no such parameter; did you mean 'state'?"}],
    )
    for path, operations in api_document()["paths"].items():
        parameters = operations.get("get", {}).get("parameters", ())
        if any(parameter["in"] == "query" for parameter in parameters):
            address = re.sub(r"\{\w+\}", str(uuid4()), path)
            refused = (await client.get(address, params={"no_filter": "1"})).json()
            assert (refused["code"], refused["errors"][0]["field"]) == ("invalid_request", "query.no_filter"), path
