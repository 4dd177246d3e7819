"""Many sleeps and timeouts that are due at once, while orchestrators are killed and the database restarts."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from embedded_servers import QUICK
from factories import add_live_worker, step, workflow
from interlock import Interlock
from interlock.config import Config
from interlock.orchestrator.run import orchestrating
from interlock.orchestrator.settings import OrchestratorSettings
from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.migrate import migrate
from interlock.store.workflows import put_workflow
from interlock.workflow.new_job import NewJob
from interlock.workflow.submit import submit_jobs
from job_driver import JobDriver
from jobs_support import process_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from uuid import UUID

    from interlock.postgres.connection import Connection

pytestmark = [pytest.mark.flow, pytest.mark.chaos]

BATCH = 100  # steps that one transaction ends


async def submit(database: Connection, document: dict[str, object], count: int) -> list[UUID]:
    await add_live_worker(database)
    await put_workflow(database, document)
    new = NewJob(str(document["name"]), {}, version=str(document["version"]))
    return [job.id for job in await submit_jobs(database, [new] * count, actor="ada")]


async def until_ended(database: Connection, jobs: Sequence[UUID]) -> set[str]:
    """Wait until jobs have ended; return their states."""
    query = "select status, completed_at from interlock.jobs where id = any (%s)"
    async with asyncio.timeout(120):
        while True:
            rows = await (await database.execute(query, [list(jobs)])).fetchall()
            if all(row["completed_at"] for row in rows):
                return {row["status"] for row in rows}
            await asyncio.sleep(0.05)


async def ends_per_step(database: Connection) -> set[int]:
    """Return how often steps ended, as recorded: {1} if each ended once."""
    query = """
        select count(audit_logs.task_id) as ends
        from interlock.tasks
            left join interlock.audit_logs on audit_logs.task_id = tasks.id and audit_logs.event = 'succeed'
        group by tasks.id
    """
    return {row["ends"] for row in await (await database.execute(query)).fetchall()}


async def test_ten_thousand_sleeps_that_are_due_at_once_end_in_bounded_batches(url: str, database: Connection) -> None:
    sleeps = [step(f"s{number}", kind="sleep", seconds=3600) for number in range(1_000)]
    jobs = await submit(database, workflow(*sleeps), 10)
    later = datetime.now(UTC) + timedelta(hours=2)
    app = Interlock(config=Config(database_url=url), clock=lambda: later)
    async with orchestrating(app, OrchestratorSettings(tick=60)):
        assert await until_ended(database, jobs) == {"COMPLETED"}
    assert await ends_per_step(database) == {1}
    # a row carries the id of the transaction that wrote it last
    query = "select count(*) as steps from interlock.tasks group by xmin::text"
    batches = [row["steps"] for row in await (await database.execute(query)).fetchall()]
    assert sum(batches) == 10_000
    assert max(batches) <= BATCH


async def test_killed_orchestrators_end_each_wait_once(url: str, database: Connection) -> None:
    jobs = await submit(
        database, workflow(step("a", kind="sleep", seconds=0.5), step("b", "a", kind="sleep", seconds=0.1)), 600
    )
    for pause_s in (0.05, 0.15, 0.3, 0.5):
        with process_of("interlock.orchestrator", url) as process:
            assert process.stdout is not None
            assert "orchestrator_started" in process.stdout.readline()
            await asyncio.sleep(pause_s)  # into the middle of its work
            process.kill()
    with process_of("interlock.orchestrator", url), process_of("interlock.orchestrator", url):
        assert await until_ended(database, jobs) == {"COMPLETED"}
    assert await ends_per_step(database) == {1}


async def test_waits_end_after_the_database_was_restarted(embedded_dir: Path) -> None:
    server = EmbeddedServer(embedded_dir / "db", settings=QUICK)
    url = server.acquire()
    async with connect(url) as database:
        await migrate(database)
        await add_live_worker(database)
        job = await JobDriver(database).submit(step("s", kind="sleep", seconds=1.5), timeout=60)
    settings = OrchestratorSettings(tick=60, events_tick=60, retry_base=0.01, retry_cap=0.1)
    async with orchestrating(Interlock(config=Config(database_url=url)), settings) as running:
        async with asyncio.timeout(60):
            while not running.is_listening:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.acquire)
        async with connect(url) as database:
            assert await until_ended(database, [job]) == {"COMPLETED"}
    await asyncio.to_thread(server.stop)
