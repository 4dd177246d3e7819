"""Maintenance of jobs by an orchestrator: independent duties, and recovery of lost results."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from factories import add_live_worker, step
from interlock import Interlock
from interlock.config import Config
from interlock.orchestrator.maintenance import JobSweeps
from interlock.orchestrator.run import orchestrating
from interlock.orchestrator.settings import OrchestratorSettings
from job_driver import JobDriver
from jobs_support import app_at

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


async def test_a_failing_duty_holds_up_no_other(database: Connection) -> None:
    await add_live_worker(database)
    driver = JobDriver(database)
    job = await driver.submit(step("s", kind="signal", signal="x"), timeout=1)
    await database.execute("alter table interlock.workflows rename column root_namespaces to gone")
    maintenance = JobSweeps("o", OrchestratorSettings())
    assert await maintenance.run(database, datetime.now(UTC) + timedelta(seconds=5)) == 0
    assert (await driver.job(job))["ending"] == "CANCELED"


async def test_an_orchestrator_finds_a_result_whose_message_was_lost(url: str, database: Connection) -> None:
    await add_live_worker(database)
    driver = JobDriver(database, {"a": 7})
    job = await driver.submit(step("a"))
    await driver.settle((await driver.claim())[0])
    await database.execute("select pgmq.purge_queue('orchestration_step_results')")
    later = datetime.now(UTC) + timedelta(minutes=5)
    async with app_at(url) as jobs, orchestrating(Interlock(config=Config(database_url=url), clock=lambda: later)):
        assert await jobs.job(job).wait(30) == {"a": 7}
