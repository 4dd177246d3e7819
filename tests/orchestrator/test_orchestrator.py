"""The orchestrator process: it advances jobs in every wake mode, survives lost connections, and shares the work."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from interlock import Interlock
from interlock.config import Config
from interlock.errors import MigrationError
from interlock.orchestrator.process import Orchestrator
from interlock.orchestrator.settings import OrchestratorSettings
from interlock.postgres.connection import connect
from interlock.postgres.notifier import WakeMode
from interlock.postgres.query import run
from interlock.store.remote_commands import Enable, Refresh, Status, Subscribe, call_processes
from interlock.store.workers import WORKERS, list_live_workers, read_worker_status
from interlock.telemetry import metrics_registry
from jobs_support import manual_worker_at, orchestrator_at, process_of, register_idle_worker
from processes import eventually
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

NO_POLLING = {"tick": 60.0, "events_tick": 60.0}  # no poll within the time of a test


def counted(kind: str) -> float:
    return metrics_registry.get_sample_value("orchestration_events_total", {"kind": kind}) or 0.0


@pytest.mark.parametrize("mode", list(WakeMode))
async def test_chains_complete_in_every_mode(url: str, database: Connection, jobs: Interlock, mode: WakeMode) -> None:
    before = counted("received")
    looks = {"tick": 0.02} if mode is WakeMode.POLLING else NO_POLLING
    async with (
        orchestrator_at(url, mode=mode, **looks) as running,
        manual_worker_at(database, {"third": "end"}) as worker,
    ):
        if mode is not WakeMode.POLLING:
            await until(lambda: running.is_listening)
        job = await jobs.submit("chain", {"n": 1})
        assert await job.wait(30) == {"third": "end"}
        assert worker.done == ["first", "second", "third"]
        seen = running.statistics
        await until(lambda: seen.finalized)  # the counter is increased after the commit that wakes the waiter
        assert (seen.received, seen.completed, seen.dispatched, seen.finalized) == (3, 3, 2, 1)
        assert (seen.failed, seen.mismatched, seen.fallback_hits) == (0, 0, 0)
    assert counted("received") == before + 3
    moves = [(move.event, move.to_state) for move in await job.history()]
    assert moves == [
        ("create", "SUBMITTED"),
        ("validate", "PENDING"),
        ("allocate_resources", "RUNNING"),
        ("success", "COMPLETED"),
    ]


async def test_a_job_waits_until_a_worker_registers(url: str, database: Connection, jobs: Interlock) -> None:
    async with orchestrator_at(url, **NO_POLLING) as running:
        await until(lambda: running.is_listening)
        await register_idle_worker(database, "elsewhere", id_="other")
        job = await jobs.submit("chain")
        status = await job.status()
        assert (status.status, status.reason) == ("PENDING", "no live worker serves namespace 'default'")
        async with manual_worker_at(database):
            await job.wait(30)
    assert [step.state for step in await job.steps()] == ["done"] * 3


async def test_polling_finds_messages_without_a_notification(url: str, database: Connection, jobs: Interlock) -> None:
    async with orchestrator_at(url, tick=0.05) as running, manual_worker_at(database):
        assert running.subscription is not None
        running.subscription.close()
        await (await jobs.submit("chain")).wait(30)
        assert running.statistics.fallback_hits > 0


async def test_several_orchestrators_finalize_each_job_once(url: str, database: Connection, jobs: Interlock) -> None:
    async with (
        orchestrator_at(url, batch=2) as one,
        orchestrator_at(url, batch=2) as other,
        manual_worker_at(database),
    ):
        handles = [await jobs.submit("chain") for _ in range(20)]
        await asyncio.gather(*(handle.wait(60) for handle in handles))
        await until(lambda: one.statistics.finalized + other.statistics.finalized == 20)
        together = Counter(vars_of(one)) + Counter(vars_of(other))
        assert (together["received"], together["completed"], together["finalized"]) == (60, 60, 20)
        assert together["mismatched"] == 0
    for handle in handles:
        assert [move.event for move in await handle.history()].count("success") == 1


def vars_of(orchestrator: Orchestrator) -> dict[str, int]:
    return dict(orchestrator.statistics.document()["orchestration"])


async def test_lost_connections_are_rebuilt(url: str, database: Connection, jobs: Interlock) -> None:
    async with orchestrator_at(url, retry_base=0.01, retry_cap=0.05) as running, manual_worker_at(database):
        await (await jobs.submit("chain")).wait(30)
        async with connect(url) as other:
            await other.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
                "and pid <> pg_backend_pid() and query ~ 'orchestration|listen|settings|workers'"
            )
        await (await jobs.submit("chain")).wait(30)
        assert running.is_running


async def test_a_job_is_canceled_after_its_timeout(url: str, database: Connection, jobs: Interlock) -> None:
    await register_idle_worker(database)
    async with orchestrator_at(url, tick=0.05):
        job = await jobs.submit("gates", timeout=0.2)
        while not (await job.status()).has_ended:
            await asyncio.sleep(0.01)
    status = await job.status()
    assert status.status == "CANCELED"
    assert "timeout of 0.2 s is over" in str(status.reason)


async def test_start_and_stop_are_safe_twice_and_stop_waits(url: str, database: Connection) -> None:
    orchestrator = Orchestrator(Interlock(config=Config(database_url=url)))
    await orchestrator.stop()
    for _ in range(2):
        await orchestrator.start()
        await orchestrator.start()
        assert orchestrator.is_running
        while not await list_live_workers(database):
            await asyncio.sleep(0.01)
        await asyncio.gather(orchestrator.stop(), orchestrator.stop())
        assert not orchestrator.is_running
        await orchestrator.stop()
        assert await read_worker_status(database, orchestrator.id) == "COMPLETED"
        await database.execute("delete from interlock.workers")


async def test_a_stop_at_once_rolls_the_batch_back(url: str, database: Connection, jobs: Interlock) -> None:
    async with manual_worker_at(database):
        job = await jobs.submit("chain")
        async with connect(url) as other, other.transaction():
            await other.execute("select * from interlock.jobs for update")  # the batch must wait here
            async with orchestrator_at(url, visibility=1) as running:
                while not await (await other.execute("select from pg_locks where not granted")).fetchall():
                    await asyncio.sleep(0.01)
                async with asyncio.timeout(30):
                    await running.stop(at_once=True)
                assert running.statistics.completed == 0
        async with orchestrator_at(url):
            await job.wait(60)


async def test_a_running_orchestrator_answers_commands(url: str, database: Connection, jobs: Interlock) -> None:
    async with orchestrator_at(url) as running, manual_worker_at(database):
        await until(lambda: running.is_listening)
        answer = (await call_processes(url, Status(), running.id))[running.id]
        assert (answer["role"], answer["enabled"], answer["mode"], answer["hearing"]) == (
            "orchestrator", True, "hybrid", True,
        )  # fmt: skip
        refused = (await call_processes(url, Subscribe("mail"), running.id))[running.id]
        assert "it takes status, refresh and enable" in refused["error"]
        assert not (await call_processes(url, Enable(enabled=False), running.id))[running.id]["enabled"]
        job = await jobs.submit("chain")
        with pytest.raises(TimeoutError):
            await job.wait(0.7)
        assert running.statistics.received == 0
        assert (await call_processes(url, Enable(enabled=True), running.id))[running.id]["enabled"]
        await job.wait(30)
        await call_processes(url, Refresh(), running.id)


async def test_an_orchestrator_follows_the_status_of_its_row(url: str, database: Connection, jobs: Interlock) -> None:
    async with (
        orchestrator_at(url, presence=0.1, tick=0.02) as running,
        manual_worker_at(database),
        connect(url) as other,
    ):

        async def move(statement: str) -> None:
            parameters = {"id": running.id, "reason": None, "actor": "grace", "now": None}
            while not await run(other, WORKERS[statement], parameters):
                await asyncio.sleep(0.01)  # it has not said yet that it is here

        await move("pause_running_worker")
        await until(lambda: not running.is_working)
        job = await jobs.submit("chain")
        with pytest.raises(TimeoutError):
            await job.wait(0.3)
        await move("resume_paused_worker")
        await job.wait(30)
        await move("terminate_worker")
        await until(lambda: not any(loop.is_running for loop in running._loops))  # noqa: SLF001 - it ends by itself


async def test_heartbeats_carry_the_statistics(url: str, database: Connection, jobs: Interlock) -> None:
    async with orchestrator_at(url, tick=0.05, presence=0.3) as running, manual_worker_at(database):
        await (await jobs.submit("chain")).wait(30)

        async def figures() -> int:
            async with connect(url) as other:
                rows = [process for process in await list_live_workers(other) if process.role == "orchestrator"]
            return int(rows[0].statistics["orchestration"]["received"]) if rows else 0

        while await figures() < 3:
            await asyncio.sleep(0.02)
        assert running.is_running


async def test_a_database_that_was_not_migrated_is_refused(make_database: Callable[[str], str]) -> None:
    orchestrator = Orchestrator(Interlock(config=Config(database_url=make_database("template0"))))
    with pytest.raises(MigrationError):
        await orchestrator.serve(signals=False)


async def test_serve_waits_for_an_unreachable_database_until_the_stop() -> None:
    settings = OrchestratorSettings(retry_base=0.01, retry_cap=0.01)
    orchestrator = Orchestrator(Interlock(config=Config(database_url="postgresql://x@127.0.0.1:1/x")), settings)
    serving = asyncio.create_task(orchestrator.serve(signals=False))
    await asyncio.sleep(0.1)
    assert not serving.done()
    orchestrator.request_stop()
    async with asyncio.timeout(60):
        await serving


@pytest.mark.parametrize(
    ("name", "value"), [("tick", 0), ("batch", 0), ("visibility", 0.5), ("presence", 0), ("retry_base", 0)]
)
@pytest.mark.unit
def test_invalid_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        OrchestratorSettings(**{name: value})


def log_events(output: str) -> list[str]:
    return [json.loads(line)["message"] for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_stops_on_a_signal(url: str, number: signal.Signals) -> None:
    with process_of("interlock.orchestrator", url) as process:
        assert process.stdout is not None
        assert "orchestrator_started" in process.stdout.readline()
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert log_events(rest)[-1] == "orchestrator_stopped"


def test_a_second_signal_stops_it_at_once(url: str) -> None:
    with process_of("interlock.orchestrator", url) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert eventually(lambda: process.poll() is not None)
    assert process.returncode == 0
