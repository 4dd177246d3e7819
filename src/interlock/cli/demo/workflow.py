"""The second act of the demo: a workflow on several real processes, one of which is killed while it holds a step.

Invariant: a demo that is broken off cancels its job, so that nobody finds half an order later.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.markup import escape
from rich.text import Text

from interlock.cli.demo.processes import Crew, DemoError
from interlock.cli.demo.views import LOST, short, since, timeline, view_on
from interlock.client.job_handle import JobStatus, StepStatus, known_fields
from interlock.errors import JobFailedError, StoreError, UnknownJobError
from interlock.postgres.connection import connect
from interlock.store.jobs import read_job_history, read_jobs, read_steps
from interlock.store.leader import read_clock
from interlock.store.tasks import read_task_history, read_tasks
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob
from interlock.workflow.submit import submit_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from rich.console import Console

    from interlock.cli.demo.processes import Member
    from interlock.postgres.connection import Connection
    from interlock.store.tasks import TaskRecord


# SECTION cli/demo_story
# What happened to a job, from the records of the database: every attempt at every step, and what was recovered.
#
# Invariant: all times are those of the database, whose clock alone counts.

# what became of an attempt, by the event that ended it
ENDINGS = {
    "succeed": "done",
    "fail": "error",
    "exhaust": LOST,
    "expire": LOST,
    "retry": "failed",
    "return": "returned",
    "cancel": "canceled",
}


class Snapshot(NamedTuple):
    """A job as it is at one moment."""

    job: JobStatus
    steps: list[StepStatus]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a step; a step that was never claimed has one without a worker and without times."""

    step: StepStatus
    state: str
    worker: str = ""
    number: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    ended_by: str = ""


@dataclass(frozen=True, slots=True)
class Recovery:
    """An attempt whose worker fell silent, and the attempt that took its place, if there is one."""

    lost: Attempt
    then: Attempt | None


@dataclass(frozen=True, slots=True)
class Story:
    """A job with all attempts, in the order in which they began."""

    job: JobStatus
    moves: tuple[str, ...]
    attempts: tuple[Attempt, ...]

    @property
    def recoveries(self) -> list[Recovery]:
        """What fell back into the queue because a lease ran out, and who took it up."""
        return [
            Recovery(lost, next((a for a in self._of(lost.step.id) if a.number > lost.number), None))
            for lost in self.attempts
            if lost.state == LOST
        ]

    def _of(self, id_: UUID) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.step.id == id_]


async def look(connection: Connection, job_id: UUID) -> Snapshot:
    """Read a job and its steps."""
    rows = await read_jobs(connection, [job_id])
    if not rows:
        raise UnknownJobError(f"there is no job {job_id} any more")
    steps = [StepStatus(**known_fields(StepStatus, row)) for row in await read_steps(connection, job_id)]
    return Snapshot(JobStatus(**known_fields(JobStatus, rows[0])), steps)


async def tell_story(connection: Connection, job_id: UUID) -> Story:
    """Read everything that happened to a job."""
    job, steps = await look(connection, job_id)
    moves: list[dict[str, Any]] = await read_job_history(connection, job_id)
    attempts = [attempt for step in steps for attempt in _attempts(step, await read_task_history(connection, step.id))]
    attempts.sort(key=lambda attempt: attempt.started_at or attempt.step.finished_at or attempt.step.created_at)
    return Story(job, tuple(move["to_state"] for move in moves), tuple(attempts))


def _attempts(step: StepStatus, records: Sequence[TaskRecord]) -> Iterator[Attempt]:
    claims = [place for place, record in enumerate(records) if record.event == "claim"]
    if not claims:
        yield Attempt(step, step.state)
    for place in claims:
        claim, end = records[place], next(iter(records[place + 1 : place + 2]), None)
        yield Attempt(
            step,
            "running" if end is None else ENDINGS.get(end.event, end.to_state),
            claim.actor,
            claim.attempt,
            claim.recorded_at,
            None if end is None else end.recorded_at,
            "" if end is None else end.actor,
        )


WORKFLOW = "demo_order_fulfillment"
ITEMS = ("cups", "plates", "spoons", "forks", "bowls", "a kettle")
ORDER = {"number": 7, "items": ITEMS, "days": 2}
SHAPE = r"""
           / reserve \           / express  \
validate -<           >- route -<            >- pack x 6 -- ship -- notify
           \ price   /           \ standard /
"""
WORKERS = 3
LOOK = 0.05
LONGEST = 60.0
FAREWELL = 10.0  # seconds in which a job that is broken off may end; it takes one, where there is time


@dataclass(frozen=True, slots=True)
class Killing:
    """Which worker was killed when, and what it held."""

    member: Member
    step: StepStatus
    at: datetime


async def play_workflow(console: Console, connection: Connection, url: str) -> None:
    """Run the workflow, kill a worker on the way, and show what became of it."""
    console.rule("[bold]A workflow loses a worker")
    console.print(Text(SHAPE.strip("\n"), style="cyan"))
    home = f"interlock-demo-{secrets.token_hex(4)}"
    async with Crew(url, home, workers=WORKERS) as crew:
        pids = ", ".join(str(member.pid) for member in crew.members)
        console.print(f"[green]starting[/green]  {WORKERS} workers and an orchestrator, as processes {pids}")
        await crew.ready(connection)
        job_id = (await submit_job(connection, NewJob(WORKFLOW, ORDER, version=home), actor="you")).id
        console.print(f"[green]submitted[/green] an order of {len(ITEMS)} items, as job {job_id}")
        try:
            killing = await Watch(console, connection, crew, job_id).run()
        except BaseException:
            await _break_off(console, url, job_id)
            raise
        _conclude(console, await tell_story(connection, job_id), killing)


