"""The second part of the demo: a workflow on several real processes, one of which is killed while it runs a step.

Then a job of the same workflow fails: a failure handler runs, and the completed steps are compensated.

Invariant: an interrupted demo cancels its job, so that no unfinished job stays in the database.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.text import Text

from interlock.cli.demo.processes import POLL_INTERVAL_S, DemoError, DemoProcesses
from interlock.cli.demo.timeline import read_snapshot, read_timeline
from interlock.cli.demo.views import make_timeline_table, make_view, seconds_between, short_name
from interlock.errors import JobFailedError, StoreError
from interlock.lifecycle import JobState, TaskRowState
from interlock.postgres.connection import connect
from interlock.process_groups import KILL_TIMEOUT_S
from interlock.store.leader import read_clock
from interlock.store.tasks import read_tasks
from interlock.workflow.cancel import cancel_job
from interlock.workflow.new_job import NewJob
from interlock.workflow.submit import submit_job

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from rich.console import Console

    from interlock.cli.demo.processes import DemoProcess
    from interlock.cli.demo.timeline import JobTimeline, Recovery
    from interlock.cli.demo.views import View
    from interlock.client.job_handle import StepStatus
    from interlock.postgres.connection import Connection


WORKFLOW = "demo_order_fulfillment"
ITEMS = ("cups", "plates", "spoons", "forks", "bowls", "a kettle")
ORDER = {"number": 7, "items": ITEMS, "days": 2}
SHAPE = r"""
           / reserve \           / express  \
validate -<           >- route -<            >- pack x 6 -- ship -- notify
           \ price   /           \ standard /                 \.. tell_support
