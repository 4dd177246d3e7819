"""Every operation of the API with every kind of token: scopes, and tokens that are limited to namespaces."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from api_support import ADMIN_HEADERS, add_token, api_at
from factories import add_live_worker, enqueue_by_sql
from interlock import Interlock
from interlock.config import Config
from interlock.store.access import TokenScope, create_token, revoke_token
from interlock.store.events import EventCursor, EventPosition, RecordedEvent
from interlock.store.limits import Limit, admit_limited_tasks, put_limits
from interlock.supervisor.http.events import EventFilter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import httpx

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

# Operations that need no token.
PUBLIC = {"GET /healthz", "GET /readyz"}
# Operations that need the scope admin; every other GET needs read, and everything else needs operate.
ADMIN = {
    "POST /api/workers",
    "POST /api/supervisor/workers/{worker_id}/terminate",
    "POST /api/pools",
    "DELETE /api/pools/{name}",
    "PUT /api/limits/{limit_key}",
    "POST /api/limits/{limit_key}/restore",
    "DELETE /api/limits/{limit_key}",
    "GET /api/tokens",
    "POST /api/tokens",
    "DELETE /api/tokens/{name}",
}
ENDLESS = {"GET /api/events"}  # a stream: a HEAD request is answered with its headers

# Operations for tokens that are limited to namespaces, besides those whose path names a task or a job: lists, which
# show these namespaces only, and operations whose body or path names a namespace, with what they answer for another.
LISTS = {"GET /api/tasks", "GET /api/jobs", "GET /api/inbox", "GET /api/namespaces", "GET /api/audit"}
# Actions by filter, which leave out what is in other namespaces.
BY_FILTER = {"POST /api/tasks/cancel", "POST /api/tasks/requeue", "POST /api/jobs/cancel"}
OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "POST /api/tasks": ({"type": "x", "namespace": "theirs"}, 403),
    "POST /api/jobs": ({"workflow": "theirs_flow"}, 403),
    "POST /api/tasks/bulk": (
        {"tasks": [{"type": "x", "namespace": "ours"}, {"type": "x", "namespace": "theirs"}]},
        403,
    ),
    "POST /api/jobs/bulk": ({"jobs": [{"workflow": "ours_flow"}, {"workflow": "theirs_flow"}]}, 403),
    "POST /api/namespaces/{name}/pause": ({}, 403),
    "POST /api/namespaces/{name}/resume": ({}, 403),
    "GET /api/explain/{kind}/{id}": ({}, 404),
}


def two_namespaces(url: str) -> Interlock:
    """Return an app with a workflow in each of two namespaces; both wait for an approval."""
    app = Interlock(config=Config(database_url=url))
    for name in ("ours", "theirs"):
        flow = app.workflow(f"{name}_flow", namespace=name)
        flow.approval("boss")
    return app


@pytest.fixture
async def client(url: str, database: Connection) -> AsyncIterator[httpx.AsyncClient]:
    """Return an admin's client of an API with a task and a job in each of the namespaces `ours` and `theirs`."""
    await add_live_worker(database, "ours", "theirs")
    async with api_at(url, app=two_namespaces(url)) as client:
        yield client


async def filled(client: httpx.AsyncClient, name: str) -> dict[str, str]:
    """Make a task and a job in a namespace, and a worker; return the parameters of paths that name them."""
    task = await client.post("/api/tasks", json={"type": "x", "namespace": name, "unique_key": name})
    job = await client.post("/api/jobs", json={"workflow": f"{name}_flow"})
    worker = await client.post("/api/workers", json={})
    for answer in (task, job, worker):
        assert answer.status_code == 201, answer.text
    found = {"task_id": task.json()["id"], "job_id": job.json()["id"], "worker_id": worker.json()["id"]}
    return found | {"name": name, "kind": "task", "id": found["task_id"], "limit_key": "mail:*"}


async def operations(client: httpx.AsyncClient) -> Iterator[tuple[str, str, str]]:
    """List all operations of the OpenAPI document as name, method and path."""
    paths = (await client.get("/openapi.json")).json()["paths"]
    return ((f"{verb.upper()} {path}", verb.upper(), path) for path, verbs in paths.items() for verb in verbs)


async def send(
    client: httpx.AsyncClient, method: str, path: str, known: dict[str, str], headers: dict[str, str], body: Any = None
) -> httpx.Response:
    for name, value in known.items():
        path = path.replace(f"{{{name}}}", value)
    assert "{" not in path, f"{path}: add the parameter to `filled`"
    if f"{method} {path}" in ENDLESS:
        return await client.request("HEAD", path, headers=headers)
    headers = {**headers, "X-Request-Id": "one"}
    content = (body or {}) if method in {"POST", "PUT", "PATCH"} else None
    return await client.request(method, path, headers=headers, json=content)


