"""Limits per period hold for the starts that real workers record, however late and however many of them claim."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from factories import enqueue
from interlock.lifecycle import WorkerState
from interlock.model.options import NewTask
from interlock.postgres.notifier import WakeMode
from interlock.store.enqueue import enqueue_task
from interlock.store.limits import Limit, put_limits
from interlock.store.tasks import claim_limited_tasks, claim_pending_tasks
from interlock.worker import fetcher
from interlock.worker.settings import WorkerSettings
from worker_support import serving, until, worker_process

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

STARTS = 5
PERIOD = timedelta(seconds=0.5)
CLAIMS = "select recorded_at from interlock.audit_logs join interlock.tasks on tasks.id = task_id"


async def starts_of(database: Connection, task_type: str) -> list[datetime]:
    query = f"{CLAIMS} where audit_logs.event = 'claim' and tasks.type = '{task_type}' order by recorded_at"
    return [row["recorded_at"] for row in await (await database.execute(query.encode())).fetchall()]


def assert_no_window_is_exceeded(starts: list[datetime]) -> None:
    for first, beyond in zip(starts, starts[STARTS:], strict=False):
        assert beyond - first >= PERIOD, f"more than {STARTS} starts between {first} and {beyond}"


async def enqueue_adds(database: Connection, count: int, key: str | None = None) -> None:
    keys = None if key is None else (key,)
    for _ in range(count):
        await enqueue_task(database, NewTask("add", {"a": 1, "b": 2}, limit_keys=keys), actor="me")


async def release_all(database: Connection) -> None:
    """Make all waiting tasks pending at once, as nothing of the engine does."""
    await database.execute(
        "update interlock.tasks set state = 'pending', event = 'release', held_by = null where state = 'waiting'"
    )


async def until_count(database: Connection, condition: str, count: int) -> None:
    query = f"select from interlock.tasks where {condition}".encode()
    async with asyncio.timeout(90):
        while (await database.execute(query)).rowcount < count:
            await asyncio.sleep(0.02)


@pytest.mark.chaos
async def test_busy_workers_that_catch_up_start_no_more_than_the_limit(url: str, database: Connection) -> None:
    await put_limits(database, [Limit("api", max_starts=STARTS, period=PERIOD)])
    for _ in range(12):
        await enqueue_task(database, NewTask("nap", {"seconds": 2.5}), actor="me")
    with (
        worker_process(url, INTERLOCK_CONCURRENCY="4"),
        worker_process(url, INTERLOCK_CONCURRENCY="4"),
        worker_process(url, INTERLOCK_CONCURRENCY="4"),
    ):
        await until_count(database, "type = 'nap' and state = 'running'", 12)
        await enqueue_adds(database, 30, "api")
        await until_count(database, "state = 'done'", 42)
    starts = await starts_of(database, "add")
    assert len(starts) == 30
    assert_no_window_is_exceeded(starts)


@pytest.mark.chaos
async def test_tasks_that_are_pending_all_at_once_start_no_faster(url: str, database: Connection) -> None:
    """Nothing is left of the pace of the leader here: only the tokens of the claims hold the limit."""
    await put_limits(database, [Limit("api", max_starts=STARTS, period=PERIOD)])
    await enqueue_adds(database, 30, "api")
    await release_all(database)
    with worker_process(url, INTERLOCK_CONCURRENCY="4"), worker_process(url, INTERLOCK_CONCURRENCY="4"):
        await until_count(database, "state = 'done'", 30)
    starts = await starts_of(database, "add")
    assert len(starts) == 30
    assert_no_window_is_exceeded(starts)


async def test_a_worker_wakes_when_the_next_token_is_there(url: str, database: Connection) -> None:
    """It polls so rarely that only the time of the token can wake it."""
    await put_limits(database, [Limit("api", max_starts=1, period=timedelta(seconds=1))])
    settings: dict[str, Any] = {"mode": WakeMode.EVENTS, "events_poll": 3600, "poll_base": 3600, "poll_cap": 3600}
    async with serving(url, **settings) as worker:
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        await enqueue_adds(database, 3, "api")
        await release_all(database)
        await database.execute("select pg_notify('interlock_limited', 'default')")
        await until(lambda: worker.context.tasks_processed == 3)
    starts = await starts_of(database, "add")
    assert all(after - before >= timedelta(seconds=1) for before, after in pairwise(starts))


async def test_tasks_with_and_without_a_limit_do_not_keep_each_other_waiting(url: str, database: Connection) -> None:
    await put_limits(database, [Limit("free", share=1)])
    await enqueue_adds(database, 30)
    await enqueue_adds(database, 30, "free")
    await release_all(database)
    async with serving(url, concurrency=1) as worker:
        await until(lambda: worker.context.tasks_processed == 60)
    query = f"{CLAIMS} where audit_logs.event = 'claim' order by audit_logs.id limit 20"
    first = query.replace("recorded_at", "limit_keys is not null as limited", 1)
    limited = [row["limited"] for row in await (await database.execute(first.encode())).fetchall()]
    assert 5 <= sum(limited) <= 15


async def test_a_default_of_another_isolation_level_stops_no_claim(url: str, database: Connection) -> None:
    await put_limits(database, [Limit("api", max_starts=5, period=PERIOD)])
    await database.execute("alter role current_user set default_transaction_isolation = 'repeatable read'")
    try:
        async with serving(url) as worker:
            await enqueue_adds(database, 2, "api")
            await release_all(database)
            await enqueue_adds(database, 2)
            await until(lambda: worker.context.tasks_processed == 4)
    finally:
        await database.execute("alter role current_user reset default_transaction_isolation")


async def test_a_refused_claim_of_limited_tasks_prevents_no_other_claim(url: str, database: Connection) -> None:
    await database.execute(
        "create or replace function interlock.take_limited_tasks(namespaces text[], types text[], "
        "least_crashes smallint, most_crashes smallint, most_of_each bigint, most bigint, moment timestamptz) "
        "returns setof uuid language plpgsql as $$ begin raise exception 'refused for the test'; end $$"
    )
    await enqueue_adds(database, 3)
    with capture_logs() as logged:
        async with serving(url) as worker:
            await until(lambda: worker.context.tasks_processed == 3)
    refusals = [entry for entry in logged if entry["event"] == "limited_claim_refused"]
    assert {(entry["log_level"], entry["error"]) for entry in refusals} == {("warning", "refused for the test")}


async def test_a_worker_that_expects_no_task_with_a_limit_claims_the_others_first(
    database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def recording(claim: Any, kind: str) -> Any:
        async def record(connection: Connection, **options: Any) -> Any:
            asked.append(kind)
            return await claim(connection, **options)

        return record

    monkeypatch.setattr(fetcher, "claim_pending_tasks", recording(claim_pending_tasks, "others"))
    monkeypatch.setattr(fetcher, "claim_limited_tasks", recording(claim_limited_tasks, "limited"))
    fetching = fetcher.Fetcher("w_1", WorkerSettings(poll_cap=0.001), ["x"])
    await fetching.claim(database, 4)
    assert asked == ["limited", "others"], "it does not know yet whether there are any"
    await enqueue(database, "x")
    await asyncio.sleep(0.002)  # the time of its next look
    asked.clear()
    assert len(await fetching.claim(database, 4)) == 1
    assert asked == ["others"], "the look waits until there is nothing else to do"
    await fetching.claim(database, 4)
    assert asked == ["others", "others", "limited"]
    asked.clear()
    fetching.expect_limited_tasks()
    await fetching.claim(database, 4)
    assert asked == ["limited", "others"]
