"""No hot statement and no list reads a whole table: plans and rows read, with a million tasks, 100,000 jobs."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest

from interlock.postgres.connection import connect
from interlock.store import audit, lists
from interlock.store.audit import RecordFilter, find_records
from interlock.store.doctor import DOCTOR
from interlock.store.jobs import JobFilter, find_job_page
from interlock.store.leader import read_clock
from interlock.store.limits import LIMITS
from interlock.store.live import SECTIONS, LiveParameters, read_live
from interlock.store.retention import RETENTION
from interlock.store.signals import InboxFilter, read_inbox_page
from interlock.store.stats import STATUS, list_limits
from interlock.store.task_admin import TaskFilter, find_task_page
from interlock.store.tasks import TASKS as OF_TASKS
from interlock.store.tasks import claim_statement
from interlock.store.workers import find_worker_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from interlock.postgres.connection import Connection
    from interlock.postgres.embedded.server import EmbeddedServer
    from interlock.postgres.query import Statement

pytestmark = pytest.mark.store

TASKS = 1_000_000
JOBS = 100_000
RECORDS = 100_000  # of the moves of tasks, spread over this month, and as many more of its latest moment
LATEST = "(now() - interval '2 minutes')"  # moment of the latest records: before the time that live pages look at
START = datetime(2026, 1, 1, tzinfo=UTC)  # of the first task; one follows each second
# Of a million tasks, all but a few are done; the newest ones are not of the rare type, tag, namespace and worker.
FILL = f"""
set session_replication_role = replica;
alter table interlock.tasks disable trigger user;
alter table interlock.jobs disable trigger user;
create function pg_temp.id_at(n int) returns uuid language sql immutable as $$
    select (lpad(to_hex({int(START.timestamp())}000 + n::bigint * 1000), 12, '0') || '70008000'
        || lpad(to_hex(n), 12, '0'))::uuid
$$;
insert into interlock.tasks (id, created_at, updated_at, type, namespace, state, attempt, worker_id, lease_expires_at,
    tags, held_by, unique_key, request_id, correlation_id)
select pg_temp.id_at(n), '{START.isoformat()}'::timestamptz + make_interval(secs => n), now(),
    case when n % 100000 = 7 then 'rare' else 'x' end,
    case when n % 100000 = 7 then 'rare' else 'default' end,
    case when n % 5000 = 1 then 'error' when n % 5000 = 2 then 'canceled' when n % 5000 = 3 then 'skipped'
        when n % 5000 = 4 then 'waiting' when n % 5000 = 5 then 'running' when n % 5000 = 6 then 'pending' else 'done'
    end,
    1, case when n % 100000 = 7 then 'w_rare-1-ff' else 'w' end, case when n % 5000 = 5 then now() end,
    case when n % 100000 = 7 then '{{rare}}'::text[] when n % 2 = 0 then '{{even}}' end,
    case when n % 5000 = 4 then 'limit' end,
    case when n % 1000 = 0 then 'k' || n % 10000 end, case when n % 1000 = 0 then 'r' || n end,
    case when n % 1000 = 0 then pg_temp.id_at(n % 10000) end
from generate_series(0, {TASKS - 1}) as n;
insert into interlock.workflows (id, name, version, definition, root_namespaces, plain_roots)
select pg_temp.id_at(n), case n when 1 then 'rare' when 2 then 'w' else 'distributed_sort' end, n::text, '{{}}',
    '{{}}', true
from generate_series(1, 4) as n;
insert into interlock.jobs (id, created_at, task_description, workflow_id, status, namespace, tags, attributes, key,
    key_order, on_conflict, request_id, correlation_id, parent_job_id, depth)
