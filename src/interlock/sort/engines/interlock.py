"""The engine `interlock`: the sort is a job with one step for each sort worker, with leases, retries and history.

Invariant: a retried step resumes from the work directory of the attempt before it, and an attempt that lost its lease
is stopped, because it runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import platform
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.client.app import Interlock, ensure_schema
from interlock.client.step_context import StepContext  # noqa: TC001 - the engine reads annotations at run time
from interlock.errors import JobFailedError, SortError, SortInputError
from interlock.lifecycle import JOB, TaskRowState
from interlock.model.backoff import Backoff
from interlock.orchestrator.run import orchestrating
from interlock.postgres.connection import connect, database_url
from interlock.sort.data.records import Source
from interlock.sort.engines.base import MasterThread
from interlock.sort.engines.job_guard import REASON, JobGuard
from interlock.sort.engines.local import worker_settings
from interlock.sort.logging import sigterm_as_interrupt
from interlock.sort.security import Security, write_token
from interlock.sort.settings import TOKEN_FILE, Progress, Report, Settings
from interlock.sort.workdir import open_work_directory
from interlock.sort.worker.worker import UnreportedFailure, run_worker
from interlock.worker.executors.base import HandlerError
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.client.job_handle import JobHandle
    from interlock.config import Config
    from interlock.sort.settings import ProgressCallback, SaveCallback

NAMESPACE = "sort"
START_TIME_FIELD = 19  # in /proc/PID/stat, after the name
MAX_TRIES = 5
LEASE_S = 10.0
REGISTER_TIMEOUT_S = 5.0  # of a step: the master listens before the job is submitted
CANCEL_TIMEOUT_S = 10.0  # for the steps of a canceled sort to stop
APP_REFERENCE = "interlock.sort.engines.interlock:app"

app = Interlock()
workflow = app.workflow("distributed_sort", namespace=NAMESPACE, version="1")


@workflow.map(over_input="shares", executor="process", max_tries=MAX_TRIES, backoff=Backoff.linear(base=0.5))
def sort_worker(
    item: dict[str, Any],
    index: int,
    master: str,
    output: str,
    work_dir: str,
    settings: dict[str, Any],
    context: StepContext,
) -> dict[str, Any]:
    """Run one worker of a sort: sort a share of the input, and merge a share of the output."""
    reporter = ProgressReporter(context)
    try:
        report = run_worker(
            master,
            Source.from_json(item),
            Path(output),
            settings=Settings(**settings),
            work_dir=Path(work_dir) / f"worker-{index}",
            index=index,
            on_progress=reporter.report,
            stop=reporter.stop,
            on_save=context.checkpoint,
            security=Security.load(Path(work_dir) / TOKEN_FILE),
        )
    except SortError as error:
        # without a traceback: the message says it all, and the command shows it
        has_ended = isinstance(error, SortInputError | UnreportedFailure)  # the master, with its command
        raise HandlerError("SortError", str(error), retryable=not has_ended) from error
    return report.json()


class ProgressReporter:
    """Reports the progress of a sort worker to its step, and stops the worker when the step is canceled."""

    def __init__(self, context: StepContext) -> None:
        self.stop = threading.Event()
        self._context = context

    def report(self, progress: Progress) -> None:
        """Store the progress with the step."""
        if self._context.cancelled:
            self.stop.set()
        for worker in progress.workers:
            self._context.progress(
                min(max(worker.percent / 100, 0.0), 1.0),
                worker.message,
                state=worker.state,
                bytes_done=worker.bytes_done,
            )


def run_as_job(
    config: Config,
    source: Source,
    output: Path,
    *,
    workers: int,
    settings: Settings,
    work_dir: Path | None,
    on_progress: ProgressCallback,
    on_save: SaveCallback | None = None,
    report_progress: Callable[[str], None] | None = None,
) -> Report:
    """Sort as a job in the configured database, whose steps run in processes of this command."""
    with (
        open_work_directory(source, output, workers, settings, work_dir) as directory,
        database_url(config, report_progress) as url,
    ):
        if config.database_url is None:
            asyncio.run(_migrate_embedded(url))
        app.config = replace(config, database_url=url)
        with sigterm_as_interrupt(), JobGuard(config) as guard:
            return asyncio.run(
                _run(source, output.absolute(), workers, settings, directory.absolute(), on_progress, on_save, guard)
            )


async def _migrate_embedded(url: str) -> None:
    """Migrate the embedded server, as every app does that starts it by itself."""
    async with connect(url) as connection:
        await ensure_schema(connection, is_embedded=True)


def _identify_command() -> dict[str, Any]:
    """Return what identifies this command among all that ever ran on this machine."""
    return {"host": platform.node(), "pid": os.getpid(), "started": _start_time(os.getpid())}


def _start_time(pid: int) -> str:
    """Return the time at which a process was started, in ticks since the machine was; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[START_TIME_FIELD]
    except OSError:
        return ""


