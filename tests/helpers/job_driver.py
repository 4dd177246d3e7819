"""Drives jobs in tests of the store: claims, settles and advances step by step, without processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from factories import NAMESPACES, claim_tasks, workflow
from interlock.lifecycle import TaskRowEvent
from interlock.store.jobs import read_jobs, read_steps
from interlock.store.tasks import Outcome, settle_running_tasks
from interlock.store.workflows import put_workflow
from interlock.workflow.advance import Advanced, advance
from interlock.workflow.new_job import NewJob
from interlock.workflow.submit import submit_job

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask


def name_of(claimed: ClaimedTask) -> str:
    """Return the name of a claimed step."""
    return str(claimed.own("step"))


class Failed(Exception):  # noqa: N818 - an outcome
    """An outcome instead of a result: the step fails permanently."""


class JobDriver:
    """Does the work of workers and of an orchestrator, one action per call; `now` replaces the clock."""

    def __init__(self, connection: Connection, outcomes: Mapping[str, Any] | None = None) -> None:
        self.connection = connection
        self.outcomes = dict(outcomes or {})
        self.ran: list[str] = []
        self.now: datetime | None = None

    async def submit(self, *steps: dict[str, Any], input: Any = None, **more: Any) -> UUID:  # noqa: A002 - the column
        """Store a workflow and submit a job of it."""
        head = {key: more.pop(key) for key in ("name", "version", "timeout", "output") if key in more}
        document = workflow(*steps, **head)
        await put_workflow(self.connection, document)
        new = NewJob(document["name"], input or {}, version=document["version"], **more)
        submitted = await submit_job(self.connection, new, actor="ada", now=self.now)
        return submitted.id

    async def claim(self, limit: int = 100) -> list[ClaimedTask]:
        """Claim pending tasks of any type, also those that are suspected of killing their worker."""
        rows = await (await self.connection.execute("select distinct type from interlock.tasks")).fetchall()
        types = [row["type"] for row in rows]
        common: Any = {"actor": "w_1", "types": types, "namespaces": NAMESPACES, "limit": limit, "now": self.now}
        claimed = await claim_tasks(self.connection, **common)
        return claimed or await claim_tasks(self.connection, suspected=True, **common)

    async def inputs(self, task_id: UUID) -> dict[str, Any]:
        """Read the inputs that a worker receives with a step."""
        query = "select interlock.step_inputs(tasks) as inputs from interlock.tasks where id = %s"
        (row,) = await (await self.connection.execute(query, [task_id])).fetchall()
        found: dict[str, Any] = row["inputs"]
        return found

    async def settle(self, claimed: ClaimedTask, *, advance: bool = False) -> None:
        """Settle one step with its configured outcome; with `advance` also advance its job, if that is simple."""
        self.ran.append(name_of(claimed))
        try:
            result = self._result(claimed)
        except Failed as error:
            await self.write(claimed, success=False, error=str(error), advance=advance)
            return
        await self.write(claimed, result=result, advance=advance)

    def _result(self, claimed: ClaimedTask) -> Any:
        outcome = self.outcomes.get(name_of(claimed))
        if isinstance(outcome, Failed):
            raise outcome
        return outcome

    async def write(
        self,
        claimed: ClaimedTask,
        *,
        success: bool = True,
        result: Any = None,
        error: str | None = None,
        advance: bool = False,
    ) -> None:
        """Settle one attempt with its result document."""
        inputs = await self.inputs(claimed.id)
        chosen = {"chosen": [result] if isinstance(result, str) else result} if inputs["kind"] == "decision" else {}
        said = {"type": "ValueError", "message": error} if error is not None else None
        document = {"step": name_of(claimed), "success": success, "result": result, "orchestration_metadata": chosen}
        event = TaskRowEvent.SUCCEED if success else TaskRowEvent.FAIL
        outcome = Outcome(claimed.id, claimed.attempt, event, output=document, error=said)
        _, lost = await settle_running_tasks(self.connection, [outcome], actor="w_1", advance=advance, now=self.now)
        assert not lost

    async def run(self, *, until: Callable[[], bool] | None = None) -> Advanced:
        """Claim, settle and advance until nothing is left; return the orchestrator's totals."""
        done = Advanced()
        while True:
            claimed = await self.claim()
            for task in claimed:
                await self.settle(task)
            step = await self.advance()
            done = Advanced(*(a + b for a, b in zip(done, step, strict=True)))
            if (not claimed and not step.received) or (until is not None and until()):
                return done

    async def advance(self, limit: int = 100) -> Advanced:
        """Advance one batch of result messages."""
        return await advance(self.connection, actor="o_1", limit=limit, now=self.now)

    async def job(self, job_id: UUID) -> dict[str, Any]:
        """Read a job."""
        (row,) = await read_jobs(self.connection, [job_id])
        return row

    async def states(self, job_id: UUID) -> dict[str, str]:
        """Read the states of a job's steps by name."""
        return {row["step"]: row["state"] for row in await read_steps(self.connection, job_id)}

    async def steps(self, job_id: UUID) -> dict[str, dict[str, Any]]:
        """Read a job's steps by name."""
        return {row["step"]: row for row in await read_steps(self.connection, job_id)}
