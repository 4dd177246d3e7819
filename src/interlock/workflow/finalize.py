"""Finalizes jobs whose last step has ended: completes them, or compensates them (saga) and then fails or cancels them.

Invariant: a job ends once, when its last step has ended. A job that does not complete is compensated first, after its
child jobs have ended: its done steps, and those of its completed child jobs, in reverse order of completion, one after
the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.lifecycle import JobState, TaskRowState
from interlock.model.joins import EndedJobStep, standing_failures
from interlock.postgres.query import run
from interlock.store.jobs import ORCHESTRATION, STEPS
from interlock.workflow.batch import Activation
from interlock.workflow.resolve import step_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import Batch, LockedJob

OUTPUT_TOO_LARGE = "the output of the job is too large to be stored: it consists of the results of its last steps"


def jobs_without_open_steps(batch: Batch) -> list[LockedJob]:
    """List the running jobs whose last step has ended."""
    running = [job for job in batch.jobs.values() if job.changed and job.status == JobState.RUNNING]
    return [job for job in running if job.open_steps == 0]


async def finalize_jobs(connection: Connection, batch: Batch) -> None:
    """Decide how jobs without open steps end, and activate the next compensation of those that compensate."""
    finished = jobs_without_open_steps(batch)
    await _complete_or_fail(connection, batch, [job for job in finished if job.ending is None])
    not_started = [job for job in batch.jobs.values() if job.changed and not job.has_started]
    ending = [job for job in (*finished, *not_started) if job.ending is not None]
    ending = await _without_unfinished_children(connection, ending)
    await _insert_compensations(connection, batch, [job for job in ending if not job.compensating])
    await _end_jobs(connection, batch, [job for job in ending if job.open_steps == 0 or not job.has_started])
    await _activate_next_compensations(connection, batch, batch.jobs.values())


async def complete_jobs(connection: Connection, batch: Batch) -> None:
    """Complete the jobs of `batch.completed`; a job whose output is too large to be stored fails instead."""
    statement, parameters = batch.complete_statement()
    completed = {row["id"] for row in await run(connection, statement, parameters)}
    refused = [job for job in batch.completed if job.id not in completed]
    if not refused:
        return
    batch.completed = [job for job in batch.completed if job.id in completed]
    for job in refused:
        job.ending = JobState.FAILED
        job.ending_reason = OUTPUT_TOO_LARGE
        job.error = {"steps": {}, "message": OUTPUT_TOO_LARGE}
        job.changed = True
    refused = await _without_unfinished_children(connection, refused)
    await _insert_compensations(connection, batch, refused)
    await _end_jobs(connection, batch, [job for job in refused if job.open_steps == 0])
    await _activate_next_compensations(connection, batch, refused)


async def _without_unfinished_children(connection: Connection, jobs: Sequence[LockedJob]) -> list[LockedJob]:
    """Leave out jobs whose child jobs have not ended: these end, and compensate, before their parent does."""
    if not jobs:
        return []
    rows = await run(connection, ORCHESTRATION["read_unfinished_children"], {"ids": [job.id for job in jobs]})
    children: dict[UUID, UUID] = {row["parent_job_id"]: row["id"] for row in rows}
    for job in jobs:
        if job.id in children:
            canceled = "" if job.cancel_reason is None else f", which is being canceled ({job.cancel_reason})"
            job.reason = f"waits for child job {children[job.id]} to end{canceled}, then: {job.ending_reason}"
    return [job for job in jobs if job.id not in children]


async def _complete_or_fail(connection: Connection, batch: Batch, jobs: Sequence[LockedJob]) -> None:
    """Complete jobs in which no failure stands; let the others fail."""
    ids = [job.id for job in jobs if job.failed_steps]
    failures = await _read_standing_failures(connection, ids) if ids else {}
    for job in jobs:
        if job.id in failures:
            job.ending = JobState.FAILED
            job.ending_reason = _describe_failure(failures[job.id][0])
            job.error = {"steps": {row["step"]: row["error"] for row in failures[job.id]}}
        else:
            batch.completed.append(job)


async def _read_standing_failures(connection: Connection, ids: Sequence[UUID]) -> dict[UUID, list[dict[str, Any]]]:
    """Read the failed steps of each job that are neither recovered nor dispensable, in the order of their ends."""
    steps: dict[UUID, list[dict[str, Any]]] = {}
    for row in await run(connection, ORCHESTRATION["read_ends_of_jobs"], {"ids": list(ids)}):
        steps.setdefault(row["job_id"], []).append(row)
    failures = {}
    for job_id, rows in steps.items():
        ends = {
            row["step"]: EndedJobStep(
                step_end(
                    row["state"],
                    skipped_by_failure=row["skipped_by_failure"],
                    superseded=row["superseded"],
                    reused=row["reused"],
                ),
                ran=row["state"] != TaskRowState.SKIPPED or row["reused"],
            )
            for row in rows
        }
        definition = rows[0]["definition"]
        standing = standing_failures(definition, ends)
        if standing:
            positions = {step["name"]: position for position, step in enumerate(definition["steps"])}
            failed = [row for row in rows if row["step"] in standing]
            failures[job_id] = sorted(failed, key=lambda row: (row["finished_at"], positions[row["step"]]))
    return failures


def _describe_failure(row: dict[str, Any]) -> str:
    error = row["error"]
    message = error.get("message") if isinstance(error, dict) else error
    if isinstance(message, str) and message.startswith("canceled by "):
        return f"step {row['step']} was {message}"
    verb = "was canceled" if row["state"] == TaskRowState.CANCELED else "failed"
    return f"step {row['step']} {verb}" + (f": {message}" if message else "")


async def _end_jobs(connection: Connection, batch: Batch, jobs: Sequence[LockedJob]) -> None:
    """Fail or cancel jobs whose compensations, if there are any, have ended."""
    failed: dict[UUID, dict[str, Any]] = {}
    compensated = [job.id for job in jobs if job.compensating]
    if compensated:
        for row in await run(connection, STEPS["read_failed_compensations"], {"ids": compensated}):
            failed.setdefault(row["job_id"], {})[row["step"]] = row["error"]
    for job in jobs:
        if job.id in failed:
            job.error = {**(job.error or {}), "compensations": failed[job.id]}
        job.reason = job.ending_reason
        (batch.failed if job.ending == JobState.FAILED else batch.canceled).append(job)


async def _insert_compensations(connection: Connection, batch: Batch, jobs: Sequence[LockedJob]) -> None:
    """Insert the compensations of the done steps of these jobs, where the definition declares any."""
    if not jobs:
        return
    by_id = {job.id: job for job in jobs}
    parameters = {"ids": list(by_id), "now": batch.now}
    for row in await run(connection, STEPS["insert_compensations"], parameters):
        job = by_id[row["job_id"]]
        job.open_steps += 1
        job.compensating = True
        job.reason = f"compensating after: {job.ending_reason}"
        batch.created_count += 1


async def _activate_next_compensations(connection: Connection, batch: Batch, jobs: Iterable[LockedJob]) -> None:
    compensating = [job for job in jobs if job.changed and job.compensating]
    if not compensating:
        return
    parameters = {
        "ids": [job.id for job in compensating],
        "open_steps": [job.open_steps for job in compensating],
    }
    for row in await run(connection, STEPS["read_next_compensations"], parameters):
        batch.activate_unless_held(Activation(row["id"], row["namespace"]), row["limit_keys"])