select pg_temp.id_at(n), '{START.isoformat()}'::timestamptz + make_interval(secs => n), 'w',
    pg_temp.id_at(case when n % 50000 = 7 then 1 else 2 end),
    case when n % 5000 = 1 then 'FAILED' when n % 5000 = 2 then 'RUNNING' else 'COMPLETED' end,
    case when n % 50000 = 7 then 'rare' else 'default' end,
    case when n % 50000 = 7 then '{{rare}}'::text[] when n % 2 = 0 then '{{even}}' end,
    case when n % 10 = 0 then jsonb_build_object('customer', n / 100) end,
    case when n % 1000 = 0 then 'k' || n % 10000 end, case when n % 1000 = 0 then n end,
    case when n % 1000 = 0 then 'queue' end, case when n % 1000 = 0 then 'r' || n end,
    pg_temp.id_at(case when n % 1000 = 0 then n % 10000 else n end),
    case when n % 1000 = 500 then pg_temp.id_at(n % 10000 / 1000) end, (n % 1000 = 500)::int
from generate_series(0, {JOBS - 1}) as n;
alter table interlock.audit_logs disable trigger user;
insert into interlock.audit_logs (task_id, to_state, event, actor, database_role, attempt, recorded_at)
select pg_temp.id_at(n), 'pending', 'create', 'fill', 'fill', 0,
    date_trunc('month', {LATEST}) + ({LATEST} - date_trunc('month', {LATEST})) * (n / {RECORDS}.0)
