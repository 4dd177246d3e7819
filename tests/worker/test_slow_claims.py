"""While claims are slow, because an old snapshot is held open, most of them look at recent tasks only."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

import interlock.worker.fetcher as fetcher_module
from factories import enqueue, task_row
from interlock.lifecycle import TaskRowEvent, WorkerState
from interlock.postgres.notifier import WakeMode
from interlock.store.limits import pause_namespace
from interlock.store.task_admin import hold_pending_tasks, release_waiting_tasks
from interlock.store.tasks import Outcome, claim_pending_tasks, notify_tasks, settle_running_tasks
from interlock.worker.fetcher import Fetcher
from interlock.worker.settings import WorkerSettings
from worker_support import serving, until

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


@pytest.fixture
def slow_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every claim that leaves no task behind counts as slow."""
    monkeypatch.setattr(fetcher_module, "SLOW_LOOK_S", -1.0)
    monkeypatch.setattr(fetcher_module, "SLOW_LOOK_PER_TASK_S", 0.0)
    monkeypatch.setattr(fetcher_module, "LOOK_SHARE", 1e9)


async def enqueue_late(database: Connection) -> UUID:
    """Enqueue a task as a transaction does that began a minute ago, without a notification."""
    async with database.transaction():
        await database.execute("set local session_replication_role = replica")
        return await enqueue(database, "add", {"a": 1, "b": 2}, run_at=datetime.now(UTC) - timedelta(minutes=1))


@pytest.mark.usefixtures("slow_looks")
async def test_after_slow_claims_only_some_look_at_tasks_of_any_age(
    database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "MAX_LOOK_INTERVAL_S", 3600.0)
    fetcher = Fetcher("w", WorkerSettings(), ["add"])
    for _ in range(fetcher_module.SLOW_LOOKS):
        assert await fetcher.claim(database, 5) == []
    late = await enqueue_late(database)
    assert await fetcher.claim(database, 5) == []
    new = [await enqueue(database, "add", priority=priority) for priority in (0, 5)]
    assert {task.id for task in await fetcher.claim(database, 5)} == set(new)
    fetcher.expect_older_tasks()
    assert [task.id for task in await fetcher.claim(database, 5)] == [late]
    assert await fetcher.claim(database, 5) == []
    monkeypatch.setattr(fetcher_module, "SLOW_LOOK_S", 60.0)
    late = await enqueue_late(database)
    fetcher.expect_older_tasks()
    assert [task.id for task in await fetcher.claim(database, 5)] == [late]
    late = await enqueue_late(database)
    assert [task.id for task in await fetcher.claim(database, 5)] == [late], "a fast look ends it"


@pytest.mark.usefixtures("slow_looks")
async def test_after_slow_recoveries_only_some_look_at_leases_of_any_age(
    database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def expire(seconds: float) -> UUID:
        task = await enqueue(database, "add")
        lease = timedelta(seconds=-seconds)
        assert len(await claim_pending_tasks(database, actor="dead", types=["add"], lease=lease)) == 1
        return task

    async def state(task: UUID) -> str:
        return str((await task_row(database, task))["state"])

    for interval_s, expected in ((3600.0, "running"), (0.0, "pending")):
        monkeypatch.setattr(fetcher_module, "FULL_RECOVERY_INTERVAL_S", interval_s)
        fetcher = Fetcher("w", WorkerSettings(recovery_interval=0.001), ["add"])
        for _ in range(fetcher_module.SLOW_LOOKS):
            await asyncio.sleep(0.001)
            assert await fetcher.recover(database)
        old, new = await expire(3600), await expire(0)
        await asyncio.sleep(0.001)
        assert await fetcher.recover(database)
        assert (await state(old), await state(new)) == (expected, "pending")


@pytest.mark.usefixtures("slow_looks")
async def test_full_claims_that_leave_tasks_behind_hide_none(database: Connection) -> None:
    fetcher = Fetcher("w", WorkerSettings(), ["add"])
    ids = {await enqueue(database, "add", run_at=datetime.now(UTC) - timedelta(minutes=n)) for n in range(12)}
    claimed = [task.id for _ in range(7) for task in await fetcher.claim(database, 2)]
    assert set(claimed) == ids


@pytest.mark.usefixtures("slow_looks")
@pytest.mark.parametrize("mode", list(WakeMode))
async def test_an_idle_worker_overlooks_no_late_task_for_longer_than_until_its_full_look(
    url: str, database: Connection, monkeypatch: pytest.MonkeyPatch, mode: WakeMode
) -> None:
    monkeypatch.setattr(fetcher_module, "SLOW_LOOKS", 1)
    monkeypatch.setattr(fetcher_module, "MAX_LOOK_INTERVAL_S", 0.5)
    async with serving(url, mode=mode, poll_base=0.01, poll_cap=60, events_poll=60) as worker:
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        await enqueue_late(database)
        await until(lambda: worker.context.tasks_processed == 1, within=30)


@pytest.mark.usefixtures("slow_looks")
async def test_an_idle_worker_starts_returned_and_released_tasks_at_once(
    url: str, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "MAX_LOOK_INTERVAL_S", 3600.0)
    task = await enqueue(database, "add", {"a": 1, "b": 2}, run_at=datetime.now(UTC) - timedelta(minutes=1))
    held = await enqueue(database, "add", {"a": 1, "b": 2}, run_at=datetime.now(UTC) - timedelta(minutes=1))
    assert await hold_pending_tasks(database, [held], actor="me", held_by="namespace") == [held]
    (claimed,) = await claim_pending_tasks(database, actor="other", types=["add"])
    assert claimed.id == task
    async with serving(url, mode=WakeMode.HYBRID, poll_base=0.01, poll_cap=0.05) as worker:
        await until(lambda: worker._components and worker.components.is_listening)  # noqa: SLF001 - it is not connected yet
        await until(lambda: worker.context.backoff_count > fetcher_module.SLOW_LOOKS)
        returned = Outcome(task, claimed.attempt, TaskRowEvent.RETURN)
        await settle_running_tasks(database, [returned], actor="other")
        await notify_tasks(database, ["default"])
        await until(lambda: worker.context.tasks_processed == 1)
        await release_waiting_tasks(database, [held], actor="me")
        await until(lambda: worker.context.tasks_processed == 2)


@pytest.mark.usefixtures("slow_looks")
async def test_a_worker_whose_namespaces_are_paused_rests(database: Connection) -> None:
    fetcher = Fetcher("w", WorkerSettings(), ["add"])
    for _ in range(fetcher_module.SLOW_LOOKS):
        assert await fetcher.claim(database, 5) == []
    await pause_namespace(database, "default", None, "ada")
    fetcher.reread_paused_namespaces()
    await fetcher.recover(database)
    assert await fetcher.claim(database, 5) == []
    fetcher.expect_older_tasks()
    assert await fetcher.seconds_until_due(database, 30.0) == 30.0, "no claim would look at any task"
