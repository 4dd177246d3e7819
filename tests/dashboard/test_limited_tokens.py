"""Sessions of tokens that are limited to namespaces: no page, sheet or topic shows anything of other namespaces."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from dashboard_support import dashboard_at, sign_in
from factories import claim_tasks, enqueue
from interlock.dashboard.app import VIEWS
from interlock.dashboard.live import LiveHub
from interlock.dashboard.pages import NAVIGATION
from interlock.dashboard.topics import topics
from interlock.sort.engines.interlock import app as sort_app
from interlock.sort.engines.interlock import workflow as sort_workflow
from interlock.store.limits import Limit, pause_namespace, put_limits
from interlock.store.pools import NewPool, create_pool
from interlock.store.schedules import Schedule, put_schedules
from interlock.store.workers import RegisteredProcess, WorkerSpec, register_worker
from interlock.supervisor.http.system import SharedExamination
from jobs_support import app_at
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from interlock import Interlock
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store
LEASE = timedelta(hours=1)
MINE, SECRET = "mine", "secret_place"
WHOLE_SYSTEM = ("/workers", "/limits", "/schedules", "/sorts", "/audit", "/doctor")
SHEETS = {
    "/ui/sheet/workers/new": "admin",
    "/ui/sheet/pools/new": "admin",
    f"/ui/sheet/pools/{SECRET}/scale": "operate",
    f"/ui/sheet/pools/{SECRET}/delete": "admin",
    f"/ui/sheet/workers/{SECRET}/terminate": "admin",
    f"/ui/sheet/workers/{SECRET}/kill": "admin",
    f"/ui/sheet/limits/{SECRET}/override": "admin",
    f"/ui/sheet/limits/{SECRET}/restore": "admin",
}


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with dashboard_at(url) as (client, _):
        yield client


@pytest.fixture
async def secrets(database: Connection, url: str) -> dict[str, str]:
    """Add one of everything to a namespace; return the values of path parameters that name them."""
    process = RegisteredProcess(SECRET, namespaces=(SECRET,), types=(SECRET,), statistics={"slots": 4})
    await register_worker(database, process, lease=LEASE)
    await create_pool(database, NewPool(SECRET, 2, WorkerSpec(namespaces=(SECRET,))), actor=SECRET)
    await put_limits(database, [Limit(SECRET, max_running=1)])
    await put_schedules(database, [Schedule(SECRET, type=SECRET, namespace=SECRET, every=LEASE)])
    task = await enqueue(database, SECRET, namespace=SECRET, limit_keys=(SECRET,))
    await claim_tasks(database, actor=SECRET, types=[SECRET], namespaces=[SECRET])
    await pause_namespace(database, SECRET, actor=SECRET, reason=SECRET)
    document = {"shares": [{}], "master": "m", "output": SECRET, "work_dir": "/w", "settings": {}}
    async with app_at(url, declared=sort_app) as app:
        job = await app.submit(sort_workflow, document)
    await enqueue(database, "visible", namespace=MINE)
    names = dict.fromkeys(("worker_id", "key", "name"), SECRET)
    return {**names, "task_id": str(task), "job_id": str(job.id), "sort_id": str(job.id)}


def routes(values: dict[str, str]) -> list[str]:
    """List the paths of all pages and sheets, with the rows of the other namespace in them."""
    found = []
    for view in VIEWS:
        for route in view.router.routes:
            path: str = route.path
            found.append(re.sub(r"\{(\w+)(?::path)?\}", lambda found: values.get(found[1], "cancel"), path))
    return found


async def test_no_page_or_sheet_shows_another_namespace(
    client: httpx.AsyncClient, database: Connection, secrets: dict[str, str]
) -> None:
    await sign_in(client, database, "admin", MINE)
    answers = {path: await client.get(path) for path in routes(secrets)}
    shown = {path for path, answer in answers.items() if answer.status_code == 200}
    assert {"/", "/namespaces"} <= shown
    for path, answer in answers.items():
        assert answer.status_code < 500, path
        if path in shown:
            assert SECRET not in answer.text, path
    for path in (*WHOLE_SYSTEM, *SHEETS, f"/workers/{SECRET}", f"/sorts/{secrets['sort_id']}"):
        assert answers[path].status_code == 403, path
        assert "limited to the namespaces mine" in answers[path].text
    assert f"/namespaces/{MINE}/pause" in answers["/namespaces"].text
    assert "Needs attention" in answers["/"].text


async def test_the_navigation_leads_to_no_refused_page(client: httpx.AsyncClient, database: Connection) -> None:
    await sign_in(client, database, "read", MINE)
    page = (await client.get("/")).text
    linked = {item.url for _, items in NAVIGATION for item in items if f'href="{item.url}"' in page}
    assert {"/", "/machines/task", "/namespaces"} <= linked
    for path in linked:
        assert (await client.get(path)).status_code != 403, path
    await sign_in(client, database, "operate")
    page = (await client.get("/")).text
    assert all(f'href="{item.url}"' in page for _, items in NAVIGATION for item in items)


async def test_lifecycles_without_namespaces_are_not_shown(client: httpx.AsyncClient, database: Connection) -> None:
    await sign_in(client, database, "read", MINE)
    page = await client.get("/machines/task")
    assert page.status_code == 200
    assert "supervised-worker" not in page.text
    assert "counted for all namespaces together" in page.text
    assert "who tried is not known here" in page.text
    for name in ("supervised-worker", "worker", "task-attempt", "sort-master"):
        assert (await client.get(f"/machines/{name}")).status_code == 403, name


async def test_topics_of_the_whole_system_and_of_other_namespaces_are_refused(
    client: httpx.AsyncClient, database: Connection
) -> None:
    await sign_in(client, database, "admin", MINE)
    refused = ("workers:admin", f"worker:admin/{SECRET}", f"held:{SECRET}", "limits:read", "schedules:read", "sorts")
    for name in (*refused, "sort:x", "doctor", "tabs:all", "machine:worker", "moves:supervised-worker"):
        answer = await client.get("/ui/events", params={"t": f"nav,{name}"})
        assert (answer.status_code, answer.json()["code"]) == (403, "namespace_not_allowed"), name
    assert (await client.get("/ui/events", params={"t": "nav", "ns": SECRET})).status_code == 403


async def test_allowed_topics_show_no_other_namespace(jobs: Interlock, secrets: dict[str, str]) -> None:
    hub = LiveHub(jobs, SharedExamination(jobs))
    arguments = ("", "task", "job", "admin", "1h", *secrets.values())
    names = [
        f"{name}:{argument}"
        for name in topics.names
        for argument in arguments
        if (found := topics.find(f"{name}:{argument}")) is not None and not found[0].whole_system(argument)
    ]
    ids = frozenset({secrets["task_id"], secrets["job_id"]})
    viewer = hub.join(names, frozenset({MINE}), row_ids=ids)
    try:
        await until(lambda: hub.tick >= 1)
        sent: Any = b"".join(part for parts in viewer.take() for part in parts)
    finally:
        hub.leave(viewer)
    assert b"depth-mine" in sent
    assert SECRET.encode() not in sent


async def test_a_sheet_needs_the_scope_of_its_act(
    client: httpx.AsyncClient, database: Connection, secrets: dict[str, str]
) -> None:
    assert secrets
    sheets = {**SHEETS, f"/ui/sheet/namespaces/{SECRET}/pause": "operate"}
    for scope in ("read", "operate", "admin"):
        await sign_in(client, database, scope)
        for path, needed in sheets.items():
            allowed = scope in {"admin", needed}
            assert (await client.get(path)).status_code == (200 if allowed else 403), (path, scope)
    client.cookies.set("interlock_read_only", "1")
    for path in sheets:
        assert (await client.get(path)).status_code == 403, path
