"""A settle that the database refuses for a moment: the outcome is kept and written later, and uses up no try."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest

from factories import enqueue, task_events, task_row
from fault_injection import gated_app, locked
from interlock import Interlock, TaskContext
from interlock.config import Config
from interlock.errors import StatementError
from interlock.lifecycle import TaskEvent, TaskState
from interlock.postgres.connection import connect, is_fault_of_values
from interlock.store.tasks import claim_pending_tasks, read_task_history
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings
from interlock.worker.settler import return_attempts
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = [pytest.mark.flow, pytest.mark.chaos]

CALLBACK = "https://example.org/done"
QUICK = WorkerSettings(duties=False, poll_base=0.01, poll_cap=0.05)
LOCKED_S = 2.7  # longer than two timeouts of the administrator


async def set_for_database(database: Connection, setting: str, value: str) -> None:
    name = database.info.dbname
    await database.execute(f"alter database \"{name}\" set {setting} = '{value}'".encode())


@asynccontextmanager
async def refusing(database: Connection, state: str, code: str = "53100") -> AsyncIterator[None]:
    """Refuse every update of a task to a state with an SQLSTATE, until the block ends."""
    await database.execute(
        f"create function public.refuse_{state}() returns trigger language plpgsql as "
        f"$$ begin raise 'refused for a moment' using errcode = '{code}'; end $$".encode()
    )
    await database.execute(
        f"create trigger refuse_{state} before update on interlock.tasks for each row "
        f"when (new.state = '{state}' and old.state <> new.state) execute function public.refuse_{state}()".encode()
    )
    try:
        yield
    finally:
        await database.execute(f"drop trigger refuse_{state} on interlock.tasks".encode())


async def outcomes(database: Connection) -> set[tuple[str, int]]:
    rows = await (await database.execute("select state, tries from interlock.tasks")).fetchall()
    return {(row["state"], row["tries"]) for row in rows}


@pytest.mark.parametrize("setting", ["lock_timeout", "statement_timeout"])
async def test_a_row_lock_under_a_timeout_of_the_administrator_does_not_fail_the_task(
    url: str, database: Connection, setting: str
) -> None:
    await set_for_database(database, setting, "1s")
    app, gate = gated_app(url)
    task = await enqueue(database, "gated")
    async with serving(app, QUICK) as worker:
        await gate.entered[1].wait()
        (attempt,) = worker.context.active.values()
        async with locked(url, task):
            gate.opened[1].set()
            await asyncio.sleep(LOCKED_S)
        await until(attempt.is_terminal)
    assert attempt.state is TaskState.COMPLETED
    assert await task_events(database, task) == ["create", "claim", "succeed"]


async def test_a_locked_row_does_not_hold_up_the_outcomes_beside_it(url: str, database: Connection) -> None:
    """Also without any timeout of the administrator."""
    app, gate = gated_app(url)
    tasks = [await enqueue(database, "gated") for _ in range(20)]
    async with serving(app, replace(QUICK, concurrency=20, lease=3)) as worker:
        await until(lambda: len(worker.context.active) == len(tasks))
        async with locked(url, tasks[10]):
            gate.opened[1].set()
            await until(lambda: len(worker.context.active) == 1)
            (attempt,) = worker.context.active.values()
            assert attempt.key[0] == tasks[10]
        await until(attempt.is_terminal)
    assert await outcomes(database) == {("done", 1)}


async def test_outcomes_are_kept_while_the_disk_is_full(url: str, database: Connection) -> None:
    app, gate = gated_app(url)
    tasks = [await enqueue(database, "gated") for _ in range(41)]
    async with serving(app, replace(QUICK, concurrency=50)) as worker:
        await until(lambda: len(worker.context.active) == len(tasks))
        async with refusing(database, "done"):
            gate.opened[1].set()
            await until(lambda: all(a.state is TaskState.REPORTING for a in worker.context.active.values()))
            await until(lambda: worker.components.settler.refusals > len(tasks))
        await until(lambda: not worker.context.active)
    assert await outcomes(database) == {("done", 1)}


async def test_slots_are_free_while_outcomes_are_kept_and_kept_outcomes_are_bounded(
    url: str, database: Connection
) -> None:
    app, gate = gated_app(url)
    gate.opened[1].set()
    async with serving(app, replace(QUICK, concurrency=2)) as worker:
        async with refusing(database, "done"):
            for _ in range(9):
                await enqueue(database, "gated")
            await until(lambda: worker.components.settler.refusals > 9)
            assert [attempt.state for attempt in worker.context.active.values()] == [TaskState.REPORTING] * 4
            assert worker.context.occupied == 0
        await until(lambda: worker.context.tasks_processed == 9)
    assert await outcomes(database) == {("done", 1)}


async def test_the_lease_of_a_refused_outcome_is_renewed(url: str, database: Connection) -> None:
    app, gate = gated_app(url)
    task = await enqueue(database, "gated")
    async with serving(app, replace(QUICK, lease=1.5, recovery_interval=0.1)) as worker:
        await gate.entered[1].wait()
        (attempt,) = worker.context.active.values()
        async with refusing(database, "done"):
            gate.opened[1].set()
            await until(lambda: attempt.state is TaskState.REPORTING)
            ends = attempt.lease_until + 2 * worker.settings.lease
            await until(lambda: attempt.lease_until > ends or attempt.is_terminal())
        await until(attempt.is_terminal)
    assert attempt.state is TaskState.COMPLETED
    assert await task_events(database, task) == ["create", "claim", "succeed"], "it did not run again"


@pytest.mark.parametrize("code", ["26000", "0A000", "42P05", "25006", "08000", "40001", "55P03", "57014", "58030"])
async def test_no_refusal_that_passes_is_an_outcome(url: str, database: Connection, code: str) -> None:
    app, gate = gated_app(url)
    task = await enqueue(database, "gated", callback_url=CALLBACK)
    async with serving(app, QUICK) as worker:
        await gate.entered[1].wait()
        (attempt,) = worker.context.active.values()
        async with refusing(database, "done", code):
            gate.opened[1].set()
            await until(lambda: worker.components.settler.refusals > 2 or attempt.is_terminal())
        await until(attempt.is_terminal)
    assert await task_events(database, task) == ["create", "claim", "succeed"]


async def test_prepared_statements_that_are_gone_cost_no_outcome(url: str, database: Connection) -> None:
    """A pooler that was not announced gives the worker another session, which knows none of its statements."""
    await database.execute(
        "create function public.forget() returns trigger language plpgsql as "
        "$$ begin execute 'deallocate all'; return null; end $$"
    )
    await database.execute(
        "create trigger forget after insert on interlock.callbacks for each statement execute function public.forget()"
    )
    app = Interlock(config=Config(database_url=url))

    @app.task
    async def plain() -> None: ...

    tasks = [await enqueue(database, "plain", callback_url=CALLBACK) for _ in range(12)]
    async with serving(app, QUICK) as worker:
        await until(lambda: worker.context.tasks_processed == len(tasks))
    assert await outcomes(database) == {("done", 1)}
    notices = await (await database.execute("select task_id from interlock.callbacks")).fetchall()
    assert sorted(notice["task_id"] for notice in notices) == sorted(tasks)


async def test_a_cancellation_that_is_refused_for_a_moment_is_written_later(url: str, database: Connection) -> None:
    app, gate = gated_app(url)
    task = await enqueue(database, "gated")
    async with serving(app, replace(QUICK, cancel_grace=0.01)) as worker:
        await gate.entered[1].wait()
        (attempt,) = worker.context.active.values()
        async with refusing(database, "canceled"):
            worker.components.runner.cancel(attempt, "not wanted")
            await until(lambda: worker.components.settler.refusals > 2 or attempt.is_terminal())
        await until(attempt.is_terminal)
    assert attempt.state is TaskState.COMPLETED
    assert await task_events(database, task) == ["create", "claim", "cancel"]


def transactional_app(url: str) -> Interlock:
    app = Interlock(config=Config(database_url=url))

    @app.task(transactional=True, max_tries=1)
    async def write(ctx: TaskContext) -> None:
        await ctx.connection.execute("insert into public.written values (1)")

    @app.task(transactional=True, max_tries=1)
    async def swallow(ctx: TaskContext) -> None:
        with suppress(psycopg.Error):
            await ctx.connection.execute("select 1 / 0")

    return app


async def last_reason(database: Connection, task: UUID, event: str) -> str | None:
    return next(line.reason for line in reversed(await read_task_history(database, task)) if line.event == event)


async def test_a_transactional_task_that_cannot_be_settled_is_returned(url: str, database: Connection) -> None:
    await database.execute("create table public.written (n int)")
    task = await enqueue(database, "write", max_tries=1)
    async with serving(transactional_app(url), QUICK) as worker:
        async with refusing(database, "done"):
            await until(lambda: worker.context.tasks_processed >= 1)
        await until(lambda: worker.context.tasks_processed >= 2)
    row = await task_row(database, task)
    assert (row["state"], row["tries"]) == ("done", 1)
    events = await task_events(database, task)
    assert (events[:3], events[-2:]) == (["create", "claim", "return"], ["claim", "succeed"])
    assert "refused for a moment" in (await last_reason(database, task, "return") or "")
    (written,) = await (await database.execute("select count(*) as n from public.written")).fetchall()
    assert written["n"] == 1, "the writes of the first attempt were rolled back"


async def test_a_transaction_that_the_handler_left_aborted_is_its_own_failure(url: str, database: Connection) -> None:
    task = await enqueue(database, "swallow", max_tries=1)
    async with serving(transactional_app(url), QUICK) as worker:
        await until(lambda: worker.context.tasks_processed >= 1)
    row = await task_row(database, task)
    assert (row["state"], row["event"]) == ("error", "fail")
    assert "aborted" in row["reason"]


async def test_a_return_at_shutdown_that_is_refused_for_a_moment_is_repeated(url: str, database: Connection) -> None:
    tasks = [await enqueue(database, "gated") for _ in range(3)]
    claimed = await claim_pending_tasks(database, actor="w", types=["gated"], limit=3)
    attempts = [
        TaskStateMachine.not_started(task, "w", TaskEvent.SHUTDOWN_REQUESTED, "which shuts down") for task in claimed
    ]
    async with connect(url) as connection:
        async with refusing(database, "pending"):
            returning = asyncio.create_task(return_attempts(connection, attempts, actor="w"))
            query = "select from pg_stat_activity where pid = %s and state = 'idle' and query ilike '%%settled%%'"
            while not await (await database.execute(query, [connection.info.backend_pid])).fetchall():
                await asyncio.sleep(0.005)
            assert not returning.done()
        async with asyncio.timeout(30):
            await returning
    for task in tasks:
        assert await task_events(database, task) == ["create", "claim", "return"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        *((code, True) for code in ("", "22P05", "22021", "23505", "54000", "P0001")),
        *((code, False) for code in ("08006", "25006", "40001", "40P01", "53100", "55P03", "57014", "58030")),
        *((code, False) for code in ("26000", "0A000", "42P05", "42P01", "42501", "XX001")),
    ],
)
def test_only_what_the_values_cause_is_their_fault(code: str, expected: bool) -> None:  # noqa: FBT001 - a parameter
    assert is_fault_of_values(StatementError("refused", sqlstate=code)) is expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [("invalid memory alloc request size 1073741824", True), ("tuple concurrently updated", False)],
)
def test_an_internal_error_is_the_fault_of_a_value_only_if_that_is_too_large(message: str, *, expected: bool) -> None:
    assert is_fault_of_values(StatementError(message, sqlstate="XX000")) is expected
