"""How jobs end: completed, failed or canceled, after their compensations.

Invariant: a job ends once, when its last step has ended; what was done in a job that does not complete is undone
before, the latest first and one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.postgres.query import run
from interlock.store.jobs import ORCHESTRATION, STEPS
from interlock.workflow.batch import Release

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import Batch, LockedJob

TOO_LARGE = "the output of the job is too large to be stored: the results of its last steps, together"


def read_at_zero(batch: Batch) -> list[LockedJob]:
    """Give the jobs whose last step has ended."""
    return [job for job in batch.jobs.values() if job.changed and job.status == "RUNNING" and job.open_steps == 0]


async def decide_endings(connection: Connection, batch: Batch) -> None:
    """Decide what becomes of jobs whose last step has ended, and let the next compensation go of the others."""
    at_zero = read_at_zero(batch)
    await _judge_failures(connection, batch, [job for job in at_zero if job.ending is None])
    ending = [job for job in at_zero if job.ending is not None]
    await _compensate(connection, batch, [job for job in ending if not job.compensating])
    await _end(connection, batch, [job for job in ending if job.open_steps == 0])
    await _release_next(connection, batch, batch.jobs.values())


async def complete_jobs(connection: Connection, batch: Batch) -> None:
    """Complete jobs in which nothing failed; one whose output cannot be stored is going to fail for it."""
    statement, parameters = batch.write_completions()
    rows = await run(connection, statement, parameters)
    if len(rows) == len(batch.completed):
        return
    refused = _refuse(batch, {row["id"] for row in rows})
    await _compensate(connection, batch, refused)
    await _end(connection, batch, [job for job in refused if job.open_steps == 0])
    await _release_next(connection, batch, refused)


def _refuse(batch: Batch, completed: Collection[UUID]) -> list[LockedJob]:
    """Let the jobs fail that could not be completed."""
    refused = [job for job in batch.completed if job.id not in completed]
    batch.completed = [job for job in batch.completed if job.id in completed]
    for job in refused:
        job.ending = "FAILED"
        job.ending_reason = TOO_LARGE
        job.error = {"steps": {}, "message": TOO_LARGE}
    return refused


async def _end(connection: Connection, batch: Batch, jobs: Sequence[LockedJob]) -> None:
    """End jobs that do not complete, and whose compensations, if there are any, are done."""
    await _note_failed_compensations(connection, [job for job in jobs if job.compensating])
    for job in jobs:
        job.reason = job.ending_reason
        (batch.failed if job.ending == "FAILED" else batch.canceled).append(job)


async def _judge_failures(connection: Connection, batch: Batch, jobs: Sequence[LockedJob]) -> None:
    """Complete jobs in which nothing failed that no step after it made up for; the others are going to fail."""
    doubtful = [job.id for job in jobs if job.failed_steps]
    failures: dict[UUID, list[dict[str, Any]]] = {}
    if doubtful:
        for row in await run(connection, ORCHESTRATION["read_failed_steps"], {"ids": doubtful}):
            if not row["handled"]:
                failures.setdefault(row["job_id"], []).append(row)
    for job in jobs:
        if job.id in failures:
            job.ending = "FAILED"
            job.ending_reason = _said(failures[job.id][0])
            job.error = {"steps": {row["step"]: row["error"] for row in failures[job.id]}}
        else:
            batch.completed.append(job)


def _said(row: dict[str, Any]) -> str:
    error = row["error"]
    message = error.get("message") if isinstance(error, dict) else error
    if isinstance(message, str) and message.startswith("canceled by "):
        return f"step {row['step']} was {message}"
    how = "was canceled" if row["state"] == "canceled" else "failed"
    return f"step {row['step']} {how}" + (f": {message}" if message else "")


async def _compensate(connection: Connection, batch: Batch, jobs: Sequence[LockedJob]) -> None:
    """Begin to undo what was done in these jobs, where a compensation was declared."""
    if not jobs:
        return
    by_id = {job.id: job for job in jobs}
    parameters = {"ids": list(by_id), "now": batch.now}
    for row in await run(connection, STEPS["insert_compensations"], parameters):
        job = by_id[row["job_id"]]
        job.open_steps += 1
        job.compensating = True
        job.reason = f"compensating after: {job.ending_reason}"
        batch.created += 1


async def _release_next(connection: Connection, batch: Batch, jobs: Iterable[LockedJob]) -> None:
    going = [job for job in jobs if job.changed and job.compensating]
    if not going:
        return
    parameters = {
        "ids": [job.id for job in going],
        "open_steps": [job.open_steps if job.id in batch.out_of_turn else None for job in going],
    }
    for row in await run(connection, STEPS["read_next_compensations"], parameters):
        batch.let_go(Release(row["id"], row["namespace"]), row["limit_key"])


async def _note_failed_compensations(connection: Connection, jobs: Sequence[LockedJob]) -> None:
    if not jobs:
        return
    failed: dict[UUID, dict[str, Any]] = {}
    for row in await run(connection, STEPS["read_failed_compensations"], {"ids": [job.id for job in jobs]}):
        failed.setdefault(row["job_id"], {})[row["step"]] = row["error"]
    for job in jobs:
        if job.id in failed:
            job.error = {**(job.error or {}), "compensations": failed[job.id]}