from generate_series(0, {RECORDS - 1}) as n;
insert into interlock.audit_logs (task_id, from_state, to_state, event, actor, database_role, attempt, recorded_at)
select pg_temp.id_at(n), 'pending', 'running', 'claim', 'fill', 'fill', 1, {LATEST}
from generate_series(0, {RECORDS - 1}) as n;
"""


@pytest.fixture(scope="module")
def filled_url(template: str, server: EmbeddedServer) -> Iterator[str]:
    """Fill a database: a million tasks and a hundred thousand jobs."""
    with psycopg.connect(server.url("postgres"), autocommit=True) as admin:
        admin.execute(f"create database lists template {template}".encode())
        with psycopg.connect(server.url("lists"), autocommit=True) as connection:
            # vacuum marks only those pages as visible to all whose commit is in the log on disk
            connection.execute("set synchronous_commit = on")
            connection.execute(FILL)
            connection.execute("vacuum analyze interlock.tasks, interlock.jobs, interlock.audit_logs")
        yield server.url("lists")
        admin.execute("drop database lists with (force)")


@pytest.fixture
async def connection(filled_url: str) -> AsyncIterator[Connection]:
    """Connect to the filled database."""
    async with connect(filled_url) as opened:
        yield opened


def id_at(n: int) -> UUID:
    """Return the id of a row."""
    milliseconds = int(START.timestamp()) * 1000 + n * 1000
    return UUID(f"{milliseconds:012x}70008000{n:012x}")


def time_at(n: int) -> datetime:
    """Return the time at which a row was created."""
    return START + timedelta(seconds=n)


class Explained:
    """Records the statements of a connection, and explains them as they were executed."""

    def __init__(self, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
        self._connection = connection
        self._execute = connection.execute
        self._calls: list[tuple[Any, Any]] = []
        monkeypatch.setattr(connection, "execute", self._record)

    async def _record(self, query: Any, parameters: Any = None, **options: Any) -> Any:
        self._calls.append((query, parameters))
        return await self._execute(query, parameters, **options)

    async def scans(self, *switched_off: str) -> list[tuple[str, str, float]]:
        """Return the scans of all statements: kind, relation and the rows that were read."""
        found: list[tuple[str, str, float]] = []
        for name in switched_off:  # as in the transaction of a list
            await self._execute(f"set {name} = off")
        for query, parameters in self._calls:
            if query.startswith(("select set_config", "explain")):
                continue
            rows = await self._execute(f"explain (analyze, format json, timing off) {query}", parameters, prepare=False)
            ((document,),) = [row.values() for row in await rows.fetchall()]
            nodes = [document[0]["Plan"]]
            while nodes:
                node = nodes.pop()
                nodes += node.get("Plans", [])
                if "Scan" in node["Node Type"] and "Subquery" not in node["Node Type"]:
                    removed = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
                    read = node["Actual Rows"] + sum(node.get(name, 0) for name in removed)
                    found.append((node["Node Type"], node.get("Relation Name", ""), read * node["Actual Loops"]))
        return found

    async def blocks(self, read: Callable[[], Awaitable[object]]) -> int:
        """Return how many blocks a function reads, by the counters of its statements."""
        self._calls.clear()
        await read()
        total = 0
        async with self._connection.transaction(force_rollback=True):
            await self._execute("set local enable_seqscan = off")  # as in the transaction of a list
            for query, parameters in self._calls:
                if query.startswith(("select set_config", "explain")):
                    continue
                rows = await self._execute(
                    f"explain (analyze, buffers, format json) {query}", parameters, prepare=False
                )
                ((document,),) = [row.values() for row in await rows.fetchall()]
                plan = document[0]["Plan"]
                total += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        return total


TASK_FILTERS: dict[str, tuple[dict[str, Any], int]] = {
    "all": ({}, 50),
    "done": ({"states": ("done",)}, 50),
    "error": ({"states": ("error",)}, 50),
    "error of a rare type": ({"states": ("error",), "type": "rare"}, 0),
    "error of a namespace": ({"states": ("error",), "namespaces": ("default", "other")}, 50),
    "canceled": ({"states": ("canceled",)}, 50),
    "skipped": ({"states": ("skipped",)}, 50),
    "waiting": ({"states": ("waiting",)}, 50),
    "pending": ({"states": ("pending",)}, 50),
    "running": ({"states": ("running",)}, 50),
    "running of a worker": ({"states": ("running",), "worker": "w"}, 50),
    "several states": ({"states": ("error", "waiting", "running", "pending", "canceled")}, 50),
    "all states": ({"states": ("error", "done")}, 50),
    "type": ({"type": "rare"}, 0),
    "tag": ({"tag": "rare"}, 0),
    "namespace": ({"namespace": "rare"}, 0),
    "namespaces": ({"namespaces": ("rare", "none")}, 0),
    "worker": ({"worker": "w_rare"}, 0),
    "unique key": ({"unique_key": "k1000"}, 50),
    "unique key in error": ({"unique_key": "k1000", "states": ("error",)}, 0),
    "request id": ({"request_ids": ["r999000"]}, 1),
    "correlation id": ({"correlation_id": id_at(1000)}, 50),
    "job": ({"job_id": id_at(1)}, 0),
    "time": ({"created_after": time_at(500_000), "created_before": time_at(500_010)}, 10),
    "time and state": ({"created_before": time_at(100_000), "states": ("error",)}, 20),
}


@pytest.mark.parametrize("name", TASK_FILTERS)
async def test_a_page_of_tasks_reads_a_bounded_number_of_rows(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    conditions, expected = TASK_FILTERS[name]
    explained = Explained(connection, monkeypatch)
    page = await find_task_page(connection, TaskFilter(**conditions), limit=50)
    assert len(page.items) == expected
    for kind, relation, rows in await explained.scans("enable_seqscan"):
        assert kind != "Seq Scan" or relation not in {"tasks", "jobs"}, name
        assert rows <= lists.MAX_LOOKED_AT + 1, (name, kind, relation)


JOB_FILTERS: dict[str, tuple[dict[str, Any], int]] = {
    "all": ({}, 50),
    "completed": ({"statuses": ["COMPLETED"]}, 50),
    "failed": ({"statuses": ["FAILED"]}, 20),
    "running or failed": ({"statuses": ["RUNNING", "FAILED"]}, 40),
    "failed of a rare namespace": ({"statuses": ["FAILED"], "namespace": "rare"}, 0),
    "workflow": ({"workflow": "rare"}, 2),
    "version": ({"workflow": "w", "version": "2"}, 50),
    "unknown workflow": ({"workflow": "none"}, 0),
    "namespace": ({"namespace": "rare"}, 0),
    "namespaces": ({"namespaces": ["rare"]}, 0),
    "rare tag": ({"tags": ["rare"]}, 2),
    "frequent tag": ({"tags": ["even"]}, 50),
    "frequent and rare tag": ({"tags": ["even", "rare"]}, 0),
    "attribute": ({"attributes": {"customer": 77}}, 10),
    "attribute and state": ({"attributes": {"customer": 77}, "statuses": ["RUNNING"]}, 0),
    "key": ({"key": "k1000"}, 10),
    "parent": ({"parent": id_at(1)}, 10),
    "request id": ({"request_ids": ["r99000"]}, 1),
    "correlation id of a request": ({"correlation_id": id_at(1000)}, 10),
    "correlation id of a job": ({"correlation_id": id_at(77)}, 1),
    "time": ({"created_after": time_at(50_000), "created_before": time_at(50_010)}, 10),
}


@pytest.mark.parametrize("name", JOB_FILTERS)
async def test_a_page_of_jobs_reads_a_bounded_number_of_rows(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    conditions, expected = JOB_FILTERS[name]
    explained = Explained(connection, monkeypatch)
    page = await find_job_page(connection, JobFilter(**conditions), limit=50)
    assert len(page.items) == expected
    for kind, relation, rows in await explained.scans("enable_seqscan"):
        assert kind != "Seq Scan" or relation != "jobs", name
        assert rows <= lists.MAX_LOOKED_AT + 1, (name, kind, relation)


RECORD_FILTERS: dict[str, tuple[dict[str, Any], int]] = {
    "all": ({}, 50),
    "tasks": ({"kinds": ["task"]}, 50),
    "workers": ({"kinds": ["worker"]}, 0),
    "actor": ({"actor": "none"}, 0),
    "event": ({"event": "create"}, 0),
    "from state": ({"from_state": "running"}, 0),
    "to state": ({"to_state": "error"}, 0),
    "database role": ({"database_role": "none"}, 0),
    "namespaces": ({"namespaces": ["rare"]}, 0),
    "row": ({"id": str(id_at(7))}, 2),
    "until": ({"until": -timedelta(hours=1)}, 50),
    "until, and actor": ({"until": -timedelta(hours=1), "actor": "none"}, 0),
    "before all": ({"until": -timedelta(days=60)}, 0),
    "since": ({"since": -timedelta(hours=1), "actor": "none"}, 0),
}
RANGE_ROWS = 16 * 90  # of a BRIN index: its pages, with the records that fit into one


@pytest.mark.parametrize("name", RECORD_FILTERS)
async def test_a_page_of_records_reads_a_bounded_number_of_rows(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where more records than a page may look at have one moment."""
    given, expected = RECORD_FILTERS[name]
    moment = await read_clock(connection)
    times = {key: moment + value for key, value in given.items() if isinstance(value, timedelta)}
    wanted = RecordFilter(**{"since": moment - timedelta(days=90), **given, **times})
    explained = Explained(connection, monkeypatch)
    page = await find_records(connection, wanted, limit=50)
    assert len(page.items) == expected
    assert (page.next is not None) == (name not in {"workers", "row", "before all"})
    for kind, relation, rows in await explained.scans("enable_seqscan", "enable_indexscan", "enable_indexonlyscan"):
        assert kind != "Seq Scan" or rows <= 1, (name, relation)  # a sequence is read like that
        if kind != "Bitmap Index Scan":  # it counts pages of the table
            assert rows <= audit.MAX_LOOKED_AT + 2 * RANGE_ROWS, (name, kind, relation)


