"""The test kit that users get: inline runs, drained queues, and a clock that tests control."""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from interlock import Backoff, Interlock, PermanentError, RetryableError, StepContext, TaskContext
from interlock.errors import InputError, StoreError
from interlock.store.task_admin import cancel_unfinished_tasks
from interlock.testing import Clock, Recorder, drain, make_context, run_inline, run_with
from interlock.worker.executors.base import HandlerError
from processes import is_process_running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from interlock.postgres.connection import Connection

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
nowhere = Interlock("postgresql://nowhere")


@nowhere.task
async def greet(ctx: TaskContext, name: str, at: datetime) -> tuple[str, datetime]:
    ctx.progress(0.5, "half way")
    await ctx.checkpoint({"name": name})
    return f"{ctx.restore()['name']} {ctx.attempt}", at


@nowhere.task
def blocking(ctx: TaskContext, n: int) -> int:
    assert ctx.checkpoint([n]).wait(5)
    return n + 1


@pytest.mark.unit
async def test_a_task_runs_inline_with_typed_arguments_and_results() -> None:
    assert await run_inline(greet, "ada", NOON) == ("ada 1", NOON)
    assert await run_inline(blocking, n=1) == 2
    with pytest.raises(InputError, match="argument 'n'"):
        await run_inline(blocking, n="x")  # type: ignore[arg-type]  # the point


PROGRAM = """
import json, sys
task = json.loads(sys.stdin.readline())
print(json.dumps({"type": "progress", "fraction": 0.5, "message": "half way"}), flush=True)
print(json.dumps({"type": "result", "output": task["input"]["n"] + 1}), flush=True)
"""


@pytest.mark.flow
async def test_a_command_runs_inline_as_a_real_program() -> None:
    app = Interlock("postgresql://nowhere")
    line = Recorder()
    increment = app.command_task("increment", [sys.executable, "-c", PROGRAM])
    assert await run_with(make_context(increment, line=line), increment, n=1) == 2
    assert line.progress == [{"fraction": 0.5, "message": "half way"}]
    with pytest.raises(HandlerError, match="exited with code 3: on standard error"):
        await run_inline(app.command_task("fails", ["sh", "-c", "echo on standard error >&2; exit 3"]))


