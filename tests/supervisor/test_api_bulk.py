"""REST endpoints for many rows: bulk enqueue and submit; cancel and requeue by filter with a preview."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from api_support import ADMIN_ACTOR, api_at
from factories import enqueue, step, workflow
from interlock.store import lists, task_actions
from interlock.store.jobs import JobFilter
from interlock.store.workflows import put_workflow
from interlock.supervisor.http.idempotency import RequestApp
from interlock.workflow.cancel_by_filter import cancel_matching_jobs, preview_job_cancel
from job_driver import Failed, JobDriver
from jobs_support import app_at as jobs_at
from jobs_support import register_idle_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    app = jobs_at(url)

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    async with api_at(url, app=app) as client:
        yield client


async def number(database: Connection, condition: str = "true", table: str = "tasks") -> int:
    rows = await (await database.execute(f"select count(*) as n from interlock.{table} where {condition}")).fetchall()
    return int(rows[0]["n"])


async def fail_tasks(database: Connection, condition: str) -> None:
    """Move pending tasks to error, as a worker does."""
    await database.execute(
        "update interlock.tasks set state = 'running', event = 'claim', attempt = attempt + 1, worker_id = 'w', "
        f"lease_expires_at = now() + interval '1 hour' where state = 'pending' and {condition}"
    )
    await database.execute(
        "update interlock.tasks set state = 'error', event = 'fail', lease_expires_at = null, "
        "settled_attempt = attempt, finished_at = clock_timestamp() where state = 'running'"
    )


async def test_bulk_enqueue_answers_ids_and_is_executed_once_per_key(
    client: httpx.AsyncClient, database: Connection
) -> None:
    tasks: list[dict[str, Any]] = [{"type": "add", "input": {"a": n, "b": 1}} for n in range(70)]
    tasks.append({"type": "other", "request_id": "mine", "tags": ["t"]})
    body = {"tasks": tasks, "request_id": "load-1"}
    first = await client.post("/api/tasks/bulk", json=body)
    assert (first.status_code, first.json()["created"], len(first.json()["items"])) == (201, 71, 71)
    again = await client.post("/api/tasks/bulk", json=body)
    assert (again.content, again.headers["Idempotency-Replayed"]) == (first.content, "true")
    assert await number(database) == 71
    inputs = await (
        await database.execute(
            "select input from interlock.tasks where id = %s::uuid", [first.json()["items"][69]["id"]]
        )
    ).fetchall()
    assert inputs[0]["input"] == {"a": 69, "b": 1}, "the answers are in the order of the request"
    same = await client.post("/api/tasks/bulk", json={"tasks": tasks[-1:]})
    assert (same.status_code, same.json()["created"]) == (200, 0)
    assert same.json()["items"][0] == {"id": first.json()["items"][70]["id"], "created": False}


async def test_bulk_enqueue_stores_nothing_and_names_every_bad_task(
    client: httpx.AsyncClient, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"type": "add", "input": {"a": 1, "b": 1}}
    wrong = await client.post("/api/tasks/bulk", json={"tasks": [good, {"input": {}}, good, {"type": "x", "prio": 1}]})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_request")
    assert [(e["index"], e["field"]) for e in wrong.json()["errors"]] == [(1, "tasks.1.type"), (3, "tasks.3.prio")]
    misfits = [good, {"type": "add", "input": {"a": "x", "b": 1}}, good, {"type": "add", "input": {"a": 1}}]
    wrong = await client.post("/api/tasks/bulk", json={"tasks": misfits})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_input")
    assert [(e["index"], e["field"]) for e in wrong.json()["errors"]] == [(1, "tasks.1"), (3, "tasks.3")]
    # refused by the database: no limit is declared for the key
    limited = [{"type": "x", "limit_key": "nobody"} if n in {2, 63} else {"type": "x"} for n in range(64)]
    wrong = await client.post("/api/tasks/bulk", json={"tasks": limited})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_input")
    assert [error["index"] for error in wrong.json()["errors"]] == [2, 63]
    assert "no limit is declared" in wrong.json()["errors"][0]["message"]
    # the search ends with as many errors as are listed
    attempts: list[int] = []
    enqueue_many = RequestApp.enqueue_many

    async def count(app: RequestApp, tasks: list[Any], **options: Any) -> Any:
        attempts.append(len(tasks))
        return await enqueue_many(app, tasks, **options)

    monkeypatch.setattr(RequestApp, "enqueue_many", count)
    wrong = await client.post("/api/tasks/bulk", json={"tasks": [limited[2]] * 400})
    assert [error["index"] for error in wrong.json()["errors"]] == list(range(100))
    assert len(attempts) < 300, "and not 799, with each half of all tasks"
    assert await number(database) == 0


async def test_bulk_submit_is_all_or_nothing_in_one_transaction(
    client: httpx.AsyncClient, database: Connection
) -> None:
    await register_idle_worker(database)
    body = {"jobs": [{"workflow": "chain", "input": {"n": n}, "tags": ["b"]} for n in range(3)], "request_id": "b-1"}
    first = await client.post("/api/jobs/bulk", json=body)
    assert (first.status_code, first.json()["created"]) == (201, 3)
    assert (await client.post("/api/jobs/bulk", json=body)).content == first.content
    assert await number(database, table="jobs") == 3
    transactions = await (await database.execute("select distinct xmin::text as x from interlock.jobs")).fetchall()
    assert len(transactions) == 1
    jobs: list[dict[str, Any]] = [{"workflow": "strict", "input": {"order": order}} for order in (1, "x", 2)]
    jobs.append({"workflow": "chain", "input": {"n": 1}, "worker_count": 3})
    jobs.append({"workflow": "nothing", "input": {}})
    wrong = await client.post("/api/jobs/bulk", json={"jobs": jobs})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_input")
    assert [(e["index"], e["field"]) for e in wrong.json()["errors"]] == [(1, "jobs.1"), (4, "jobs.4")]
    assert "there is no workflow 'nothing'" in wrong.json()["errors"][1]["message"]
    assert await number(database, table="jobs") == 3


async def test_the_effect_of_a_cancel_equals_its_preview(client: httpx.AsyncClient, database: Connection) -> None:
    for _ in range(5):
        await enqueue(database, "mail", tags=("old",))
    await enqueue(database, "print")
    running = await enqueue(database, "mail", tags=("old",), namespace="busy")
    await database.execute(
        "update interlock.tasks set state = 'running', event = 'claim', attempt = 1, worker_id = 'w', "
        "lease_expires_at = now() + interval '1 hour' where id = %s",
        [running],
    )
    wanted: dict[str, Any] = {"filter": {"type": "mail", "tag": "old"}}
    preview = (await client.post("/api/tasks/cancel", json={**wanted, "preview": True})).json()
    assert (preview["matched"], preview["possible"], preview["capped"]) == (6, 6, False)
    assert preview["states"] == {"pending": 5, "running": 1}
    assert len(preview["sample"]) == 6
    assert await number(database, "state = 'canceled'") == 0
    await enqueue(database, "mail", tags=("old",))  # after the preview
    same = await client.post("/api/tasks/cancel", json={**wanted, "preview": True, "horizon": preview["horizon"]})
    assert (same.json()["matched"], same.json()["horizon"]) == (6, preview["horizon"])
    body = {**wanted, "horizon": preview["horizon"], "limit": 4, "reason": "sent by hand", "request_id": "c-1"}
    first = (await client.post("/api/tasks/cancel", json=body)).json()
    assert (first["matched"], first["changed"], first["next"] is None) == (4, 4, False)
    assert (await client.post("/api/tasks/cancel", json=body)).json() == first, "one key, one effect"
    body |= {"cursor": first["next"], "request_id": "c-2"}
    second = (await client.post("/api/tasks/cancel", json=body)).json()
    assert (second["matched"], second["changed"], second["next"]) == (2, 2, None)
    assert first["requested"] + second["requested"] == 1
    assert await number(database, "state = 'canceled' and reason = 'sent by hand'") == 5
    assert await number(database, "type = 'mail' and state = 'pending'") == 1, "enqueued after the preview"
    moves = f"event = 'cancel' and actor = '{ADMIN_ACTOR}' and reason = 'sent by hand'"
    assert await number(database, moves, table="audit_logs") == 5


async def test_a_requeue_says_what_it_cannot_do_and_why(client: httpx.AsyncClient, database: Connection) -> None:
    await register_idle_worker(database)
    job = (await client.post("/api/jobs", json={"workflow": "chain", "input": {"n": 1}})).json()
    assert job["status"] == "RUNNING"
    await fail_tasks(database, "job_id is not null")
    await enqueue(database, "mail", unique_key="k")
    await fail_tasks(database, "unique_key = 'k'")
    await enqueue(database, "mail", unique_key="k")  # takes the key
    await enqueue(database, "mail", unique_key="two")
    await fail_tasks(database, "unique_key = 'two'")
    await enqueue(database, "mail", unique_key="two")  # the same key, in the same requeue
    await fail_tasks(database, "unique_key = 'two'")
    await enqueue(database, "mail")
    await fail_tasks(database, "unique_key is null and job_id is null")
    body = {"filter": {"state": ["error", "pending"]}}
    preview = (await client.post("/api/tasks/requeue", json={**body, "preview": True})).json()
    assert {(one["reason"], one["count"]) for one in preview["obstacles"]} == {
        ("is pending", 1),
        ("another unfinished task has its unique key", 2),
        ("is a step of a job: retry the job instead", 1),
    }
    assert (preview["matched"], preview["possible"], preview["states"]) == (6, 2, {"error": 2})
    done = (await client.post("/api/tasks/requeue", json={**body, "horizon": preview["horizon"]})).json()
    assert (done["changed"], done["next"]) == (2, None)
    assert await number(database, f"event = 'requeue' and actor = '{ADMIN_ACTOR}'", table="audit_logs") == 2
    again = (await client.post("/api/tasks/requeue", json={**body, "horizon": preview["horizon"]})).json()
    assert again["changed"] == 0


async def test_an_empty_filter_must_be_meant_and_counts_are_capped(
    client: httpx.AsyncClient, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        await enqueue(database)
    for path in ("/api/tasks/cancel", "/api/tasks/requeue", "/api/jobs/cancel"):
        wrong = await client.post(path, json={"preview": True})
        assert (wrong.status_code, "all: true" in wrong.json()["detail"]) == (422, True)
    monkeypatch.setattr(task_actions, "MAX_COUNTED", 2)
    preview = (await client.post("/api/tasks/cancel", json={"all": True, "preview": True})).json()
    assert (preview["matched"], preview["capped"]) == (2, True)
    broken = await client.post("/api/tasks/cancel", json={"all": True, "cursor": "nonsense"})
    assert (broken.status_code, broken.json()["errors"][0]["field"]) == (422, "cursor")
    done = (await client.post("/api/tasks/cancel", json={"all": True})).json()
    assert (done["changed"], done["next"]) == (3, None)


async def test_jobs_are_canceled_by_filter_in_batches(client: httpx.AsyncClient, database: Connection) -> None:
    await register_idle_worker(database)
    for n in range(5):
        await client.post("/api/jobs", json={"workflow": "chain", "input": {"n": n}, "tags": ["old"]})
    body: dict[str, Any] = {"filter": {"workflow": "chain", "tags": ["old"]}}
    preview = (await client.post("/api/jobs/cancel", json={**body, "preview": True})).json()
    assert (preview["matched"], preview["possible"]) == (5, 5)
    late = await client.post("/api/jobs", json={"workflow": "chain", "input": {"n": 9}, "tags": ["old"]})
    body |= {"horizon": preview["horizon"], "limit": 2, "reason": "a new release"}
    changed, batches, cursor = 0, 0, None
    while batches == 0 or cursor is not None:
        answer = (await client.post("/api/jobs/cancel", json={**body, "cursor": cursor})).json()
        changed, batches, cursor = changed + answer["changed"], batches + 1, answer["next"]
    assert (changed, batches) == (5, 3)
    assert (await client.get(f"/api/jobs/{late.json()['id']}")).json()["status"] != "CANCELED"
    assert await number(database, "ending = 'CANCELED' or status = 'CANCELED'", table="jobs") == 5
    again = (await client.post("/api/jobs/cancel", json={**body, "preview": True})).json()
    assert again["possible"] <= 1


async def test_the_preview_of_a_cancel_knows_which_failing_jobs_it_can_change(database: Connection) -> None:
    """A failing job can be canceled once, while it waits for child jobs; its compensations always run to their end."""
    await register_idle_worker(database)
    driver = JobDriver(database)
    await put_workflow(database, workflow(step("s", kind="signal", signal="s"), name="sub"))
    driver.outcomes = {"bad": Failed("no")}
    waits = await driver.submit(step("c", kind="child", workflow="sub", wait=False), step("bad", "c"))
    await driver.run()
    undoes = await driver.submit(step("a", compensate="undo"), step("bad", "a"), name="undoes")
    await driver.run(until=lambda: driver.ran.count("bad") == 2)
    await driver.advance()
    (row,) = await (await database.execute("select * from interlock.jobs where id = %s", [undoes])).fetchall()
    assert (row["ending"], row["compensating"]) == ("FAILED", True)
    wanted = JobFilter(statuses=["RUNNING"])
    preview = await preview_job_cancel(database, wanted)
    assert (preview.matched, preview.possible) == (3, 2)
    assert preview.obstacles == {"has failed and ends by itself": 1}
    batch = await cancel_matching_jobs(database, wanted, limit=10, actor="ada", horizon=preview.horizon)
    assert (batch.matched, batch.changed) == (3, 2)
    assert waits in {job["id"] for job in batch.sample}
    again = await preview_job_cancel(database, wanted, horizon=preview.horizon)
    batch = await cancel_matching_jobs(database, wanted, limit=10, actor="ada", horizon=preview.horizon)
    assert (again.matched, again.possible) == (batch.matched, batch.changed) == (3, 0)
    assert again.obstacles == {"is being canceled": 2, "has failed and ends by itself": 1}


async def test_actions_go_on_over_short_pages(
    client: httpx.AsyncClient, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement looks at a bounded number of rows: a page without a match is not the end of the list."""
    monkeypatch.setattr(lists, "MAX_LOOKED_AT", 3)
    await register_idle_worker(database)
    for kind in ("wanted", *["other"] * 8, "wanted", *["other"] * 8):
        await enqueue(database, kind)
        await client.post("/api/jobs", json={"workflow": "chain", "input": {"n": 1}})
    for n in (0, 9):
        made = (await client.get("/api/jobs?limit=200")).json()["items"]
        assert len(made) == 18
        await database.execute("update interlock.jobs set namespace = 'far' where id = %s::uuid", [made[17 - n]["id"]])
    for path, condition in (("/api/tasks/cancel", {"type": "wanted"}), ("/api/jobs/cancel", {"namespace": "far"})):
        preview = await client.post(path, json={"filter": condition, "preview": True})
        assert preview.json()["matched"] == 2, preview.text
        first = (await client.post(path, json={"filter": condition, "limit": 1})).json()
        assert (first["matched"], first["changed"], first["next"] is None) == (1, 1, False)
        more = {"filter": condition, "limit": 1, "cursor": first["next"]}
        second = (await client.post(path, json=more)).json()
        assert (second["matched"], second["changed"], second["next"]) == (1, 1, None)


