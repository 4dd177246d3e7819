"""Handles: waiting for results, canceling, requeueing, one by one and by filter."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from factories import add_live_worker, step
from interlock import Interlock, PermanentError, TaskFailedError, TaskRowState
from interlock.client import results
from interlock.errors import InputError, StoreError
from interlock.postgres.connection import connect
from interlock.postgres.notifier import Notifier
from interlock.store.task_admin import cancel_unfinished_tasks, requeue_ended_tasks
from interlock.store.tasks import claim_pending_tasks, find_ended
from interlock.testing import drain
from job_driver import Failed, JobDriver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

NEVER = 3600.0
KILL = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and"


@pytest.fixture
async def app(url: str) -> AsyncIterator[Interlock]:
    app = Interlock(url, actor="shop")

    @app.task
    async def double(n: int) -> int:
        return n * 2

    @app.task(max_tries=1)
    async def fail(message: str, *, permanent: bool = False) -> None:
        raise (PermanentError if permanent else ValueError)(message)

    @app.task
    async def never() -> None: ...

    async with app:
        yield app


async def waiting_rows(database: Connection) -> list[Any]:
    return await (await database.execute("select task_id from interlock.waiters")).fetchall()


async def noted(database: Connection, count: int) -> None:
    while len(await waiting_rows(database)) != count:
        await asyncio.sleep(0.01)


async def test_a_result_that_is_there_is_given_at_once(app: Interlock, database: Connection) -> None:
    handle = await app.tasks["double"].enqueue(4)
    await drain(app)
    assert await handle.result(timeout=60) == await app.handle(handle.id).result() == 8
    assert await waiting_rows(database) == []


async def test_a_notification_wakes_a_waiter(
    app: Interlock, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "POLL_INTERVAL_S", NEVER)
    monkeypatch.setattr(results, "RECHECK_DELAYS_S", ())
    handles = await app.tasks["double"].enqueue_many([{"n": n} for n in range(100)])
    waits = [asyncio.create_task(handle.result(60)) for handle in handles]
    twice = asyncio.create_task(handles[0].result(60))
    await noted(database, 100)
    await drain(app)
    assert await asyncio.gather(*waits) == [n * 2 for n in range(100)]
    assert await twice == 0
    listeners = "select count(*) as n from pg_stat_activity where query like 'listen%' and datname = current_database()"
    assert (await (await database.execute(listeners)).fetchall())[0]["n"] == 1


async def test_a_waiter_finds_the_end_without_a_notification(app: Interlock, monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(*_: object) -> None:
        await asyncio.sleep(NEVER)

    monkeypatch.setattr(Notifier, "_listen", deaf)
    monkeypatch.setattr(results, "POLL_INTERVAL_S", 0.05)
    handle = await app.tasks["double"].enqueue(1)
    result = asyncio.create_task(handle.result(60))
    await asyncio.sleep(0)
    await drain(app)
    assert await result == 2


async def test_whatever_goes_wrong_at_a_look_there_is_another(app: Interlock, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def ask(*given: Any) -> list[UUID]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("something that nobody thought of")
        return await find_ended(*given)

    async def deaf(*_: object) -> None:
        await asyncio.sleep(NEVER)

    monkeypatch.setattr(results, "find_ended", ask)
    monkeypatch.setattr(Notifier, "_listen", deaf)
    monkeypatch.setattr(results, "POLL_INTERVAL_S", 0.05)
    handle = await app.tasks["double"].enqueue(1)
    result = asyncio.create_task(handle.result(20))
    while not asked:
        await asyncio.sleep(0.01)
    await drain(app)
    assert await result == 2


async def test_a_wait_begun_during_the_final_commit_sees_the_end(
    app: Interlock, database: Connection, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "POLL_INTERVAL_S", NEVER)
    monkeypatch.setattr(results, "RECHECK_DELAYS_S", (0.02, 0.1, 0.4, 1.0, 3.0, 10.0))
    handle = await app.tasks["never"].enqueue()
    async with connect(url) as other:
        async with other.transaction():
            ended = await cancel_unfinished_tasks(other, [handle.id], actor="other", reason="no")
            waiting = asyncio.create_task(handle.result(60))
            await noted(database, 1)
        assert ended
        with pytest.raises(TaskFailedError, match="was canceled: no"):
            await waiting


async def test_finished_waits_are_removed_while_others_begin(
    app: Interlock, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "POLL_INTERVAL_S", NEVER)
    monkeypatch.setattr(results, "MAX_STALE_WAITERS", 5)
    for n in range(30):
        handle = await app.tasks["double"].enqueue(n)
        waiting = asyncio.create_task(handle.result(60))
        while not any(row["task_id"] == handle.id for row in await waiting_rows(database)):
            await asyncio.sleep(0)
        await drain(app)
        assert await waiting == n * 2
        assert len(await waiting_rows(database)) <= 2 * results.MAX_STALE_WAITERS


@pytest.mark.chaos
async def test_lost_listeners_are_rebuilt(
    app: Interlock, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "POLL_INTERVAL_S", NEVER)
    monkeypatch.setattr(results, "RECHECK_DELAYS_S", ())
    first = await app.tasks["double"].enqueue(1)
    waiting = asyncio.create_task(first.result(60))
    await noted(database, 1)
    while app.notifier.reconnects == 0:
        await database.execute(f"{KILL} query like 'listen%'".encode())
        await asyncio.sleep(0.01)
    second = await app.tasks["double"].enqueue(2)
    also = asyncio.create_task(second.result(60))
    await noted(database, 2)
    await drain(app)
    assert (await waiting, await also) == (2, 4)


async def test_rows_of_finished_waiters_are_deleted(app: Interlock, database: Connection) -> None:
    handle = await app.tasks["double"].enqueue(4)
    with pytest.raises(TimeoutError, match=r"not ended within 0\.1 s"):
        await handle.result(timeout=0.1)
    await noted(database, 0)


@pytest.mark.parametrize(("permanent", "kind"), [(False, "ValueError"), (True, "PermanentError")])
async def test_a_failure_raises_with_its_stored_error(app: Interlock, permanent: bool, kind: str) -> None:  # noqa: FBT001 - a parameter of the test
    handle = await app.tasks["fail"].enqueue("no such mailbox", permanent=permanent)
    await drain(app)
    with pytest.raises(TaskFailedError, match=rf"task fail .* ended in error: {kind}: no such mailbox") as caught:
        await handle.result()
    error = caught.value.error
    assert caught.value.state == "error"
    assert error is not None
    assert (error["type"], error["retryable"]) == (kind, not permanent)
    assert "no such mailbox" in str(error["traceback"])


async def test_closing_the_app_wakes_waiters(url: str) -> None:
    app = Interlock(url)

    @app.task
    async def never() -> None: ...

    async with app:
        waiting = asyncio.create_task((await never.enqueue()).result())
        while not app.completions._futures:  # noqa: SLF001 - until it waits
            await asyncio.sleep(0.01)
    with pytest.raises(StoreError, match="closed"):
        await waiting


async def run_by_another(database: Connection, *types: str) -> None:
    assert await claim_pending_tasks(database, actor="worker-1", types=types, limit=10)


async def test_a_pending_task_is_canceled_at_once_and_its_waiters_are_told(app: Interlock) -> None:
    handle = await app.tasks["never"].enqueue()
    assert await handle.cancel("changed my mind") == "canceled"
    assert await handle.cancel() == "ended"
    with pytest.raises(TaskFailedError, match="was canceled: changed my mind"):
        await handle.result(60)
    assert (await handle.history())[-1].actor == "shop"


async def test_a_running_task_is_canceled_by_asking_or_by_force(app: Interlock, database: Connection) -> None:
    handle = await app.tasks["never"].enqueue()
    await run_by_another(database, "never")
    assert await handle.cancel("please") == "requested"
    asked = "select state, reason, cancel_requested_at is not null as asked from interlock.tasks"
    assert await (await database.execute(asked)).fetchall() == [{"state": "running", "reason": "please", "asked": True}]
    assert await handle.cancel("now", force=True) == "canceled"
    assert (await handle.status()).state == "canceled"


async def test_a_canceled_task_can_be_requeued_with_new_tries_and_a_higher_fence(app: Interlock) -> None:
    handle = await app.tasks["fail"].enqueue("x")
    await drain(app)
    assert await handle.requeue("fixed it")
    assert not await handle.requeue()
    status = await handle.status()
    assert (status.state, status.tries, status.attempt, status.reason) == ("pending", 0, 1, "fixed it")


async def test_a_task_whose_unique_key_is_taken_again_is_not_requeued(app: Interlock) -> None:
    unique = app.tasks["fail"].options(unique_key="k")
    old = await unique.enqueue("x")
    await drain(app)
    await unique.enqueue("y")
    other = await app.tasks["fail"].enqueue("z")
    await drain(app, limit=0)
    assert not await old.requeue()
    assert (await old.status()).state == "error"
    assert await other.cancel() == "canceled"
    done = await app.requeue(states=["error", "canceled"])
    assert [task.id for task in done.tasks] == [other.id]


async def test_steps_are_not_requeued_but_their_jobs_retried(app: Interlock, database: Connection) -> None:
    driver = JobDriver(database, {"a": Failed("no"), "b": Failed("no")})
    await add_live_worker(database)
    job = await driver.submit(step("a"), step("b"), worker_count=1)
    await driver.run()
    assert (await driver.job(job))["status"] == "FAILED"
    alone = await app.tasks["fail"].enqueue("x")
    await drain(app)
    preview = await app.requeue(preview=True)
    assert (preview.count, preview.steps_left_out) == (1, 2)
    done = await app.requeue(limit=1)
    assert ([task.id for task in done.tasks], done.count, done.steps_left_out) == ([alone.id], 1, 2)
    failed = (await driver.steps(job))["a"]
    assert await requeue_ended_tasks(database, [failed["id"]], actor="ada") == []
    with pytest.raises(InputError, match=f"is step 'a' of job {job}.*`interlock jobs retry {job} STEP`"):
        await app.handle(failed["id"]).requeue()
    assert await driver.states(job) == {"a": "error", "b": "error"}


async def test_tasks_after_the_preview_use_up_nothing_of_the_limit(app: Interlock) -> None:
    never = app.tasks["never"].options(tags=["old"])
    await never.enqueue_many([{}] * 3)
    preview = await app.cancel(tag="old", limit=2, preview=True)
    late = await never.enqueue()
    done = await app.cancel(tag="old", limit=2, horizon=preview.horizon)
    assert [task.id for task in done.tasks] == [task.id for task in preview.tasks]
    assert (done.count, (await late.status()).state) == (2, "pending")


async def test_acts_by_filter_are_previewed_and_then_done_in_pages(app: Interlock) -> None:
    never = app.tasks["never"]
    await never.options(tags=["old", "x"], namespace="a").enqueue_many([{}] * 1200)
    kept = await never.options(tags=["new"]).enqueue()
    preview = await app.cancel(tag="old", preview=True)
    assert (preview.count, len(preview.tasks), preview.preview) == (1200, 100, True)
    assert {task.state for task in preview.tasks} == {"pending"}
    some = await app.cancel(tag="old", limit=600, reason="stale")
    assert (some.count, some.preview) == (600, False)
    assert (await app.cancel(tag="old")).count == 600
    assert (await kept.status()).state == "pending"
    assert (await app.cancel(namespace="a")).count == 0
    assert (await app.requeue(states=["canceled"], type="never", preview=True)).count == 1200
    assert (await app.requeue(states=["canceled"], type="never")).count == 1200
    assert len(await app.find(states=["pending"], namespace="a", limit=2000)) == 1200


async def test_canceling_by_filter_asks_those_that_run(app: Interlock, database: Connection) -> None:
    running = await app.tasks["never"].enqueue()
    await run_by_another(database, "never")
    pending = await app.tasks["never"].enqueue()
    assert (await app.cancel(type="never")).count == 2
    assert [(await handle.status()).state for handle in (running, pending)] == ["running", "canceled"]
    assert (await app.cancel(type="never", force=True)).count == 1


async def test_tasks_are_found_by_state_and_page(app: Interlock) -> None:
    handles = await app.tasks["double"].enqueue_many([{"n": n} for n in range(5)])
    page = await app.find(states=["pending"], type="double", limit=3)
    rest = await app.find(states=["pending"], limit=3, before=page[-1].id)
    assert [task.id for task in [*page, *rest]] == [handle.id for handle in reversed(handles)]
    for wrong in (["lost"], "pending"):
        with pytest.raises(InputError, match="waiting, pending, running"):
            await app.find(states=wrong)


async def test_calls_survive_a_server_restart(
    app: Interlock, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await app.find()
    await database.execute(f"{KILL} pid <> pg_backend_pid()".encode())
    monkeypatch.setattr("interlock.postgres.connection.CHECK_AFTER_IDLE_S", -1.0)
    assert await app.find() == []


async def test_states_are_members_of_exported_enums(app: Interlock) -> None:
    handle = await app.tasks["never"].enqueue()
    status = await handle.status()
    (summary,) = await app.find(type="never")
    (record,) = await handle.history()
    assert status.state == "pending"
    assert status.state is summary.state is record.to_state is TaskRowState.PENDING
    assert await handle.cancel() == "canceled"
    assert (await handle.status()).state is TaskRowState.CANCELED
    assert [record.from_state for record in await handle.history()] == [None, TaskRowState.PENDING]