async def _cancel_orphans() -> None:
    """Cancel the jobs whose commands were killed on this machine: each had the master, so none can end."""
    for job in await app.find_jobs(workflow=workflow.name, status=[str(state) for state in JOB.unfinished]):
        handle = app.job(job.id)
        command = (await handle.status()).input.get("command") or {}
        if command.get("host") == platform.node() and command["started"] != _start_time(command["pid"]):
            await handle.cancel(REASON)


def engine_settings(workers: int) -> WorkerSettings:
    """Return the settings of the engine's worker in this process, for so many sort workers at a time."""
    return WorkerSettings(
        namespaces=(NAMESPACE,),
        concurrency=workers,
        processes=workers,
        app_reference=APP_REFERENCE,
        lease=LEASE_S,
        recovery_interval=1.0,
    )


async def _run(
    source: Source,
    output: Path,
    workers: int,
    settings: Settings,
    work_dir: Path,
    on_progress: ProgressCallback,
    on_save: SaveCallback | None,
    guard: JobGuard,
) -> Report:
    async with app, orchestrating(app), serving(app, engine_settings(workers)):
        await _cancel_orphans()
        security = Security.generate()
        write_token(work_dir, security.token)  # not into the database, which others can read
        with MasterThread(
            workers,
            settings=settings,
            work_dir=work_dir,
            on_progress=on_progress,
            on_save=on_save,
            security=security,
        ) as master:
            document = {
                "shares": [source.share(number, workers).json() for number in range(workers)],
                "master": await asyncio.to_thread(lambda: master.address),
                "output": str(output),
                "work_dir": str(work_dir),
                "command": _identify_command(),
                "settings": replace(
                    worker_settings(settings, workers, source), register_timeout_s=REGISTER_TIMEOUT_S
                ).json(),
            }
            job = await app.submit(workflow, document)
            guard.watch(job.id)
            return await _wait_for_end(job, master)


async def _wait_for_end(job: JobHandle, master: MasterThread) -> Report:
    """Wait for the master and all steps; when either fails, end the other."""
    steps = asyncio.create_task(_wait_for_steps(job))
    result = asyncio.create_task(asyncio.to_thread(master.result))
    result.add_done_callback(lambda task: task.cancelled() or task.exception())  # not awaited after an interrupt
    try:
        await asyncio.wait({steps, result}, return_when=asyncio.FIRST_EXCEPTION)
        if steps.done() and (error := steps.exception()) is not None:
            master.stop()
            await asyncio.gather(result, return_exceptions=True)
            raise error
        return await result
    finally:
        if not steps.done():
            await job.cancel("the sort was stopped")
            await asyncio.wait({steps}, timeout=CANCEL_TIMEOUT_S)
            steps.cancel()


async def _wait_for_steps(job: JobHandle) -> None:
    try:
        await job.wait()
    except JobFailedError as error:
        failed = [step for step in await job.steps() if step.state == TaskRowState.ERROR and step.error]
        reasons = "; ".join(f"{step.step}: {(step.error or {}).get('message')}" for step in failed)
        raise SortError(f"the sort failed, as job {job.id}: {reasons or error}") from error
