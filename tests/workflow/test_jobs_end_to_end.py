"""Jobs through real worker and orchestrator processes, some of which are killed on the way."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from interlock.errors import JobFailedError
from jobs_support import app_at, process_of

if TYPE_CHECKING:
    import subprocess

    from interlock.postgres.connection import Connection

SHORT = {"INTERLOCK_LEASE": "2", "INTERLOCK_CONCURRENCY": "20", "INTERLOCK_LOG_LEVEL": "warning"}


@pytest.mark.flow
async def test_a_job_starts_with_its_worker_and_ends_with_its_steps(url: str) -> None:
    async with app_at(url) as jobs:
        chain, broken = await jobs.submit("chain", {"n": 4}), await jobs.submit("broken")
        assert {(await job.status()).status for job in (chain, broken)} == {"PENDING"}
        with process_of("interlock.orchestrator", url), process_of("interlock.worker", url, **SHORT):
            assert await chain.wait(60) == {"third": "got 50"}
            with pytest.raises(JobFailedError, match="step bad failed: fine no more"):
                await broken.wait(60)
            gates = await jobs.submit("gates")
            await gates.signal("paid", {"euros": 5})
            await gates.approve("boss", False, "too dear", by="grace")  # noqa: FBT003 - the answer
            with pytest.raises(JobFailedError, match="rejected by grace: too dear"):
                await gates.wait(60)
            slow = await jobs.submit("slow")
            while (await slow.steps())[0].state != "running":
                await asyncio.sleep(0.02)
            assert await slow.cancel("enough")
            with pytest.raises(JobFailedError, match="was canceled"):
                await slow.wait(60)
        first = (await chain.steps())[0]
        assert first.output is not None
        assert (first.output["step"], first.output["success"], first.output["status"]) == ("first", True, "completed")
        assert first.output["metadata"]["worker_id"] == first.worker_id
        bad = (await broken.steps())[1]
        assert bad.output is not None
        assert (bad.output["success"], bad.output["error"]["message"]) == (False, "fine no more")


@pytest.mark.chaos
async def test_every_job_ends_once_while_processes_are_killed(url: str, database: Connection) -> None:
    count = 150
    async with app_at(url) as jobs:
        with ExitStack() as stack:

            def begin(module: str) -> subprocess.Popen[str]:
                return stack.enter_context(process_of(module, url, **SHORT))

            orchestrators = [begin("interlock.orchestrator") for _ in range(2)]
            workers = [begin("interlock.worker") for _ in range(2)]
            handles = [await jobs.submit("chain", {"n": number}) for number in range(count // 3)]
            for processes, module in ((orchestrators, "interlock.orchestrator"), (workers, "interlock.worker")):
                await handles[-1].wait(90)
                handles += [await jobs.submit("chain", {"n": number}) for number in range(count // 3)]
                processes[0].kill()
                begin(module)
            outputs = await asyncio.gather(*(handle.wait(100) for handle in handles))
        assert outputs == [{"third": f"got {(number + 1) * 10}"} for _ in range(3) for number in range(count // 3)]
    rows = await (
        await database.execute(
            "select event, count(*) as moves, count(distinct job_id) as jobs from interlock.job_state_transitions "
            "group by event order by event"
        )
    ).fetchall()
    expected = ("create", "validate", "allocate_resources", "success")
    assert {row["event"]: (row["moves"], row["jobs"]) for row in rows} == dict.fromkeys(expected, (count, count))
