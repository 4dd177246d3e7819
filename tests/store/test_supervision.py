"""Who may act on a supervised row, and what is freed, as the database decides it; no process is started here."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from interlock.lifecycle import SupervisedWorkerEvent as Event
from interlock.model.options import NewTask
from interlock.store.enqueue import enqueue_task
from interlock.store.pools import delete_abandoned_pools, even_out_pools, hold_bound_pool, list_pools
from interlock.store.supervision import HeldWorker, Supervision
from interlock.store.tasks import claim_pending_tasks
from interlock.store.workers import (
    RegisteredProcess,
    WorkerSpec,
    create_worker,
    deregister_worker,
    detach_process,
    ensure_registered,
    move_worker,
    read_worker,
    register_worker,
)

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

ONE = Supervision("one", "here")
OTHER = Supervision("other", "here")
FAR = Supervision("far", "there")
NOW = datetime(2030, 1, 1, tzinfo=UTC)
LONG = timedelta(hours=1)


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


async def started(database: Connection, **spec: Any) -> str:
    worker = await create_worker(database, spec=WorkerSpec(**spec), actor="ada", now=NOW)
    await move_worker(database, worker, Event.START_TASK, actor="ada", now=NOW)
    return worker


async def held(database: Connection, supervision: Supervision, seconds: float = 0) -> HeldWorker:
    """Take the one row that there is, and read it."""
    await supervision.lease_workers(database, limit=10, now=at(seconds))
    (row,) = await supervision.read_held_workers(database, now=at(seconds))
    return row


async def with_a_process(database: Connection, supervision: Supervision = ONE) -> HeldWorker:
    row = await held(database, supervision)
    generation = await supervision.announce_process(database, row, "w-1-x", now=NOW)
    assert generation == row.generation + 1
    await supervision.record_process(database, row.id, generation, 4711, "then")
    (row,) = await supervision.read_held_workers(database, now=NOW)
    return row


async def test_a_row_is_one_supervisor_s_until_its_lease_runs_out(database: Connection) -> None:
    worker = await started(database)
    assert await ONE.lease_workers(database, limit=10, now=NOW) == [worker]
    assert await OTHER.lease_workers(database, limit=10, now=at(9)) == []
    await ONE.renew_held_workers(database, now=at(9))
    assert await OTHER.lease_workers(database, limit=10, now=at(18)) == []
    assert await OTHER.lease_workers(database, limit=10, now=at(20)) == [worker]
    assert await ONE.read_held_workers(database, now=at(20)) == []
    await OTHER.release_held_workers(database)
    assert await ONE.lease_workers(database, limit=10, now=at(20)) == [worker]


async def test_rows_without_work_are_not_claimed(database: Connection) -> None:
    idle = await create_worker(database, actor="ada")
    await register_worker(database, RegisteredProcess("by hand"))
    paused = await started(database)
    await move_worker(database, paused, Event.PAUSE, actor="ada")
    assert await ONE.lease_workers(database, limit=10) == []
    await move_worker(database, idle, Event.START_TASK, actor="ada")
    assert await ONE.lease_workers(database, limit=10) == [idle]


async def test_a_stale_owner_of_a_row_writes_nothing(database: Connection) -> None:
    await started(database)
    row = await with_a_process(database)
    later = at(11)
    await OTHER.lease_workers(database, limit=10, now=later)
    assert await ONE.announce_process(database, row, "again", now=later) is None
    async with ONE.lock_held_worker(database, row, now=later) as mine:
        assert not mine
    async with OTHER.lock_held_worker(database, row, now=later) as mine:
        assert mine
    await ONE.record_process_end(database, row, "gone", crashes=3, now=later)
    assert (await OTHER.read_held_workers(database, now=later))[0].crashes == 0
    assert await OTHER.announce_process(database, row, "again", now=later) == 2
    async with OTHER.lock_held_worker(database, row, now=later) as mine:
        assert not mine, "this was the generation before"


async def test_a_process_on_another_host_is_replaced_only_when_it_is_silent(database: Connection) -> None:
    await started(database)
    row = await with_a_process(database)
    said = RegisteredProcess(row.id, generation=1)
    assert await ensure_registered(database, said, now=at(0)) == "RUNNING"
    assert await ensure_registered(database, said, now=at(10)) == "RUNNING"
    assert await FAR.lease_workers(database, limit=10, now=at(20)) == []
    assert await FAR.lease_workers(database, limit=10, now=at(26)) == [row.id]


async def test_a_replaced_process_can_neither_heartbeat_nor_deregister(database: Connection) -> None:
    await started(database)
    row = await with_a_process(database)
    first, second = RegisteredProcess(row.id, generation=1), RegisteredProcess(row.id, generation=2)
    assert await ONE.announce_process(database, row, "w-2-x", now=NOW) == 2
    assert await ensure_registered(database, second, now=NOW) == "RUNNING"
    assert await ensure_registered(database, first, now=NOW) == "TERMINATED"
    await detach_process(database, first, now=NOW)
    seen = (await read_worker(database, row.id))["seen_until"]
    assert seen > NOW
    await detach_process(database, second, now=NOW)
    assert (await read_worker(database, row.id))["seen_until"] == NOW
    assert await ensure_registered(database, RegisteredProcess("w_gone", generation=1)) == "TERMINATED"


async def test_a_spec_that_is_no_object_is_empty(database: Connection) -> None:
    worker = await started(database)
    await database.execute("update interlock.workers set metadata = '{\"spec\": 7}' where id = %s", [worker])
    assert (await held(database, ONE)).spec == {}


async def test_rows_bound_to_a_supervisor_end_with_it(database: Connection) -> None:
    assert await hold_bound_pool(database, "up", 1, supervisor="one", lease=timedelta(seconds=10), now=NOW)
    assert await even_out_pools(database, "other", now=NOW) == []
    assert await even_out_pools(database, "one", now=NOW) == [("up", 1)]
    assert await OTHER.lease_workers(database, limit=10, now=NOW) == []
    worker = (await held(database, ONE)).id
    timeout = timedelta(seconds=45)
    assert (
        await OTHER.terminate_silent_workers(database, heartbeat_timeout=timeout, watched_since=NOW, now=at(50)) == []
    )
    (silent,) = await OTHER.terminate_silent_workers(database, heartbeat_timeout=timeout, watched_since=NOW, now=at(60))
    assert silent.id == worker
    row = await read_worker(database, worker)
    assert row["status"] == "TERMINATED"
    assert row["reason"] == "no heartbeat for 50 s, and its supervisor one is gone"
    await delete_abandoned_pools(database, heartbeat_timeout=timeout, watched_since=NOW, now=at(60))
    assert await list_pools(database) == []


@pytest.mark.parametrize("ended", [False, True], ids=["that vanished", "that vanished and was ended"])
async def test_a_silent_worker_s_tasks_are_freed_after_observation(database: Connection, *, ended: bool) -> None:
    await register_worker(database, RegisteredProcess("by hand"), now=NOW)
    task = await enqueue_task(database, NewTask("add", {}), actor="me")
    await claim_pending_tasks(database, actor="by hand", types=["add"], limit=1, lease=LONG, now=NOW)
    if ended:
        await deregister_worker(database, "by hand", now=NOW)

    async def free(seconds: float, watched: float) -> str:
        timeout = timedelta(seconds=45)
        await ONE.terminate_silent_workers(
            database, heartbeat_timeout=timeout, watched_since=at(watched), now=at(seconds)
        )
        (row,) = await (await database.execute("select state from interlock.tasks where id = %s", [task.id])).fetchall()
        return str(row["state"])

    assert await free(44, watched=0) == "running"
    assert await free(90, watched=50) == "running"
    assert await free(90, watched=0) == "pending"
