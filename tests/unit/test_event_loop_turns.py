"""Attempts that share an asyncio task: no handler sees the context of another, and none waits for another."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from fault_injection import gated_app
from interlock import Interlock
from interlock.config import Config
from interlock.lifecycle import TaskState
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.tasks import claim_pending_tasks
from interlock.worker.outcome import Interruption
from interlock.worker.run import serving
from interlock.worker.runner import MAX_LOOP_HOLD_S
from interlock.worker.settings import WorkerSettings
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

MANY = 20
SETTINGS = WorkerSettings(duties=False, concurrency=2 * MANY)
word: ContextVar[str] = ContextVar("word", default="clean")


def app_with(url: str, handler: Callable[..., Any]) -> Interlock:
    app = Interlock(config=Config(database_url=url, worker_name="test-worker"))
    app.task(name="it", max_tries=1)(handler)
    return app


async def run_many(app: Interlock, tasks: int = MANY) -> list[str]:
    """Enqueue tasks before the worker starts, so that it claims them in one batch; return their states."""
    async with app:
        handles = await app.tasks["it"].enqueue_many({"number": number} for number in range(tasks))
    async with serving(app, SETTINGS) as worker:
        await until(lambda: worker.context.tasks_processed == tasks)
    async with app:
        return [(await handle.status()).state for handle in handles]


async def test_handlers_that_do_not_wait_share_a_task_and_those_that_wait_have_their_own(url: str) -> None:
    quick: set[asyncio.Task[Any] | None] = set()
    patient: set[asyncio.Task[Any] | None] = set()
    everybody = asyncio.Event()

    async def handler(number: int) -> None:
        if number < MANY // 2:
            quick.add(asyncio.current_task())
            return
        patient.add(asyncio.current_task())
        if len(patient) == MANY - MANY // 2:
            everybody.set()
        await everybody.wait()

    assert set(await run_many(app_with(url, handler))) == {"done"}
    assert len(quick) < MANY // 2
    assert len(patient) == MANY - MANY // 2


async def test_context_variables_do_not_leak_between_handlers(url: str) -> None:
    seen: list[str] = []

    async def handler(number: int) -> None:
        seen.append(word.get())
        token = word.set(f"of {number}")
        if number % 5 == 0:
            await asyncio.sleep(0)
            word.reset(token)

    assert set(await run_many(app_with(url, handler))) == {"done"}
    assert seen == ["clean"] * MANY


async def test_a_handler_that_cancels_its_own_task_does_not_cancel_the_next(url: str) -> None:
    async def handler(number: int) -> None:
        if number == 0:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return
        await asyncio.sleep(0)

    assert set(await run_many(app_with(url, handler))) == {"done"}


async def test_a_timeout_within_a_handler_ends_that_handler_alone(url: str) -> None:
    async def handler(number: int) -> None:
        async with asyncio.timeout(0.05 if number % 2 else None):
            if number % 2:
                await asyncio.Event().wait()

    states = await run_many(app_with(url, handler))
    assert states == ["error" if number % 2 else "done" for number in range(MANY)]


async def test_a_handler_that_fails_at_once_leaves_the_others_their_turn(url: str) -> None:
    async def handler(number: int) -> None:
        if number % 3 == 0:
            raise SystemExit(number)
        if number % 3 == 1:
            raise asyncio.CancelledError

    states = await run_many(app_with(url, handler))
    assert states == ["done" if number % 3 == 2 else "error" for number in range(MANY)]


async def test_handlers_that_compute_let_the_loop_have_its_turn_between_them(url: str) -> None:
    turns = 0

    async def handler(number: int) -> None:
        def count() -> None:
            nonlocal turns
            turns += 1

        loop = asyncio.get_running_loop()
        loop.call_soon(count)
        until_then = loop.time() + MAX_LOOP_HOLD_S
        while loop.time() <= until_then:
            pass
        if number == MANY - 1:
            assert turns > 0

    assert set(await run_many(app_with(url, handler))) == {"done"}


async def test_an_attempt_that_is_interrupted_before_its_turn_does_not_run(url: str, database: Connection) -> None:
    ran: list[int] = []

    async def handler(number: int) -> None:
        ran.append(number)

    app = app_with(url, handler)
    async with app:
        await app.tasks["it"].enqueue_many({"number": number} for number in range(2))
        claimed = await claim_pending_tasks(database, actor="w", types=["it"], limit=2)
    async with serving(app, SETTINGS) as worker:
        await until(lambda: worker.context.backoff_count > 0)
        worker.components.runner.start(claimed, asyncio.get_running_loop().time() + 30)
        first, second = list(worker.context.active.values())
        second.interrupt(Interruption.LEASE_LOST)
        await until(lambda: not worker.context.active)
    assert ran == [claimed[0].input["number"]]
    assert (first.state, second.state) == (TaskState.COMPLETED, TaskState.ABANDONED)


async def test_a_reclaimed_task_stops_its_lost_attempt(url: str, database: Connection) -> None:
    app, gate = gated_app(url)
    async with app:
        await app.tasks["gated"].enqueue_many([{}])
    async with serving(app, replace(SETTINGS, recovery_interval=3600, lease=3600)) as worker:
        await gate.entered[1].wait()
        (first,) = worker.context.active.values()
        await database.execute("update interlock.tasks set lease_expires_at = now() - interval '1 s'")
        await recover_expired_tasks(database, actor="somebody")
        await database.execute("update interlock.tasks set crashes = 0")  # else it waits until the worker is idle
        worker.components.registration.refresh()
        await gate.entered[2].wait()
        await until(first.is_terminal)
        (second,) = worker.context.active.values()
        gate.opened[2].set()
        await until(second.is_terminal)
    assert (first.state, second.state) == (TaskState.ABANDONED, TaskState.COMPLETED)
    assert (first.key[1], second.key[1]) == (1, 2)