class Watch:
    """Looks at the job until it has ended, and kills the first worker that is seen packing."""

    def __init__(self, console: Console, connection: Connection, crew: Crew, job_id: UUID) -> None:
        self._connection = connection
        self._crew = crew
        self._job_id = job_id
        self._view = view_on(console)
        self._killing: Killing | None = None
        self._is_back = False

    async def run(self) -> Killing | None:
        """Watch to the end; tell what was killed."""
        try:
            with self._view:
                async with asyncio.timeout(LONGEST):
                    while not await self._look():  # noqa: ASYNC110 - others change it
                        await asyncio.sleep(LOOK)
        except TimeoutError:
            raise DemoError(f"job {self._job_id} has not ended within {LONGEST:g} s") from None
        return self._killing

    async def _look(self) -> bool:
        seen = await look(self._connection, self._job_id)
        self._view.show(seen, self._crew)
        self._crew.check()
        if self._killing is None:
            await self._strike(seen.steps)
        elif not self._is_back:
            self._await_return(self._killing, seen.steps)
        return seen.job.has_ended

    async def _strike(self, steps: Sequence[StepStatus]) -> None:
        for step in steps:
            member = self._crew.member(step.worker_id) if step.kind == "part" and step.state == "running" else None
            if member is not None and (at := await self._kill(member, step)) is not None:
                self._killing = Killing(member, step, at)
                killed = f"[bold red]kill -9[/bold red] {member.name} [dim](pid {member.pid})[/dim]"
                self._view.tell(f"{killed}, which holds {escape(step.step)}")
                return

    async def _kill(self, member: Member, step: StepStatus) -> datetime | None:
        """Kill a worker if it still holds the step; it stands still while that is looked at."""
        member.signal(signal.SIGSTOP)
        try:
            (now,) = await read_tasks(self._connection, [step.id])
            at = await read_clock(self._connection)
            if (now["state"], now["attempt"]) != ("running", step.attempt):
                return None
            member.killed = True
            member.signal(signal.SIGKILL)
            await member.process.wait()
        finally:
            member.signal(signal.SIGCONT)
        return at

    def _await_return(self, killing: Killing, steps: Sequence[StepStatus]) -> None:
        for step in steps:
            if step.id == killing.step.id and step.attempt > killing.step.attempt:
                self._is_back = True
                again = f"{escape(step.step)} runs again, as attempt {step.attempt}"
                self._view.tell(f"[bold yellow]recovered[/bold yellow]: {again}")


async def _break_off(console: Console, url: str, job_id: UUID) -> None:
    """Cancel the job, and give the processes a moment to see to it, what was reserved included."""
    with suppress(OSError):  # the terminal may be gone
        console.print("[yellow]stopping[/yellow]  the job is canceled, and the processes end")
    with suppress(StoreError, TimeoutError):
        async with asyncio.timeout(FAREWELL), connect(url) as connection:  # the other may be in the middle of something
            await cancel_job(connection, job_id, actor="you", reason="the demo was broken off")
            while not (await look(connection, job_id)).job.has_ended:  # noqa: ASYNC110 - others do it
                await asyncio.sleep(LOOK)


def _conclude(console: Console, story: Story, killing: Killing | None) -> None:
    console.rule("[bold]The job's timeline")
    console.print(timeline(console, story))
    console.rule("[bold]What was recovered")
    recoveries = story.recoveries
    for recovery in recoveries:
        _tell_recovery(console, recovery, killing)
    if not recoveries:
        console.print("nothing had to be")
    job = story.job
    if job.status != "COMPLETED":
        raise JobFailedError(f"job {job.id} ended {job.status}: {job.reason}", status=job.status, error=job.error)
    tasks = len({attempt.step.id for attempt in story.attempts})
    console.print(
        f"\nThe job went {', '.join(story.moves)}; each of its {tasks} steps has exactly one recorded outcome.\n"
        f"[green]{escape(str((job.output or {}).get('notify')))}[/green]\n\n"
        f"[bold]interlock jobs show {job.id}[/bold] tells it all again; "
        "examples/order_workflow.py is the code, docs/workflows.md the guide."
    )


def _tell_recovery(console: Console, recovery: Recovery, killing: Killing | None) -> None:
    moments = [(at, text) for at, text in _moments(recovery, killing) if at is not None]
    for at, text in moments:
        console.print(f"{since(moments[0][0], at):6.2f} s  {text}")


def _moments(recovery: Recovery, killing: Killing | None) -> Iterator[tuple[datetime | None, str]]:
    """Tell what happened to a step between the attempt that was lost and the end of the one that took its place."""
    lost, then = recovery.lost, recovery.then
    step = escape(lost.step.step)
    yield lost.started_at, f"{short(lost.worker)} takes {step}, as attempt {lost.number}"
    if killing is not None and killing.member.is_called(lost.worker):
        yield killing.at, f"[bold red]kill -9[/bold red]: {killing.member.name} says nothing any more"
    act = f"gives {step} up" if then is None else f"puts {step} back into the queue"
    yield lost.ended_at, f"its lease has run out: {short(lost.ended_by)} {act}"
    if then is not None:
        yield then.started_at, f"{short(then.worker)} takes {step}, as attempt {then.number}"
        yield then.ended_at, f"[green]{then.state}[/green]"