"""
IMPOSSIBLE_ORDER = {"number": 8, "items": ("cups", "a piano"), "days": 9}
WORKERS = 3
JOB_TIMEOUT_S = 60.0
CANCEL_TIMEOUT_S = 10.0  # for the job of an interrupted demo to end; it takes about a second


@dataclass(frozen=True, slots=True)
class KilledWorker:
    """A worker that the demo killed, and the step that it ran."""

    process: DemoProcess
    step: StepStatus
    at: datetime


async def show_workflow(console: Console, connection: Connection, url: str) -> None:
    """Run the workflow, kill a worker on the way, and show the timeline of the job."""
    console.rule("[bold]A workflow loses a worker")
    console.print(Text(SHAPE.strip("\n"), style="cyan"))
    namespace = f"interlock-demo-{secrets.token_hex(4)}"
    async with DemoProcesses(url, namespace, workers=WORKERS) as processes:
        pids = ", ".join(str(process.pid) for process in processes.all)
        console.print(f"[green]starting[/green]  {WORKERS} workers and an orchestrator, as processes {pids}")
        await processes.wait_until_registered(connection)
        job_id = (await submit_job(connection, NewJob(WORKFLOW, ORDER, version=namespace), actor="you")).id
        console.print(f"[green]submitted[/green] an order of {len(ITEMS)} items, as job {job_id}")
        async with _canceled_if_interrupted(console, url, job_id):
            kill = await JobWatch(connection, processes, job_id, make_view(console)).run()
        _show_timeline(console, await read_timeline(connection, job_id), kill)
        console.rule("[bold]A workflow fails and is undone")
        job_id = (await submit_job(connection, NewJob(WORKFLOW, IMPOSSIBLE_ORDER, version=namespace), actor="you")).id
        console.print(f"[green]submitted[/green] an order with a piano, which fits into no parcel, as job {job_id}")
        async with _canceled_if_interrupted(console, url, job_id):
            await JobWatch(connection, processes, job_id).run()
        _show_compensation(console, await read_timeline(connection, job_id))


class JobWatch:
    """Polls the job until it has ended; with a view, shows it, and kills the first worker that runs a part of a map."""

    def __init__(
        self, connection: Connection, processes: DemoProcesses, job_id: UUID, view: View | None = None
    ) -> None:
        self._connection = connection
        self._processes = processes
        self._job_id = job_id
        self._view = view
        self._kill: KilledWorker | None = None
        self._is_recovered = False

    async def run(self) -> KilledWorker | None:
        """Watch the job to its end; return the kill."""
        try:
            with self._view or nullcontext():
                async with asyncio.timeout(JOB_TIMEOUT_S):
                    while not await self._poll():  # noqa: ASYNC110 - other processes change it
                        await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            raise DemoError(f"job {self._job_id} has not ended within {JOB_TIMEOUT_S:g} s") from None
        return self._kill

    async def _poll(self) -> bool:
        snapshot = await read_snapshot(self._connection, self._job_id)
        self._processes.check()
        if self._view is not None:
            self._view.show(snapshot, self._processes)
            if self._kill is None:
                await self._kill_worker_of_part(snapshot.steps, self._view)
            elif not self._is_recovered:
                self._detect_recovery(self._kill, snapshot.steps, self._view)
        return snapshot.job.has_ended

    async def _kill_worker_of_part(self, steps: Sequence[StepStatus], view: View) -> None:
        for step in steps:
            if step.kind != "part" or step.state != TaskRowState.RUNNING:
                continue
            process = self._processes.find_worker(step.worker_id)
            if process is not None and (at := await self._kill_process(process, step)) is not None:
                self._kill = KilledWorker(process, step, at)
                killed = f"[bold red]kill -9[/bold red] {process.name} [dim](pid {process.pid})[/dim]"
                view.print_event(f"{killed}, which holds {escape(step.step)}")
                return

    async def _kill_process(self, process: DemoProcess, step: StepStatus) -> datetime | None:
        """Kill a worker if it still holds the step; SIGSTOP suspends it during the check."""
        process.group.send_signal(signal.SIGSTOP)
        try:
            (task,) = await read_tasks(self._connection, [step.id])
            at = await read_clock(self._connection)
            if (task["state"], task["attempt"]) != (TaskRowState.RUNNING, step.attempt):
                return None
            process.killed = True
            process.group.kill()
            await process.group.wait(KILL_TIMEOUT_S)
        finally:
            process.group.send_signal(signal.SIGCONT)
        return at

    def _detect_recovery(self, kill: KilledWorker, steps: Sequence[StepStatus], view: View) -> None:
        for step in steps:
            if step.id == kill.step.id and step.attempt > kill.step.attempt:
                self._is_recovered = True
                again = f"{escape(step.step)} runs again, as attempt {step.attempt}"
                view.print_event(f"[bold yellow]recovered[/bold yellow]: {again}")


@asynccontextmanager
async def _canceled_if_interrupted(console: Console, url: str, job_id: UUID) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        await _cancel_job(console, url, job_id)
        raise


async def _cancel_job(console: Console, url: str, job_id: UUID) -> None:
    """Cancel the job and wait until it has ended, compensations included."""
    with suppress(OSError):  # the terminal may be gone
        console.print("[yellow]stopping[/yellow]  canceling the job, then the processes end")
    with suppress(StoreError, TimeoutError):
        async with (
            asyncio.timeout(CANCEL_TIMEOUT_S),
            connect(url) as connection,
        ):  # a new one: the other may be in use
            await cancel_job(connection, job_id, actor="you", reason="the demo was interrupted")
            while not (await read_snapshot(connection, job_id)).job.has_ended:  # noqa: ASYNC110 - other processes end it
                await asyncio.sleep(POLL_INTERVAL_S)


def _show_timeline(console: Console, timeline: JobTimeline, kill: KilledWorker | None) -> None:
    console.rule("[bold]The job's timeline")
    console.print(make_timeline_table(console, timeline))
    console.rule("[bold]What was recovered")
    recoveries = timeline.recoveries
    for recovery in recoveries:
        _show_recovery(console, recovery, kill)
    if not recoveries:
        console.print("nothing")
    job = timeline.job
    if job.status != JobState.COMPLETED:
        raise JobFailedError(f"job {job.id} ended {job.status}: {job.reason}", status=job.status, error=job.error)
    tasks = len({attempt.step.id for attempt in timeline.attempts})
    console.print(
        f"\nThe job went {', '.join(timeline.states)}; each of its {tasks} steps has exactly one recorded outcome.\n"
        f"[green]{escape(str((job.output or {}).get('notify')))}[/green]\n\n"
        f"[bold]interlock jobs show {job.id}[/bold] shows the job; "
        "examples/order_workflow.py is the code, docs/workflows.md the guide."
    )


def _show_compensation(console: Console, timeline: JobTimeline) -> None:
    console.print(make_timeline_table(console, timeline))
    job = timeline.job
    if job.status != JobState.FAILED:
        raise JobFailedError(f"job {job.id} ended {job.status}: {job.reason}", status=job.status, error=job.error)
    (observed,) = [attempt.step.result for attempt in timeline.attempts if attempt.step.step == "tell_support"]
    console.print(
        f"\nThe job went {', '.join(timeline.states)}: {escape(str(job.reason))}.\n"
        f"tell_support has on_failure, so it ran and changed nothing else: [green]{escape(str(observed))}[/green].\n"
        "reserve has a compensation, which ran after everything else had ended.\n\n"
        f"[bold]interlock diagram {job.id}[/bold] draws the job."
    )


def _show_recovery(console: Console, recovery: Recovery, kill: KilledWorker | None) -> None:
    events = [(at, text) for at, text in _recovery_events(recovery, kill) if at is not None]
    for at, text in events:
        console.print(f"{seconds_between(events[0][0], at):6.2f} s  {text}")


def _recovery_events(recovery: Recovery, kill: KilledWorker | None) -> Iterator[tuple[datetime | None, str]]:
    """Yield time and text of each event from the start of the lost attempt to the end of its replacement."""
    lost, replacement = recovery.lost, recovery.next
    step = escape(lost.step.step)
    yield lost.started_at, f"{short_name(lost.worker)} claims {step} as attempt {lost.number}"
    if kill is not None and kill.process.has_id(lost.worker):
        yield kill.at, f"[bold red]kill -9[/bold red]: {kill.process.name} sends no more heartbeats"
    action = f"fails {step}" if replacement is None else f"returns {step} to the queue"
    yield lost.ended_at, f"the lease has expired: {short_name(lost.ended_by)} {action}"
    if replacement is not None:
        yield replacement.started_at, f"{short_name(replacement.worker)} claims {step} as attempt {replacement.number}"
        yield replacement.ended_at, f"[green]{replacement.state}[/green]"
