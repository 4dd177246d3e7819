"""Pages of operations as the server answers: what they show, whom they offer acts, hostile texts, cron in words."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from dashboard_support import dashboard_at, sign_in
from factories import claim_tasks, enqueue
from interlock.dashboard.counts import master_state
from interlock.dashboard.cron_words import describe_cron
from interlock.dashboard.format import exact
from interlock.dashboard.render import CONTENT_SECURITY_POLICY
from interlock.dashboard.views import workers
from interlock.dashboard.views.sorts import make_row
from interlock.lifecycle import SupervisedWorkerEvent
from interlock.model.options import NewTask
from interlock.sort.engines.interlock import app as sort_app
from interlock.sort.engines.interlock import workflow as sort_workflow
from interlock.store.enqueue import enqueue_task
from interlock.store.limits import Limit, admit_limited_tasks, pause_namespace, put_limits
from interlock.store.pools import NewPool, create_pool
from interlock.store.schedules import Schedule, pause_schedules, put_schedules, tick_request_id
from interlock.store.stats import MAX_COUNTED
from interlock.store.workers import RegisteredProcess, WorkerSpec, create_worker, move_worker, register_worker
from interlock.supervisor.http.system import SharedExamination
from jobs_support import app_at
from work_support import fail_attempt
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store
HOSTILE = "<script>alert(1)</script>\"'&"
PAGES = ("/workers", "/namespaces", "/schedules", "/limits", "/sorts", "/audit", "/doctor")
LEASE = timedelta(hours=1)


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with dashboard_at(url) as (client, _):
        yield client


async def add_everything(database: Connection) -> str:
    """Add one of everything that the pages show, with hostile names and reasons; return the id of a worker."""
    process = RegisteredProcess(HOSTILE, namespaces=("default",), types=(HOSTILE,), statistics={"slots": 4})
    await register_worker(database, process, lease=LEASE)
    await create_pool(database, NewPool("mail", 2, WorkerSpec(namespaces=(HOSTILE,))), actor=HOSTILE)
    await put_limits(database, [Limit(HOSTILE, max_running=1), Limit("mail-api", max_starts=10, period=LEASE)])
    await put_schedules(
        database,
        [Schedule(HOSTILE, type=HOSTILE, cron="30 2 * * 1-5", timezone="Europe/Berlin")],
    )
    await enqueue(database, HOSTILE, limit_keys=(HOSTILE,))
    await enqueue(database, "held")
    await claim_tasks(database, actor=HOSTILE, types=["held"])
    await pause_namespace(database, HOSTILE, actor=HOSTILE, reason=HOSTILE)
    return await create_worker(database, spec=WorkerSpec(concurrency=2), actor=HOSTILE)


async def test_operations_pages_keep_the_policy_and_show_hostile_texts_as_text(
    client: httpx.AsyncClient, database: Connection
) -> None:
    worker = await add_everything(database)
    await sign_in(client, database)
    for path in (*PAGES, f"/workers/{worker}", "/workers?state=all", "/workers?pool=mail", f"/audit?actor={HOSTILE}"):
        page = await client.get(path)
        assert page.status_code == 200, f"{path}: {page.text[-2000:]}"
        assert page.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert "<script>alert" not in page.text, path
        assert not re.search(r"<[^>]+\s(style|on\w+)=", page.text), f"{path} has an inline style or handler"
        assert len(re.findall(r"<h1[ >]", page.text)) == 1
        assert 'data-copy="interlock ' in page.text, f"{path} has no command to copy"
    workers = (await client.get("/workers")).text
    assert "1 live · 1 of 4 slots in use" in workers
    assert "0 of 2 live" in workers


async def test_pages_without_rows_teach(client: httpx.AsyncClient, database: Connection) -> None:
    await sign_in(client, database)
    for path, text in {
        "/workers": "interlock up --app",
        "/schedules": "@app.periodic",
        "/limits": "app.limit(",
        "/sorts": "--engine interlock",
        "/audit?event=none": "No such move",
        "/doctor": "All well",
        "/namespaces": "default",
    }.items():
        assert text in (await client.get(path)).text, path


async def test_scope_read_is_offered_no_acts(client: httpx.AsyncClient, database: Connection) -> None:
    worker = await add_everything(database)
    paths = (*PAGES, f"/workers/{worker}")
    await sign_in(client, database)
    offered = [path for path in paths if re.search(r"data-(act|sheet)=", (await client.get(path)).text)]
    assert offered == ["/workers", "/namespaces", "/schedules", "/limits", f"/workers/{worker}"]
    await sign_in(client, database, "operate")
    page = (await client.get("/workers")).text
    assert "/start" in page
    assert "/ui/sheet/pools/new" not in page
    assert "/delete" not in page
    await sign_in(client, database, "read")
    for path in paths:
        assert not re.search(r"data-(act|sheet)=", (await client.get(path)).text), path


async def test_the_last_outcome_of_a_schedule(client: httpx.AsyncClient, database: Connection) -> None:
    tick = datetime(2026, 5, 1, 12, tzinfo=UTC)
    await put_schedules(database, [Schedule("sync", type="x", every=timedelta(minutes=5))])
    await database.execute("update interlock.schedules set last_at = %s", [tick])
    await enqueue_task(database, NewTask("x", {}, request_id=tick_request_id("sync", tick)), actor="leader")
    await sign_in(client, database)
    page = (await client.get("/schedules")).text
    assert "every 5 min" in page
    assert re.search(r"#clock[^>]*></svg>pending</span>", page)


async def test_times_are_true_without_the_script(client: httpx.AsyncClient, database: Connection) -> None:
    """The script makes them relative; the server does not claim that everything is now."""
    await put_schedules(database, [Schedule("yearly", type="x", cron="0 0 1 1 *")])
    await pause_namespace(database, "press", actor="ada", reason="paper")
    cursor = await database.execute("select next_at from interlock.schedules")
    (row,) = await cursor.fetchall()
    await sign_in(client, database)
    assert f">{exact(row['next_at'])}</time>" in (await client.get("/schedules")).text
    for path in ("/schedules", "/namespaces"):
        assert ">now</time>" not in (await client.get(path)).text, path


async def test_a_paused_schedule_shows_who_paused_it_and_why(client: httpx.AsyncClient, database: Connection) -> None:
    await put_schedules(database, [Schedule("a b", type="x", every=timedelta(minutes=5))])
    await pause_schedules(database, ["a b"], actor="ada", reason="<stock-taking>")
    await sign_in(client, database, "operate")
    assert "by ada: &lt;stock-taking&gt;" in (await client.get("/schedules")).text
    sheet = (await client.get("/ui/sheet/schedules/a%20b/pause")).text
    assert 'data-confirm="/ui/act/api/schedules/a%20b/pause"' in sheet
    assert 'name="reason"' in sheet


async def test_audit_finds_records_by_id_actor_event_and_time(client: httpx.AsyncClient, database: Connection) -> None:
    first = await enqueue(database)
    await enqueue(database)
    await claim_tasks(database, actor="worker-7", types=["x"])
    await sign_in(client, database)

    async def rows(query: str) -> int:
        return len(re.findall(r'<tr id="row-', (await client.get(f"/audit?{query}")).text))

    assert await rows("") == 3
    assert await rows(f"id={first}") == 2
    assert await rows("actor=worker-7") == 1
    assert await rows("event=create&to_state=pending&kind=task") == 2
    assert await rows("kind=worker") == 0
    assert await rows("until=2020-01-01T00:00") == 0
    assert (await client.get("/audit?since=never")).status_code == 422
    page = (await client.get("/audit?since=2030-01-01T00:00")).text
    assert "must not be later" in page


async def test_audit_pages_with_a_cursor(client: httpx.AsyncClient, database: Connection) -> None:
    for _ in range(51):
        await enqueue(database)
    await sign_in(client, database)
    first = (await client.get("/audit")).text
    found = re.search(r'rel="next" href="([^"]+)"', first)
    assert found is not None
    second = (await client.get(found[1].replace("&amp;", "&"))).text
    assert len(re.findall(r'<tr id="row-', second)) == 1


async def test_doctor_names_the_row_in_the_command(client: httpx.AsyncClient, database: Connection) -> None:
    await put_schedules(database, [Schedule("nightly report", type="nothing", every=LEASE)])
    process = RegisteredProcess("w", namespaces=("default",), types=("x",))
    await register_worker(database, process, lease=LEASE)
    await sign_in(client, database)
    page = (await client.get("/doctor")).text
    assert "schedule_unknown" in page
    assert 'data-copy="interlock schedules delete &#39;nightly report&#39;"' in page
    assert ">1</b>" in page  # beside Doctor in the navigation


async def test_pages_share_one_examination_by_doctor(url: str, database: Connection) -> None:
    async with dashboard_at(url) as (client, dashboard):
        await sign_in(client, database)
        assert (await client.get("/doctor")).status_code == 200
        first = dashboard.hub.doctor.latest
        assert first is not None
        for path in ("/doctor", "/doctor?again=1", "/"):
            assert (await client.get(path)).status_code == 200
        assert dashboard.hub.doctor.latest is first, "examined again within ten seconds"
        unbounded = SharedExamination(dashboard.app, max_age_s=0.0)
        made = await unbounded.read()
        assert await unbounded.read(60.0) is made
        assert await unbounded.read() is not made


async def test_findings_of_doctor_need_attention_and_are_counted(url: str, database: Connection) -> None:
    await put_schedules(database, [Schedule("nightly", type="nothing", every=LEASE)])
    await register_worker(database, RegisteredProcess("w", namespaces=("default",), types=("x",)), lease=LEASE)
    async with dashboard_at(url) as (client, dashboard):
        await sign_in(client, database)
        assert "schedule_unknown" not in (await client.get("/")).text, "the first page waits for no examination"
        viewer = dashboard.hub.join(["nav", "attention"], None)
        sent: dict[str, str] = {}

        def is_told() -> bool:
            sent.update(dict(orjson.loads(patch) for patch in viewer.take()[0]))
            return "schedule_unknown" in sent.get("attention", "") and ">1</b>" in sent.get("n-findings", "")

        await until(is_told)
        dashboard.hub.leave(viewer)
        page = (await client.get("/")).text
    assert "schedule_unknown" in page
    assert 'href="/doctor"' in page


async def test_the_history_of_a_worker_is_read_in_pages(
    client: httpx.AsyncClient, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_MOVES", 1)
    worker = await create_worker(database, spec=WorkerSpec(), actor="first")
    await move_worker(database, worker, SupervisedWorkerEvent.START_TASK, actor="second")
    await sign_in(client, database)
    page = (await client.get(f"/workers/{worker}")).text
    found = re.search(r'href="([^"]+after=[^"]+)" rel="next"', page)
    assert found is not None
    assert "1 move ·" in page
    assert "second" not in page
    page = (await client.get(found[1].replace("&amp;", "&"))).text
    assert "second" in page
    assert 'rel="next"' not in page


@pytest.mark.unit
@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("* * * * *", "every minute"),
        ("*/15 * * * *", "every 15 minutes"),
        ("*/15 9-17 * * 1-5", "every 15 minutes from 09:00 to 17:59, Monday to Friday"),
        ("0 * * * *", "every hour"),
        ("20 * * * *", "at minute 20 of every hour"),
        ("0 */6 * * *", "every 6 hours from 00:00"),
        ("30 2 * * *", "at 02:30, every day"),
        ("30 2 * * MON-FRI", "at 02:30, Monday to Friday"),
        ("0 6,18 * * *", "at 06:00 and 18:00, every day"),
        ("0 6 1 * *", "at 06:00, on day 1 of the month"),
        ("0 0 L * *", "at 00:00, on the last day of the month"),
        ("0 8 * JAN,jul 0", "at 08:00, on Sunday, in January and July"),
        ("0 8 1 * 1", None),  # either of them fits
        ("*/7 * * * *", None),  # the last interval of the hour is shorter
        ("0 8 * * 1#2", None),
        ("nonsense", None),
    ],
)
def test_cron_in_words(cron: str, words: str | None) -> None:
    assert describe_cron(cron) == words


def _worker(part: int, of_task: str, **progress: Any) -> dict[str, Any]:
    return {
        "id": f"id-{part}",
        "part": part,
        "state": of_task,
        "progress": progress or None,
        "attempt": 1,
        "worker_id": None,
        "error": None,
    }


@pytest.mark.unit
@pytest.mark.parametrize(
    ("status", "workers", "phases", "percent"),
    [
        ("RUNNING", [], ["now", "open", "open", "open"], 0),
        (
            "RUNNING",
            [
                _worker(0, "running", state="Merging", fraction=0.9),
                _worker(1, "running", state="WaitingForMergeSignal", fraction=0.8),
                _worker(2, "done"),
            ],
            ["done", "done", "now", "open"],
            90,
        ),
        ("FAILED", [_worker(0, "error", state="Failed")], ["failed", "open", "open", "open"], 0),
        ("COMPLETED", [_worker(0, "done")], ["done"] * 4, 100),
    ],
)
def test_the_phase_of_a_sort_is_that_of_its_slowest_worker(
    status: str, workers: list[dict[str, Any]], phases: list[str], percent: int
) -> None:
    times = dict.fromkeys(("created_at", "started_at", "completed_at"))
    row = make_row({"id": "i", "status": status, "reason": None, "output": "/out", "workers": workers, **times})
    assert [state for _, state in row.phases] == phases
    assert round(100 * row.fraction) == percent


@pytest.mark.parametrize(
    ("workers", "master"),
    [
        ([], "Registering"),
        (["Initializing", "Sampling"], "Registering"),
        (["WaitingForPartitionConfig", "Sampling"], "Sampling"),
        (["Sorting", "WaitingForShuffleSignal"], "Sorting"),
        (["WaitingForMergeSignal", "Shuffling"], "Shuffling"),
        (["Completed", "Merging"], "Merging"),
        (["Failed", "Sorting"], "Sorting"),
    ],
)
@pytest.mark.unit
def test_the_master_of_a_sort_is_where_its_slowest_worker_is(workers: list[str], master: str) -> None:
    assert master_state(workers) == master


async def test_running_sorts_are_counted_in_their_lifecycles(
    client: httpx.AsyncClient, database: Connection, url: str
) -> None:
    document = {"shares": [{}, {}], "master": "m", "output": "/o", "work_dir": "/w", "settings": {}}
    async with app_at(url, declared=sort_app) as app:
        job = await app.submit(sort_workflow, document)
    start = (
        "update interlock.jobs set status = 'RUNNING', event = 'allocate_resources', started_at = now() where id = %s"
    )
    await database.execute(start, [job.id])
    await sign_in(client, database)
    page = (await client.get("/machines/sort-master")).text
    assert 'aria-label="Registering: 1"' in page


async def test_sorts_are_shown_from_their_jobs(client: httpx.AsyncClient, database: Connection, url: str) -> None:
    document = {"shares": [{}, {}], "master": "m", "output": HOSTILE, "work_dir": "/w", "settings": {}}
    async with app_at(url, declared=sort_app) as app:
        job = await app.submit(sort_workflow, document)
    await sign_in(client, database)
    page = (await client.get("/sorts")).text
    assert f'href="/sorts/{job.id}"' in page
    assert "<script>alert" not in page
    page = (await client.get(f"/sorts/{job.id}")).text
    assert "PENDING" in page
    assert 'aria-current="step">Sampling' in page
    assert (await client.get("/sorts/00000000-0000-7000-8000-000000000000")).status_code == 404
    assert (await client.get("/sorts/none")).status_code == 404


async def test_only_the_limit_that_is_full_needs_attention(client: httpx.AsyncClient, database: Connection) -> None:
    """Tasks wait for all of their keys together: the one with room does not hold them."""
    await put_limits(database, [Limit("full", max_running=1), Limit("roomy", max_running=5), Limit("idle", share=1)])
    for _ in range(3):
        await enqueue(database, limit_keys=("full", "roomy"))
    await admit_limited_tasks(database, actor="leader")
    await sign_in(client, database)
    attention = (await client.get("/")).text.partition('id="attention"')[2].partition("</section>")[0]
    assert 'Limit <span class="mono">full</span> holds 2 tasks' in attention
    assert "roomy" not in attention


async def test_a_limit_says_that_more_may_wait_than_were_counted(
    client: httpx.AsyncClient, database: Connection
) -> None:
    await put_limits(database, [Limit("busy", max_running=1)])
    await database.execute(
        "insert into interlock.tasks (type, limit_keys, state, held_by, reason) "
        "select 'x', '{busy}', 'waiting', 'limit', 'limit busy' from generate_series(1, %s)",
        [MAX_COUNTED + 1],
    )
    await sign_in(client, database)
    for path in ("/", "/limits", "/limits/busy"):
        assert f"{MAX_COUNTED:,}+" in (await client.get(path)).text, path


async def test_a_task_that_is_tried_again_has_left_its_worker(client: httpx.AsyncClient, database: Connection) -> None:
    """It holds its limit between two tries, but no worker runs it."""
    await put_limits(database, [Limit("psp", max_running=1)])
    task = await enqueue(database, limit_keys=("psp",))
    await admit_limited_tasks(database, actor="leader")
    (claimed,) = await claim_tasks(database, actor="w_before", types=["x"])
    await fail_attempt(database, task, claimed.attempt)
    await sign_in(client, database)
    for path in ("/limits", "/limits/psp"):
        page = (await client.get(path)).text
        assert f"/tasks/{task}" in page, path
        assert "w_before" not in page, path