def needed_scope(name: str) -> TokenScope:
    if name in ADMIN:
        return TokenScope.ADMIN
    return TokenScope.READ if name.startswith("GET ") else TokenScope.OPERATE


async def test_every_operation_with_every_kind_of_token(client: httpx.AsyncClient, database: Connection) -> None:
    known = await filled(client, "ours")
    yesterday = datetime.now(UTC) - timedelta(days=1)
    _, old = await create_token(
        database, "old", TokenScope.ADMIN, actor="test", lifetime=timedelta(hours=1), now=yesterday
    )
    revoked = await add_token(database, "admin", "revoked")
    await revoke_token(database, "revoked", actor="test")
    unknown = {
        "none": {"Authorization": ""},
        "wrong": {"Authorization": "Bearer il_wrong"},
        "no bearer": {"Authorization": "Basic YTpi"},
        "expired": {"Authorization": f"Bearer {old}"},
        "revoked": revoked,
    }
    scopes = {scope: await add_token(database, scope) for scope in TokenScope}
    count = 0
    for name, method, path in await operations(client):
        for kind, headers in unknown.items():
            answer = await send(client, method, path, known, headers)
            assert (answer.status_code == 401) is (name not in PUBLIC), f"{name} with {kind}: {answer.text}"
        for scope, headers in scopes.items():
            answer = await send(client, method, path, known, headers)
            allowed = name in PUBLIC or scope.includes(needed_scope(name))
            refused = answer.status_code == 403 and answer.json()["code"] == "insufficient_scope"
            assert refused is not allowed, f"{name} with scope {scope}: {answer.text}"
            assert answer.status_code != 401
        count += 1
    assert count >= 70


async def test_a_token_of_another_namespace_reaches_nothing(client: httpx.AsyncClient, database: Connection) -> None:
    """A new operation is refused for such tokens, unless it names a task or a job, or is marked and listed above."""
    known = await filled(client, "theirs")
    headers = await add_token(database, "admin", "limited", "ours")
    for name, method, path in await operations(client):
        body, status = OTHERS.get(name, ({"all": True} if name in BY_FILTER else {}, 403))
        answer = await send(client, method, path, known, headers, body)
        if name in PUBLIC | ENDLESS:
            assert answer.status_code == 200
        elif name in BY_FILTER:
            assert (answer.status_code, answer.json()["matched"]) == (200, 0), f"{name}: {answer.text}"
        elif name in LISTS:
            assert (answer.status_code, answer.json()["items"]) == (200, []), name
        elif "{task_id}" in path or "{job_id}" in path or status == 404:
            known_as = known["task_id" if "{job_id}" not in path else "job_id"]
            nothing = str(uuid4())
            other = {key: nothing if value == known_as else value for key, value in known.items()}
            absent = await send(client, method, path, other, headers, body)
            assert answer.status_code == absent.status_code == 404, f"{name}: {answer.text}"
            assert answer.text.replace(known_as, nothing) == absent.text, "an unknown one looks the same"
        else:
            assert (answer.status_code, answer.json().get("code")) == (403, "namespace_not_allowed"), name
            assert answer.json()["namespaces"] == ["ours"]
    assert (await client.get("/api/tasks?namespace=ours")).json()["items"] == [], "all or none"
    assert (await client.get("/api/namespaces")).json()["items"][0]["paused_at"] is None
    assert (await client.get(f"/api/tasks/{known['task_id']}")).json()["state"] == "pending"
    assert (await client.get(f"/api/jobs/{known['job_id']}")).json()["status"] == "RUNNING"


