"""Limits hold tasks in waiting, with the reason, and let in exactly as many as they allow."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from factories import enqueue
from interlock.errors import ConfigError
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import connect
from interlock.store.limits import (
    Limit,
    LimitUsage,
    admit_limited_tasks,
    delete_limits,
    put_limits,
    sweep_limits,
)
from interlock.store.stats import list_limits
from interlock.store.task_admin import requeue_ended_tasks
from interlock.store.tasks import Outcome, claim_limited_tasks, settle_running_tasks
from interlock.store.workers import RegisteredProcess, deregister_worker, register_worker
from interlock.worker.maintenance.leader import SWEEP_INTERVAL_S, LimitsDuty

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(seconds=60)


async def enqueue_limited(database: Connection, count: int = 1, key: str = "mail", **options: Any) -> list[UUID]:
    options = {"limit_key": key, "run_at": NOON - MINUTE, **options}
    return [await enqueue(database, **options) for _ in range(count)]


async def admit(database: Connection, now: datetime = NOON) -> int:
    return (await admit_limited_tasks(database, actor="leader", now=now)).released


async def serve(database: Connection, name: str = "worker", namespace: str = "default", task_type: str = "x") -> None:
    process = RegisteredProcess(name, namespaces=(namespace,), types=(task_type,))
    await register_worker(database, process, lease=MINUTE, now=NOON)


async def run_duty(database: Connection, now: datetime = NOON) -> None:
    """Sweep and admit as a new leader does."""
    await LimitsDuty("leader").run_once(database, now=now)


async def rows(database: Connection, state: str, columns: str = "id") -> list[Any]:
    query = f"select {columns} from interlock.tasks where state = %s order by priority desc, run_at, id"
    return [tuple(row.values()) for row in await (await database.execute(query.encode(), [state])).fetchall()]


async def end_one(database: Connection, event: TaskRowEvent = TaskRowEvent.SUCCEED, now: datetime = NOON) -> UUID:
    (task,) = await claim_limited_tasks(database, actor="w", types=["x"], now=now)
    await settle_running_tasks(database, [Outcome(task.id, task.attempt, event)], actor="w", now=now)
    return task.id


async def test_at_most_max_running_tasks_of_a_key_are_pending_or_running(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=2)])
    ids = await enqueue_limited(database, 5)
    assert await rows(database, "waiting", "held_by, reason") == [("limit", "limit mail")] * 5
    assert await admit(database) == 2
    assert await admit(database) == 0
    assert await rows(database, "pending") == [(ids[0],), (ids[1],)]
    assert await rows(database, "waiting", "reason") == [("limit mail: 2 of 2 pending or running",)] * 3
    await end_one(database)
    assert await admit(database) == 1
    assert await rows(database, "pending") == [(ids[1],), (ids[2],)]


async def test_the_order_of_admission_is_that_of_the_claim(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=1)])
    (late,) = await enqueue_limited(database, run_at=NOON)
    (early,) = await enqueue_limited(database)
    (urgent,) = await enqueue_limited(database, priority=5, run_at=NOON)
    (future,) = await enqueue_limited(database, priority=9, run_at=NOON + SECOND)
    order = []
    while await admit(database):
        order.append(await end_one(database))
    assert order == [urgent, early, late], "what is not due yet takes up no room"
    admission = await admit_limited_tasks(database, actor="leader", now=NOON)
    assert admission.next_at == NOON + SECOND
    assert await admit(database, NOON + SECOND) == 1
    assert await rows(database, "pending") == [(future,)]


async def test_starts_are_limited_in_a_window_that_slides(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_starts=3, period=MINUTE)])
    await enqueue_limited(database, 10)
    assert await admit(database) == 3
    assert await admit(database) == 0, "as many are admitted as may start"
    for _ in range(3):
        await end_one(database)
    assert await admit_limited_tasks(database, actor="l", now=NOON) == (0, NOON + MINUTE, False)
    told = "limit mail: 3 starts per 60 s reached, next at 2030-01-01 12:01:00 UTC"
    assert {reason for (reason,) in await rows(database, "waiting", "reason")} == {told}
    assert await admit(database, NOON + MINUTE - timedelta(microseconds=1)) == 0, "ended tasks have started, too"
    assert await admit(database, NOON + MINUTE) == 3


async def test_the_next_start_comes_when_enough_of_the_window_has_passed(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_starts=2, period=MINUTE)])
    await enqueue_limited(database, 6)
    assert await admit(database) == 2
    await end_one(database)
    await end_one(database, now=NOON + 20 * SECOND)
    assert await admit_limited_tasks(database, actor="l", now=NOON + 20 * SECOND) == (0, NOON + MINUTE, False)
    assert await admit_limited_tasks(database, actor="l", now=NOON + MINUTE) == (1, NOON + 80 * SECOND, False)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=12))
def test_no_window_and_no_moment_ever_exceeds_the_limits(url: str, steps: list[tuple[int, int, int]]) -> None:
    async def play() -> None:
        async with connect(url) as database:
            await put_limits(database, [Limit("mail", max_running=4, max_starts=3, period=MINUTE)])
            await database.execute("delete from interlock.limit_usage")
            now, started = NOON, []
            for seconds, arriving, ending in steps:
                now += seconds * SECOND
                await enqueue_limited(database, arriving)
                await admit(database, now)
                await sweep_limits(database, actor="l", now=now)
                assert len(await rows(database, "pending")) <= 4
                for task in await claim_limited_tasks(database, actor="w", types=["x"], limit=ending, now=now):
                    started.append(now)
                    event = TaskRowEvent.RETRY if len(started) % 3 == 0 else TaskRowEvent.SUCCEED
                    await settle_running_tasks(database, [Outcome(task.id, task.attempt, event)], actor="w", now=now)
            for begin in started:
                assert sum(begin <= moment < begin + MINUTE for moment in started) <= 3
            await clear(database)

    asyncio.run(play())


async def clear(database: Connection) -> None:
    await database.execute(
        "update interlock.tasks set state = 'canceled', event = 'cancel' where state in ('waiting', 'pending')"
    )
    await database.execute("delete from interlock.tasks")


@pytest.mark.chaos
async def test_several_admitting_at_once_let_in_no_more_than_one_would(url: str, database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=7), Limit("sms", max_starts=5, period=MINUTE)])
    await enqueue_limited(database, 30)
    await enqueue_limited(database, 30, "sms")

    async def leader() -> int:
        async with connect(url) as connection:
            return sum([await admit(connection) for _ in range(5)])

    assert sum(await asyncio.gather(*(leader() for _ in range(4)))) == 12
    assert len(await rows(database, "pending")) == 12


async def test_a_key_whose_limit_was_deleted_holds_nothing(database: Connection) -> None:
    ids = await enqueue_limited(database, 3, "lifted", run_at=NOON + MINUTE)
    await delete_limits(database, ["lifted"], actor="test")
    assert await admit(database) == 3
    assert sorted(await rows(database, "pending")) == sorted((id_,) for id_ in ids)


async def test_a_limit_that_is_lifted_or_changed_is_so_for_what_waits(database: Connection) -> None:
    limit = Limit("mail", max_running=1)
    assert await put_limits(database, [limit]) == ["mail"]
    assert await put_limits(database, [limit]) == [], "nothing changes, nobody is woken"
    await enqueue_limited(database, 5)
    assert await admit(database) == 1
    await put_limits(database, [Limit("mail", max_running=3)])
    assert await admit(database) == 2
    assert [(limit.key, limit.max_running) for limit in await list_limits(database)] == [("mail", 3)]
    assert await delete_limits(database, ["mail", "other"], actor="test") == ["mail"]
    assert await admit(database) == 2


async def test_a_limit_that_is_lowered_takes_back_the_last_in_line(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=4)])
    ids = await enqueue_limited(database, 4)
    assert await admit(database) == 4
    await put_limits(database, [Limit("mail", max_running=1)])
    assert sorted(await sweep_limits(database, actor="leader", now=NOON)) == sorted(ids[1:])
    assert await rows(database, "pending") == [(ids[0],)]
    assert await rows(database, "waiting", "reason") == [("limit mail: more than 1 running",)] * 3
    assert await admit(database) == 0


async def test_requeued_tasks_wait_for_their_limit_again(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=1)])
    await enqueue_limited(database, 3)
    ended = []
    while await admit(database):
        ended.append(await end_one(database, TaskRowEvent.FAIL))
    assert sorted(await requeue_ended_tasks(database, ended, actor="ada", now=NOON)) == sorted(ended)
    assert len(await rows(database, "waiting")) == 3
    assert await admit(database) == 1


async def test_a_retried_task_keeps_its_place(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=1)])
    await enqueue_limited(database, 2)
    await admit(database)
    retried = await end_one(database, TaskRowEvent.RETRY)
    assert await admit(database) == 0
    assert await rows(database, "pending") == [(retried,)]


async def test_hold_reasons_are_written_on_change_for_the_next_tasks(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=1)])
    await enqueue_limited(database, 150)
    await admit(database)
    told = "xmin::text, reason"
    first = await rows(database, "waiting", told)
    assert sum(reason == "limit mail: 1 of 1 pending or running" for _, reason in first) == 100
    await admit(database)
    assert await rows(database, "waiting", told) == first, "nothing was written again"


async def test_past_starts_are_forgotten(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_starts=1, period=MINUTE)])
    await enqueue_limited(database, 2)
    for minute in range(2):
        assert await admit(database, NOON + minute * MINUTE) == 1
        await end_one(database, now=NOON + minute * MINUTE)
    await sweep_limits(database, actor="leader", now=NOON + MINUTE)
    found = await (await database.execute("select used_at from interlock.limit_usage")).fetchall()
    assert [row["used_at"] for row in found] == [NOON + MINUTE]


async def test_the_duty_rests_until_a_window_frees_a_start_and_at_most_until_the_sweep(database: Connection) -> None:
    await serve(database)
    duty = LimitsDuty("leader")
    assert await duty.run_once(database, now=NOON) == SWEEP_INTERVAL_S
    await put_limits(database, [Limit("mail", max_starts=1, period=2 * SECOND)])
    await enqueue_limited(database, 2)
    await duty.run_once(database, now=NOON)
    await end_one(database)
    assert await duty.run_once(database, now=NOON) == 2
    await put_limits(database, [Limit("many", max_running=5000)])
    await database.execute(
        "insert into interlock.tasks (type, state, held_by, limit_keys)"
        " select 'x', 'waiting', 'limit', '{unlimited}' from generate_series(1, 1500)"
    )
    assert await duty.run_once(database, now=NOON) == 0, "there is more to let in"
    assert await duty.run_once(database, now=NOON) == 2


@pytest.mark.parametrize("bound", [{"max_starts": 5, "period": 2 * SECOND}, {"max_running": 5}])
async def test_tasks_that_no_live_worker_runs_take_no_room(database: Connection, bound: dict[str, Any]) -> None:
    await put_limits(database, [Limit("mail", **bound)])
    await serve(database)
    await serve(database, "other", "printing", "print")
    await enqueue_limited(database, 5, namespace="nobody")
    await enqueue_limited(database, 5, namespace="printing")
    (startable,) = await enqueue_limited(database)
    await run_duty(database)
    assert await rows(database, "pending") == [(startable,)]
    assert await rows(database, "waiting", "reason") == [
        *[("limit mail: no live worker serves namespace 'nobody'",)] * 5,
        *[("limit mail: no live worker of namespace 'printing' has the handler x",)] * 5,
    ]
    await serve(database, "third", "nobody")
    await run_duty(database)
    assert len(await rows(database, "pending")) == 5


@pytest.mark.parametrize("bound", [{"max_starts": 1, "period": 2 * SECOND}, {"max_running": 1}])
async def test_an_admitted_task_whose_worker_ended_gives_its_place_back(
    database: Connection, bound: dict[str, Any]
) -> None:
    await put_limits(database, [Limit("mail", **bound)])
    await serve(database)
    await serve(database, "other", "elsewhere")
    (first,) = await enqueue_limited(database, namespace="elsewhere")
    (second,) = await enqueue_limited(database)
    await run_duty(database)
    assert await rows(database, "pending") == [(first,)]
    await deregister_worker(database, "other", now=NOON)
    await run_duty(database)
    assert await rows(database, "pending") == [(second,)]
    assert await rows(database, "waiting", "id, reason") == [
        (first, "limit mail: no live worker serves namespace 'elsewhere'")
    ]


async def test_a_reason_does_not_count_admitted_tasks_as_starts(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_starts=3, period=MINUTE)])
    await enqueue_limited(database, 4)
    await admit(database)
    told = "limit mail: 0 of 3 starts per 60 s used, 3 admitted and not started yet"
    assert await rows(database, "waiting", "reason") == [(told,)]
    await end_one(database)
    await admit(database)
    told = "limit mail: 1 of 3 starts per 60 s used, 2 admitted and not started yet, next at 2030-01-01 12:01:00 UTC"
    assert await rows(database, "waiting", "reason") == [(told,)]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "limit 'k': give max_running, or max_starts, max_weight or max_cost with a period"),
        ({"max_running": 0}, "max_running must be a whole number from 1 to 2147483647, not 0"),
        ({"max_starts": 3}, "max_starts, max_weight and max_cost need a period, and a period one of them"),
        ({"period": MINUTE}, "max_starts, max_weight and max_cost need a period, and a period one of them"),
        ({"max_weight": 0, "period": MINUTE}, "max_weight must be a number greater than 0, not 0"),
        ({"max_cost": float("inf"), "period": MINUTE}, "max_cost must be a number greater than 0, not inf"),
        ({"share": "much"}, "share must be a number greater than 0, not 'much'"),
        ({"max_starts": 3, "period": -MINUTE}, "period must be greater than 0, got -1 day, 23:59:00"),
    ],
)
def test_an_invalid_limit_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Limit("k", **options)


@pytest.mark.unit
def test_a_near_next_start_is_left_out() -> None:
    use = LimitUsage(
        "k",
        max_running=None,
        max_starts=2,
        max_weight=None,
        max_cost=None,
        period=SECOND,
        share=1,
        running=0,
        due=0,
        due_weight=0,
        starts=2,
        weight=0,
        cost=0,
    )
    assert use.hold_detail(1, NOON + SECOND, NOON) == "2 starts per 1 s reached"


@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
async def test_admission_goes_by_its_indexes(database: Connection, mode: str) -> None:
    database.prepare_threshold = 0
    await database.execute(f"set plan_cache_mode = {mode}".encode())
    await put_limits(database, [Limit("k0", max_running=10), Limit("k1", max_starts=20, period=MINUTE)])
    await database.execute("insert into interlock.tasks (type) select 'x' from generate_series(1, 20000)")
    await database.execute(
        "insert into interlock.tasks (type, state, held_by, limit_keys)"
        " select 'x', 'waiting', 'limit', array['k' || mod(n, 5)] from generate_series(1, 5000) as n"
    )
    await database.execute("analyze interlock.tasks")
    query = "select seq_scan from pg_stat_xact_user_tables where relname = 'tasks'"
    async with database.transaction():
        assert await admit(database) == 3030
        await sweep_limits(database, actor="leader", now=NOON)
        assert await (await database.execute(query)).fetchone() == {"seq_scan": 0}
