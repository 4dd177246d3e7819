"""Recovery from each kind of worker failure, with real processes."""

from __future__ import annotations

import signal
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from interlock.store.workers import list_live_workers
from jobs_support import app_at, orchestrator_at
from pool_support import Event, Fleet, config_at, kill, pooling
from processes import is_process_running
from worker_support import until, worker_process

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


class Clock:
    """The server's time, until the test advances it."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime | None:
        return datetime.now(UTC) + self.ahead if self.ahead else None


async def test_a_transient_error_is_retried_three_times_and_the_worker_stays_running(url: str, fleet: Fleet) -> None:
    worker = await fleet.add()
    async with pooling(url, restart_backoff=0.05):
        notes = []
        for generation in (1, 2, 3):
            row = await fleet.seen(worker, partial(_has_begun, generation))
            assert row["status"] == "RUNNING"
            kill(row["pid"])
            notes.append((await fleet.seen(worker, partial(_has_crashed, generation)))["process_note"])
        await fleet.alive(worker, generation=4)
        assert [note.partition("; ")[2] for note in notes] == [
            "restart 1 of 3 in 0.05 s",
            "restart 2 of 3 in 0.1 s",
            "restart 3 of 3 in 0.2 s",
        ]
        assert notes[0].startswith("the process was killed by SIGKILL")
    assert fleet.history(worker)[-1][0] == "RUNNING"


async def test_a_worker_that_crashes_quickly_again_and_again_fails_with_the_reason(url: str, fleet: Fleet) -> None:
    worker = await fleet.add(app="unimportable_app:app")
    async with pooling(url, max_restarts=1):
        row = await fleet.seen(worker, lambda row: row["status"] == "FAILED")
        assert row["generation"] == 2
        reason = "2 quick crashes in a row; last: the process exited with code 1: "
        assert row["reason"].startswith(f"{reason}cannot import unimportable_app: RuntimeError: no good\n")
        assert "unimportable_app.py:3, in <module>" in row["reason"]
        await fleet.seen(worker, lambda row: row["supervisor_id"] is None)


async def test_a_process_that_lasted_begins_anew_with_its_tries(url: str, fleet: Fleet) -> None:
    worker = await fleet.add()
    async with pooling(url, stable_after=0.3):
        kill((await fleet.seen(worker, partial(_has_begun, 1)))["pid"])
        await fleet.seen(worker, partial(_has_crashed, 1))
        await fleet.alive(worker, generation=2)
        await fleet.seen(worker, partial(_has_crashed, 0))


async def test_memory_above_the_limit_pauses_the_worker(url: str, fleet: Fleet) -> None:
    worker = await fleet.add(memory_limit_mb=250)
    async with pooling(url):
        first = await fleet.alive(worker)
        task = await fleet.enqueue("grow", megabytes=300, seconds=5)
        row = await fleet.seen(worker, lambda row: row["status"] == "PAUSED")
        assert row["reason"].startswith("the process uses ")
        assert row["reason"].endswith(" MB of memory; its limit is 250 MB")
        assert is_process_running(first["pid"])
        await fleet.state_of(task, "done")
        row = await fleet.seen(worker, lambda row: row["pid"] is None)
        assert row["status"] == "PAUSED"
        await fleet.move(worker, Event.RESUME)
        await fleet.alive(worker, generation=2)
        assert fleet.row(worker)["crashes"] == 0


async def test_an_unrecoverable_error_fails_the_worker_at_once_with_the_reason(url: str, fleet: Fleet) -> None:
    worker = await fleet.add(app="nowhere:app")
    async with pooling(url):
        row = await fleet.seen(worker, lambda row: row["status"] == "FAILED")
    assert row["generation"] == 1
    assert "there is no module 'nowhere'" in row["reason"]


async def test_a_worker_without_heartbeat_is_terminated(url: str, fleet: Fleet) -> None:
    worker = await fleet.add(lease=3600)
    clock = Clock()
    async with pooling(url, clock=clock, grace=0, stop_margin=0.3, max_poll_gap=1e9):
        row = await fleet.alive(worker)
        task = await fleet.enqueue("nap", seconds=3600)
        await fleet.state_of(task, "running")
        kill(row["pid"], signal.SIGSTOP)
        clock.ahead = timedelta(seconds=120)
        await fleet.state_of(task, "pending")
        assert fleet.row(worker)["status"] == "TERMINATED"
        await fleet.seen(worker, lambda row: row["pid"] is None)
        assert not is_process_running(row["pid"])
    state, reason = fleet.history(worker)[-1]
    assert state == "TERMINATED"
    assert reason.startswith("no heartbeat for 1")


async def test_a_silent_worker_of_no_pool_is_terminated(url: str, fleet: Fleet, database: Connection) -> None:
    clock = Clock()
    task = await fleet.enqueue("nap", seconds=3600)
    with worker_process(url, INTERLOCK_LEASE="3600") as process:
        await fleet.state_of(task, "running")
        async with pooling(url, clock=clock, heartbeat_timeout=20, max_poll_gap=1e9) as pool:
            await until(lambda: pool.watched_since is not None)
            await until(lambda: fleet.rows("select * from interlock.workers where status = 'RUNNING'"))
            (live,) = await list_live_workers(database)
            process.kill()
            clock.ahead = timedelta(seconds=60)
            await fleet.state_of(task, "pending")
    state, reason = fleet.history(live.id)[-1]
    assert state == "TERMINATED"
    assert reason.startswith("no heartbeat for ")


async def test_a_job_waits_for_a_worker_and_stays_running_when_its_worker_crashes(url: str, fleet: Fleet) -> None:
    async with (
        orchestrator_at(url, tick=0.05),
        app_at(url) as jobs,
        pooling(url, config_at(url, app="jobs_app:app")),
    ):
        job = await jobs.submit("slow", {"seconds": 5})
        assert (await job.status()).status == "PENDING"
        worker = await fleet.add(lease=3600)
        row = await fleet.alive(worker)
        await until(lambda: fleet.rows("select * from interlock.tasks where state = 'running'"))
        kill(row["pid"])
        await until(lambda: fleet.rows("select * from interlock.tasks where state = 'running' and attempt = 2"))
        assert (await job.status()).status == "RUNNING"
        assert await job.wait(60) is not None
        assert fleet.row(worker)["generation"] == 2
    assert [row["status"] for row in fleet.rows("select status from interlock.jobs")] == ["COMPLETED"]


def _has_begun(generation: int, row: dict[str, Any]) -> bool:
    return row["generation"] == generation and row["pid"] is not None


def _has_crashed(times: int, row: dict[str, Any]) -> bool:
    return bool(row["crashes"] == times)