async def test_actions_take_the_conditions_of_the_lists(client: httpx.AsyncClient, database: Connection) -> None:
    await enqueue(database, "mail")
    task = {"type": "mail", "unique_key": "u", "request_id": "r", "correlation_id": str(uuid4())}
    made = (await client.post("/api/tasks", json=task)).json()
    matching: list[dict[str, Any]] = [
        {"unique_key": "u"},
        {"request_id": "r"},
        {"correlation_id": task["correlation_id"]},
        {"created_after": made["created_at"], "unique_key": "u"},
        {"status": ["pending"], "request_id": "r"},
        {"ids": [made["id"]]},
        {"ids": [made["id"]], "standalone": True},
    ]
    others: list[dict[str, Any]] = [
        {"created_before": made["created_at"], "unique_key": "u"},
        {"worker": "w"},
        {"job": made["id"]},
        {"status": ["error"]},
        {"ids": [made["id"]], "steps_only": True},
        {"ids": [made["id"]], "status": ["error"]},
    ]
    for condition in matching + others:
        answer = await client.post("/api/tasks/cancel", json={"filter": condition, "preview": True})
        assert answer.json()["matched"] == (1 if condition in matching else 0), (condition, answer.text)
    parameters = (await client.get("/openapi.json")).json()
    for path, model in (("/api/tasks", "TaskFilter"), ("/api/jobs", "JobFilter")):
        listed = {each["name"] for each in parameters["paths"][path]["get"]["parameters"]} - {"limit", "cursor"}
        plural = {"tag": "tags", "attribute": "attributes"} if path == "/api/jobs" else {}
        offered = set(parameters["components"]["schemas"][model]["properties"])
        chosen = {"ids", "standalone", "steps_only"} if path == "/api/tasks" else set()  # a selection of rows
        assert offered - chosen == {plural.get(name, name) for name in listed}