async def test_a_limited_token_works_in_its_namespaces(client: httpx.AsyncClient, database: Connection) -> None:
    ours, theirs = await filled(client, "ours"), await filled(client, "theirs")
    headers = await add_token(database, "operate", "limited", "ours", "more")

    async def listed(path: str, member: str) -> list[str]:
        answer = await client.get(path, headers=headers)
        assert answer.status_code == 200, answer.text
        return [item[member] for item in answer.json()["items"]]

    assert await listed("/api/jobs", "id") == [ours["job_id"]]
    assert await listed("/api/jobs?namespace=theirs", "id") == []
    assert await listed("/api/inbox", "job_id") == [ours["job_id"]]
    assert await listed("/api/namespaces", "name") == ["ours"]
    assert set(await listed("/api/tasks", "namespace")) == {"ours"}
    assert ours["task_id"] in await listed("/api/tasks?namespace=ours", "id")
    for path in (
        f"/api/tasks/{ours['task_id']}",
        f"/api/jobs/{ours['job_id']}/steps",
        f"/api/explain/job/{ours['job_id']}",
    ):
        assert (await client.get(path, headers=headers)).status_code == 200, path
    acts: list[tuple[str, dict[str, Any], int]] = [
        ("/api/tasks", {"type": "x", "namespace": "more"}, 201),
        ("/api/tasks", {"type": "x"}, 403),  # into the namespace `default`
        ("/api/tasks", {"type": "x", "namespace": "ours", "unique_key": "theirs"}, 409),
        ("/api/jobs", {"workflow": "ours_flow"}, 201),
        ("/api/jobs", {"workflow": "ours_flow", "parent_job_id": ours["job_id"]}, 201),
        ("/api/jobs", {"workflow": "ours_flow", "parent_job_id": theirs["job_id"]}, 404),
        ("/api/jobs", {"workflow": "theirs_flow", "input": {"unfit": 1}}, 403),
        ("/api/tasks/bulk", {"tasks": [{"type": "x", "namespace": "ours"}, {"type": "x", "namespace": "more"}]}, 201),
        ("/api/jobs/bulk", {"jobs": [{"workflow": "ours_flow"}]}, 201),
        ("/api/jobs/bulk", {"jobs": [{"workflow": "ours_flow", "parent_job_id": theirs["job_id"]}]}, 404),
        ("/api/namespaces/ours/pause", {}, 200),
        ("/api/namespaces/ours/resume", {}, 200),
        (f"/api/tasks/{ours['task_id']}/cancel", {}, 200),
        (f"/api/jobs/{ours['job_id']}/approve", {"step": "boss"}, 200),
    ]
    for path, body, status in acts:
        answer = await client.post(path, json=body, headers=headers)
        assert answer.status_code == status, f"{path} {body}: {answer.text}"
    whole = await client.get("/api/jobs?namespace=theirs", headers=ADMIN_HEADERS)
    assert [job["id"] for job in whole.json()["items"]] == [theirs["job_id"]], "nothing was stored there"


async def test_actions_by_filter_keep_to_the_namespaces_of_the_token(
    client: httpx.AsyncClient, database: Connection
) -> None:
    ours, theirs = await filled(client, "ours"), await filled(client, "theirs")
    headers = await add_token(database, "operate", "limited", "ours")
    for path in ("/api/tasks/cancel", "/api/jobs/cancel"):
        preview = await client.post(path, json={"all": True, "preview": True}, headers=headers)
        done = await client.post(path, json={"all": True}, headers=headers)
        assert preview.json()["matched"] == done.json()["matched"] > 0, done.text
        other = await client.post(path, json={"filter": {"namespace": "theirs"}}, headers=headers)
        assert other.json()["matched"] == 0
    assert (await client.get(f"/api/tasks/{ours['task_id']}")).json()["state"] == "canceled"
    assert (await client.get(f"/api/tasks/{theirs['task_id']}")).json()["state"] == "pending"
    assert (await client.get(f"/api/jobs/{ours['job_id']}")).json()["ending"] == "CANCELED"
    assert (await client.get(f"/api/jobs/{theirs['job_id']}")).json()["ending"] is None


async def test_keys_of_bulk_elements_belong_to_the_actor(client: httpx.AsyncClient, database: Connection) -> None:
    one, other = await add_token(database, "operate", "one"), await add_token(database, "operate", "other")
    bodies: dict[str, dict[str, Any]] = {
        "tasks": {"tasks": [{"type": "x", "request_id": "k"}]},
        "jobs": {"jobs": [{"workflow": "ours_flow", "request_id": "k"}]},
    }
    for kind, body in bodies.items():
        path = f"/api/{kind}/bulk"
        first = (await client.post(path, json=body, headers=one)).json()["items"]
        assert (await client.post(path, json=body, headers=one)).json()["items"] == [{**first[0], "created": False}]
        second = (await client.post(path, json=body, headers=other)).json()["items"]
        assert (second[0]["created"], second[0]["id"] != first[0]["id"]) == (True, True)
        for headers, made in ((one, first), (other, second)):
            found = (await client.get(f"/api/{kind}?request_id=k", headers=headers)).json()["items"]
            assert [item["id"] for item in found] == [made[0]["id"]], "each finds its own by its key"
        found = (await client.get(f"/api/{kind}?request_id=token:one:k", headers=other)).json()["items"]
        assert [item["id"] for item in found] == [first[0]["id"]], "and all by the whole request id"
        wanted = {"filter": {"request_id": "k"}, "preview": True}
        assert (await client.post(f"/api/{kind}/cancel", json=wanted, headers=one)).json()["matched"] == 1


