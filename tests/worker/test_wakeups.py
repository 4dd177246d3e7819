"""Wake modes: notifications wake an idle worker at once, polling finds tasks without them; fair claims."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from interlock.lifecycle import WorkerState
from interlock.model.options import NewTask
from interlock.postgres.notifier import WakeMode
from interlock.store.enqueue import enqueue_task
from interlock.store.tasks import claim_pending_tasks, until_next_run
from worker_support import serving, until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

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
        assert await until_next_run(database, types=["add"], namespaces=["default"], now=now) == left


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
