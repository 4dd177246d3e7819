"""Settling under failures: each outcome is written once, and none is lost."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import enqueue, task_events, task_row
from fault_injection import FaultyProxy, blocked_by, fail_with_nul, gated_app, kill, locked
from interlock import Interlock, PermanentError, RetryableError, TaskContext
from interlock.config import Config
from interlock.lifecycle import TaskRowEvent, TaskRowState, TaskState, WorkerState
from interlock.postgres.notifier import WakeMode
from interlock.service import cancel_and_wait
from interlock.store.jobs import read_steps
from interlock.store.step_results import read_queue_state
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.tasks import Outcome, claim_pending_tasks, read_task_history, settle_running_tasks
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.executors.base import HandlerError
from interlock.worker.outcome import describe_error, error_document
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings
from interlock.worker.settler import Settler, max_batch_size
from worker_support import until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection
    from interlock.worker.process import WorkerStateMachine

pytestmark = [pytest.mark.flow, pytest.mark.chaos]

CALLBACK = "https://example.org/done"
QUICK = WorkerSettings(duties=False, poll_base=0.01, poll_cap=0.05)
PATIENT = WorkerSettings(duties=False, poll_base=60, poll_cap=60)


async def notices(database: Connection) -> list[tuple[Any, ...]]:
    rows = await (await database.execute("select task_id, attempt, state from interlock.callbacks")).fetchall()
    return [tuple(notice.values()) for notice in rows]


def only_attempt(worker: WorkerStateMachine) -> Any:
    (attempt,) = worker.context.active.values()
    return attempt


@pytest.mark.parametrize("callback", [None, CALLBACK], ids=["plain", "callback"])
async def test_a_flush_on_a_killed_backend_is_written_once(
    url: str, database: Connection, callback: str | None
) -> None:
    task = await enqueue(database, "gated", callback_url=callback)
    app, gate = gated_app(url)
    async with serving(app, QUICK) as worker:
        await gate.entered[1].wait()
        attempt = only_attempt(worker)
        async with locked(url, task) as holder:
            gate.opened[1].set()
            flushing = await blocked_by(database, holder)
            await kill(database, flushing)
            await blocked_by(database, holder, but=flushing)  # it was kept, and is being written again
            assert worker.context.active, "its slot is taken until the answer"
        await until(attempt.is_terminal)
    assert attempt.state is TaskState.COMPLETED
    assert await task_events(database, task) == ["create", "claim", "succeed"]
    assert await notices(database) == ([(task, 1, "done")] if callback else [])


async def test_a_cancellation_with_a_killed_backend_is_written_once(url: str, database: Connection) -> None:
    task = await enqueue(database, "gated", callback_url=CALLBACK)
    app, gate = gated_app(url)
    async with serving(app, replace(QUICK, cancel_grace=0.01)) as worker:
        await gate.entered[1].wait()
        attempt = only_attempt(worker)
        async with locked(url, task) as holder:
            worker.components.runner.cancel(attempt, "not wanted")
            flushing = await blocked_by(database, holder)
            await kill(database, flushing)
            await blocked_by(database, holder, but=flushing)
        await until(attempt.is_terminal)
    assert attempt.state is TaskState.COMPLETED
    assert await task_events(database, task) == ["create", "claim", "cancel"]
    assert await notices(database) == [(task, 1, "canceled")]


@pytest.mark.parametrize(
    ("callback", "last_words"),
    [(None, b"jsonb_to_recordset"), (CALLBACK, b"COMMIT")],
    ids=["plain", "callback"],
)
async def test_an_outcome_with_a_lost_reply_counts_as_written(
    url: str, database: Connection, callback: str | None, last_words: bytes
) -> None:
    """The server has committed, but the reply is lost: the repeated settle finds its own outcome."""
    task = await enqueue(database, "gated", callback_url=callback)
    async with FaultyProxy(url) as network:
        app, gate = gated_app(network.url)
        async with serving(app, replace(QUICK, recovery_interval=3600)) as worker:
            await gate.entered[1].wait()
            attempt = only_attempt(worker)
            network.fatal = last_words
            gate.opened[1].set()
            await until(attempt.is_terminal)
            assert network.fatal is None, "it was settled twice"
            assert worker.components.statistics.tasks.mismatched == 0
    assert attempt.state is TaskState.COMPLETED
    assert await task_events(database, task) == ["create", "claim", "succeed"]
    assert await notices(database) == ([(task, 1, "done")] if callback else [])


FAILING_HINT = """
create table public.hints (n int);
create function public.pg_notify(channel text, payload text) returns void language plpgsql as $$
begin
    if channel = 'interlock_done' and not exists (select from public.hints) then
        {failure}
    end if;
    perform pg_catalog.pg_notify(channel, payload);
