"""Failures around a handler: no slot leaks, no lease is held for nothing, no request is forgotten."""

from __future__ import annotations

import signal
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest

from factories import enqueue, task_row
from fault_injection import until_no_transaction_is_open
from interlock.lifecycle import WorkerEvent, WorkerState
from interlock.store.task_admin import recover_expired_tasks, request_cancel_of_running_tasks
from interlock.store.tasks import MAX_CRASHES, claim_pending_tasks
from processes import eventually
from worker_support import serving, until, worker_process

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = [pytest.mark.flow, pytest.mark.chaos]


def states(url: str) -> dict[str, int]:
    with psycopg.connect(url) as connection:
        return dict(connection.execute("select state, count(*) from interlock.tasks group by 1").fetchall())


async def test_no_exception_however_odd_costs_a_slot(url: str, database: Connection) -> None:
    odd = [await enqueue(database, "fail_oddly", {"kind": kind}, max_tries=1) for kind in ("unshowable", "foreign", "")]
    nonsense = [await enqueue(database, "report_nonsense", {"nul": nul}, max_tries=1) for nul in (True, False)]
    good = await enqueue(database, "add", {"a": 1, "b": 1})
    broken = await enqueue(database, "fail_with_a_broken_backoff", max_tries=2)  # last, as its next try is soon due
    async with serving(url) as worker:
        await until(lambda: worker.context.tasks_processed == 7)
        assert not worker.context.active
    assert [(await task_row(database, task))["state"] for task in odd] == ["error"] * 3
    assert [(await task_row(database, task))["state"] for task in nonsense] == ["error"] * 2
    assert "progress cannot be stored" in (await task_row(database, nonsense[0]))["reason"]
    assert (await task_row(database, broken))["state"] == "pending", "it is tried again after the default backoff"
    assert (await task_row(database, good))["state"] == "done"


@pytest.mark.parametrize(
    "poison",
    [
        "(repeat('[', 1200) || repeat(']', 1200))::jsonb",
        """('{"a": ' || repeat('[', 1200) || repeat(']', 1200) || '}')::jsonb""",
        """('{"a": ' || repeat('[', 400) || repeat(']', 400) || ', "b": 1}')::jsonb""",
        """('{"a": ' || repeat('9', 6000) || ', "b": 1}')::jsonb""",
    ],
    ids=["deep", "deep argument", "readable, but too deep to be written", "digits"],
)
async def test_json_that_python_cannot_parse_fails_only_its_task(url: str, database: Connection, poison: str) -> None:
    query = f"select id from interlock.enqueue('add', {poison}, max_tries => 1)"
    (task,) = await (await database.execute(query.encode())).fetchall()
    good = await enqueue(database, "add", {"a": 1, "b": 1})
    async with serving(url, concurrency=2) as worker:
        await until(lambda: worker.context.tasks_processed == 2)
    ended = await task_row(database, task["id"])
    assert ended["state"] == "error"
    assert (await task_row(database, good))["state"] == "done"


async def test_unreadable_json_beside_the_input_is_an_error_of_its_task_alone(url: str, database: Connection) -> None:
    task = await enqueue(database, "add", {"a": 1, "b": 1})
    await database.execute("update interlock.tasks set checkpoint = (repeat('[', 1200) || repeat(']', 1200))::jsonb")
    async with serving(url) as worker:
        await until(lambda: worker.context.tasks_processed == 1)
    assert "nested too deeply" in (await task_row(database, task))["reason"]


async def test_an_idle_worker_with_recovery_due_survives_lost_connections(url: str, database: Connection) -> None:
    async with serving(url, poll_base=0.01, poll_cap=0.02, recovery_interval=0) as worker:
        for processed in range(1, 5):
            await until(lambda: worker.state is WorkerState.BACKING_OFF and worker.context.connection is not None)
            await database.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and pid <> pg_backend_pid()"
            )
            await enqueue(database, "add", {"a": 1, "b": 1})
            await until(partial(lambda seen: worker.context.tasks_processed == seen, processed))


async def test_a_settle_connection_lost_while_idle_is_replaced(url: str, database: Connection) -> None:
    await enqueue(database, "nap", {"seconds": 0.5})
    async with serving(url, concurrency=2, poll_base=0.01, poll_cap=0.05) as worker:
        await until(lambda: worker.context.active and worker.state is WorkerState.BACKING_OFF)
        await database.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid() and pid <> %s",
            [worker.connection.info.backend_pid],
        )
        await until(lambda: worker.context.tasks_processed == 1)
        await enqueue(database, "add", {"a": 1, "b": 1})
        await until(lambda: worker.context.tasks_processed == 2)
    assert states(url) == {"done": 2}


