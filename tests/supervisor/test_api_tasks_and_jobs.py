"""REST endpoints of jobs, tasks and namespaces."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from api_support import ADMIN_ACTOR, api_at
from factories import enqueue_by_sql
from interlock.errors import DefinitionChangedError
from interlock.store.limits import Limit, pause_namespace, put_limits
from interlock.store.schedules import Schedule, put_schedules
from interlock.supervisor.http.problems import problem_from_error
from jobs_support import app_at as jobs_at
from jobs_support import manual_worker_at, orchestrator_at, register_idle_worker
from worker_support import app_at as tasks_at
from worker_support import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with api_at(url, app=jobs_at(url)) as client:
        yield client


async def submitted(client: httpx.AsyncClient, workflow: str, **body: Any) -> str:
    answer = await client.post("/api/jobs", json={"workflow": workflow, **body})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def ended(client: httpx.AsyncClient, job: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            found: dict[str, Any] = (await client.get(f"/api/jobs/{job}")).json()
            if found["status"] in {"COMPLETED", "FAILED", "CANCELED"}:
                return found
            await asyncio.sleep(0.01)


async def test_a_done_job_shows_steps_and_history(client: httpx.AsyncClient, url: str, database: Connection) -> None:
    async with manual_worker_at(database), orchestrator_at(url):
        job = await submitted(client, "chain", input={"n": 1})
        found = await ended(client, job)
    assert (found["status"], found["output"]) == ("COMPLETED", {"third": "third"})
    steps = (await client.get(f"/api/jobs/{job}/steps", params={"limit": 2})).json()
    assert [step["step"] for step in steps["items"]] == ["first", "second"]
    more = (await client.get(f"/api/jobs/{job}/steps", params={"limit": 2, "cursor": steps["next"]})).json()
    assert ([step["step"] for step in more["items"]], more["next"]) == (["third"], None)
    moves = (await client.get(f"/api/jobs/{job}/history")).json()["items"]
    assert [move["to_state"] for move in moves] == ["SUBMITTED", "PENDING", "RUNNING", "COMPLETED"]
    assert {move["database_role"] for move in moves} == {"interlock"}
    assert (await client.get(f"/api/explain/job/{job}")).json()["state"] == "COMPLETED"
    wrong = await client.get(f"/api/explain/task/{job}")
    assert (wrong.status_code, wrong.json()["code"]) == (404, "unknown_task")
    listed = (await client.get("/api/jobs", params={"status": "COMPLETED", "workflow": "chain"})).json()["items"]
    assert [each["id"] for each in listed] == [job]
    retried = await client.post(f"/api/jobs/{job}/retry", json={"step": "second", "request_id": "again"})
    assert retried.status_code == 201
    assert retried.json()["retried_from"] == job


async def test_signal_and_approval_over_the_api(client: httpx.AsyncClient, url: str, database: Connection) -> None:
    async with manual_worker_at(database), orchestrator_at(url):
        job = await submitted(client, "gates")
        wrong = await client.post(f"/api/jobs/{job}/signal", json={"name": "nothing"})
        assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_input")
        sent = await client.post(f"/api/jobs/{job}/signal", json={"name": "paid", "payload": {"euros": 3}})
        assert sent.json() == {"outcome": "sent"}
        (item,) = (await client.get("/api/inbox")).json()["items"]
        assert (item["job_id"], item["step"], item["kind"]) == (job, "boss", "approval")
        assert (await client.post(f"/api/jobs/{job}/approve", json={"step": "boss"})).json() == {"outcome": "sent"}
        assert (await ended(client, job))["status"] == "COMPLETED"
    late = await client.post(f"/api/jobs/{job}/signal", json={"name": "paid"})
    assert (late.status_code, late.json()["code"]) == (409, "not_possible")
    assert (await client.get("/api/inbox")).json() == {"items": [], "next": None}


async def test_signals_over_the_api_are_typed_repeatable_and_listed(
    client: httpx.AsyncClient, database: Connection
) -> None:
    await register_idle_worker(database)
    job = await submitted(client, "desk", input={"clerk": "eva"})
    wrong = await client.post(f"/api/jobs/{job}/signal", json={"name": "form", "payload": {"pages": "two"}})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_input")
    assert "signal 'form': payload.pages: must be of type integer" in wrong.json()["detail"]
    assert (await client.get(f"/api/jobs/{job}/signals")).json()["items"] == []
    for payload in ({"pages": 1}, {"pages": 2}):
        body = {"name": "form", "payload": payload, "request_id": f"form-{payload['pages']}"}
        for _ in range(2):
            assert (await client.post(f"/api/jobs/{job}/signal", json=body)).json() == {"outcome": "sent"}
    reused = {"name": "form", "payload": {"pages": 3}, "request_id": "form-2"}
    answer = await client.post(f"/api/jobs/{job}/signal", json=reused)
    assert (answer.status_code, answer.json()["code"]) == (422, "key_reused")
    await database.execute("delete from interlock.idempotency_keys")
    answer = await client.post(f"/api/jobs/{job}/signal", json={**reused, "payload": {"pages": 2}})
    assert answer.json() == {"outcome": "already sent"}, "also when the stored answer has expired"
    sent = (await client.get(f"/api/jobs/{job}/signals")).json()["items"]
    assert [(each["payload"], each["consumed_by"]) for each in sent] == [({"pages": 1}, "form"), ({"pages": 2}, None)]
    assert (await client.post(f"/api/jobs/{job}/approve", json={"step": "release"})).json() == {"outcome": "sent"}
    again = await client.post(f"/api/jobs/{job}/approve", json={"step": "release", "approved": False})
    assert again.json() == {"outcome": "already sent"}


async def test_the_inbox_over_the_api_is_filtered_and_paged(client: httpx.AsyncClient, database: Connection) -> None:
    await register_idle_worker(database)
    jobs = [await submitted(client, "desk", input={"clerk": clerk}) for clerk in ("eva", "ada", "eva")]
    first = (await client.get("/api/inbox", params={"limit": 4})).json()
    rest = (await client.get("/api/inbox", params={"limit": 4, "cursor": first["next"]})).json()
    assert [item["job_id"] for item in first["items"] + rest["items"]] == [job for job in jobs for _ in range(2)]
    assert rest["next"] is None
    found = (await client.get("/api/inbox", params={"assignee": "eva", "kind": "signal", "workflow": "desk"})).json()
    assert [item["job_id"] for item in found["items"]] == [jobs[0], jobs[2]]
    assert found["items"][0]["signal"] == "form"
    assert found["items"][0]["wait_started_at"] is not None
    for refused in ({"kind": "sleep"}, {"cursor": "x"}, {"cursor": "WyIyMDI2LTAxLTAxVDAwOjAwOjAwWiIsIngiXQ"}):
        assert (await client.get("/api/inbox", params=refused)).status_code == 422


async def test_a_second_cancel_and_an_early_retry_are_409(client: httpx.AsyncClient, database: Connection) -> None:
    await register_idle_worker(database)
    job = await submitted(client, "chain")
    early = await client.post(f"/api/jobs/{job}/retry", json={"step": "first"})
    assert (early.status_code, early.json()["code"]) == (409, "not_possible")
    canceled = await client.post(f"/api/jobs/{job}/cancel", json={"reason": "not needed"})
    assert canceled.status_code == 200
    again = await client.post(f"/api/jobs/{job}/cancel")
    assert (again.status_code, again.json()["code"]) == (409, "illegal_transition")
    moves = (await client.get(f"/api/jobs/{job}/history")).json()["items"]
    assert {move["actor"] for move in moves} == {ADMIN_ACTOR}


async def test_a_canceled_job_is_retried_without_a_step(client: httpx.AsyncClient) -> None:
    job = await submitted(client, "chain")
    canceled = await client.post(f"/api/jobs/{job}/cancel")
    assert canceled.json()["status"] == "CANCELED", "it had not started"
    for _ in range(2):
        retried = await client.post(f"/api/jobs/{job}/retry", headers={"Idempotency-Key": "k"})
        assert (retried.status_code, retried.json()["retried_from"]) == (201, job)
    assert len((await client.get("/api/jobs")).json()["items"]) == 2


async def test_child_jobs_are_listed_under_their_parent(client: httpx.AsyncClient, database: Connection) -> None:
    await register_idle_worker(database)
    parent = await submitted(client, "chain")
    children = [await submitted(client, "chain", parent_job_id=parent) for _ in range(3)]
    page = (await client.get(f"/api/jobs/{parent}/children", params={"limit": 2})).json()
    rest = (await client.get(f"/api/jobs/{parent}/children", params={"cursor": page["next"]})).json()
    assert [job["id"] for job in page["items"] + rest["items"]] == list(reversed(children))
    assert {job["depth"] for job in page["items"]} == {1}


async def test_jobs_are_found_by_tag_attribute_status_and_time(client: httpx.AsyncClient) -> None:
    tagged = await submitted(client, "chain", tags=["eu", "vip"], attributes={"customer": 7, "name": "a:b"})
    child = await submitted(client, "chain", tags=["eu"], attributes={"customer": "7"}, parent_job_id=tagged)

    async def found(**params: Any) -> list[str]:
        answer = await client.get("/api/jobs", params=params)
        assert answer.status_code == 200, answer.json()
        return [job["id"] for job in answer.json()["items"]]

    assert await found(tag="eu") == [child, tagged]
    assert await found(tag=["eu", "vip"]) == [tagged]
    assert await found(attribute="customer:7") == [tagged]
    assert await found(attribute='customer:"7"') == [child]
    assert await found(attribute="name:a:b", status=["PENDING", "FAILED"], workflow="chain") == [tagged]
    assert await found(parent=tagged) == [child]
    assert await found(created_before="2020-01-01T00:00:00Z") == []
    assert await found(created_after="2020-01-01T00:00:00Z", status="FAILED") == []
    page = (await client.get("/api/jobs", params={"tag": "eu", "limit": 1})).json()
    assert await found(tag="eu", cursor=page["next"]) == [tagged]
    shown = (await client.get(f"/api/jobs/{tagged}")).json()
    assert (shown["tags"], shown["attributes"]) == (["eu", "vip"], {"customer": 7, "name": "a:b"})
    for wrong in ({"attribute": "customer"}, {"version": "1"}, {"created_after": "2020-01-01"}, {"status": "done"}):
        assert (await client.get("/api/jobs", params=wrong)).status_code == 422
    refused = await client.post("/api/jobs", json={"workflow": "chain", "attributes": {"a": [1]}})
    assert refused.status_code == 422


async def test_a_validation_error_fails_the_job_at_once_and_is_recorded(client: httpx.AsyncClient) -> None:
    answer = await client.post("/api/jobs", json={"workflow": "strict", "input": {"order": "x"}})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
    assert answer.headers["content-type"] == "application/problem+json"
    assert "order" in answer.json()["detail"]
    job = answer.json()["job_id"]
    found = (await client.get(f"/api/jobs/{job}")).json()
    assert (found["status"], found["reason"], found["open_steps"]) == ("FAILED", answer.json()["detail"], 0)
    moves = (await client.get(f"/api/jobs/{job}/history")).json()["items"]
    assert [(move["to_state"], move["event"]) for move in moves] == [("SUBMITTED", "create"), ("FAILED", "reject")]
    assert (await client.get(f"/api/jobs/{job}/steps")).json()["items"] == []
    derived = await client.post("/api/jobs", json={"workflow": "chain", "input": {"n": "x"}})
    assert "input.n: must be of type integer (parameter 'n' of step 'first')" in derived.json()["detail"]
    keyed = {"workflow": "strict", "input": {}, "request_id": "k"}
    first, second = [await client.post("/api/jobs", json=keyed) for _ in range(2)]
    assert first.json() == second.json(), "one record of the refusal"
    unknown = await client.post("/api/jobs", json={"workflow": "nothing"})
    assert "there is no workflow 'nothing'" in unknown.json()["detail"]
    assert len((await client.get("/api/jobs")).json()["items"]) == 3


def test_a_submit_of_a_changed_definition_is_a_conflict() -> None:
    problem = problem_from_error(DefinitionChangedError("workflow 'orders' version '1' is stored with another one"))
    assert (problem.status, problem.code) == (409, "not_possible")
    assert "orders" in problem.detail


async def test_a_job_with_a_key_is_refused_returned_or_queued(client: httpx.AsyncClient, database: Connection) -> None:
    async def post(**fields: Any) -> httpx.Response:
        return await client.post("/api/jobs", json={"workflow": "chain", "key": "customer-7", **fields})

    await register_idle_worker(database)
    first = (await post()).json()
    assert (first["status"], first["key"]) == ("RUNNING", "customer-7")
    refused = await post(on_conflict="reject")
    assert (refused.status_code, refused.json()["code"], refused.json()["job_id"]) == (409, "job_conflict", first["id"])
    existing = await post(on_conflict="return_existing")
    assert (existing.status_code, existing.json()["id"], existing.json()["created"]) == (200, first["id"], False)
    queued = await post(on_conflict="queue")
    assert (queued.status_code, queued.json()["status"]) == (201, "PENDING")
    assert queued.json()["reason"] == f"waits for job {first['id']} with key 'customer-7'"
    debounced = (await post(debounce=3600, debounce_max=7200)).json()
    assert (debounced["status"], "(debounce)" in debounced["reason"]) == ("SUBMITTED", True)
    for wrong in ({"on_conflict": "explode"}, {"debounce": 0}, {"key": ""}):
        assert (await post(**wrong)).json()["code"] == "invalid_request"
    alone = await client.post("/api/jobs", json={"workflow": "chain", "debounce": 5})
    assert (alone.status_code, alone.json()["code"]) == (422, "invalid_input")
    assert "need a key" in alone.json()["detail"]


async def test_a_used_request_id_with_another_input_is_refused_after_the_key_has_expired(
    client: httpx.AsyncClient, database: Connection
) -> None:
    body = {"workflow": "chain", "input": {"n": 1}, "request_id": "r"}
    job = (await client.post("/api/jobs", json=body)).json()["id"]
    other = {**body, "input": {"n": 2}}
    assert (await client.post("/api/jobs", json=other)).json()["code"] == "key_reused", "by the stored key"
    await database.execute("delete from interlock.idempotency_keys")
    refused = await client.post("/api/jobs", json=other)
    assert (refused.status_code, refused.json()["code"]) == (422, "key_reused")
    assert job in refused.json()["detail"]
    await database.execute("delete from interlock.idempotency_keys")
    again = await client.post("/api/jobs", json=body)
    assert (again.status_code, again.json()["id"]) == (200, job)
    assert len((await client.get("/api/jobs")).json()["items"]) == 1


async def test_a_task_is_enqueued_and_its_result_awaited(url: str) -> None:
    async with api_at(url, app=tasks_at(url)) as client, serving(url):
        wrong = await client.post("/api/tasks", json={"type": "add", "input": {"a": 1}})
        assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_input")
        answer = await client.post("/api/tasks", json={"type": "add", "input": {"a": 1, "b": 2}, "tags": ["sum"]})
        assert (answer.status_code, answer.json()["created"]) == (201, True)
        task = answer.json()["id"]
        result = await client.get(f"/api/tasks/{task}/result", params={"wait": 20})
        assert (result.status_code, result.json()["output"], result.json()["ended"]) == (200, 3, True)
        moves = (await client.get(f"/api/tasks/{task}/history")).json()["items"]
        assert [move["to_state"] for move in moves] == ["pending", "running", "done"]
        assert {move["database_role"] for move in moves} == {"interlock"}
        listed = (await client.get("/api/tasks", params={"tag": "sum", "state": ["done", "error"]})).json()
        assert [each["id"] for each in listed["items"]] == [task]
        late = await client.post(f"/api/tasks/{task}/cancel")
        assert late.status_code == 409
        assert late.json()["detail"] == "Cannot transition from terminal state done to canceled"


async def test_a_task_of_unknown_type_is_enqueued_canceled_and_requeued(client: httpx.AsyncClient) -> None:
    made = await client.post("/api/tasks", json={"type": "mystery", "unique_key": "one", "delay": 60})
    task = made.json()["id"]
    assert (await client.get(f"/api/tasks/{task}/result")).status_code == 202
    canceled = (await client.post(f"/api/tasks/{task}/cancel", json={"reason": "no"})).json()
    assert (canceled["outcome"], canceled["task"]["state"]) == ("canceled", "canceled")
    other = await client.post("/api/tasks", json={"type": "mystery", "unique_key": "one"})
    blocked = await client.post(f"/api/tasks/{task}/requeue", json={"request_id": "r1"})
    assert (blocked.status_code, blocked.json()["detail"]) == (409, "Another task has the unique key 'one' now")
    await client.post(f"/api/tasks/{other.json()['id']}/cancel")
    assert (await client.post(f"/api/tasks/{task}/requeue")).json()["state"] == "pending"


async def test_requeue_of_a_single_step_is_409(client: httpx.AsyncClient, database: Connection) -> None:
    await register_idle_worker(database)
    job = await submitted(client, "chain")
    (step, *_) = (await client.get(f"/api/jobs/{job}/steps")).json()["items"]
    answer = await client.post(f"/api/tasks/{step['id']}/requeue")
    assert (answer.status_code, answer.json()["code"]) == (409, "not_possible")


async def test_a_namespace_is_paused_listed_and_resumed(client: httpx.AsyncClient) -> None:
    await client.post("/api/tasks", json={"type": "letter", "namespace": "mail"})
    paused = await client.post("/api/namespaces/mail/pause", json={"reason": "the printer burns"})
    assert paused.json() == {"name": "mail", "paused": True, "tasks": 1}
    (found,) = (await client.get("/api/namespaces")).json()["items"]
    assert (found["name"], found["reason"], found["held"]) == ("mail", "the printer burns", 1)
    assert (await client.get("/api/status")).json()["namespaces"]["mail"]["tasks"] == {"waiting": 1}
    assert (await client.post("/api/namespaces/mail/resume")).json()["tasks"] == 1
    again = await client.post("/api/namespaces/mail/resume")
    assert (again.status_code, again.json()["code"]) == (409, "not_possible")


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("job", ["", "/steps", "/signals", "/history", "/children", "/cancel", "/retry", "/signal", "/approve"]),
        ("task", ["", "/history", "/result", "/cancel", "/requeue"]),
        ("worker", ["", "/history", "/start"]),
    ],
)
async def test_unknown_resources_are_404_by_kind(client: httpx.AsyncClient, kind: str, paths: list[str]) -> None:
    bodies = {"/retry": {"step": "x"}, "/signal": {"name": "x"}, "/approve": {"step": "x"}}
    posted = {"/cancel", "/requeue", "/start", *bodies}
    for path in paths:
        place = f"/api/{kind}s/{uuid4()}{path}"
        answer = await client.post(place, json=bodies.get(path, {})) if path in posted else await client.get(place)
        assert (answer.status_code, answer.json()["code"]) == (404, f"unknown_{kind}"), path


async def test_explaining_what_is_unknown_is_404_by_kind(client: httpx.AsyncClient, database: Connection) -> None:
    task = await enqueue_by_sql(database, type="add")
    asked = {
        **dict.fromkeys((f"task/{uuid4()}", f"step/{uuid4()}"), "unknown_task"),
        **dict.fromkeys((f"job/{uuid4()}", f"job/{task}"), "unknown_job"),
        **{f"{kind}/nothing": f"unknown_{kind}" for kind in ("worker", "namespace", "schedule", "limit")},
    }
    for path, code in asked.items():
        answer = await client.get(f"/api/explain/{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, code), path
        assert f"there is no {path.partition('/')[0]} " in answer.json()["detail"], path
    past = await client.get(f"/api/explain/job/{uuid4()}", params={"at": "2026-01-01T00:00:00Z"})
    assert (past.status_code, past.json()["code"]) == (404, "unknown_job")
    for kind in ("task", "step", "job"):
        misnamed = await client.get(f"/api/explain/{kind}/nightly")
        assert (misnamed.status_code, misnamed.json()["code"]) == (422, "invalid_input")
        assert misnamed.json()["detail"] == f"the id of a {kind} must be a UUID, got 'nightly'"


async def test_every_kind_is_explained_over_the_api(client: httpx.AsyncClient, database: Connection) -> None:
    await pause_namespace(database, "reports", "on fire", "ada")
    await put_limits(database, [Limit("mail", max_running=1)])
    await put_schedules(database, [Schedule("nightly", "clean", every=timedelta(hours=1))])
    namespace = (await client.get("/api/explain/namespace/reports")).json()
    assert (namespace["kind"], namespace["state"]) == ("namespace", "paused")
    assert namespace["facts"][0]["code"] == "namespace_paused"
    assert namespace["facts"][0]["command"] == "interlock namespaces resume reports"
    assert (await client.get("/api/explain/schedule/nightly")).json()["state"] == "active"
    assert (await client.get("/api/explain/limit/mail")).json()["state"] == "open"
    past = (await client.get("/api/explain/namespace/reports", params={"at": "2026-01-01T00:00:00Z"})).json()
    assert (past["state"], past["at"]) == ("active", "2026-01-01T00:00:00+00:00")
    refused = await client.get("/api/explain/namespace/reports", params={"at": "2026-01-01"})
    assert refused.status_code == 422, "a time needs its zone"


async def test_the_doctor_is_shared_by_callers(client: httpx.AsyncClient, database: Connection) -> None:
    answers = await asyncio.gather(*(client.get("/api/doctor") for _ in range(3)))
    first = answers[0].json()
    assert (first["severity"], first["findings"], first["full"]) == (None, [], False)
    await database.execute("alter table interlock.tasks disable trigger guard_update")
    answers.append(await client.get("/api/doctor"))
    assert {answer.json()["examined_at"] for answer in answers} == {first["examined_at"]}, "one examination for all"


async def test_the_doctor_reports_what_the_command_does(url: str, database: Connection) -> None:
    await database.execute("alter table interlock.tasks disable trigger guard_update")
    async with api_at(url, app=jobs_at(url)) as client:
        document = (await client.get("/api/doctor")).json()
    (finding,) = document["findings"]
    assert document["severity"] == "error"
    assert (finding["code"], finding["rows"], finding["sample"]) == ("guard_disabled", 1, ["guard_update on tasks"])
    assert finding["fixable"]