LIST_BLOCKS = 5_000  # of 8 kB that one page of a list may read


async def test_million_tasks_every_list_below_100_ms(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, which are the same on every machine: what a page costs does not grow with the tables."""
    moment = await read_clock(connection)
    records = RecordFilter(since=moment - timedelta(days=90))
    pages: dict[str, Callable[[], Awaitable[object]]] = {
        **{f"tasks: {name}": partial(find_task_page, connection, TaskFilter(**given), limit=50)
           for name, (given, _) in TASK_FILTERS.items()},
        **{f"jobs: {name}": partial(find_job_page, connection, JobFilter(**given), limit=50)
           for name, (given, _) in JOB_FILTERS.items()},
        "records": partial(find_records, connection, records, limit=50),
        "inbox": partial(read_inbox_page, connection, InboxFilter(), limit=50),
        "workers": partial(find_worker_page, connection, limit=50),
        "limits": partial(list_limits, connection),
    }  # fmt: skip
    explained = Explained(connection, monkeypatch)
    blocks = {name: await explained.blocks(read) for name, read in pages.items()}
    assert {name: count for name, count in blocks.items() if not 0 <= count <= LIST_BLOCKS} == {}


LIVE_ROWS = 20_000  # that one section of the live statement may read
LARGE_TABLES = ("tasks", "jobs", "audit_logs")
COUNTS = {"live_task_states", "live_job_states"}  # a full count at most every ten minutes


@pytest.mark.parametrize("section", sorted(SECTIONS - COUNTS))
async def test_a_live_section_reads_a_bounded_number_of_rows(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    explained = Explained(connection, monkeypatch)
    ids = [id_at(n) for n in range(50)]
    parameters = LiveParameters(
        by_namespace=True,
        window=timedelta(seconds=30),
        task_ids=ids,
        job_ids=ids,
        step_job_ids=ids[:5],
        worker_ids=["w"],
    )
    await read_live(connection, frozenset({section.removeprefix("live_")}), parameters)
    for kind, relation, rows in await explained.scans():
        is_large = rows > 0 and relation.startswith(LARGE_TABLES)  # the default partition of the records is empty
        assert kind != "Seq Scan" or not is_large, (section, relation)
        assert rows <= LIVE_ROWS, (section, kind, relation)


async def test_rare_tasks_are_found_by_going_on_from_page_to_page(connection: Connection) -> None:
    found: list[UUID] = []
    pages, cursor = 0, None
    while pages == 0 or cursor is not None:
        wanted = TaskFilter(tag="rare", created_after=time_at(TASKS - 10 * lists.MAX_LOOKED_AT))
        page = await find_task_page(connection, wanted, limit=3, before=cursor)
        found += [task.id for task in page.items]
        pages, cursor = pages + 1, page.next
    assert found == [id_at(n) for n in reversed(range(7, TASKS, 100_000)) if n >= TASKS - 10 * lists.MAX_LOOKED_AT]
    assert pages in {10, 11}, "each page looks at a part of the table"


async def test_many_pending_tasks_are_found_by_the_order_of_ids(connection: Connection) -> None:
    async with connection.transaction(force_rollback=True):
        await connection.execute(
            "update interlock.tasks set state = 'pending', unique_key = null "
            "where id >= %s and lease_expires_at is null",
            [id_at(TASKS - 2 * lists.MAX_LOOKED_AT)],
        )
        page = await find_task_page(connection, TaskFilter(states=("pending",)), limit=50)
    assert [task.id for task in page.items] == [id_at(n) for n in reversed(range(TASKS - 50, TASKS))]


FEW, MANY = 100, 3_000  # rows that a page may look at here, and rows of the table
FILL_WORKERS = f"""
alter table interlock.workers disable trigger user;
insert into interlock.workers (id, created_at, status, event, host, workspace_id, namespaces)
select 'w' || n, '{START.isoformat()}'::timestamptz + make_interval(secs => n), 'RUNNING', 'start', 'a', 'main',
    '{{default}}'
from generate_series(1, {MANY}) as n;
update interlock.workers set host = 'b', workspace_id = 'rare', namespaces = '{{rare}}', status = 'PAUSED'
where id = 'w7';
"""


@pytest.mark.parametrize(
    "conditions",
    [
        {"statuses": ["PAUSED"]},
        {"host": "b"},
        {"workspace_id": "rare"},
        {"namespace": "rare"},
        {"namespaces": ["rare"]},
    ],
    ids=str,
)
async def test_a_page_of_workers_reads_a_bounded_number_of_rows(
    database: Connection, monkeypatch: pytest.MonkeyPatch, conditions: dict[str, Any]
) -> None:
    monkeypatch.setattr(lists, "MAX_LOOKED_AT", FEW)
    async with database.transaction(force_rollback=True):
        for statement in FILL_WORKERS.split(";\n")[:-1]:
            await database.execute(statement)
        explained = Explained(database, monkeypatch)
        page = await find_worker_page(database, **conditions, limit=50)
        assert page.items == []
        for kind, relation, rows in await explained.scans("enable_seqscan"):
            assert rows <= FEW + 1, (kind, relation)
        found = []
        while page.next is not None:
            page = await find_worker_page(database, **conditions, before=page.next, limit=50)
            found += page.items
    assert [worker["id"] for worker in found] == ["w7"]


FILL_INBOX = f"""
set local session_replication_role = replica;
alter table interlock.tasks disable trigger user;
alter table interlock.jobs disable trigger user;
insert into interlock.workflows (id, name, version, definition, root_namespaces, plain_roots)
select gen_random_uuid(), name, '1', '{{}}', '{{}}', true from unnest(array['often', 'rare']) as name;
insert into interlock.workflow_steps (workflow_id, step, position, namespace, priority, max_tries, kind, spec, edges)
select id, 'ask', 0, name, 0, 1, case name when 'rare' then 'approval' else 'signal' end, '{{"signal": "go"}}', 0
from interlock.workflows;
insert into interlock.jobs (task_description, workflow_id, namespace, created_at)
select name, id, name, '{START.isoformat()}'::timestamptz + make_interval(secs => n)
from generate_series(1, {MANY}) as n
    join interlock.workflows on name = case when n = {MANY - 7} then 'rare' else 'often' end;
insert into interlock.tasks (type, job_id, step, state, held_by, wait_started_at, assignee)
select 'x', id, 'ask', 'waiting', 'signal', created_at, namespace
from interlock.jobs;
"""


@pytest.mark.parametrize(
    "conditions",
    [{"assignee": "rare"}, {"workflow": "rare"}, {"kind": "approval"}, {"namespaces": ["rare"]}],
    ids=str,
)
async def test_a_page_of_the_inbox_reads_a_bounded_number_of_rows(
    database: Connection, monkeypatch: pytest.MonkeyPatch, conditions: dict[str, Any]
) -> None:
    monkeypatch.setattr(lists, "MAX_LOOKED_AT", FEW)
    async with database.transaction(force_rollback=True):
        for statement in FILL_INBOX.split(";\n")[:-1]:
            await database.execute(statement)
        await database.execute("analyze interlock.tasks")
        explained = Explained(database, monkeypatch)
        page = await read_inbox_page(database, InboxFilter(**conditions), limit=50)
        for kind, relation, rows in await explained.scans("enable_seqscan"):
            assert rows <= FEW + 1, (kind, relation)
        found = page.items
        while page.next is not None:
            page = await read_inbox_page(database, InboxFilter(**conditions), after=page.next, limit=50)
            found += page.items
    assert [(item["workflow"], item["assignee"]) for item in found] == [("rare", "rare")]


MOVED = "'01a1e2cf-6c0c-75b3-83a4-94f638565840'"
IDS = f"array_fill({MOVED}::uuid, array[100])"
CLAIM = {
    "namespaces": "array['default', 'rare']",
    "types": "array['x', 'rare']",
    "each": "50",
    "limit": "100",
    "lease": "'30 s'",
    "actor": "'w'",
    "recent": "'6000 years'",
    "least_crashes": "0",
    "most_crashes": "0",
}
NO_TYPE = {"types": "array['none', 'never']"}
LANES = """'[{"keys": ["k1", "all"], "tasks": 5}]'"""
AGES = dict.fromkeys(("done", "canceled", "skipped", "error"), "'7 days'")
OUTCOME = f"""{{"id": {MOVED.replace("'", '"')}, "attempt": 1, "event": "succeed"}}"""
# What runs for every task, or again and again while nothing happens; `now` is null in all of them.
HOT: dict[str, tuple[Statement, dict[str, str]]] = {
    "claim": (claim_statement(2), CLAIM),
    "claim of other types": (claim_statement(2), CLAIM | NO_TYPE),
    "claim of suspected tasks": (claim_statement(2), CLAIM | {"least_crashes": "1", "most_crashes": "3"}),
    **{
        name: (OF_TASKS[name], parameters)
        for name, parameters in {
            "until_next_run": CLAIM,
            "until_limited_start": CLAIM,
            "has_suspected_tasks": CLAIM,
            "settle_running_tasks": {"actor": "'w'", "expected": "1", "outcomes": f"'[{OUTCOME}]'"},
            "renew_running_tasks": {"ids": IDS, "attempts": "array_fill(1, array[100])", "lease": "'30 s'"},
            "recover_expired_tasks": {"limit": "100", "actor": "'w'", "max_crashes": "3", "message": "'gone %%s'"},
            "find_claims_without_reply": {"worker": "'w'", "within": "'1 minute'"},
            "read_task_history": {"id": MOVED, "after": "0"},
        }.items()
    },
    **{
        name: (LIMITS[name], parameters)
        for name, parameters in {
            "read_waiting_lanes": {},
            "read_limit_usage": {"keys": "array['k1', 'all']"},
            "read_admissible_tasks": {"lanes": LANES, "served_only": "true"},
            "write_limit_reasons": {"lanes": LANES, "each": "100", "served_only": "true"},
            "next_limited_run_at": {},
        }.items()
    },
    **{
        name: (RETENTION[name], {"stretch": "1000", "batch": "1000", "age": "'7 days'", **AGES})
        for name in ("delete_ended_tasks", "read_outdated_jobs", "delete_steps_of_jobs", "delete_jobs_without_steps")
    },
    **{
        name: (STATUS[name], {"most": "1000", "pairs": "1000"})
        for name in (
            "count_pending_by_namespace", "count_running_and_waiting_tasks", "count_ended_tasks",
            "count_unfinished_jobs", "count_unsuccessful_jobs", "list_limits",
        )
    },
    "read_due_types": (DOCTOR["read_due_types"], {"each": "1000"}),
    "count_unrecovered_tasks": (DOCTOR["count_unrecovered_tasks"], {"threshold": "'1 minute'"}),
}  # fmt: skip
HOT_ROWS = 5_000  # that one scan of a hot statement may read: more than any state but done has here


def explain_prepared(connection: psycopg.Connection, statement: Statement, given: dict[str, str]) -> dict[str, Any]:
    """Execute a prepared statement and return its plan."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    text = re.sub(r"%\((\w+)\)s", number, statement.sql).replace("%%", "%")
    connection.execute(f"prepare hot as {text}".encode())
    values = f"({', '.join(given.get(name, 'null') for name in names)})" if names else ""
    try:
        rows = connection.execute(f"explain (analyze, format json, timing off) execute hot{values}".encode()).fetchall()
    finally:
        connection.execute("deallocate hot")
    plan: dict[str, Any] = rows[0][0][0]["Plan"]
    return plan


@pytest.fixture(scope="module")
def hot_connection(filled_url: str) -> Iterator[psycopg.Connection]:
    """Connect to the filled database, and undo what the statements do."""
    with psycopg.connect(filled_url, prepare_threshold=None) as connection:
        yield connection
        connection.rollback()


@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
@pytest.mark.parametrize("name", HOT)
def test_a_hot_statement_reads_a_bounded_number_of_rows(
    hot_connection: psycopg.Connection, name: str, mode: str
) -> None:
    statement, given = HOT[name]
    hot_connection.execute(f"set plan_cache_mode = {mode}".encode())
    if statement in LIMITS.values() or statement in STATUS.values():
        hot_connection.execute("set enable_seqscan = off")  # as in the transactions of these statements
    try:
        nodes = [explain_prepared(hot_connection, statement, given)]
    finally:
        hot_connection.rollback()
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        if "Scan" not in node["Node Type"] or not node.get("Relation Name", "").startswith(LARGE_TABLES):
            continue
        removed = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
        read = (node["Actual Rows"] + sum(node.get(part, 0) for part in removed)) * node["Actual Loops"]
        assert read <= (0 if node["Node Type"] == "Seq Scan" else HOT_ROWS), node  # some partitions are empty
