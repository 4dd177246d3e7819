"""The pool with real worker processes: a process follows its row within a second."""

from __future__ import annotations

import asyncio
import signal
import time

import httpx
import pytest

from cli_support import APP, Shell
from factories import run_sql
from pool_support import Event, Fleet, kill, pooling, supervisor_process
from processes import eventually, is_process_running
from worker_support import until, worker_process

pytestmark = pytest.mark.flow

MEMBERS = "select * from interlock.workers where pool = 'up' order by id"


async def test_a_process_follows_start_pause_resume_and_terminate(url: str, fleet: Fleet) -> None:
    worker = await fleet.add()
    async with pooling(url):
        row = await fleet.alive(worker)
        assert is_process_running(row["pid"])
        await fleet.state_of(await fleet.enqueue("add", a=1, b=2), "done")
        await fleet.move(worker, Event.PAUSE)
        await fleet.obeys(worker, paused=True)
        held = await fleet.enqueue("add", a=1, b=2)
        await fleet.move(worker, Event.RESUME)
        await fleet.obeys(worker, paused=False)
        done = await fleet.state_of(held, "done")
        assert done["worker_id"] == row["instance"] != worker
        await fleet.move(worker, Event.TERMINATE)
        row = await fleet.seen(worker, lambda row: row["supervisor_id"] is None)
    assert (row["status"], row["pid"], row["generation"]) == ("TERMINATED", None, 1)


async def test_pause_over_the_api_pauses_the_process(url: str, fleet: Fleet) -> None:
    with Shell(url).begun("--log-level", "warning", "supervisor", *APP, "--port", "0") as process:
        assert process.stderr is not None
        api = process.stderr.readline().split()[4].rstrip(",")
        process.stderr.readline()  # the link that signs in; the token exists now
        headers = {"Authorization": f"Bearer {Shell(url).answer('token', 'local')}"}
        async with httpx.AsyncClient(base_url=api, headers=headers) as client:

            async def call(path: str) -> str:
                answer = await client.post(path)
                assert answer.status_code == 200, answer.text
                return str(answer.json()["status"])

            worker = (await client.post("/api/workers", json={})).json()["id"]
            await call(f"/api/workers/{worker}/start")
            row = await fleet.alive(worker)
            assert await call(f"/api/supervisor/workers/{worker}/pause") == "PAUSED"
            await fleet.obeys(worker, paused=True)
            await call(f"/api/supervisor/workers/{worker}/resume")
            await fleet.obeys(worker, paused=False)
            await call(f"/api/supervisor/workers/{worker}/terminate")
            await until(lambda: not is_process_running(row["pid"]))
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.communicate)
    assert process.returncode == 0


async def test_a_hung_process_is_killed_and_its_tasks_return_at_once(url: str, fleet: Fleet) -> None:
    worker = await fleet.add(lease=3600)
    async with pooling(url, grace=0, stop_margin=0.3):
        row = await fleet.alive(worker)
        task = await fleet.enqueue("block_the_loop", seconds=3600)
        await fleet.state_of(task, "running")
        await fleet.move(worker, Event.TERMINATE)
        await fleet.state_of(task, "pending")
        row = await fleet.seen(worker, lambda row: row["pid"] is None)
    assert row["process_note"] == "the process was killed by SIGKILL"


async def test_a_stopped_pool_ends_its_processes_and_the_next_one_restarts_them(url: str, fleet: Fleet) -> None:
    worker = await fleet.add()
    async with pooling(url):
        first = await fleet.alive(worker)
    row = fleet.row(worker)
    assert not is_process_running(first["pid"])
    assert (row["status"], row["supervisor_id"], row["pid"], row["crashes"]) == ("RUNNING", None, None, 0)
    async with pooling(url, leave_running=True):
        second = await fleet.alive(worker, generation=2)
    assert is_process_running(second["pid"])
    async with pooling(url):  # adopts the process and stops it in the end
        await fleet.seen(worker, lambda row: row["supervisor_id"] is not None)
        assert fleet.row(worker)["pid"] == second["pid"]
    assert not is_process_running(second["pid"])