end
$$;
"""


@pytest.mark.parametrize(
    "failure", ["raise exception 'no hints today';", "perform pg_terminate_backend(pg_backend_pid());"], ids=str.split
)
async def test_a_failed_notify_does_not_repeat_the_settle(url: str, database: Connection, failure: str) -> None:
    """A pg_notify() that shadows the server's own makes the first notification fail, or kills its backend."""
    await database.execute(FAILING_HINT.format(failure=failure).encode())
    name = database.info.dbname
    await database.execute(f'alter database "{name}" set search_path = public, pg_catalog'.encode())
    task = await enqueue(database, "gated")
    await database.execute(
        "insert into interlock.waiters values (%s, gen_random_uuid(), now() + interval '1 h')", [task]
    )
    app, gate = gated_app(url)
    async with serving(app, QUICK) as worker:
        await gate.entered[1].wait()
        attempt = only_attempt(worker)
        gate.opened[1].set()
        await until(attempt.is_terminal)
        gate.opened[2].set()  # what is claimed just when the connection is lost is returned, and claimed again
        later = await enqueue(database, "gated")
        await until(lambda: worker.context.tasks_processed == 2)
        assert worker.components.statistics.tasks.mismatched == 0
    assert attempt.state is TaskState.COMPLETED
    assert await task_events(database, task) == ["create", "claim", "succeed"]
    assert (await task_row(database, later))["state"] == "done"


async def test_an_idle_worker_advances_the_job_of_its_step_without_an_orchestrator(
    url: str, database: Connection
) -> None:
    app = Interlock(config=Config(database_url=url))
    flow = app.workflow("flow")

    @flow.step
    async def first() -> int:
        return 1

    @flow.step(after=["first"])
    async def second(first: int) -> int:
        return first + 1

    async with app, serving(app, PATIENT) as worker:
        await until(lambda: worker.state is WorkerState.BACKING_OFF)
        job = await app.submit("flow")
        async with asyncio.timeout(60):
            while (await job.steps())[1].state != TaskRowState.DONE:
                await asyncio.sleep(0.01)
        second_id = (await job.steps())[1].id
    moves = [(move.event, move.actor) for move in await read_task_history(database, second_id)]
    assert ("release", worker.worker_id) in moves


async def test_a_worker_that_holds_two_attempts_leaves_the_job_to_the_orchestrators(
    url: str, database: Connection
) -> None:
    app, gate = gated_app(url)
    flow = app.workflow("flow")

    @flow.step
    async def first() -> None:
        pass

    flow.task("gated", name="second", after=["first"])
    await enqueue(database, "gated")
    async with app, serving(app, replace(PATIENT, concurrency=2)):
        await gate.entered[1].wait()
        job = await app.submit("flow")
        async with asyncio.timeout(60):
            while not (await read_queue_state(database))["waiting"]:
                await asyncio.sleep(0.01)
        gate.opened[1].set()
    states = {row["step"]: row["state"] for row in await read_steps(database, job.id)}
    assert states == {"first": "done", "second": "waiting"}


class Answers:
    """The owner of attempts that a settler has settled: their attempt number, and whether the outcome was written."""

    is_idle = False

    def __init__(self) -> None:
        self.written: list[tuple[int, bool]] = []

    def finish(self, attempt: TaskStateMachine, *, written: bool) -> None:
        self.written.append((attempt.key[1], written))


async def test_two_attempts_at_one_task_are_never_written_in_one_batch(url: str, database: Connection) -> None:
    """The outcome of the first attempt was queued for too long; this worker has run the second meanwhile."""
    app, _ = gated_app(url)
    definition = app.tasks["gated"]
    await enqueue(database, "gated")
    answers = Answers()
    settler = Settler(answers, "w", max_batch=100)
    for lease, suspected in ((timedelta(milliseconds=1), False), (timedelta(minutes=1), True)):
        (claimed,) = await claim_pending_tasks(database, actor="w", types=["gated"], lease=lease, suspected=suspected)
        attempt = TaskStateMachine.of_claim(claimed, "w", definition, lease_until=0)
        attempt.outcome = Outcome(*attempt.key, TaskRowEvent.SUCCEED, output=claimed.attempt)
        settler.add(attempt)
        await recover_expired_tasks(database, actor="w")
    running = asyncio.create_task(settler.run(database))
    await until(lambda: len(answers.written) == 2)
    await cancel_and_wait([running])
    assert answers.written == [(1, False), (2, True)]


@pytest.mark.unit
@pytest.mark.parametrize(("slots", "outcomes"), [(1, 100), (299, 100), (600, 200), (1500, 500), (100_000, 500)])
def test_a_batch_takes_at_most_a_third_of_many_slots(slots: int, outcomes: int) -> None:
    assert max_batch_size(slots) == outcomes


