"""A workflow of a few steps that return, fail or choose what the test says, run in the process of the test."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from interlock import Interlock, PermanentError, StepContext, TaskRowState, serving
from interlock.config import Config
from interlock.testing import Clock, drain
from interlock.worker.settings import WorkerSettings
from jobs_support import orchestrator_at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from datetime import timedelta
    from uuid import UUID

    from interlock import JobHandle, StepStatus, Workflow

START = datetime(2030, 1, 1, tzinfo=UTC)

WORDS = {TaskRowState.ERROR: "failed", TaskRowState.SKIPPED: "skipped"}


@dataclass(frozen=True, slots=True)
class CaseReport:
    """How a job stands: `states` has one word per step, as in Airflow where it has one ("upstream failed")."""

    status: str
    states: dict[str, str]
    output: Any
    reason: str | None


class WorkflowCase:
    """Declares workflows on a fresh app and runs jobs of them; `ran` lists the handlers in the order they ran.

    The handler of a step takes `tick` seconds of the test's clock.
    """

    tick = 0.001

    def __init__(self, url: str, *, clock: Clock | None) -> None:
        self.clock = clock or Clock(START)
        self.app = Interlock(config=Config(database_url=url), actor="ada", clock=clock)
        self.ran: list[str] = []
        self._url = url

    @cached_property
    def wf(self) -> Workflow:
        """The workflow "case"."""
        return self.app.workflow("case")

    def step(
        self,
        name: str,
        returns: Any = None,
        *,
        fails: str | bool = False,
        undo: str | None = None,
        wf: Workflow | None = None,
        **options: Any,
    ) -> None:
        """Declare a step that returns a value or fails for good; `undo` is recorded when it is compensated."""

        async def handle() -> Any:
            self.ran.append(name)
            self.clock.advance(self.tick)
            if fails:
                raise PermanentError(fails if isinstance(fails, str) else f"{name} failed")
            return returns

        async def compensate() -> None:
            self.ran.append(str(undo))

        if undo is not None:
            options["compensate"] = compensate
        (wf or self.wf).step(name=name, **options)(handle)

    def steps(self, *names: str, **options: Any) -> None:
        """Declare steps that return their own names."""
        for name in names:
            self.step(name, name, **options)

    def compute(self, name: str, function: Callable[..., Any], after: Sequence[str] = (), **options: Any) -> None:
        """Declare a step that computes its result from the results of the steps in `after`, in their order."""

        async def handle(ctx: StepContext) -> Any:
            self.ran.append(name)
            return function(*(ctx.get_dependency_result(each) for each in after))

        self.wf.step(name=name, after=list(after), max_tries=1, **options)(handle)

    def decision(self, name: str, chooses: Any, branches: list[str], **options: Any) -> None:
        """Declare a decision that chooses the same branches every time."""

        async def choose() -> Any:
            self.ran.append(name)
            return chooses

        self.wf.decision(name=name, branches=branches, **options)(choose)

    async def submit(self, workflow: str = "case", *, input: Any = None, **options: Any) -> JobHandle:  # noqa: A002
        """Submit a job; the first call opens the app."""
        if not self.app.is_open:
            await self.app.open()
        return await self.app.submit(workflow, input or {}, **options)

    async def drain(self, job: JobHandle, *, after: timedelta | float = 0) -> CaseReport:
        """Advance the clock, run everything that is due and report on a job."""
        self.clock.advance(after)
        await drain(self.app)
        return await self.report(job)

    async def run(self, *, input: Any = None, **options: Any) -> CaseReport:  # noqa: A002 - the name of the column
        """Submit a job and run everything that is due."""
        return await self.drain(await self.submit(input=input, **options))

    async def report(self, job: JobHandle) -> CaseReport:
        """Read how a job stands."""
        status = await job.status()
        states = {step.step: _word(step) for step in await job.steps()}
        return CaseReport(status.status.value, states, status.output, status.reason)

    async def cancel_step(self, job: JobHandle, name: str) -> None:
        """Cancel one step of a job."""
        await self.app.handle(await self.step_id(job, name)).cancel()

    async def step_id(self, job: JobHandle, name: str) -> UUID:
        """Find the id of a step."""
        (found,) = [step.id for step in await job.steps() if step.step == name]
        return found

    @asynccontextmanager
    async def processes(self, *, concurrency: int = 10) -> AsyncIterator[None]:
        """Run a worker and an orchestrator in this process until the block ends."""
        if not self.app.is_open:
            await self.app.open()
        settings = WorkerSettings(concurrency=concurrency, cancel_grace=0.5)
        async with orchestrator_at(self._url), serving(self.app, settings):
            yield

    async def close(self) -> None:
        """Close the app."""
        if self.app.is_open:
            await self.app.close()


def _word(step: StepStatus) -> str:
    if step.state is TaskRowState.SKIPPED and step.skipped_by_failure:
        return "upstream failed"
    return WORDS.get(step.state, step.state.value)
