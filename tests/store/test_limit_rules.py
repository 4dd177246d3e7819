"""Rules of limits: patterns, several keys, weights, budgets and fair shares; tokens are taken by the claim."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import enqueue_by_sql
from interlock import InputError, Interlock
from interlock.errors import DefinitionError, StatementError
from interlock.lifecycle import TaskRowEvent
from interlock.model.options import NewTask
from interlock.postgres.connection import connect
from interlock.store.enqueue import enqueue_task, enqueue_tasks
from interlock.store.limits import Limit, admit_limited_tasks, put_limits, record_reported_usage, sweep_limits
from interlock.store.stats import list_limits
from interlock.store.tasks import Outcome, claim_limited_tasks, claim_pending_tasks, settle_running_tasks
from interlock.store.tasks import until_limited_start as until_start

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask

pytestmark = pytest.mark.store

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(seconds=60)
X: dict[str, Any] = {"types": ["x"], "actor": "w"}


@pytest.fixture
async def app(url: str) -> AsyncIterator[Interlock]:
    async with Interlock(url, actor="shop") as opened:
        yield opened


async def add(database: Connection, *keys: str, count: int = 1, **options: Any) -> None:
    task = NewTask("x", {}, **{"run_at": NOON - MINUTE, "limit_keys": keys, **options})
    await enqueue_tasks(database, [task] * count, actor="me")


async def admit(database: Connection, now: datetime = NOON) -> int:
    return (await admit_limited_tasks(database, actor="leader", now=now)).released


async def claim(database: Connection, limit: int = 100, now: datetime = NOON) -> list[ClaimedTask]:
    return await claim_limited_tasks(database, limit=limit, now=now, **X)


async def end(
    database: Connection,
    claimed: list[ClaimedTask],
    event: TaskRowEvent = TaskRowEvent.SUCCEED,
    now: datetime = NOON,
    **reported: Any,
) -> None:
    outcomes = [Outcome(task.id, task.attempt, event, **reported) for task in claimed]
    await settle_running_tasks(database, outcomes, actor="w", now=now)
    await record_reported_usage(database, outcomes, now=now)


async def reasons(database: Connection) -> set[str]:
    query = "select distinct reason from interlock.tasks where state = 'waiting'"
    return {row["reason"] for row in await (await database.execute(query)).fetchall()}


async def release_all(database: Connection) -> None:
    await database.execute(
        "update interlock.tasks set state = 'pending', event = 'release', held_by = null where state = 'waiting'"
    )


# --- tokens


async def test_a_claim_starts_no_more_than_the_tokens_that_are_left(database: Connection) -> None:
    await put_limits(database, [Limit("api", max_starts=3, period=MINUTE)])
    await add(database, "api", count=10)
    await release_all(database)
    assert [len(await claim(database, 2)) for _ in range(3)] == [2, 1, 0]
    assert await claim(database, now=NOON + MINUTE - timedelta(microseconds=1)) == []
    assert len(await claim(database, now=NOON + MINUTE)) == 3


async def test_a_session_with_another_isolation_level_claims_under_read_committed(database: Connection) -> None:
    """Such as one behind a pooler, where nothing can be set for the session."""
    await put_limits(database, [Limit("api", max_starts=3, period=MINUTE)])
    await add(database, "api", count=10)
    await release_all(database)
    await database.execute("set default_transaction_isolation = 'repeatable read'")
    assert [len(await claim(database, 2)) for _ in range(3)] == [2, 1, 0]


async def test_a_claim_without_a_limit_leaves_tasks_with_a_limit_alone(database: Connection) -> None:
    await put_limits(database, [Limit("api", max_running=5)])
    await add(database, "api")
    await admit(database)
    assert await claim_pending_tasks(database, now=NOON, **X) == []
    assert len(await claim(database)) == 1


async def test_each_start_of_a_retried_task_takes_a_token(database: Connection) -> None:
    await put_limits(database, [Limit("api", max_starts=2, period=MINUTE)])
    await add(database, "api")
    await admit(database)
    for _ in range(2):
        claimed = await claim(database)
        assert len(claimed) == 1
        await end(database, claimed, TaskRowEvent.RETRY)
    assert await claim(database) == []
    assert len(await sweep_limits(database, actor="leader", now=NOON)) == 1
    assert await reasons(database) == {"limit api: 2 starts per 60 s reached"}
    await admit(database)
    assert await reasons(database) == {"limit api: 2 starts per 60 s reached, next at 2030-01-01 12:01:00 UTC"}
    assert await admit(database, NOON + MINUTE) == 1


async def test_a_key_whose_tokens_are_being_taken_is_passed_over_and_others_are_not(
    url: str, database: Connection
) -> None:
    await put_limits(database, [Limit("*", max_starts=5, period=MINUTE)])
    await add(database, "a", count=20)
    await add(database, "b", count=4)
    await release_all(database)
    async with connect(url) as other:
        async with other.transaction():
            first = await claim(other, 2)
            assert len(first) == 2
            second = await claim(database)
            assert len(second) == 4, "those of the other key"
        assert len(await claim(database)) == 3, "the rest of the tokens of the first key"


async def test_a_token_without_a_time_counts_as_used_now(database: Connection) -> None:
    """A worker that dies after its claim leaves such tokens; the leader gives them a time."""
    await put_limits(database, [Limit("api", max_starts=1, period=MINUTE)])
    await add(database, "api", count=2)
    await database.execute("insert into interlock.limit_usage (key, used_at, starts) values ('api', 'infinity', 1)")
    await release_all(database)
    assert await claim(database, now=NOON + 24 * 60 * MINUTE) == []
    await admit(database)
    assert await claim(database, now=NOON + MINUTE - SECOND) == []
    assert len(await claim(database, now=NOON + MINUTE)) == 1


async def test_the_time_until_the_next_start_is_that_of_the_token(database: Connection) -> None:
    await put_limits(database, [Limit("api", max_starts=1, period=MINUTE)])
    where: dict[str, Any] = {"types": ["x"], "namespaces": ["default"]}
    assert await until_start(database, now=NOON, **where) is None
    await add(database, "api", count=2)
    await release_all(database)
    assert (await until_start(database, now=NOON, **where) or MINUTE) <= timedelta()
    await claim(database)
    assert await until_start(database, now=NOON + 20 * SECOND, **where) == 40 * SECOND


async def test_claims_refuse_an_isolation_level_that_would_not_see_the_tokens_of_others(database: Connection) -> None:
    await put_limits(database, [Limit("api", max_starts=1, period=MINUTE)])
    await add(database, "api")
    async with database.transaction(force_rollback=True):
        await database.execute("set transaction isolation level repeatable read")
        with pytest.raises(StatementError, match="read committed"):
            await claim(database)


# --- patterns and several keys


async def test_a_pattern_gives_each_key_its_own_counters_and_the_most_specific_rule_wins(database: Connection) -> None:
    rules = [
        Limit("*", max_running=9),
        Limit("mail:*", max_running=1),
        Limit("mail:big:*", max_running=3),
        Limit("mail:acme", max_running=2),
    ]
    await put_limits(database, rules)
    for key in ("other", "mail:x", "mail:y", "mail:big:z", "mail:acme"):
        await add(database, key, count=10)
    await admit(database)
    found = {limit.key: (limit.rule, limit.taken) for limit in await list_limits(database, now=NOON)}
    assert {key: use for key, use in found.items() if use[1]} == {
        "other": ("*", 9),
        "mail:x": ("mail:*", 1),
        "mail:y": ("mail:*", 1),
        "mail:big:z": ("mail:big:*", 3),
        "mail:acme": ("mail:acme", 2),
    }


async def test_all_keys_of_a_task_must_have_room(database: Connection) -> None:
    await put_limits(database, [Limit("mail:*", max_running=2), Limit("smtp", max_starts=3, period=MINUTE)])
    await add(database, "mail:a", "smtp", count=5)
    await add(database, "mail:b", "smtp", count=5)
    assert await admit(database) == 3
    assert await reasons(database) == {
        "limit mail:a: 2 of 2 pending or running",
        "limit smtp: 0 of 3 starts per 60 s used, 3 admitted and not started yet",
    } or await reasons(database) == {
        "limit mail:b: 2 of 2 pending or running",
        "limit smtp: 0 of 3 starts per 60 s used, 3 admitted and not started yet",
    }
    await end(database, await claim(database))
    assert await admit(database) == 0
    assert await admit(database, NOON + MINUTE) == 3


async def test_keys_and_weights_are_rendered_from_the_arguments(app: Interlock, database: Connection) -> None:
    await put_limits(database, [Limit("mail:*", share=1), Limit("smtp", share=1)])

    @app.task(limit_key=["mail:{tenant}:{urgent}", "smtp"], limit_weight="{tokens}")
    async def send(tenant: int, tokens: float = 7, *, urgent: bool = False) -> None: ...

    one = await send.enqueue(tenant=5)
    (many,) = await send.enqueue_many([{"tenant": 6, "tokens": 2.5, "urgent": True}])
    query = "select limit_keys, limit_weight from interlock.tasks where id = any (%s) order by id"
    stored = await (await database.execute(query, [[one.id, many.id]])).fetchall()
    assert [tuple(row.values()) for row in stored] == [
        (["mail:5:false", "smtp"], 7.0),
        (["mail:6:true", "smtp"], 2.5),
    ]
    given = {"type": "send", "input": '{"tenant": "t", "n": 3}', "limit_keys": ["mail:{tenant}"], "limit_weight": "{n}"}
    by_sql = await enqueue_by_sql(database, **given)
    (row,) = await (await database.execute(query, [[by_sql]])).fetchall()
    assert tuple(row.values()) == (["mail:t"], 3.0)


async def test_an_argument_that_makes_no_key_is_refused(app: Interlock, database: Connection) -> None:
    await put_limits(database, [Limit("mail:*", share=1)])

    @app.task(limit_key="mail:{tenant}")
    async def send(tenant: str | None) -> None: ...

    for bad in ("", "a*", "{x}", None):
        with pytest.raises(InputError, match=r"limit key mail:{tenant}: the argument tenant must be a number"):
            await send.enqueue(tenant=bad)
    with pytest.raises(InputError, match=r"limit key mail:{tenant}: the argument tenant must be a number"):
        await enqueue_task(database, NewTask("send", {}, limit_keys=("mail:{tenant}",)), actor="me")


@pytest.mark.unit
def test_a_placeholder_that_names_no_parameter_is_refused_where_it_is_written() -> None:
    app = Interlock("postgresql://nowhere/none")
    with pytest.raises(DefinitionError, match=r"task send: limit_key 'mail:{tenant}' names the argument 'tenant'"):

        @app.task(limit_key="mail:{tenant}")
        async def send(to: str) -> None: ...

    @app.task
    async def plain(to: str) -> None: ...

    with pytest.raises(InputError, match=r"limit_weight '{tokens}' names the argument 'tokens', and the task has to"):
        plain.options(limit_weight="{tokens}")


async def test_an_undeclared_key_is_refused_by_every_way_to_enqueue(app: Interlock, database: Connection) -> None:
    await put_limits(database, [Limit("mail:*", max_running=1)])

    @app.task(limit_key="male:{tenant}")
    async def send(tenant: str) -> None: ...

    refusal = (
        r"task send: no limit is declared for its limit key 'male:a'; declare one with app\.limit\('male:a', \.\.\.\) "
        r"or with `interlock limits set`, for the key or for a pattern such as male:\*"
    )
    for stored in (
        lambda: send.enqueue(tenant="a"),
        lambda: send.enqueue_many([{"tenant": "a"}]),
        lambda: app.enqueue_many([send.prepare(tenant="a")]),
    ):
        with pytest.raises(InputError, match=refusal):
            await stored()
    with pytest.raises(Exception, match=refusal):
        await enqueue_by_sql(database, type="send", limit_keys=["male:a"])
    assert await (await database.execute("select from interlock.tasks")).fetchall() == []


# --- weights and budgets


async def test_weights_of_starts_are_limited_and_corrected_by_what_is_reported(database: Connection) -> None:
    await put_limits(database, [Limit("llm", max_weight=100, period=MINUTE)])
    await add(database, "llm", count=5, limit_weight="40")
    assert await admit(database) == 2
    assert await reasons(database) == {
        "limit llm: weight of 0 of 100 per 60 s used, 80 admitted and not started yet, 40 needed"
    }
    claimed = await claim(database)
    assert len(claimed) == 2
    await end(database, claimed[:1], weight=5.0)
    assert await admit(database) == 1, "45 are used"
    claimed += await claim(database)
    await end(database, claimed[1:], weight=70.0)
    assert await admit(database, NOON + MINUTE - SECOND) == 0, "145 are used"
    assert await admit(database, NOON + MINUTE) == 2


async def test_the_claim_holds_the_weight_whatever_is_pending(database: Connection) -> None:
    await put_limits(database, [Limit("llm", max_weight=100, period=MINUTE)])
    await add(database, "llm", count=3, limit_weight="60")
    await add(database, "llm", limit_weight="30")
    await release_all(database)
    assert len(await claim(database)) == 2, "60 and 30"
    assert await claim(database) == []
    assert len(await claim(database, now=NOON + MINUTE)) == 1


@pytest.mark.parametrize("heavy", [8, 15])
async def test_a_heavy_task_starts_although_lighter_ones_of_another_lane_keep_coming(
    database: Connection, heavy: int
) -> None:
    await put_limits(database, [Limit("llm", max_weight=10, period=MINUTE), Limit("tenant:*", share=1)])
    await add(database, "tenant:light", "llm", count=10)
    await admit(database)
    await end(database, await claim(database, 5))
    await end(database, await claim(database, 5, now=NOON + 30 * SECOND), now=NOON + 30 * SECOND)
    await add(database, "tenant:heavy", "llm", limit_weight=str(heavy))
    started = []
    for half_minute in range(2, 12):
        now = NOON + half_minute * 30 * SECOND
        await add(database, "tenant:light", "llm", count=10)
        await admit(database, now)
        claimed = await claim(database, now=now)
        started.append(sum("tenant:heavy" in task.own("limit_keys") for task in claimed))
        await end(database, claimed, now=now)
    assert sum(started[:4]) == 1, f"the heavy task did not start within two windows: {started}"
    assert sum(started) == 1


async def test_lighter_tasks_do_not_pass_a_heavy_retry_for_ever(database: Connection) -> None:
    await put_limits(database, [Limit("llm", max_weight=10, period=MINUTE)])
    await add(database, "llm", limit_weight="8")
    await admit(database)
    heavy = await claim(database)
    await end(database, heavy, TaskRowEvent.RETRY)
    started = []
    for half_minute in range(6):
        now = NOON + half_minute * 30 * SECOND
        await add(database, "llm", count=10, priority=1)
        await admit(database, now)
        claimed = await claim(database, now=now)
        started += [task.id for task in claimed]
        await end(database, claimed, now=now)
    assert heavy[0].id in started


async def test_a_lane_that_its_own_limit_blocks_reserves_nothing(database: Connection) -> None:
    rules = [Limit("llm", max_weight=10, period=MINUTE), Limit("tenant:*", max_running=1)]
    await put_limits(database, rules)
    await add(database, "tenant:heavy", "llm", limit_weight="8")
    await admit(database)
    await claim(database)
    await add(database, "tenant:heavy", "llm", limit_weight="8")
    await add(database, "tenant:light", "llm")
    assert await admit(database) == 1


async def test_other_lanes_name_the_heavier_task_that_is_before_them(database: Connection) -> None:
    await put_limits(database, [Limit("llm", max_weight=10, period=MINUTE), Limit("tenant:*", share=1)])
    await add(database, "tenant:light", "llm", count=5)
    await admit(database)
    await claim(database)
    await add(database, "tenant:heavy", "llm", limit_weight="8")
    await add(database, "tenant:light", "llm")
    await database.execute("insert into interlock.limit_lanes (keys, served) values ('{tenant:heavy,llm}', 0)")
    assert await admit(database) == 0
    told = "limit llm: weight of 5 of 10 per 60 s used"
    next_at = "next at 2030-01-01 12:01:00 UTC"
    assert await reasons(database) == {
        f"{told}, 8 needed, {next_at}",
        f"{told}, 1 needed, after a task of weight 8, {next_at}",
    }


async def test_a_lowered_weight_holds_for_tasks_that_are_pending_already(database: Connection) -> None:
    await put_limits(database, [Limit("llm", max_weight=100, period=MINUTE)])
    await add(database, "llm", count=5, limit_weight="20")
    assert await admit(database) == 5
    await put_limits(database, [Limit("llm", max_weight=40, period=MINUTE)])
    assert await sweep_limits(database, actor="leader", now=NOON) == []
    assert [len(await claim(database, now=NOON + minute * MINUTE)) for minute in range(3)] == [2, 2, 1]


async def test_a_task_that_is_heavier_than_the_limit_starts_in_an_empty_window(database: Connection) -> None:
    await put_limits(database, [Limit("llm", max_weight=10, period=MINUTE)])
    await add(database, "llm")
    await add(database, "llm", limit_weight="500", run_at=NOON)
    assert await admit(database) == 1
    await end(database, await claim(database))
    assert await admit(database, NOON + MINUTE - SECOND) == 0
    assert await admit(database, NOON + MINUTE) == 1
    assert len(await claim(database, now=NOON + MINUTE)) == 1


async def test_a_budget_holds_tasks_once_it_is_spent_and_says_until_when(database: Connection) -> None:
    await put_limits(database, [Limit("llm", max_cost=10, period=MINUTE)])
    await add(database, "llm", count=200)
    assert await admit(database) == 100, "of those whose cost is not known yet, no more are pending"
    first = await claim(database, 3)
    await end(database, first[:2], cost=4.0)
    await end(database, first[2:], TaskRowEvent.RETRY, now=NOON + 10 * SECOND, cost=4.0)
    assert await claim(database, now=NOON + 20 * SECOND) == [], "12 are spent"
    await sweep_limits(database, actor="leader", now=NOON + 20 * SECOND)
    await admit(database, NOON + 20 * SECOND)
    query = "select id, reason from interlock.tasks where state = 'waiting' order by priority desc, run_at, id limit 1"
    (held,) = await (await database.execute(query)).fetchall()
    assert held["reason"] == "limit llm: cost of 12 of 10 per 60 s spent, next at 2030-01-01 12:01:00 UTC"
    assert await admit(database, NOON + MINUTE) == 100
    assert len(await claim(database, 5, NOON + MINUTE)) == 5


# --- fairness


async def order_of_admission(database: Connection, rounds: int) -> list[str]:
    """Let one task after another start and end under a limit of one; return their first keys."""
    order = []
    for _ in range(rounds):
        await admit(database)
        (task,) = await claim(database)
        order.append(task.own("limit_keys")[0])
        await end(database, [task])
    return order


async def test_a_tenant_with_many_tasks_does_not_keep_another_waiting(database: Connection) -> None:
    await put_limits(database, [Limit("mail:*", share=1), Limit("smtp", max_running=1)])
    await add(database, "mail:big", "smtp", count=2000)
    await add(database, "mail:small", "smtp", count=25, run_at=NOON)
    counted = Counter(await order_of_admission(database, 40))
    assert counted == {"mail:big": 20, "mail:small": 20}


async def test_lanes_get_their_shares_in_one_round_and_by_weight(database: Connection) -> None:
    await put_limits(
        database, [Limit("mail:*", share=1), Limit("mail:gold", share=3), Limit("smtp", max_starts=40, period=MINUTE)]
    )
    await add(database, "mail:iron", "smtp", count=100)
    await add(database, "mail:gold", "smtp", count=100)
    await add(database, "mail:heavy", "smtp", count=100, limit_weight="2")
    assert await admit(database) == 40
    taken = {limit.key: limit.taken for limit in await list_limits(database, now=NOON)}
    assert abs(taken["mail:gold"] - 3 * taken["mail:iron"]) <= 3
    assert abs(taken["mail:iron"] - 2 * taken["mail:heavy"]) <= 2


async def test_a_lane_that_was_idle_does_not_make_up_for_it(database: Connection) -> None:
    await put_limits(database, [Limit("mail:*", share=1), Limit("smtp", max_running=1)])
    await add(database, "mail:a", "smtp", count=100)
    await order_of_admission(database, 20)
    await add(database, "mail:b", "smtp", count=100)
    assert Counter(await order_of_admission(database, 20)) == {"mail:a": 10, "mail:b": 10}


async def test_priority_decides_within_a_lane(database: Connection) -> None:
    await put_limits(database, [Limit("mail:*", share=1), Limit("smtp", max_running=1)])
    await add(database, "mail:a", "smtp", count=5)
    await add(database, "mail:a", "smtp", priority=9)
    await add(database, "mail:b", "smtp", count=5)
    await order_of_admission(database, 2)
    query = "select priority from interlock.tasks where state = 'done' and 'mail:a' = any (limit_keys)"
    assert [row["priority"] for row in await (await database.execute(query)).fetchall()] == [9]


async def test_ten_thousand_tasks_of_one_lane_are_one_step_of_the_walk(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=1)])
    await database.execute(
        "insert into interlock.tasks (type, state, held_by, limit_keys)"
        " select 'x', 'waiting', 'limit', '{mail}' from generate_series(1, 10000)"
    )
    await database.execute("vacuum analyze interlock.tasks")
    read = "select idx_tup_fetch from pg_stat_xact_user_tables where relname = 'tasks'"
    async with database.transaction():
        assert await admit(database) == 1
        row = await (await database.execute(read)).fetchone()
        assert row is not None
        assert row["idx_tup_fetch"] < 1000
