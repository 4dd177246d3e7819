"""Slots are released, whatever a handler raises, returns or reports, and whatever fails around it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from fault_injection import gated_app, until_no_transaction_is_open
from interlock import Interlock, TaskContext, WorkerSettings, serving
from interlock.config import Config
from interlock.errors import TaskFailedError
from interlock.lifecycle import TaskState
from interlock.postgres.notifier import WakeMode
from interlock.testing import drain
from worker_support import until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = [pytest.mark.flow, pytest.mark.chaos]

QUICK = WorkerSettings(duties=False, poll_base=0.01, poll_cap=0.05)
PATIENT = WorkerSettings(duties=False, lease=3600, cancel_grace=0.05)


class OwnError(BaseException):
    """Derived from BaseException, as the panics of some extension modules are."""


RAISED = {kind.__name__: kind for kind in (KeyboardInterrupt, SystemExit, GeneratorExit, OwnError)}


def seventeen_mebibytes() -> str:
    """Return 17 MiB; a handler for the process executor."""
    return "y" * 17 * 1024 * 1024


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"a": value}
    return value


def app_at(url: str) -> Interlock:
    app = Interlock(url)

    @app.task(max_tries=1)
    async def raises(kind: str) -> None:
        raise RAISED[kind]

    @app.task(max_tries=1)
    async def raises_in_context(ctx: TaskContext, kind: str) -> None:
        ctx.progress(0.5)
        raise RAISED[kind]

    @app.task(max_tries=1, transactional=True)
    async def transact(ctx: TaskContext, how: str) -> Any:
        if how == "deep":
            return nested(300)
        costs = {"huge": 10**400, "text": "abc", "nan": float("nan"), "negative": -0.01, "fine": 2}
        ctx.cost = costs[how]  # type: ignore[assignment]
        return None

    @app.task(max_tries=1)
    async def save(ctx: TaskContext, how: str) -> Any:
        values = {"nan": float("nan"), "time": datetime.now(UTC), "nul": "\0", "object": object(), "fine": [1]}
        await ctx.checkpoint(values[how])
        return ctx.restore()

    @app.task(max_tries=1)
    async def large(size: int) -> str:
        return "é" * size

    @app.task
    async def nap(ctx: TaskContext) -> None:
        ctx.progress(0.5)
        await asyncio.sleep(3600)

    @app.task
    async def fine() -> str:
        return "fine"

    return app


@pytest.mark.parametrize("task", ["raises", "raises_in_context"])
@pytest.mark.parametrize("kind", list(RAISED))
async def test_a_handler_cannot_end_the_worker_whatever_it_raises(url: str, task: str, kind: str) -> None:
    app = app_at(url)
    async with app, serving(app, QUICK) as worker:
        with pytest.raises(TaskFailedError, match=kind):
            await (await app.tasks[task].enqueue(kind=kind)).result(timeout=60)
        assert await (await app.tasks["fine"].enqueue()).result(timeout=60) == "fine"
        await until(lambda: not worker.context.active)


@pytest.mark.parametrize(
    ("task", "how"),
    [
        *(("transact", how) for how in ("deep", "huge", "text", "nan", "negative")),
        *(("save", how) for how in ("nan", "time", "nul")),
    ],
)
async def test_values_that_cannot_be_stored_fail_the_task(url: str, database: Connection, task: str, how: str) -> None:
    app = app_at(url)
    async with app, serving(app, QUICK) as worker:
        with pytest.raises(TaskFailedError, match=r"stored|cost must be a finite number"):
            await (await app.tasks[task].enqueue(how=how)).result(timeout=60)
        assert await (await app.tasks[task].enqueue(how="fine")).result(timeout=60) in (None, [1])
        await until(lambda: not worker.context.active)
        await until_no_transaction_is_open(database)


async def test_oversized_batches_are_written_singly(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.store.tasks.MAX_BATCH_CHARACTERS", 5_000)
    app = app_at(url)
    large = app.tasks["large"]
    async with app, serving(app, WorkerSettings(duties=False, concurrency=40, largest_result=10_000)) as worker:
        # of each letter two bytes are stored, and the quotes
        handles = await large.enqueue_many([{"size": 3_000}] * 30 + [{"size": 4_999}, {"size": 5_000}])
        results = await asyncio.gather(*(handle.result(timeout=60) for handle in handles), return_exceptions=True)
        await until(lambda: not worker.context.active)
    assert [len(result) if isinstance(result, str) else 0 for result in results] == [3_000] * 30 + [4_999, 0]
    with pytest.raises(TaskFailedError, match=r"has 10,002 bytes of JSON, and at most 10,000 are stored \(sett"):
        raise results[-1]


@pytest.mark.parametrize("kind", ["transact", "costly"])
async def test_the_largest_result_is_the_same_for_every_way_to_settle(url: str, kind: str) -> None:
    app = Interlock(config=Config(database_url=url, largest_result=2_000))

    @app.task(max_tries=1, transactional=True)
    async def transact(ctx: TaskContext, size: int) -> str:
        assert ctx.connection is not None
        return "y" * size

    @app.task(max_tries=1)
    async def costly(ctx: TaskContext, size: int) -> str:
        ctx.cost = 1
        return "y" * size

    task = app.tasks[kind]
    told = "at most 2,000 are stored"
    async with app:
        async with serving(app):
            assert await (await task.enqueue(size=1_998)).result(timeout=60) == "y" * 1_998
            with pytest.raises(TaskFailedError, match=told):
                await (await task.enqueue(size=1_999)).result(timeout=60)
        await task.enqueue(size=1_999)
        (ran,) = await drain(app)
        assert (ran.event, told in str(ran.error)) == ("fail", True)


async def test_a_result_of_a_process_may_be_as_large_as_any(url: str) -> None:
    app = Interlock(url)
    app.task(executor="process", name="ys", max_tries=1)(seventeen_mebibytes)
    async with app, serving(app):
        handle = await app.tasks["ys"].enqueue()
        assert len(await handle.result(timeout=60)) == 17 * 1024 * 1024


async def test_whatever_breaks_around_an_attempt_its_slot_comes_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_at(url)
    async with app, serving(app, QUICK) as worker:
        assert await (await app.tasks["fine"].enqueue()).result(timeout=60) == "fine"

        def broken(*_: Any) -> None:
            raise OSError("nothing goes")

        with monkeypatch.context() as patch:
            patch.setattr(worker.components.settler, "add", broken)
            handle = await app.tasks["fine"].enqueue()
            await until(lambda: worker.context.tasks_processed == 2)
        assert not worker.context.active
        assert (await handle.status()).state == "running", "until its lease runs out"
        assert await (await app.tasks["fine"].enqueue()).result(timeout=60) == "fine"


async def test_a_slot_comes_back_when_an_attempt_is_given_up_whose_task_was_claimed_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("nothing goes")

    app, gate = gated_app(url)
    settings = WorkerSettings(  # without notifications, it finds out only by its next claim that it has lost the task
        duties=False, concurrency=2, lease=3600, mode=WakeMode.POLLING, poll_base=0.01, poll_cap=0.05
    )
    async with app, serving(app, settings) as worker:
        handle = await app.tasks["gated"].enqueue()
        await gate.entered[1].wait()
        with monkeypatch.context() as patch:
            patch.setattr(worker.components.runner, "abandon", broken)
            await handle.cancel(force=True)
            await handle.requeue()
            await gate.entered[2].wait()
            await until(lambda: worker.context.occupied == 1)
        gate.opened[2].set()
        assert await handle.result(timeout=60) == 2
        await until(lambda: not worker.context.active)
        assert worker.context.occupied == 0


async def test_a_forced_cancellation_reaches_the_handler_at_once(url: str) -> None:
    app = app_at(url)
    async with app, serving(app, PATIENT) as worker:
        handle = await app.tasks["nap"].enqueue()
        await until(lambda: worker.context.active)
        assert (await app.cancel(type="nap", force=True)).count == 1
        await until(lambda: not worker.context.active)
        assert (await handle.status()).state == "canceled"


async def test_a_handler_sees_its_renewed_lease(url: str) -> None:
    app = app_at(url)
    async with app, serving(app, WorkerSettings(duties=False, lease=3, cancel_grace=0.05)) as worker:
        handle = await app.tasks["nap"].enqueue()
        await until(lambda: worker.context.active)
        (attempt,) = worker.context.active.values()
        first = attempt.context.lease_timeout
        assert first is not None
        await until(lambda: datetime.now(UTC) > first)
        assert attempt.state is TaskState.PROCESSING
        assert attempt.context.lease_timeout is not None
        assert attempt.context.lease_timeout > first
        await handle.cancel(force=True)