async def test_a_commit_that_is_refused_is_how_a_transactional_task_failed(url: str, database: Connection) -> None:
    await database.execute("create table public.written (x int)")
    await database.execute(
        "create function public.too_late() returns trigger language plpgsql as "
        "$$ begin raise exception 'refused at the commit'; end $$"
    )
    await database.execute(
        "create constraint trigger late after insert on public.written deferrable initially deferred "
        "for each row execute function public.too_late()"
    )
    task = await enqueue(database, "transact_too_late", max_tries=1)
    async with serving(url) as worker:
        await until(lambda: worker.context.tasks_processed == 1)
    failed = await task_row(database, task)
    assert failed["state"] == "error"
    assert "refused at the commit" in failed["reason"]


async def test_a_transactional_task_without_its_lease_leaves_no_transaction(url: str, database: Connection) -> None:
    await database.execute("create table public.written (x int)")
    task = await enqueue(database, "transact_slowly")
    async with serving(url, lease=1.5, recovery_interval=3600) as worker:
        await until(lambda: worker.context.active)
        (attempt,) = worker.context.active.values()
        await database.execute(
            "update interlock.tasks set state = 'pending', event = 'expire', lease_expires_at = null"
        )
        await claim_pending_tasks(database, actor="thief", types=["transact_slowly"], lease=timedelta(hours=1))
        await until(attempt.is_terminal)
        await until(lambda: not worker.context.active)
        await until_no_transaction_is_open(database)
    assert (await task_row(database, task))["worker_id"] == "thief"


async def test_a_busy_worker_recovers_expired_leases(url: str, database: Connection) -> None:
    dead = await enqueue(database, "add", {"a": 1, "b": 1}, priority=9)
    await claim_pending_tasks(database, actor="dead", types=["add"], lease=timedelta(milliseconds=1))
    for _ in range(300):
        await enqueue(database, "nap", {"seconds": 0.01})
    async with serving(url, recovery_interval=0.01) as worker:
        await until(lambda: worker.context.tasks_processed >= 5)
        assert (await task_row(database, dead))["state"] == "done", "long before the backlog is worked off"
        worker.request_shutdown()


async def test_a_cancellation_is_not_forgotten_when_the_worker_dies(url: str, database: Connection) -> None:
    task = await enqueue(database, "nap", {"seconds": 3600})
    await claim_pending_tasks(database, actor="dead", types=["nap"], lease=timedelta(milliseconds=1))
    assert await request_cancel_of_running_tasks(database, [task], reason="enough") == [task]
    async with serving(url, recovery_interval=0.01, cancel_grace=0.05, poll_cap=0.1):
        await until(lambda: states(url) == {"canceled": 1})


async def test_the_last_crash_sends_a_webhook(database: Connection) -> None:
    task = await enqueue(database, "add", {}, max_tries=1, callback_url="https://example.org/done")
    for crashes in range(MAX_CRASHES):
        await claim_pending_tasks(
            database, actor="dead", types=["add"], lease=timedelta(milliseconds=1), suspected=crashes > 0
        )
        assert len(await recover_expired_tasks(database, actor="me")) == 1
    assert (await task_row(database, task))["event"] == "exhaust"
    notices = await (await database.execute("select task_id, state from interlock.callbacks")).fetchall()
    assert [tuple(notice.values()) for notice in notices] == [(task, "error")]
    assert (await task_row(database, task))["error"]["type"] == "WorkerCrashed"


async def test_a_handler_that_ignores_cancellation_does_not_block_exit(url: str, database: Connection) -> None:
    task = await enqueue(database, "stubborn")
    with worker_process(url, INTERLOCK_GRACE="0") as process:
        eventually(lambda: states(url) == {"running": 1})
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert (await task_row(database, task))["state"] == "pending"


async def test_a_database_that_refuses_every_claim_is_not_stormed(url: str, database: Connection) -> None:
    async with serving(url, poll_base=0.05) as worker:
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        await database.execute("alter table interlock.tasks rename to hidden")
        worker.components.fetcher.reread_paused_namespaces()
        await until(lambda: worker.context.backoff_count >= 4)
        connects = [move for move in worker.history if move.event is WorkerEvent.CONNECTED]
        assert len(connects) <= 7, "each refusal makes the next pause longer"
        await database.execute("alter table interlock.hidden rename to tasks")
        await enqueue(database, "add", {"a": 1, "b": 1})
        await until(lambda: worker.context.tasks_processed == 1)
