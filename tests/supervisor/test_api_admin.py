"""REST endpoints of workflows, schedules, limits, tokens and given-up webhooks."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from api_support import ADMIN_ACTOR, api_at
from interlock.store.access import TokenScope, create_token
from jobs_support import app_at as jobs_at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with api_at(url, app=jobs_at(url)) as client:
        yield client


async def test_workflows_are_listed_shown_and_drawn(client: httpx.AsyncClient) -> None:
    first = (await client.get("/api/workflows", params={"limit": 2})).json()
    assert [each["name"] for each in first["items"]] == sorted(each["name"] for each in first["items"])
    second = (await client.get("/api/workflows", params={"limit": 2, "cursor": first["next"]})).json()
    assert second["items"][0]["name"] > first["items"][1]["name"]
    shown = (await client.get("/api/workflows/chain")).json()
    assert [step["name"] for step in shown["definition"]["steps"]] == ["first", "second", "third"]
    assert [each["version"] for each in shown["versions"]] == [shown["version"]]
    drawing = await client.get("/api/diagrams/chain")
    assert (drawing.headers["content-type"], drawing.text[:4]) == ("image/svg+xml", "<svg")
    assert "flowchart" in (await client.get("/api/diagrams/chain", params={"format": "mermaid"})).text
    for path in ("/api/workflows/none", "/api/diagrams/none", "/api/workflows/chain?version=none"):
        assert (await client.get(path)).json()["code"] == "unknown_workflow"


async def test_a_schedule_is_stored_paused_resumed_run_and_deleted(
    client: httpx.AsyncClient, database: Connection
) -> None:
    path = "/api/schedules/" + quote("reports eu, daily?", safe="")
    body = {"type": "report", "cron": "30 4 * * *", "timezone": "Europe/Berlin", "options": {"priority": 3}}
    made = (await client.put(path, json=body)).json()
    assert (made["name"], made["options"], made["paused_at"]) == ("reports eu, daily?", {"priority": 3}, None)
    assert [each["name"] for each in (await client.get("/api/schedules")).json()["items"]] == ["reports eu, daily?"]
    assert (await client.post(f"{path}/resume")).json()["code"] == "not_possible"
    assert (await client.post(f"{path}/pause")).json()["paused_at"] is not None
    paused = (await client.post(f"{path}/pause", json={"reason": "stock-taking"})).json()
    assert (paused["paused_by"], paused["pause_reason"]) == (ADMIN_ACTOR, "stock-taking")
    resumed = (await client.post(f"{path}/resume", json={"reason": "all counted"})).json()
    assert (resumed["paused_at"], resumed["paused_by"], resumed["pause_reason"]) == (None, None, None)
    assert (resumed["resumed_by"], resumed["resume_reason"]) == (ADMIN_ACTOR, "all counted")
    ran = await client.post(f"{path}/run", headers={"Idempotency-Key": "now"})
    assert (ran.status_code, ran.json()["kind"]) == (201, "task")
    assert (await client.post(f"{path}/run", headers={"Idempotency-Key": "now"})).content == ran.content
    rows = await (await database.execute("select id::text, priority from interlock.tasks")).fetchall()
    assert [(row["id"], row["priority"]) for row in rows] == [(ran.json()["id"], 3)]
    for wrong in (
        {"type": "x"},
        {"type": "x", "cron": "nonsense"},
        {"type": "x", "workflow": "y", "every": 1},
        {"type": "x", "every": 1, "options": {"priority": "high"}},
        {"type": "x", "every": 1, "options": {"color": 1}},
    ):
        assert (await client.put("/api/schedules/wrong", json=wrong)).json()["code"] == "invalid_input", wrong
    assert (await client.delete(path)).json() == {"name": "reports eu, daily?", "deleted": True}
    for answer in (await client.get(path), await client.delete(path), await client.post(f"{path}/run")):
        assert answer.json()["code"] == "unknown_schedule"


async def test_limits_are_overridden_restored_and_deleted_by_admins_only(
    client: httpx.AsyncClient, database: Connection
) -> None:
    await database.execute("insert into interlock.limits (key, max_running) values ('mail:*', 5)")
    path = "/api/limits/" + quote("mail:*", safe="")
    token = (await create_token(database, "op", TokenScope.OPERATE, actor="test"))[1]
    refused = await client.put(path, json={"max_running": 1}, headers={"Authorization": f"Bearer {token}"})
    assert (refused.status_code, refused.json()["code"]) == (403, "insufficient_scope")
    changed = (await client.put(path, json={"max_running": 1, "reason": "slow"})).json()
    assert (changed["max_running"], changed["declared"]["max_running"]) == (1, 5)
    assert (changed["overridden_by"], changed["override_reason"]) == (ADMIN_ACTOR, "slow")
    assert (await client.put(path, json={"max_starts": 1})).json()["code"] == "invalid_input"
    (listed,) = (await client.get("/api/limits")).json()["items"]
    assert (listed["key"], listed["max_running"], listed["taken"]) == ("mail:*", 1, 0)
    assert (await client.post(f"{path}/restore", json={"reason": "fast"})).json()["deleted"] is False
    shown = (await client.get(path)).json()
    assert (shown["max_running"], shown["declared"]) == (5, None)
    assert [(each["event"], each["reason"]) for each in shown["changes"]] == [("restore", "fast"), ("override", "slow")]
    assert (await client.post(f"{path}/restore")).json()["code"] == "not_possible"
    assert (await client.delete(path, params={"reason": "unused"})).json() == {"name": "mail:*", "deleted": True}
    assert (await client.get(path)).json()["code"] == "unknown_limit"


async def test_the_secret_of_a_token_is_answered_once_and_stored_nowhere(
    client: httpx.AsyncClient, database: Connection
) -> None:
    body = {"name": "ci/main", "scope": "operate", "days": 9}
    keyed = await client.post("/api/tokens", json=body, headers={"Idempotency-Key": "k"})
    assert (keyed.status_code, keyed.json()["code"]) == (422, "invalid_request")
    made = await client.post("/api/tokens", json=body)
    secret = made.json()["token"]
    assert (made.status_code, secret[:3]) == (201, "il_")
    assert secret not in (await client.get("/api/tokens")).text
    stored = await (await database.execute("select count(*) as n from interlock.idempotency_keys")).fetchall()
    assert stored[0]["n"] == 0
    used = {"Authorization": f"Bearer {secret}"}
    assert (await client.get("/api/tokens", headers=used)).json()["code"] == "insufficient_scope"
    assert (await client.post("/api/tokens", json={"name": "ci/main"})).json()["code"] == "not_possible"
    assert (await client.delete("/api/tokens/ci%2Fmain")).json() == {"name": "ci/main", "deleted": True}
    assert (await client.get("/api/tasks", headers=used)).status_code == 401
    assert (await client.delete("/api/tokens/ci%2Fmain")).json()["code"] == "unknown_token_name"
    assert (await client.get("/api/tokens", params={"revoked": True})).json()["items"][-1]["revoked_by"] == ADMIN_ACTOR


async def test_given_up_webhooks_are_listed_retried_and_discarded(
    client: httpx.AsyncClient, database: Connection
) -> None:
    await database.execute(
        "insert into interlock.callbacks (task_id, attempt, state, url, tries, error, given_up_at) "
        "select interlock.new_id(), 1, 'done', 'http://x', 8, 'answered 500', now() from generate_series(1, 3)"
    )
    first = (await client.get("/api/webhooks", params={"limit": 2})).json()
    rest = (await client.get("/api/webhooks", params={"limit": 2, "cursor": first["next"]})).json()
    one, two, three = (each["id"] for each in first["items"] + rest["items"])
    assert (await client.post("/api/webhooks/retry", json={"ids": [one, 10**9]})).json() == {"ids": [one], "count": 1}
    assert (await client.post("/api/webhooks/discard", json={"ids": [two]})).json()["count"] == 1
    assert (await client.post("/api/webhooks/discard", json={"all": True})).json()["ids"] == [three]
    assert (await client.post("/api/webhooks/retry", json={})).status_code == 422
    left = await (await database.execute("select id from interlock.callbacks")).fetchall()
    assert [row["id"] for row in left] == [one]
