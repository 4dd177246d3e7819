"""Pools with real processes, under attack: poison tasks, a frozen supervisor, apps that cannot be imported."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from interlock import Interlock
from interlock.config import Config
from interlock.postgres.connection import connect
from interlock.store.pools import NewPool, create_pool, scale_pool
from interlock.store.workers import WorkerSpec, kill_worker
from interlock.supervisor.http.app import create_api
from pool_support import Event, Fleet, is_here, pooling, supervisor_process
from processes import is_process_running
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.supervisor.pool.pool import Pool

pytestmark = pytest.mark.flow

MEMBERS = "select * from interlock.workers where pool = 'fleet' and status in ('IDLE', 'RUNNING', 'PAUSED') order by id"


async def make_pool(url: str, desired: int, **spec: Any) -> None:
    async with connect(url) as connection:
        await create_pool(connection, NewPool("fleet", desired, WorkerSpec(**spec)), actor="ada")


async def scale(url: str, desired: int) -> None:
    async with connect(url) as connection:
        await scale_pool(connection, "fleet", desired, actor="ada")


def live(fleet: Fleet) -> list[dict[str, Any]]:
    """Return the members whose process has sent a heartbeat."""
    return [row for row in fleet.rows(MEMBERS) if is_here(row, row["generation"])]


def processes_of(fleet: Fleet) -> int:
    """Count the worker processes of this host that run for members of the pool, by their command lines."""
    ids = [row["id"].encode() for row in fleet.rows("select id from interlock.workers where pool = 'fleet'")]
    found = 0
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        found += b"--row" in words and words[words.index(b"--row") + 1] in ids
    return found


@asynccontextmanager
async def readiness_of(url: str, pool: Pool) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of an API beside a pool."""
    config = Config(database_url=url)
    async with Interlock(config=config) as app:
        transport = httpx.ASGITransport(app=create_api(app, config, pool=pool))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


async def test_three_poison_tasks_do_not_empty_a_fleet_of_three(
    url: str, fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    await make_pool(url, 3)
    poison = [await fleet.enqueue("kill_worker", after=0) for _ in range(3)]
    good = [await fleet.enqueue("add", a=1, b=number) for number in range(5)]
    async with pooling(url) as pool, readiness_of(url, pool) as client:
        for task in poison:
            ended = await fleet.state_of(task, "error")
            assert ended["error"]["type"] == "WorkerCrashed"
        for task in good:
            await fleet.state_of(task, "done")
        await until(lambda: len(live(fleet)) == 3)
        assert (await client.get("/readyz")).status_code == 200
        # a row keeps the suspects of its last crash only; the log has those of all crashes
        suspects = {task for row in fleet.rows(MEMBERS) for task in row["suspected_tasks"]}
        assert suspects
        assert suspects <= set(poison)
        logged = capsys.readouterr().out
        assert all(f"suspected: task {task}" in logged for task in poison)
        assert not any(f"task {task}" in logged for task in good)
        notes = " ".join(row["process_note"] or "" for row in fleet.rows(MEMBERS))
        assert "(kill_worker), which it ran alone" in notes
        assert len(fleet.rows("select * from interlock.workers where status = 'FAILED'")) == 0


async def test_an_app_that_cannot_be_imported_is_retried_slowly_and_is_not_ready(url: str, fleet: Fleet) -> None:
    await make_pool(url, 1, app="nowhere:app")
    async with pooling(url, restart_backoff=0.5, ready_timeout=0.2) as pool, readiness_of(url, pool) as client:
        (row,) = await eventually_rows(fleet, lambda row: row["crashes"] >= 2)
        assert row["status"] == "RUNNING"
        assert "there is no module 'nowhere'" in row["process_note"]
        assert row["generation"] <= row["crashes"] + 1, "one process per restart"
        assert row["restart_at"] is not None or row["pid"] is not None
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "no_live_worker")
        assert (await client.get("/healthz")).status_code == 200
        await scale(url, 0)
        assert (await client.get("/readyz")).status_code == 200
        await until(lambda: not fleet.rows(MEMBERS))


async def eventually_rows(fleet: Fleet, look: Any) -> list[dict[str, Any]]:
    await until(lambda: bool(rows := fleet.rows(MEMBERS)) and all(map(look, rows)))
    return fleet.rows(MEMBERS)


async def test_readiness_tells_that_the_pool_does_not_reconcile(url: str) -> None:
    async with pooling(url, max_poll_gap=3600) as pool, readiness_of(url, pool) as client:
        assert (await client.get("/readyz")).status_code == 200
        await pool.stop()
        pool.settings = type(pool.settings)(max_poll_gap=0)
        answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["code"]) == (503, "supervision_stalled")


async def test_supervision_goes_on_while_a_supervisor_is_frozen_and_after_it_wakes(url: str, fleet: Fleet) -> None:
    await make_pool(url, 2)
    with supervisor_process(url) as frozen:
        await until(lambda: len(live(fleet)) == 2)
        first = live(fleet)
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            async with pooling(url) as pool:
                await scale(url, 3)
                os.kill(first[0]["pid"], signal.SIGKILL)
                await until(lambda: len(live(fleet)) == 3 and fleet.row(first[0]["id"])["generation"] == 2)
                await until(lambda: {row["supervisor_id"] for row in live(fleet)} == {pool.id})
                assert processes_of(fleet) == 3
                os.kill(frozen.pid, signal.SIGCONT)
                added = await fleet.enqueue("add", a=1, b=2)
                await fleet.state_of(added, "done")
                await scale(url, 4)  # whichever of the two adds it
                await until(lambda: len(live(fleet)) == 4)
                assert processes_of(fleet) == 4
                assert sorted(row["generation"] for row in fleet.rows(MEMBERS)) == [1, 1, 1, 2]
        finally:
            os.kill(frozen.pid, signal.SIGCONT)


async def test_terminate_gives_running_tasks_their_grace(url: str, fleet: Fleet) -> None:
    worker = await fleet.add(grace=25)
    async with pooling(url):
        await fleet.alive(worker)
        task = await fleet.enqueue("nap", seconds=1.5)
        await fleet.state_of(task, "running")
        await fleet.move(worker, Event.TERMINATE)
        row = await fleet.state_of(task, "done", "pending")
        assert (row["state"], row["attempt"]) == ("done", 1)
        await fleet.seen(worker, lambda row: row["pid"] is None)


async def test_force_kills_a_process_that_stops_and_its_group(url: str, fleet: Fleet) -> None:
    worker = await fleet.add(grace=25)
    async with pooling(url):
        row = await fleet.alive(worker)
        task = await fleet.enqueue("nap", seconds=3600)
        await fleet.state_of(task, "running")
        await fleet.move(worker, Event.TERMINATE)
        async with connect(url) as connection:
            await kill_worker(connection, worker, actor="ada")
        await fleet.state_of(task, "pending")
        row = await fleet.seen(worker, lambda row: row["pid"] is None)
        assert row["process_note"] == "the process was killed by SIGKILL"
    assert not is_process_running(row["pid"] or 0) or row["pid"] is None
