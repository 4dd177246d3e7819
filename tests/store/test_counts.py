"""Counts by state: exact while they are small, and estimated from a sample, which they say, when they are not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from interlock.cli.status import format_overview
from interlock.store import stats
from interlock.store.stats import (
    JobCount,
    StateCount,
    count_jobs,
    count_tasks,
    count_unfinished_tasks,
    list_limits,
    overview_document,
    read_overview,
)

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
# Of each 100 tasks: 80 done, 5 in error, 5 canceled, 5 pending (with priorities and due times), 3 waiting, 2 running.
FILL = """
alter table interlock.tasks disable trigger user;
insert into interlock.tasks (type, namespace, state, priority, run_at, worker_id, lease_expires_at, held_by, limit_keys,
    crashes)
select 'x', case when n % 2 = 0 then 'a' else 'b' end, state, n % 3,
    '2030-01-01 12:00Z'::timestamptz + make_interval(hours => case when n % 4 < 2 then 1 else -(n % 7 + 1) end),
    case when state = 'running' then 'w' end, case when state = 'running' then now() end,
    case when state = 'waiting' then 'limit' end,
    case when state = 'waiting' or state = 'pending' and n % 5 = 1 then array['k'] end,
    case when n % 11 = 0 then 1 else 0 end
from generate_series(1, 20000) as n,
    lateral (select case when n % 100 < 80 then 'done' when n % 100 < 85 then 'error' when n % 100 < 90 then 'canceled'
        when n % 100 < 95 then 'pending' when n % 100 < 98 then 'waiting' else 'running' end as state) as chosen;
alter table interlock.tasks enable trigger user;
"""
FILL_JOBS = """
alter table interlock.jobs disable trigger user;
insert into interlock.jobs (task_description, status)
select 'w', case when n % 10 = 0 then 'RUNNING' when n % 10 = 1 then 'FAILED' else 'COMPLETED' end
from generate_series(1, 5000) as n;
alter table interlock.jobs enable trigger user;
"""


async def fill(database: Connection) -> None:
    for script in (FILL, FILL_JOBS):
        for statement in script.split(";\n")[:-1]:
            await database.execute(statement.encode())
    await database.execute("vacuum analyze interlock.tasks")
    await database.execute("vacuum analyze interlock.jobs")


async def test_counts_below_the_bound_are_those_of_a_full_count_in_a_table_of_any_size(
    database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(database)
    exact = await count_tasks(database, whole=True, now=NOW)
    assert not any(count.is_estimate for count in exact)
    monkeypatch.setattr(stats, "MAX_FULL_COUNT_PAGES", 0)
    counted = await count_tasks(database, now=NOW)
    assert [count for count in counted if count.state != "done"] == [count for count in exact if count.state != "done"]
    assert {count.state for count in counted if count.is_estimate} == {"done"}
    unfinished = {"pending", "running", "waiting"}
    assert await count_unfinished_tasks(database, now=NOW) == [count for count in exact if count.state in unfinished]
    assert [count for count in await count_jobs(database) if not count.is_estimate] == [
        JobCount("default", "FAILED", 500),
        JobCount("default", "RUNNING", 500),
    ]


async def test_counts_above_the_bound_are_estimates_that_say_so(
    database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(database)
    exact = {count[:2]: count.tasks for count in await count_tasks(database, whole=True)}
    for name, value in (("MAX_FULL_COUNT_PAGES", 0), ("MAX_COUNTED", 50)):
        monkeypatch.setattr(stats, name, value)
    for pages, tolerance in ((100_000, 0.06), (50, 0.5)):  # all pages, and a tenth: two significant digits
        monkeypatch.setattr(stats, "SAMPLE_PAGES", pages)
        counted = await count_tasks(database)
        assert {count[:2] for count in counted} == set(exact)
        for count in counted:
            assert count.is_estimate
            assert count.tasks == pytest.approx(exact[count[:2]], rel=tolerance), count
        assert all(count.is_estimate for count in await count_jobs(database))


async def test_an_estimate_is_never_below_what_was_counted(
    database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(database)
    for name, value in (("MAX_FULL_COUNT_PAGES", 0), ("MAX_COUNTED", 50), ("SAMPLE_PAGES", 0.0)):
        monkeypatch.setattr(stats, name, value)
    pending = [count for count in await count_unfinished_tasks(database, now=NOW) if count.state == "pending"]
    assert [(count.tasks >= 50, count.is_estimate) for count in pending] == [(True, True)] * 2


async def test_the_oldest_due_task_is_found_whatever_its_priority(database: Connection) -> None:
    query = "insert into interlock.tasks (type, priority, run_at, crashes) values ('x', %s, %s, %s)"
    oldest = NOW - timedelta(hours=9)
    for priority, run_at, crashes in (
        (9, NOW - timedelta(hours=1), 0),
        (3, NOW - timedelta(hours=2), 0),
        (-7, oldest, 0),
        (9, NOW - timedelta(hours=3), 2),
        (20, NOW + timedelta(hours=1), 0),
    ):
        await database.execute(query, [priority, run_at, crashes])
    assert await count_unfinished_tasks(database, now=NOW) == [StateCount("default", "pending", 5, oldest)]
    await database.execute("update interlock.tasks set run_at = %s where priority < 9", [NOW + timedelta(hours=1)])
    (count,) = await count_unfinished_tasks(database, now=NOW)
    assert count.oldest_due_at == NOW - timedelta(hours=3), "of a suspected task"


async def test_pending_tasks_of_many_namespaces_are_counted_together(
    database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = "insert into interlock.tasks (type, namespace) select 'x', 'n' || n from generate_series(1, 9) as n"
    await database.execute(query)
    monkeypatch.setattr(stats, "MAX_PAIRS", 4)
    counts = await count_unfinished_tasks(database)
    assert [count.namespace for count in counts] == ["n1", "n2", "n3", "n4", "…"]
    assert [(count.tasks, count.is_estimate) for count in counts[3:]] == [(1, False), (5, True)]


async def test_the_overview_marks_estimates(database: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(database)
    assert "~" not in format_overview(await read_overview(database))
    monkeypatch.setattr(stats, "MAX_FULL_COUNT_PAGES", 0)
    seen = await read_overview(database)
    document = overview_document(seen)
    assert {name: entry["estimated"] for name, entry in document["namespaces"].items()} == {
        "a": ["done"],
        "b": ["done"],
    }
    assert document["estimated_jobs"] == {"default": ["COMPLETED"]}
    done = document["namespaces"]["a"]["tasks"]["done"]
    text = format_overview(seen)
    assert f"~{done}" in text
    assert "--all counts every row" in text
    assert "~" not in format_overview(await read_overview(database, whole=True))


async def test_tasks_of_a_limit_are_counted_up_to_a_bound(
    database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(database)
    (limit,) = await list_limits(database, now=NOW)
    assert (limit.key, limit.waiting, limit.taken, limit.is_bound) == ("k", 600, 200, False)
    monkeypatch.setattr(stats, "MAX_COUNTED", 300)
    (limit,) = await list_limits(database, now=NOW)
    assert (limit.key, limit.waiting, limit.taken, limit.is_bound) == ("k", 300, 200, True)
    assert "300+" in format_overview(await read_overview(database, now=NOW))