@pytest.mark.flow
async def test_a_command_that_runs_inline_has_its_timeout(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    text = f"echo $$ > {started}; exec sleep 600"
    slow = Interlock("postgresql://nowhere").command_task("slow", ["sh", "-c", text], timeout=1)
    with pytest.raises(TimeoutError, match="still running after 1 s"):
        await run_inline(slow)
    assert not is_process_running(int(started.read_text()))


async def test_a_drained_queue_runs_commands_too(app: Interlock) -> None:
    increment = app.command_task("increment", [sys.executable, "-c", PROGRAM])
    handle = await increment.enqueue(n=1)
    assert [ran.event for ran in await drain(app)] == ["succeed"]
    assert await handle.result() == 2


@pytest.mark.unit
async def test_progress_of_a_handler_is_recorded() -> None:
    line = Recorder()
    context = make_context(greet, attempt=3, line=line)
    await run_with(context, greet, "bob", NOON)
    assert line.progress == [{"fraction": 0.5, "message": "half way"}]
    assert line.checkpoints == [{"name": "bob"}]
    assert context.output_data == {"result": ["bob 3", "2030-01-01T12:00:00Z"]}


@nowhere.task(timeout=0.02)
async def slow(ctx: TaskContext) -> None:
    assert ctx.deadline is not None
    await asyncio.sleep(30)


@nowhere.task(timeout=0.02)
def slow_thread(ctx: TaskContext) -> None:
    while not ctx.cancelled:  # return when asked, so that the thread ends
        time.sleep(0.001)


@nowhere.task(timeout=30)
async def own_timeout() -> None:
    raise TimeoutError("of its own")


@pytest.mark.unit
async def test_a_task_that_runs_inline_has_its_timeout() -> None:
    contexts = [make_context(task) for task in (slow, slow_thread)]
    for task, context in zip((slow, slow_thread), contexts, strict=True):
        async with asyncio.timeout(60):
            with pytest.raises(TimeoutError, match=r"the handler was still running after 0.02 s"):
                await run_with(context, task)
    assert contexts[1].cancelled
    with pytest.raises(TimeoutError, match="of its own"):
        await run_inline(own_timeout)


@pytest.mark.unit
async def test_a_transactional_task_says_what_it_needs_to_run_inline() -> None:
    @Interlock("postgresql://nowhere").task(transactional=True)
    async def order(ctx: TaskContext) -> None:
        await ctx.connection.execute("select 1")

    with pytest.raises(StoreError, match=r"task order is transactional .* open its app first"):
        await run_inline(order)


@pytest.mark.unit
def test_a_test_clock_advances_only_on_demand() -> None:
    clock = Clock(NOON)
    assert (clock(), clock.advance(90), clock()) == (NOON, NOON + timedelta(seconds=90), NOON + timedelta(seconds=90))
    with pytest.raises(ValueError, match="forward"):
        clock.advance(timedelta(seconds=-1))
    with pytest.raises(ValueError, match="time zone"):
        Clock(datetime(2030, 1, 1))  # noqa: DTZ001 - the point
    assert Clock()().tzinfo is UTC


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


@pytest.fixture
async def app(url: str, clock: Clock) -> AsyncIterator[Interlock]:
    async with Interlock(url, clock=clock) as opened:
        yield opened


@pytest.mark.store
async def test_retries_come_when_the_clock_says_so(app: Interlock, clock: Clock) -> None:
    @app.task(max_tries=3, backoff=Backoff.exponential(60, jitter=0))
    async def flaky(ctx: TaskContext) -> str:
        if not ctx.is_last_try:
            raise RuntimeError(f"try {ctx.tries}")
        return "at last"

    handle = await flaky.enqueue()
    assert [ran.event for ran in await drain(app)] == ["retry"]
    status = await handle.status()
    assert (status.state, status.run_at, status.reason) == (
        "pending",
        NOON + timedelta(seconds=60),
        "RuntimeError: try 1",
    )
    assert await drain(app) == []
    clock.advance(60)
    assert [ran.event for ran in await drain(app)] == ["retry"]
    clock.advance(120)
    assert [ran.event for ran in await drain(app)] == ["succeed"]
    assert await handle.result() == "at last"


@pytest.mark.store
async def test_errors_end_as_their_kind_says(app: Interlock, clock: Clock) -> None:
    @app.task(backoff=lambda _: 10)
    async def fail(how: str) -> None:
        if how == "permanent":
            raise PermanentError("never\0 \ud800")  # which no jsonb column can hold as it is
        raise RetryableError("soon", retry_after=5 if how == "soon" else None)

    handles = [await fail.enqueue(how) for how in ("permanent", "soon", "later")]
    ran = await drain(app)
    assert [(one.event, one.error and one.error["retryable"]) for one in ran] == [
        ("fail", False),
        ("retry", True),
        ("retry", True),
    ]
    assert ran[0].error is not None
    assert ran[0].error["message"] == "never\ufffd ?"
    run_ats = [(await handle.status()).run_at - clock() for handle in handles[1:]]
    assert run_ats == [timedelta(seconds=5), timedelta(seconds=10)]


@pytest.mark.store
async def test_tasks_enqueued_by_tasks_are_drained_too_by_default(app: Interlock) -> None:
    @app.task
    async def countdown(n: int) -> None:
        if n:
            await countdown.enqueue(n - 1)

    @app.task(namespace="elsewhere")
    def other() -> None: ...

    await countdown.enqueue(2)
    await other.enqueue()
    assert len(await drain(app, namespaces=["default"], until_empty=False)) == 1
    assert len(await drain(app, namespaces=["default"])) == 2
    assert [ran.type for ran in await drain(app)] == ["other"]


@pytest.mark.store
async def test_a_delayed_task_is_due_when_the_clock_says_so(app: Interlock, clock: Clock) -> None:
    @app.task
    async def later(n: int) -> None: ...

    await later.options(delay=timedelta(hours=1)).enqueue(1)
    await later.options(delay=3600).enqueue_many([{"n": n} for n in range(60)])
    await later.options(run_at=NOON + timedelta(hours=2)).enqueue(3)
    assert await drain(app) == []
    clock.advance(3600)
    assert len(await drain(app)) == 61
    clock.advance(3600)
    assert len(await drain(app)) == 1


@pytest.mark.store
async def test_a_transactional_task_commits_its_writes_with_its_outcome(app: Interlock, database: Connection) -> None:
    await database.execute("create table orders (id int primary key)")

    @app.task(transactional=True, max_tries=1)
    async def order(ctx: TaskContext, number: int, how: str = "well") -> None:
        await ctx.connection.execute("insert into orders values (%s)", [number])
        if how == "badly":
            raise ValueError("no")
        if how == "canceled":
            assert ctx.task_id is not None
            await cancel_unfinished_tasks(database, [ctx.task_id], actor="somebody", running=True)

    for number, how in enumerate(["well", "badly", "canceled"]):
        await order.enqueue(number, how)
    assert [ran.event for ran in await drain(app)] == ["succeed", "fail", "lost"]
    assert await (await database.execute("select id from orders")).fetchall() == [{"id": 0}]


@pytest.mark.store
async def test_an_inline_transactional_task_commits(app: Interlock, database: Connection) -> None:
    await database.execute("create table orders (id int primary key)")

    async def orders() -> list[int]:
        return [row["id"] for row in await (await database.execute("select id from orders")).fetchall()]

    @app.task(transactional=True, timeout=20)
    async def order(ctx: TaskContext, number: int, how: str = "well") -> int:
        await ctx.connection.execute("insert into orders values (%s)", [number])
        assert number not in await orders(), "nothing is committed before the end"
        if how == "badly":
            raise ValueError("no")
        return "x" if how == "wrongly" else number  # type: ignore[return-value]  # the point

    assert await run_inline(order, 1) == 1
    with pytest.raises(ValueError, match="no"):
        await run_inline(order, 2, how="badly")
    with pytest.raises(PermanentError, match="result"):
        await run_inline(order, 3, how="wrongly")
    with pytest.raises(psycopg.errors.UniqueViolation):
        await run_inline(order, 1)
    async with app.connection() as own, own.transaction(force_rollback=True):
        assert await run_with(make_context(order, connection=own), order, 4) == 4
        with pytest.raises(psycopg.errors.UniqueViolation):
            await run_with(make_context(order, connection=own), order, 4)
    assert await orders() == [1], "a connection of the test's own is committed, or not, by the test"
    assert await app.find() == [], "nothing of the queue is touched"


@pytest.mark.store
async def test_progress_cost_and_checkpoints_are_stored(app: Interlock, database: Connection) -> None:
    @app.task
    async def costly(ctx: TaskContext, values: list[Any]) -> None:
        ctx.cost = 1.5
        ctx.progress(1, "done", rows=len(values))
        assert await ctx.checkpoint(values)

    handle = await costly.enqueue([1, 2])
    await drain(app)
    status = await handle.status()
    assert (status.cost, status.progress) == (1.5, {"fraction": 1, "message": "done", "rows": 2})
    stored = await (await database.execute("select checkpoint from interlock.tasks")).fetchone()
    assert stored == {"checkpoint": [1, 2]}


@pytest.mark.store
async def test_a_drain_carries_jobs_through_everything_that_they_wait_for(url: str) -> None:
    clock = Clock(NOON)
    undone: list[str] = []
    app = Interlock(url, clock=clock)
    wf = app.workflow("month", timeout=60 * 86_400)

    def cancel_it(result: str) -> None:
        undone.append(result)

    @wf.step(namespace="desk", compensate=cancel_it)
    def book(ctx: StepContext, days: int) -> str:
        assert ctx.step == "book"
        return f"booked for {days} days"

    wf.sleep("rest", 30 * 86_400, after=[book])
    wf.approval("agreed", after=["rest"], timeout=86_400, namespace="desk")

    @wf.map(over_input="guests", after=["agreed"])
    async def invite(item: str) -> str:
        return f"dear {item}"

    kid = app.workflow("kid")

    @kid.step
    def greet_all(names: list[str]) -> str:
        return ", ".join(names)

    wf.child("letter", kid, input={"names": "invite"}, after=["invite"])
    async with app:
        job = await app.submit("month", {"days": 3, "guests": ["eva", "bob"]})
        late = await app.submit("month", {"days": 1, "guests": []})
        assert (await job.status()).status == "PENDING"
        assert [ran.type for ran in await drain(app)] == ["month/book", "month/book"]
        clock.advance(timedelta(days=30, seconds=1))
        assert await drain(app) == [], "they have slept, which takes no task"
        assert {step.step: step.state for step in await job.steps()}["rest"] == "done"
        await job.approve("agreed")
        ran = [ran.type for ran in await drain(app)]
        assert (ran.count("month/invite"), ran.count("kid/greet_all")) == (2, 1)
        assert await job.wait(5) == {"letter": {"greet_all": "dear eva, dear bob"}}
        clock.advance(timedelta(days=2))
        await drain(app)
        assert (await late.status()).reason == "step agreed failed: no signal 'agreed' within 86400 s"
        assert undone == ["booked for 1 days"]
