"""The last third of a step's way: its result is stored, a tiny message tells of it, and its job is carried on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from factories import add_live_worker, step
from interlock import Interlock, PermanentError, StepContext
from interlock.config import Config
from interlock.store.tasks import read_task_history
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings
from job_driver import JobDriver
from jobs_support import orchestrator_at

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

FIELDS = {"step", "success", "result", "status", "error", "metadata", "orchestration_metadata"}
METADATA = {"started_at", "completed_at", "execution_ms", "worker_id", "attempt", "retryable"}
QUEUE = "select message from pgmq.q_orchestration_step_results order by msg_id"


def shop(url: str) -> Interlock:
    """Declare a workflow whose job needs what its steps say, and one of which fails."""
    app = Interlock(config=Config(database_url=url), actor="ada")
    wf = app.workflow("order")

    @wf.step
    async def price(ctx: StepContext, boxes: int) -> float:
        ctx.set_metadata("currency", "EUR")
        return boxes * 1.5

    @wf.decision(after=[price], branches=["cheap", "dear"])
    async def route(price: float) -> str:
        return "dear" if price > 10 else "cheap"

    @wf.step(after=[route])
    async def cheap() -> str:
        return "by land"

    @wf.step(after=[route])
    async def dear() -> str:
        raise PermanentError("no plane")

    return app


async def documents(database: Connection, job: Any) -> dict[str, dict[str, Any]]:
    """Read the stored results of a job's steps, by name."""
    query = "select step, output from interlock.tasks where job_id = %s and output is not null"
    return {row["step"]: row["output"] for row in await (await database.execute(query, [job.id])).fetchall()}


async def test_results_with_metadata_complete_the_job(url: str, database: Connection) -> None:
    app = shop(url)
    async with app, serving(app, WorkerSettings(duties=False)) as worker, orchestrator_at(url):
        good = await app.submit("order", {"boxes": 2})
        assert await good.wait(30) == {"cheap": "by land"}
        bad = await app.submit("order", {"boxes": 20})
        with pytest.raises(Exception, match="step dear failed: no plane"):
            await bad.wait(30)
        steps = {each.step: each for each in await bad.steps()}
        moves = {name: await read_task_history(database, steps[name].id) for name in ("price", "dear")}
        worker_id = worker.worker_id
    stored = await documents(database, bad)
    assert {name: document["status"] for name, document in stored.items()} == {
        "price": "completed",
        "route": "completed",
        "dear": "failed",
    }
    for name, document in stored.items():
        assert (set(document), set(document["metadata"])) == (FIELDS, METADATA)
        assert (document["step"], document["metadata"]["worker_id"]) == (name, worker_id)
        assert document["metadata"]["execution_ms"] >= 0
    assert (stored["price"]["result"], stored["dear"]["error"]["message"]) == (30.0, "no plane")
    assert stored["price"]["orchestration_metadata"] == {"currency": "EUR"}, "what the handler said"
    assert stored["route"]["orchestration_metadata"] == {"chosen": ["dear"]}, "what the orchestrator went by"
    assert [(move.from_state, move.to_state) for move in moves["price"]][-1] == ("running", "done")
    assert [(move.from_state, move.to_state) for move in moves["dear"]][-1] == ("running", "error")
    assert (await (await database.execute(QUEUE)).fetchall()) == [], "every message was acted on"


async def test_a_message_is_a_few_dozen_bytes_however_large_the_result(database: Connection) -> None:
    await add_live_worker(database)
    driver = JobDriver(database, {"a": "x" * 1_000_000})
    job = await driver.submit(step("a"), step("b", "a"))
    (task,) = await driver.claim()
    await driver.settle(task)
    (row,) = await (await database.execute(QUEUE)).fetchall()
    correlation = (await driver.job(job))["correlation_id"]
    said = {"job_id": str(job), "task_id": str(task.id), "correlation_id": str(correlation)}
    assert row["message"] == said
    assert len(orjson.dumps(row["message"])) < 200
    await driver.advance()
    (after,) = await driver.claim()
    assert len(after.own("job")["results"]["a"]) == 1_000_000, "it was read from the database"