async def test_processes_of_a_killed_supervisor_are_adopted_or_replaced(url: str, fleet: Fleet) -> None:
    survivor, victim = await fleet.add(), await fleet.add(namespaces=("elsewhere",))
    with supervisor_process(url) as supervisor:
        first, second = await fleet.alive(survivor), await fleet.alive(victim)
        supervisor.kill()
        supervisor.wait()
    await fleet.state_of(await fleet.enqueue("add", a=1, b=2), "done")
    kill(second["pid"])
    eventually(lambda: not is_process_running(second["pid"]))
    async with pooling(url) as pool:
        await fleet.alive(victim, generation=2)
        row = fleet.row(survivor)
        assert (row["pid"], row["generation"], row["supervisor_id"]) == (first["pid"], 1, pool.id)
        kill(first["pid"])  # not a child of this supervisor
        await fleet.alive(survivor, generation=2)


async def test_two_supervisors_manage_disjoint_rows(url: str, fleet: Fleet) -> None:
    lease = 2.0
    async with pooling(url, max_processes=2, lease=lease, leave_running=True) as one:
        early = [await fleet.add(), await fleet.add()]
        for worker in early:
            await fleet.alive(worker)
        async with pooling(url, max_processes=3, lease=lease) as other:
            late = await fleet.add()
            await fleet.alive(late)
            await asyncio.sleep(lease * 1.4)  # longer than a lease that is not renewed
            holders = [fleet.row(worker)["supervisor_id"] for worker in (*early, late)]
            assert holders == [one.id, one.id, other.id]
            # only the holder of a row manages its process
            run_sql(url, f"update interlock.workers set supervisor_id = '{other.id}' where id = '{early[0]}'")
            await fleet.seen(early[0], lambda row: row["pid"] in [child.pid for child in other.processes.values()])
            await until(lambda: early[0] not in one.processes)
        assert {fleet.row(worker)["generation"] for worker in (*early, late)} == {1}
        assert is_process_running(fleet.row(early[1])["pid"])
    async with pooling(url):
        await fleet.seen(early[1], lambda row: row["supervisor_id"] is not None)


async def test_a_process_of_an_old_generation_stops_by_itself(url: str, fleet: Fleet) -> None:
    worker = await fleet.add()
    async with pooling(url, leave_running=True):
        row = await fleet.alive(worker)
    run_sql(url, f"update interlock.workers set generation = 2 where id = '{worker}'")
    run_sql(url, f"select pg_notify('interlock_control', '{worker}')")
    eventually(lambda: not is_process_running(row["pid"]))
    assert fleet.row(worker)["status"] == "RUNNING"


async def test_a_self_registered_worker_follows_pause_and_terminate(url: str, fleet: Fleet) -> None:
    async with pooling(url) as pool:
        with worker_process(url) as process:
            running = "select id from interlock.workers where status = 'RUNNING'"
            await until(lambda: fleet.rows(running))
            worker = fleet.rows(running)[0]["id"]
            await assert_follows_within_a_second(fleet, worker)
            await fleet.move(worker, Event.TERMINATE)
            await asyncio.to_thread(process.wait, 60)
        assert not pool.processes
    assert fleet.row(worker)["supervisor_id"] is None


async def assert_follows_within_a_second(fleet: Fleet, worker: str) -> None:
    """Pause and resume a worker; on a busy machine one of three tries within the limit is enough."""
    took = []
    for _ in range(3):
        began = time.monotonic()
        await fleet.move(worker, Event.PAUSE)
        await fleet.obeys(worker, paused=True)
        await fleet.move(worker, Event.RESUME)
        await fleet.obeys(worker, paused=False)
        took.append(time.monotonic() - began)
        if took[-1] < 2:
            return
    pytest.fail(f"pause and resume took longer than 2 s: {took}")


async def test_bound_rows_end_with_their_pool(url: str, fleet: Fleet) -> None:
    async with pooling(url, tied=True) as pool:
        assert await pool.hold_pool("up", 2) == "up"
        await until(lambda: len(fleet.rows(MEMBERS)) == 2)
        worker, paused = (row["id"] for row in fleet.rows(MEMBERS))
        await fleet.alive(worker)
        await fleet.move(paused, Event.PAUSE)
        async with pooling(url, tied=True) as other:
            assert (await other.hold_pool("up", 0)).startswith("up-")
    assert [fleet.row(each)["status"] for each in (worker, paused)] == ["COMPLETED", "TERMINATED"]
    assert fleet.rows("select * from interlock.pools") == []
