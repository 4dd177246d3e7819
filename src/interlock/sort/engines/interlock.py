"""The sort as a job of the engine: one step for each sort worker, leased, retried and recorded like any other.

Invariant: a step that is run again goes on from what the attempt before it left in the temporary directory, and an
attempt that lost its lease is stopped, because it runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.client.app import Interlock
from interlock.client.step_context import StepContext  # noqa: TC001 - the engine reads annotations at run time
from interlock.errors import JobFailedError, PermanentError, SortError, SortInputError
from interlock.model.backoff import Backoff
from interlock.orchestrator.run import orchestrating
from interlock.postgres.connection import database_url
from interlock.sort.data.records import Source
from interlock.sort.engines.base import Leader, of_one
from interlock.sort.settings import Progress, Report, Settings
from interlock.sort.workdir import unfinished
from interlock.sort.worker.worker import Untold, run_worker
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.client.job_handle import JobHandle
    from interlock.config import Config

NAMESPACE = "sort"
TRIES = 5
LEASE = 10.0
REACHED = 5.0  # seconds in which a step finds its master, which listened before there was a job
FAREWELL = 10.0  # seconds in which the steps of a sort that is given up may stop
REFERENCE = "interlock.sort.engines.interlock:app"

app = Interlock()
workflow = app.workflow("distributed_sort", namespace=NAMESPACE, version="1")


@workflow.map(over_input="shares", executor="process", max_tries=TRIES, backoff=Backoff.linear(base=0.5))
def sort_worker(
    item: dict[str, Any],
    index: int,
    master: str,
    output: str,
    temp: str,
    settings: dict[str, Any],
    context: StepContext,
) -> dict[str, Any]:
    """Be one worker of a sort: sort a share of the input, and merge a share of the output."""
    telling = Telling(context)
    try:
        report = run_worker(
            master,
            Source.of(item),
            Path(output),
            settings=Settings(**settings),
            temp=Path(temp) / f"worker-{index}",
            index=index,
            told=telling.hear,
            stop=telling.stop,
            saved=context.checkpoint,
        )
    except (SortInputError, Untold) as error:  # the master is in the command that made the job, and gone with it
        raise PermanentError(str(error)) from error
    return report.json()


class Telling:
    """Passes on how far a sort worker is and, the other way, that its step was canceled."""

    def __init__(self, context: StepContext) -> None:
        self.stop = threading.Event()
        self._context = context

    def hear(self, seen: Progress) -> None:
        """Pass it on."""
        if self._context.cancelled:
            self.stop.set()
        for worker in seen.workers:
            self._context.progress(
                min(max(worker.percent / 100, 0.0), 1.0),
                worker.message,
                state=worker.state,
                bytes_done=worker.bytes_done,
            )


def run_steps(
    config: Config,
    source: Source,
    output: Path,
    *,
    workers: int,
    settings: Settings,
    temp: Path | None,
    told: Callable[[Progress], None],
) -> Report:
    """Sort as a job in the configured database, whose steps run in processes of this command."""
    with unfinished(source, output, workers, settings, temp) as place, database_url(config) as url:
        app.config = replace(config, database_url=url)
        return asyncio.run(_run(source, output.absolute(), workers, settings, place.absolute(), told))


async def _run(
    source: Source,
    output: Path,
    workers: int,
    settings: Settings,
    temp: Path,
    told: Callable[[Progress], None],
) -> Report:
    crew = WorkerSettings(
        namespaces=(NAMESPACE,),
        concurrency=workers,
        processes=workers,
        app_reference=REFERENCE,
        lease=LEASE,
        recovery_interval=1.0,
    )
    async with app, orchestrating(app), serving(app, crew):
        with Leader(workers, settings=settings, temp=temp, told=told) as leader:
            document = {
                "shares": [source.share(number, workers).json() for number in range(workers)],
                "master": await asyncio.to_thread(lambda: leader.address),
                "output": str(output),
                "temp": str(temp),
                "settings": asdict(replace(of_one(settings, workers), registering=REACHED)),
            }
            job = await app.submit(workflow, document)
            return await _finished(job, leader)


async def _finished(job: JobHandle, leader: Leader) -> Report:
    """Wait for the master and all steps; when either fails, end the other."""
    steps = asyncio.create_task(_steps_done(job))
    leading = asyncio.create_task(asyncio.to_thread(leader.result))
    leading.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody asks after an interrupt
    try:
        await asyncio.wait({steps, leading}, return_when=asyncio.FIRST_EXCEPTION)
        if steps.done() and (error := steps.exception()) is not None:
            leader.stop()
            await asyncio.gather(leading, return_exceptions=True)
            raise error
        return await leading
    finally:
        if not steps.done():
            await job.cancel("the sort was given up")
            await asyncio.wait({steps}, timeout=FAREWELL)
            steps.cancel()


async def _steps_done(job: JobHandle) -> None:
    try:
        await job.wait()
    except JobFailedError as error:
        failed = [step for step in await job.steps() if step.state == "error" and step.error]
        reasons = "; ".join(f"{step.step}: {(step.error or {}).get('message')}" for step in failed)
        raise SortError(f"the sort failed, as job {job.id}: {reasons or error}") from error
