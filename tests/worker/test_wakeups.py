"""Wake modes: notifications wake an idle worker at once, polling finds tasks without them; fair claims."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from interlock.lifecycle import TaskRowEvent, WorkerState
from interlock.model.options import NewTask
from interlock.postgres.connection import connect
from interlock.postgres.notifier import DUE_CHANNEL, RELEASED_CHANNEL, TASKS_CHANNEL, WakeMode, listen, receive
from interlock.store.enqueue import enqueue_task, enqueue_tasks
from interlock.store.tasks import Outcome, claim_pending_tasks, settle_running_tasks, until_next_run
from interlock.worker.fetcher import poll_interval
from interlock.worker.settings import WorkerSettings
from worker_support import serving, until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection
    from interlock.worker.process import WorkerStateMachine

pytestmark = pytest.mark.flow

ADD = NewTask("add", {"a": 1, "b": 2})


@pytest.mark.parametrize("mode", [WakeMode.HYBRID, WakeMode.EVENTS])
async def test_a_notification_wakes_an_idle_worker_early(url: str, database: Connection, mode: WakeMode) -> None:
    async with serving(url, mode=mode, poll_base=60, poll_cap=60) as worker:
        await until(lambda: worker._components and worker.components.is_listening)  # noqa: SLF001 - it is not connected yet
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        await enqueue_task(database, ADD, actor="me")
        await until(lambda: worker.context.tasks_processed == 1)


async def test_polling_alone_finds_tasks_too(url: str, database: Connection) -> None:
    async with serving(url, mode=WakeMode.POLLING, poll_base=0.01, poll_cap=0.05) as worker:
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        await enqueue_task(database, ADD, actor="me")
        await until(lambda: worker.context.tasks_processed == 1)
        assert not worker.components.is_listening


@pytest.mark.unit
def test_polling_is_at_most_500_ms_apart_by_default() -> None:
    for empty_polls in (1, 2, 3, 10, 1_000):
        assert 0 < poll_interval(WorkerSettings(), empty_polls) <= 0.5


@pytest.mark.parametrize(
    ("mode", "polling"), [(WakeMode.HYBRID, {}), (WakeMode.EVENTS, {"events_poll": 0.3}), (WakeMode.POLLING, {})]
)
async def test_polling_finds_a_task_whose_notification_was_lost(
    url: str, database: Connection, mode: WakeMode, polling: dict[str, float]
) -> None:
    async with serving(url, mode=mode, **polling) as worker:
        await until(lambda: worker._components is not None)  # noqa: SLF001 - it is not connected yet
        await until(lambda: worker.components.is_listening is (mode is not WakeMode.POLLING))
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        async with database.transaction():
            await database.execute("set local session_replication_role = replica")  # the notifying trigger does not run
            await enqueue_task(database, ADD, actor="me")
        await until(lambda: worker.context.tasks_processed == 1)
        assert worker.components.statistics.tasks.fallback_hits == (0 if mode is WakeMode.POLLING else 1)


async def test_in_events_mode_a_worker_that_listens_polls_seldom(url: str, database: Connection) -> None:
    async with serving(url, mode=WakeMode.EVENTS, poll_base=0.001, poll_cap=0.001, events_poll=60) as worker:
        await until(lambda: worker._components and worker.components.is_listening)  # noqa: SLF001 - not connected yet
        await enqueue_task(database, ADD, actor="me")
        await until(lambda: worker.context.tasks_processed == 1)
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        polls = worker.context.backoff_count
        await asyncio.sleep(0.3)  # nothing happens, which no event can tell
        assert worker.context.backoff_count == polls


async def wait_for_idle(worker: WorkerStateMachine, database: Connection) -> None:
    """Wait until a worker has read the next due time and waits for notifications."""
    await until(lambda: worker._components and worker.components.is_listening)  # noqa: SLF001 - it is not connected yet
    async with asyncio.timeout(60):
        while not await (await database.execute(IS_IDLE)).fetchall():
            await asyncio.sleep(0.01)


IS_IDLE = """
select from pg_stat_activity
where datname = current_database() and state = 'idle' and pid <> pg_backend_pid()
    and query like 'with recursive levels%'
