"""Maintenance of jobs by an orchestrator: independent duties, and recovery of lost results."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from interlock import Interlock
from interlock.config import Config
from interlock.orchestrator.maintenance import JobMaintenance
from interlock.orchestrator.run import orchestrating
from interlock.orchestrator.settings import OrchestratorSettings
from jobs_support import app_at
from workflow_support import Hand, serve, step

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


async def test_a_failing_duty_holds_up_no_other(database: Connection) -> None:
    await serve(database)
    hand = Hand(database)
    job = await hand.submit(step("s", kind="signal", signal="x"), timeout=1)
    await database.execute("alter table interlock.workflows rename column root_namespaces to gone")
    maintenance = JobMaintenance("o", OrchestratorSettings())
    assert await maintenance.run(database, datetime.now(UTC) + timedelta(seconds=5))
    assert (await hand.job(job))["ending"] == "CANCELED"


async def test_an_orchestrator_finds_a_result_whose_message_was_lost(url: str, database: Connection) -> None:
    await serve(database)
    hand = Hand(database, {"a": 7})
    job = await hand.submit(step("a"))
    await hand.settle((await hand.claim())[0])
    await database.execute("select pgmq.purge_queue('orchestration_step_results')")
    later = datetime.now(UTC) + timedelta(minutes=5)
    async with app_at(url) as jobs, orchestrating(Interlock(config=Config(database_url=url), clock=lambda: later)):
        assert await jobs.job(job).wait(30) == {"a": 7}
