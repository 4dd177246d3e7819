"""The moves of task rows: claimed once, fenced, recovered, and recorded with who, why and which attempt."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from factories import enqueue
from interlock.lifecycle import TaskRowEvent
from interlock.model.options import NewTask
from interlock.postgres.connection import connect
from interlock.postgres.query import run
from interlock.store.enqueue import enqueue_task
from interlock.store.task_admin import (
    cancel_unfinished_tasks,
    exonerate_tasks,
    hold_pending_tasks,
    recover_expired_tasks,
    release_waiting_tasks,
    requeue_ended_tasks,
)
from interlock.store.tasks import (
    TASKS,
    ClaimedTask,
    HeldAttempt,
    LostAttempt,
    Outcome,
    claim_pending_tasks,
    has_suspected_tasks,
    read_task_history,
    renew_running_tasks,
    settle_running_tasks,
)

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
LEASE = timedelta(seconds=30)


async def enqueue_at_noon(database: Connection, count: int = 1, **options: Any) -> list[UUID]:
    return [await enqueue(database, **{"run_at": NOON, **options}) for _ in range(count)]


async def claim(
    database: Connection, actor: str = "w", limit: int = 1, now: datetime = NOON, *, suspected: bool = False
) -> list[ClaimedTask]:
    return await claim_pending_tasks(
        database, actor=actor, types=["x"], limit=limit, lease=LEASE, suspected=suspected, now=now
    )


async def crash(database: Connection, times: int) -> list[str]:
    """Claim a task and let its lease expire, so often; return the events of the recoveries."""
    events = []
    for _ in range(times):
        assert await claim(database, "w1") or await claim(database, "w1", suspected=True)
        ((_, event, _, _),) = await recover_expired_tasks(database, actor="w2", now=NOON + timedelta(hours=1))
        events.append(event)
    return events


async def row(database: Connection, task: UUID) -> dict[str, object]:
    found = await (await database.execute("select * from interlock.tasks where id = %s", [task])).fetchone()
    assert found is not None
    return found


async def test_claims_go_by_priority_then_time_then_age(database: Connection) -> None:
    (late,) = await enqueue_at_noon(database, run_at=NOON - timedelta(seconds=1))
    (early,) = await enqueue_at_noon(database, run_at=NOON - timedelta(seconds=2))
    (urgent,) = await enqueue_at_noon(database, priority=5)
    (future,) = await enqueue_at_noon(database, run_at=NOON + timedelta(seconds=1), priority=9)
    (elsewhere,) = await enqueue_at_noon(database, namespace="other", priority=9)
    claimed = [task.id for _ in range(4) for task in await claim(database, "w")]
    assert claimed == [urgent, early, late]
    assert {future, elsewhere}.isdisjoint(claimed)


TYPES = ["a", "b", "c", "d"]


async def claim_types(database: Connection, limit: int, **options: Any) -> list[UUID]:
    """Claim tasks of four types, in the order of their claims if they are claimed one by one."""
    return [
        task.id
        for task in await claim_pending_tasks(
            database, **{"actor": "w", "types": TYPES, "limit": limit, "lease": LEASE, "now": NOON, **options}
        )
    ]


async def enqueue_mixed(database: Connection) -> list[UUID]:
    """Enqueue due tasks of four types; return them in the order of the claim: priority, run_at, id."""
    made = [
        (-priority, NOON - timedelta(seconds=age), type_)
        for priority, age, type_ in itertools.product((0, 3), (1, 2), ("a", "c", "b"))
    ]
    made = made[::5] + made[1::5] + made[4::5] + made[2::5] + made[3::5]
    rows = [
        (priority, at, await enqueue(database, type_, priority=-priority, run_at=at)) for priority, at, type_ in made
    ]
    return [id_ for *_, id_ in sorted(rows)]


@pytest.mark.parametrize("limit", [1, 2, 5, 12])
async def test_claims_of_several_types_go_by_priority_then_time_then_age(database: Connection, limit: int) -> None:
    expected = await enqueue_mixed(database)
    await enqueue(database, "not served", priority=9, run_at=NOON - LEASE)
    await enqueue(database, "d", priority=9, run_at=NOON + LEASE)
    while expected:
        assert sorted(await claim_types(database, limit)) == sorted(expected[:limit])
        expected = expected[limit:]
    assert await claim_types(database, limit) == []


async def test_a_claim_of_several_types_passes_over_locked_tasks_and_locks_no_others(
    url: str, database: Connection
) -> None:
    expected = await enqueue_mixed(database)
    async with connect(url) as other, connect(url) as third, other.transaction():
        assert sorted(await claim_types(other, 3)) == sorted(expected[:3])
        async with database.transaction():
            assert sorted(await claim_types(database, 4)) == sorted(expected[3:7])
            assert sorted(await claim_types(third, 9)) == sorted(expected[7:])


async def test_each_namespace_gives_its_share_of_a_claim_of_several_types(database: Connection) -> None:
    ids = {
        namespace: [await enqueue(database, type_, namespace=namespace, run_at=NOON) for type_ in ("a", "b") * 3]
        for namespace in ("m", "n")
    }
    claimed = await claim_types(database, 4, namespaces=["m", "n", "empty"])
    assert sorted(claimed) == sorted(ids["m"][:2] + ids["n"][:2])


async def test_a_claim_of_recent_tasks_leaves_older_ones_to_a_full_one(database: Connection) -> None:
    (old, recent) = [await enqueue(database, run_at=NOON - timedelta(seconds=age)) for age in (11, 9)]
    assert await claim_types(database, 9, types=["x"], recent_s=10) == [recent]
    assert await claim_types(database, 9, types=["x"]) == [old]


@pytest.mark.parametrize(
    "name", ["plain", 'a "quoted", {braced} one', "back\\slash", "two\nlines\t", "null", "größer 🙂"]
)
async def test_a_task_is_claimed_whatever_its_type_and_namespace_are_called(database: Connection, name: str) -> None:
    namespace = " ".join(name.split())  # part of addresses: no control characters
    task = (await enqueue_task(database, NewTask(name, {}, namespace=namespace), actor="me")).id
    assert await claim_pending_tasks(database, actor="w", types=["n"], namespaces=["n"]) == []
    (claimed,) = await claim_pending_tasks(database, actor="w", types=["x", name], namespaces=["x", namespace])
    assert (claimed.id, claimed.type, claimed.namespace) == (task, name, namespace)


async def test_many_claimers_at_once_never_get_the_same_task(url: str, database: Connection) -> None:
    ids = await enqueue_at_noon(database, 200)

    async def claimer(name: str) -> list[UUID]:
        mine: list[UUID] = []
        async with connect(url) as connection:
            while claimed := await claim(connection, name, 7):
                mine += [task.id for task in claimed]
        return mine

    claims = await asyncio.gather(*(claimer(f"w{n}") for n in range(8)))
    assert sorted(id_ for mine in claims for id_ in mine) == sorted(ids)


async def test_enqueueing_the_same_id_twice_stores_one_task(database: Connection) -> None:
    same = uuid4()
    task = NewTask("x", {}, task_id=same)
    assert await enqueue_task(database, task, actor="me") == (same, True)
    assert await enqueue_task(database, task, actor="me") == (same, False)
    assert len(await read_task_history(database, same)) == 1


async def test_a_late_attempt_is_refused_and_writes_nothing(database: Connection) -> None:
    (task,) = await enqueue_at_noon(database)
    (first,) = await claim(database, "w1")
    later = NOON + timedelta(seconds=31)
    assert await recover_expired_tasks(database, actor="w2", now=later) == [(task, "expire", "default", None)]
    lost = [LostAttempt(task, first.attempt)]
    done = Outcome(task, first.attempt, TaskRowEvent.SUCCEED, output="late")
    assert (await settle_running_tasks(database, [done], actor="w1", now=later))[1] == lost, "while it is pending"
    assert await claim(database, "w2", now=later) == [], "it is suspected of killing its worker"
    (second,) = await claim(database, "w2", now=later, suspected=True)
    assert second.attempt == first.attempt + 1
    assert (await settle_running_tasks(database, [done], actor="w1", now=later))[1] == lost, "while another runs it"
    assert await renew_running_tasks(database, [HeldAttempt(task, first.attempt)], now=later) == ([], lost)
    assert await renew_running_tasks(database, [HeldAttempt(task, second.attempt)], now=later) == (
        [(task, None, None)],
        [],
    )
    assert (await row(database, task))["output"] is None


async def test_a_batch_settles_each_attempt_in_its_own_way(database: Connection) -> None:
    await enqueue_at_noon(database, 4)
    done, failed, retried, returned = await claim(database, "w", 4)
    again = NOON + timedelta(minutes=1)
    awaited, lost = await settle_running_tasks(
        database,
        [
            Outcome(done.id, 1, TaskRowEvent.SUCCEED, output={"n": 1}, cost=0.5),
            Outcome(failed.id, 1, TaskRowEvent.FAIL, error={"type": "ValueError"}, reason="ValueError: no"),
            Outcome(retried.id, 1, TaskRowEvent.RETRY, error={"type": "OSError"}, delay=60),
            Outcome(returned.id, 1, TaskRowEvent.RETURN, reason="shutdown"),
        ],
        actor="w",
        now=NOON,
    )
    assert (awaited, lost) == ([], [])
    rows = [await row(database, task.id) for task in (done, failed, retried, returned)]
    assert [r["state"] for r in rows] == ["done", "error", "pending", "pending"]
    assert [r["tries"] for r in rows] == [1, 1, 1, 0], "a task that is returned has used up no try"
    assert [r["attempt"] for r in rows] == [1, 1, 1, 1]
    assert [r["lease_expires_at"] for r in rows] == [None] * 4
    assert (rows[0]["output"], rows[0]["cost"]) == ({"n": 1}, 0.5)
    assert rows[2]["run_at"] == again


async def test_a_task_ends_in_error_after_three_crashes_in_a_row_and_uses_up_no_try(database: Connection) -> None:
    (task,) = await enqueue_at_noon(database, max_tries=1)
    assert await crash(database, 2) == ["expire", "expire"]
    suspect = await row(database, task)
    assert (suspect["state"], suspect["tries"], suspect["crashes"]) == ("pending", 0, 2)
    assert await crash(database, 1) == ["exhaust"]
    assert await recover_expired_tasks(database, actor="w2", now=NOON + timedelta(days=1)) == []
    ended = await row(database, task)
    assert (ended["state"], ended["tries"], ended["crashes"]) == ("error", 0, 3)
    assert "killed its worker 3 times" in str(ended["reason"])
    assert "killed its worker 3 times" in str(ended["error"])
    reasons = [line.reason or "" for line in await read_task_history(database, task) if line.event == "expire"]
    assert [reason.partition("; ")[2] for reason in reasons] == [
        "it may have killed its worker (1 of 3 times)",
        "it may have killed its worker (2 of 3 times)",
    ]


@pytest.mark.parametrize("event", [TaskRowEvent.RETRY, TaskRowEvent.RETURN])
async def test_a_settle_clears_the_suspicion(database: Connection, event: TaskRowEvent) -> None:
    (task,) = await enqueue_at_noon(database)
    await crash(database, 2)
    (claimed,) = await claim(database, suspected=True)
    await settle_running_tasks(database, [Outcome(task, claimed.attempt, event)], actor="w", now=NOON)
    assert (await row(database, task))["crashes"] == 0
    assert len(await claim(database)) == 1


async def test_suspected_tasks_are_claimed_with_the_fewest_crashes_first(database: Connection) -> None:
    bad, *others = await enqueue_at_noon(database, 3)
    await claim(database, limit=3)
    await recover_expired_tasks(database, actor="v", now=NOON + timedelta(hours=1))
    namespaces = {"types": ["x"], "namespaces": ["default"]}
    assert await has_suspected_tasks(database, now=NOON, **namespaces)
    assert not await has_suspected_tasks(database, now=NOON - timedelta(hours=1), **namespaces)
    (first,) = await claim(database, suspected=True)
    assert first.id == bad
    await recover_expired_tasks(database, actor="v", now=NOON + timedelta(hours=1))
    assert [(await claim(database, suspected=True))[0].id for _ in range(3)] == [*others, bad]
    assert not await has_suspected_tasks(database, now=NOON, **namespaces)


async def test_only_tasks_that_are_still_pending_after_that_attempt_are_exonerated(database: Connection) -> None:
    tasks = await enqueue_at_noon(database, 3)
    attempts = {claimed.id: claimed.attempt for claimed in await claim(database, limit=3)}
    assert await exonerate_tasks(database, attempts, now=NOON) == attempts, "none is recovered yet"
    await recover_expired_tasks(database, actor="v", now=NOON + timedelta(hours=1))
    (taken,) = await claim(database, suspected=True)
    (crashed,) = await claim(database, suspected=True)
    later = [Outcome(taken.id, taken.attempt, TaskRowEvent.SUCCEED)]
    await settle_running_tasks(database, later, actor="w", now=NOON)
    await recover_expired_tasks(database, actor="v", now=NOON + timedelta(hours=1))
    assert await exonerate_tasks(database, attempts, now=NOON) == {}
    counts = {id_: (await row(database, id_))["crashes"] for id_ in tasks}
    assert counts == {taken.id: 0, crashed.id: 2, tasks[2]: 0}


async def test_a_renewed_lease_is_not_recovered(database: Connection) -> None:
    (task,) = await enqueue_at_noon(database)
    (claimed,) = await claim(database, "w")
    await renew_running_tasks(
        database, [HeldAttempt(task, claimed.attempt)], lease=LEASE, now=NOON + timedelta(seconds=20)
    )
    assert await recover_expired_tasks(database, actor="v", now=NOON + timedelta(seconds=45)) == []
    assert len(await recover_expired_tasks(database, actor="v", now=NOON + timedelta(seconds=51))) == 1


async def test_a_requeued_task_has_new_tries_and_a_higher_fence(database: Connection) -> None:
    (task,) = await enqueue_at_noon(database, max_tries=1)
    await crash(database, 3)
    assert await requeue_ended_tasks(database, [task], actor="ada", reason="fixed", now=NOON) == [task]
    (claimed,) = await claim(database, "w")
    assert (claimed.attempt, claimed.tries) == (4, 1)


async def test_waiting_tasks_are_released_skipped_or_canceled_and_pending_ones_held(database: Connection) -> None:
    waiting = await enqueue_at_noon(database, 3, limit_key="mail")
    (pending,) = await enqueue_at_noon(database)
    assert await hold_pending_tasks(database, [pending], actor="m", held_by="namespace", detail="busy") == [pending]
    assert await claim(database, "w") == []
    assert set(await release_waiting_tasks(database, [waiting[0], pending], actor="m")) == {waiting[0], pending}
    skips = {
        "ids": waiting[:2],
        "reasons": ["other branch"] * 2,
        "skipped_by_failure": [False] * 2,
        "errors": [None] * 2,
    }
    skipped = await run(database, TASKS["skip_waiting_tasks"], {**skips, "actor": "m", "now": None})
    assert [row["id"] for row in skipped] == [waiting[1]]
    canceled = await cancel_unfinished_tasks(database, waiting, actor="ada", reason="changed my mind")
    assert set(canceled) == {waiting[0], waiting[2]}
    states = [(await row(database, task))["state"] for task in [*waiting, pending]]
    assert states == ["canceled", "skipped", "canceled", "pending"]


async def test_a_canceled_running_task_cannot_be_settled_any_more(database: Connection) -> None:
    (task,) = await enqueue_at_noon(database)
    (claimed,) = await claim(database, "w")
    assert await cancel_unfinished_tasks(database, [task], actor="ada", now=NOON) == [], "running ones only if told so"
    assert await cancel_unfinished_tasks(database, [task], actor="ada", now=NOON, running=True) == [task]
    done = Outcome(task, claimed.attempt, TaskRowEvent.SUCCEED)
    assert await settle_running_tasks(database, [done], actor="w", now=NOON) == (
        [],
        [LostAttempt(task, claimed.attempt)],
    )


async def test_the_history_shows_actor_event_and_reason(database: Connection) -> None:
    (task,) = await enqueue_at_noon(database)
    await claim(database, "w1")
    await recover_expired_tasks(database, actor="w2", now=NOON + timedelta(hours=1))
    await cancel_unfinished_tasks(database, [task], actor="ada", reason="enough")
    history = [(r.event, r.to_state, r.actor, r.attempt) for r in await read_task_history(database, task)]
    assert history == [
        ("create", "pending", "me", 0),
        ("claim", "running", "w1", 1),
        ("expire", "pending", "w2", 1),
        ("cancel", "canceled", "ada", 1),
    ]
    reasons = [r.reason for r in await read_task_history(database, task)]
    assert reasons[2] is not None
    assert reasons[2].startswith("the lease of w1 on attempt 1 ran out")
    assert reasons[3] == "enough"


async def test_ids_sort_by_time_on_this_server_and_on_older_ones(database: Connection) -> None:
    source = await (await database.execute("select prosrc from pg_proc where proname = 'new_id'")).fetchone()
    assert source is not None
    for expression in ("interlock.new_id()", OLDER):
        made = []
        for _ in range(5):
            found = await (await database.execute(f"select {expression} as id".encode())).fetchone()
            assert found is not None
            made.append(found["id"])
            await asyncio.sleep(0.002)  # ids are made of milliseconds: the next one must be another's
        assert made == sorted(made)
        assert {id_.version for id_ in made} == {7}
        assert {id_.variant for id_ in made} == {"specified in RFC 4122"}


OLDER = """encode(set_bit(set_bit(
    overlay(uuid_send(gen_random_uuid())
        placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
        from 1 for 6),
    52, 1), 53, 1), 'hex')::uuid"""