@pytest.mark.parametrize("kind", ["process", "command"])
async def test_nul_characters_in_a_child_error_are_replaced(url: str, database: Connection, kind: str) -> None:
    app = Interlock(config=Config(database_url=url))
    app.task(executor="process", max_tries=1, name="process")(fail_with_nul)
    said = json.dumps({"type": "error", "error_type": "Odd\0Error", "message": "a \0", "traceback": "line \0"})
    app.command_task("command", [sys.executable, "-c", f"print({said!r})"], max_tries=1)
    task = await enqueue(database, kind, max_tries=1)
    other = await enqueue(database, kind, max_tries=1)
    async with serving(app, QUICK) as worker:
        await until(lambda: worker.context.tasks_processed == 2)
        assert worker.components.statistics.tasks.completed == 2
    for id_ in (task, other):
        failed = await task_row(database, id_)
        assert failed["state"] == "error"
        assert failed["error"]["type"].startswith("ValueError" if kind == "process" else "Odd")
        assert failed["error"]["message"].startswith("a ")
        assert failed["error"]["traceback"], "it is stored as it was said, but for the one character"
        assert not failed["error"]["message"].startswith("the outcome could not be stored")


async def test_a_worker_wakes_at_once_for_its_own_retry(url: str, database: Connection) -> None:
    app = Interlock(config=Config(database_url=url))
    resting = asyncio.Event()

    @app.task(max_tries=2)
    async def twice(ctx: TaskContext) -> None:
        if ctx.tries == 1:
            await resting.wait()
            raise RetryableError("not yet", retry_after=0)

    task = await enqueue(database, "twice", max_tries=2)
    async with serving(app, replace(PATIENT, mode=WakeMode.POLLING, concurrency=2)) as worker:
        await until(lambda: worker.context.active and worker.state is WorkerState.BACKING_OFF)
        resting.set()
        await until(lambda: worker.context.tasks_processed == 2)
    assert (await task_row(database, task))["state"] == "done"


async def test_another_worker_wakes_at_once_for_a_returned_task(url: str, database: Connection) -> None:
    (leaving, gate), (staying, other_gate) = gated_app(url), gated_app(url)
    other_gate.opened[2].set()
    async with serving(staying, PATIENT) as heir:
        await until(lambda: heir.state is WorkerState.BACKING_OFF and heir.components.is_listening)
        heir.components.registration.enable(enabled=False)
        task = await enqueue(database, "gated")
        async with serving(leaving, replace(QUICK, grace=0)):
            await gate.entered[1].wait()
            looked = heir.context.backoff_count
            heir.components.registration.enable(enabled=True)
            await until(lambda: heir.context.backoff_count > looked and heir.state is WorkerState.BACKING_OFF)
        await until(lambda: heir.context.tasks_processed == 1)
    assert await task_events(database, task) == ["create", "claim", "return", "claim", "succeed"]


@pytest.mark.store
async def test_a_retry_is_due_by_the_clock_of_the_server(database: Connection) -> None:
    task = await enqueue(database, "gated")
    (claimed,) = await claim_pending_tasks(database, actor="w", types=["gated"])
    outcome = Outcome(claimed.id, claimed.attempt, TaskRowEvent.RETRY, error={"type": "E"}, delay=90.5)
    clock = "select clock_timestamp() as at"
    (before,) = await (await database.execute(clock)).fetchall()
    await settle_running_tasks(database, [outcome], actor="w")
    (after,) = await (await database.execute(clock)).fetchall()
    row = await task_row(database, task)
    assert row["state"] == "pending"
    assert before["at"] <= row["run_at"] - timedelta(seconds=90.5) <= after["at"]


async def test_a_transactional_task_finishes_after_its_last_statement_and_not_at_its_first(
    url: str, database: Connection
) -> None:
    app = Interlock(url)

    @app.task(transactional=True)
    async def transact(ctx: TaskContext) -> str:
        await ctx.connection.execute("select 1")  # the transaction begins
        cursor = await ctx.connection.execute("select clock_timestamp() as at")
        (row,) = await cursor.fetchall()
        return str(row["at"])

    async with app, serving(app, WorkerSettings(duties=False)):
        handle = await transact.enqueue()
        await handle.result(timeout=60)
        *_, succeed = await handle.history()
    row = await task_row(database, handle.id)
    assert datetime.fromisoformat(row["output"]) < row["finished_at"] <= succeed.recorded_at


@pytest.mark.store
async def test_a_retry_without_a_delay_is_due_when_it_was_before(database: Connection) -> None:
    task = await enqueue(database, "gated")
    before = (await task_row(database, task))["run_at"]
    (claimed,) = await claim_pending_tasks(database, actor="w", types=["gated"])
    outcome = Outcome(claimed.id, claimed.attempt, TaskRowEvent.RETURN)
    await settle_running_tasks(database, [outcome], actor="w")
    assert (await task_row(database, task))["run_at"] == before


def test_long_errors_of_a_handler_are_truncated() -> None:
    long = "x" * 1_000_000
    for error in (PermanentError(long), HandlerError("Error", long, trace="y" * 20_000 + "end", retryable=False)):
        document = error_document(error)
        assert document["message"].endswith("x… (1,000,000 characters in all)")
        assert all(len(str(value)) < 21_000 for value in document.values())
        assert len(describe_error(error)) < 11_000
    assert error_document(HandlerError("Error", "short", trace="the end", retryable=True)) == {
        "type": "Error",
        "message": "short",
        "traceback": "the end",
        "retryable": True,
    }
