"""Concurrent orchestrators, workers, cancellations and signals: every job ends once, without deadlocks."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from factories import step, workflow
from interlock.errors import InputError
from interlock.postgres.connection import connect
from interlock.store.jobs import find_jobs
from interlock.store.step_results import read_queue_state
from interlock.store.task_admin import cancel_unfinished_tasks
from interlock.store.workflows import put_workflow
from interlock.workflow.advance import advance, cancel_overdue_jobs, start_waiting_jobs
from interlock.workflow.cancel import cancel_job
from interlock.workflow.signals import send_signal
from job_driver import Failed, JobDriver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

ENDED = {"COMPLETED", "FAILED", "CANCELED"}


@asynccontextmanager
async def crowd(
    url: str, outcomes: dict[str, object], orchestrators: int = 3, workers: int = 2
) -> AsyncIterator[list[int]]:
    """Run orchestrators and workers concurrently; return how many jobs each orchestrator ended."""
    stopping = asyncio.Event()
    finalized: list[int] = []

    async def orchestrate(number: int) -> None:
        ended = 0
        async with connect(url) as connection:
            while not stopping.is_set():
                done = await advance(connection, actor=f"o_{number}", limit=7, visibility=1)
                assert done.failed == 0
                ended += done.finalized
                await start_waiting_jobs(connection, actor=f"o_{number}")
                await cancel_overdue_jobs(connection, actor=f"o_{number}")
        finalized.append(ended)

    async def work() -> None:
        async with connect(url) as connection:
            other = JobDriver(connection, outcomes)
            while not stopping.is_set():
                for task in await other.claim(limit=10):
                    await other.settle(task)

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for number in range(orchestrators):
            group.create_task(orchestrate(number))
        for _ in range(workers):
            group.create_task(work())
        try:
            yield finalized
        finally:
            stopping.set()


async def all_ended(connection: Connection) -> bool:
    return {row["status"] for row in await find_jobs(connection, limit=1000)} <= ENDED


async def test_several_orchestrators_advance_every_job_once(driver: JobDriver, url: str) -> None:
    names = [f"b{i}" for i in range(20)]
    for number in range(5):
        await driver.submit(step("a"), *(step(name, "a") for name in names), step("z", *names), name=f"w{number}")
    async with crowd(url, {}) as finalized:
        while not await all_ended(driver.connection):
            await asyncio.sleep(0.02)
    assert sum(finalized) == 5
    twice = "select task_id from interlock.audit_logs where event = 'release' group by task_id having count(*) > 1"
    assert await (await driver.connection.execute(twice)).fetchall() == []


async def test_concurrent_cancellations_and_signals_do_not_deadlock(driver: JobDriver, url: str) -> None:
    chance = random.Random(8)  # noqa: S311 - which job is canceled is no secret
    await put_workflow(driver.connection, workflow(step("x", compensate="undo"), step("y", "x"), name="child"))
    jobs: list[UUID] = []
    async with crowd(url, {"b3": Failed("no"), "a": [1, 2, 3]}):
        for number in range(25):
            job = await driver.submit(
                step("a", compensate="undo"),
                *(step(f"b{at}", "a") for at in range(5)),
                step("m", "a", kind="map", over="a"),
                step("c", "a", kind="child", workflow="child"),
                step("s", "a", kind="signal", signal="go"),
                step("mend", recovers=["b3"]),
                step("z", *(f"b{at}" for at in range(5)), "m", "c", "s", join="any"),
                worker_count=chance.choice([None, 2]),
                name="big",
            )
            jobs.append(job)
            at = chance.choice(jobs)
            if number % 2:
                await cancel_job(driver.connection, at, actor="ada")
            else:
                rows = list((await driver.steps(at)).values())
                ids = [row["id"] for row in chance.sample(rows, 3)]
                await cancel_unfinished_tasks(driver.connection, ids, actor="ada")
        for job in jobs:
            if (await driver.job(job))["status"] == "RUNNING" and (await driver.job(job))["ending"] is None:
                await asyncio.wait_for(signal(driver, job), 30)
        while not await all_ended(driver.connection):
            await asyncio.sleep(0.05)
    found = await find_jobs(driver.connection, limit=1000)
    assert {row["open_steps"] for row in found} == {0}
    left = "select count(*) as tasks from interlock.tasks where state in ('waiting', 'pending', 'running')"
    assert (await (await driver.connection.execute(left)).fetchall())[0]["tasks"] == 0
    ends = "select job_id from interlock.job_state_transitions where to_state in ('COMPLETED', 'FAILED', 'CANCELED')"
    assert len(await (await driver.connection.execute(ends)).fetchall()) == len(found), "each job ended once"
    circles = "select deadlocks from pg_stat_database where datname = current_database()"
    assert (await (await driver.connection.execute(circles)).fetchall())[0]["deadlocks"] == 0
    await driver.run()
    assert (await read_queue_state(driver.connection))["archived"] == 0


async def signal(driver: JobDriver, job: UUID) -> None:
    """Send the signal that a job waits for, if it still can be reached."""
    try:
        await send_signal(driver.connection, job, "go", 1, actor="ada")
    except InputError:
        assert (await driver.job(job))["status"] in ENDED or (await driver.job(job))["ending"] is not None