"""


@pytest.mark.parametrize("mode", [WakeMode.HYBRID, WakeMode.EVENTS])
async def test_an_idle_worker_starts_a_delayed_task_when_it_is_due(
    url: str, database: Connection, mode: WakeMode
) -> None:
    async with serving(url, mode=mode, poll_base=60, poll_cap=60, events_poll=60) as worker:
        await wait_for_idle(worker, database)
        for delay in (0.6, 0.3):  # the second notification carries the earlier time
            later = NewTask("add", {"a": 1, "b": 2}, delay=timedelta(seconds=delay))
            await enqueue_task(database, later, actor="me")
        await until(lambda: worker.context.tasks_processed == 2, within=30)


async def test_an_idle_worker_starts_the_retry_of_another_workers_task_when_it_is_due(
    url: str, database: Connection
) -> None:
    await enqueue_task(database, ADD, actor="me")
    (claimed,) = await claim_pending_tasks(database, actor="another", types=["add"])
    async with serving(url, mode=WakeMode.EVENTS, events_poll=60) as worker:
        await wait_for_idle(worker, database)
        retry = Outcome(claimed.id, claimed.attempt, TaskRowEvent.RETRY, error={"message": "no"}, delay=0.3)
        await settle_running_tasks(database, [retry], actor="another")
        await until(lambda: worker.context.tasks_processed == 1, within=30)


@pytest.mark.store
async def test_a_statement_sends_the_earliest_due_time_of_each_namespace_once(url: str, database: Connection) -> None:
    now = datetime.now(UTC)
    waits = {"a": (30, 10, 20), "b": (40,), "c": (0, 50), "d": (3600,), "e": (-60, 0)}
    tasks = [
        NewTask("add", {}, namespace=namespace, run_at=now + timedelta(seconds=seconds))
        for namespace, many in waits.items()
        for seconds in many
    ]
    async with connect(url) as listener:
        await listen(listener, [DUE_CHANNEL, TASKS_CHANNEL, RELEASED_CHANNEL])
        await enqueue_tasks(database, tasks, actor="me")
        told = await notifications(listener)
        assert told == {
            (DUE_CHANNEL, f"{(now + timedelta(seconds=10)).timestamp():.6f} a"),
            (DUE_CHANNEL, f"{(now + timedelta(seconds=40)).timestamp():.6f} b"),
            (TASKS_CHANNEL, "c"),
            (RELEASED_CHANNEL, "e"),
        }
        claimed = [
            (await claim_pending_tasks(database, actor="w", types=["add"], namespaces=["c"], now=now))[0],
            *await claim_pending_tasks(
                database, actor="w", types=["add"], namespaces=["a"], limit=3, now=now + timedelta(seconds=60)
            ),
        ]
        delays = {claimed[0].id: 5.0, **{task.id: 7.0 + place for place, task in enumerate(claimed[1:])}}
        retries = [
            Outcome(task.id, task.attempt, TaskRowEvent.RETRY, error={}, delay=delays[task.id]) for task in claimed
        ]
        await settle_running_tasks(database, retries, actor="w")
        told = await notifications(listener)
        rows = await (
            await database.execute("select run_at, namespace from interlock.tasks where tries > 0")
        ).fetchall()
        first = {name: min(row["run_at"] for row in rows if row["namespace"] == name) for name in ("a", "c")}
        assert {(DUE_CHANNEL, f"{at.timestamp():.6f} {name}") for name, at in first.items()} <= told
        assert len(told) < len(retries) + 1


async def notifications(listener: Connection) -> set[tuple[str, str]]:
    """Return the notifications that have arrived before one of our own."""
    told: set[tuple[str, str]] = set()

    def note(channel: str, payload: str) -> bool:
        told.add((channel, payload))
        return channel == TASKS_CHANNEL and payload == "the end"

    await listener.execute("select pg_notify('interlock_tasks', 'the end')")
    assert await receive(listener, 30, note)
    return told - {(TASKS_CHANNEL, "the end")}


async def test_a_task_for_later_is_run_when_it_is_due(url: str, database: Connection) -> None:
    async with serving(url, poll_base=60, poll_cap=60) as worker:
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        await database.execute("select interlock.enqueue('add', '{\"a\": 1, \"b\": 1}', delay => '0.3 s')")
        await database.execute("select interlock.enqueue('add', '{\"a\": 1, \"b\": 1}')")
        await until(lambda: worker.context.tasks_processed == 2)


async def test_a_task_that_became_due_since_the_claim_is_not_slept_over(database: Connection) -> None:
    await database.execute("select interlock.enqueue('add', delay => '1 h')")
    due = await (await database.execute("select run_at from interlock.tasks")).fetchone()
    assert due is not None
    for left in (timedelta(minutes=1), timedelta(milliseconds=-10)):
        now = due["run_at"] - left
        found = await until_next_run(database, types=["add"], namespaces=["default"], now=now)
        assert found.remaining == left


@pytest.mark.store
async def test_the_next_due_task_is_found_among_all_priorities_and_namespaces(database: Connection) -> None:
    now = datetime.now(UTC)
    for namespace, priority, seconds in (("a", 5, 50), ("a", 0, 40), ("a", -3, 30), ("b", 9, 20), ("c", 0, 10)):
        later = NewTask("add", {}, namespace=namespace, priority=priority, run_at=now + timedelta(seconds=seconds))
        await enqueue_task(database, later, actor="me")
    await enqueue_task(database, NewTask("other", {}, namespace="a", run_at=now + timedelta(seconds=1)), actor="me")
    for namespaces, seconds in ((["a"], 30), (["a", "b"], 20), (["b", "c"], 10)):
        found = await until_next_run(database, types=["add"], namespaces=namespaces, now=now)
        assert found.remaining == timedelta(seconds=seconds)


async def test_a_worker_is_notified_of_its_own_namespaces_only(url: str, database: Connection) -> None:
    async with serving(url, namespaces=("mine",), poll_base=60, poll_cap=60) as worker:
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        await enqueue_task(database, ADD, actor="me")
        await enqueue_task(database, NewTask("add", {"a": 1, "b": 2}, namespace="mine"), actor="me")
        await until(lambda: worker.context.tasks_processed == 1)
    (left,) = await (await database.execute("select state from interlock.tasks where namespace = 'default'")).fetchall()
    assert left["state"] == "pending"


@pytest.mark.store
async def test_a_claim_takes_fair_shares_of_the_namespaces(database: Connection) -> None:
    for namespace, count in (("loud", 100), ("quiet", 3), ("calm", 3)):
        for _ in range(count):
            await enqueue_task(database, NewTask("add", {}, namespace=namespace, priority=5), actor="me")
    namespaces = ("loud", "quiet", "calm")
    claimed = await claim_pending_tasks(database, actor="w", types=["add"], namespaces=namespaces, limit=9)
    assert Counter(task.namespace for task in claimed) == {"loud": 3, "quiet": 3, "calm": 3}
    claimed = await claim_pending_tasks(database, actor="w", types=["add"], namespaces=namespaces, limit=9)
    assert Counter(task.namespace for task in claimed) == {"loud": 3}


@pytest.mark.store
async def test_a_worker_never_claims_a_type_that_it_does_not_know(database: Connection) -> None:
    await enqueue_task(database, NewTask("unknown", {}), actor="me")
    await enqueue_task(database, ADD, actor="me")
    claimed = await claim_pending_tasks(database, actor="w", types=["add"], limit=10)
    assert [task.type for task in claimed] == ["add"]