async def test_a_token_is_created_with_namespaces(client: httpx.AsyncClient) -> None:
    body = {"name": "mail", "scope": "operate", "namespaces": ["ours", "more"]}
    keyed = await client.post("/api/tokens", json=body, headers={"Idempotency-Key": "once"})
    assert (keyed.status_code, keyed.json()["code"]) == (422, "invalid_request")
    made = await client.post("/api/tokens", json=body)
    assert (made.status_code, made.json()["namespaces"]) == (201, ["more", "ours"])
    headers = {"Authorization": f"Bearer {made.json()['token']}"}
    refused = await client.post("/api/tasks", json={"type": "x", "namespace": "theirs"}, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "namespace_not_allowed")
    listed = {token["name"]: token["namespaces"] for token in (await client.get("/api/tokens")).json()["items"]}
    assert listed["mail"] == ["more", "ours"]
    assert (await client.post("/api/tokens", json={"name": "none", "namespaces": []})).status_code == 422


async def test_an_explanation_names_no_tasks_of_other_namespaces(
    client: httpx.AsyncClient, database: Connection
) -> None:
    await put_limits(database, [Limit("shared", max_running=1)])
    holder = await enqueue_by_sql(database, type="x", namespace="theirs", limit_keys=["shared"])
    await admit_limited_tasks(database, actor="leader")
    held = await enqueue_by_sql(database, type="x", namespace="ours", limit_keys=["shared"])
    headers = await add_token(database, "read", "limited", "ours")
    path = f"/api/explain/task/{held}"
    assert str(holder) in (await client.get(path)).text
    answer = await client.get(path, headers=headers)
    assert answer.json()["facts"][0]["code"] == "limit_full"
    assert str(holder) not in answer.text
    early = {"at": "2026-01-01T00:00:00Z"}
    hidden = await client.get(f"/api/explain/task/{holder}", headers=headers, params=early)
    absent = await client.get(f"/api/explain/task/{uuid4()}", headers=headers, params=early)
    assert hidden.json()["detail"].replace(str(holder), "") == absent.json()["detail"].replace(
        absent.json()["instance"].rpartition("/")[2], ""
    )
    assert (await client.get("/api/explain/namespace/ours", headers=headers)).status_code == 200
    for kind, name in (("namespace", "theirs"), ("limit", "shared"), ("worker", "w_1"), ("schedule", "s")):
        assert (await client.get(f"/api/explain/{kind}/{name}", headers=headers)).status_code == 403


async def test_a_stored_answer_is_not_replayed_to_a_token_with_other_rights(
    client: httpx.AsyncClient, database: Connection
) -> None:
    body = {"type": "x", "namespace": "theirs", "request_id": "once"}
    first = await client.post("/api/tasks", json=body, headers=await add_token(database, "operate", "bot", "theirs"))
    assert first.status_code == 201, first.text
    await revoke_token(database, "bot", actor="test")
    for namespaces, scope in ((("ours",), "operate"), (("theirs",), "admin")):
        headers = await add_token(database, scope, "bot", *namespaces)
        answer = await client.post("/api/tasks", json=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (422, "key_reused")
        await revoke_token(database, "bot", actor="test")
    same = await client.post("/api/tasks", json=body, headers=await add_token(database, "operate", "bot", "theirs"))
    assert (same.content, same.headers["Idempotency-Replayed"]) == (first.content, "true")


async def test_a_limited_token_learns_nothing_of_other_namespaces(
    client: httpx.AsyncClient, database: Connection
) -> None:
    theirs = await filled(client, "theirs")
    headers = await add_token(database, "operate", "limited", "ours")
    task = {"type": "y", "namespace": "ours", "unique_key": "theirs"}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/api/tasks", task),
        ("/api/tasks/bulk", {"tasks": [task]}),
        ("/api/jobs", {"workflow": "nope"}),
        ("/api/jobs", {"workflow": "theirs_flow", "version": "nope"}),
        ("/api/jobs/bulk", {"jobs": [{"workflow": "nope"}]}),
    ]
    for path, body in requests:
        answer = await client.post(path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input"), answer.text
        assert theirs["task_id"] not in answer.text
        assert "type x" not in answer.text
        assert "known are" not in answer.text
        assert "it has" not in answer.text
    for kinds in ({}, {"kind": "worker"}):
        found = (await client.get("/api/audit", params=kinds, headers=headers)).json()["items"]
        assert [record for record in found if record["kind"] == "worker"] == []
    cursor = EventCursor(EventPosition(1, 1, 1), datetime.now(UTC))
    served = RecordedEvent(cursor, {"kind": "worker", "to_state": "IDLE"}, frozenset({"ours"}))
    assert EventFilter().matches(served)
    assert not EventFilter(reachable=frozenset({"ours"})).matches(served)
