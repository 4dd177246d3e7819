"""Retries an ended job: a new job that runs the failed steps again, or a given one, and keeps what need not run again.

Invariant: a result is not reused if its step comes after a step that runs again, was compensated, or comes after a
compensated step; the old job stays as it ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.errors import InputError, UnknownJobError
from interlock.lifecycle import JOB, JobEvent, JobState, TaskRowState
from interlock.model.graph import AFTER, RECOVERY, edges
from interlock.model.joins import EndedJobStep, StepEnd, standing_failures
from interlock.postgres.connection import transaction
from interlock.postgres.query import run
from interlock.store.jobs import JOBS, STEPS
from interlock.workflow.activate import activate_root_steps
from interlock.workflow.new_job import NewJob, Submitted, find_submitted_jobs, find_workflows, insert_jobs, prepare_job
from interlock.workflow.resolve import step_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection


async def retry_job_from(
    connection: Connection,
    job_id: UUID,
    step: str | None = None,
    *,
    actor: str,
    request_id: str | None = None,
    now: datetime | None = None,
) -> Submitted:
    """Submit an ended job again, in which the failed steps, this step and the steps after them run again.

    Done steps are reused. A failed step that the job did without (recovered, or left behind by a partial join) and a
    step that `cancel_rest` canceled are not run again either, unless they come after one that is.
    """
    old = await _read_ended_job(connection, job_id)
    reused = await _read_kept_steps(connection, job_id, step, old)
    (found,) = await find_workflows(connection, [(old["workflow"], old["version"])], now=now)
    new = NewJob(
        old["workflow"],
        old["input"],
        version=old["version"],
        request_id=request_id,
        worker_count=old["worker_count"],
        timeout=old["timeout_seconds"],
        correlation_id=old["correlation_id"],
        tags=old["tags"],
        attributes=old["attributes"],
        callback_url=old["callback_url"],
        key=old["key"],
        on_conflict=None if old["key"] is None else "queue",
    )
    job = prepare_job(new, found, retried_from=job_id, reused=reused)
    async with transaction(connection):
        (inserted,) = await insert_jobs(connection, [job], actor=actor, now=now)
        if inserted.needs_activation:
            await activate_root_steps(connection, [inserted.id], actor=actor, now=now)
    if inserted.created:
        return Submitted(job.id, created=True)
    existing = await find_submitted_jobs(connection, [job])
    return Submitted(existing.get(job.id, job.id), created=False)


async def _read_ended_job(connection: Connection, job_id: UUID) -> dict[str, Any]:
    rows = await run(connection, JOBS["read_jobs"], {"ids": [job_id]})
    if not rows or rows[0]["workflow"] is None:
        raise UnknownJobError(f"there is no job {job_id} that could be retried")
    if rows[0]["status"] not in JOB.final:
        raise InputError(f"job {job_id} is {rows[0]['status']}: it can be retried once it has ended; cancel it first")
    return rows[0]


async def _read_kept_steps(
    connection: Connection, job_id: UUID, step: str | None, old: dict[str, Any]
) -> dict[str, Any]:
    """Read what the new job takes over, by step: a document with the result, or whether the step counts as failed."""
    rows = {row["step"]: row for row in await run(connection, STEPS["read_reusable_steps"], {"job_id": job_id})}
    _check_steps(job_id, step, old, rows)
    ends = {name: _end(row) for name, row in rows.items()}
    (found,) = await run(connection, STEPS["read_job_definition"], {"job_id": job_id})
    failed = _failed_steps(found["definition"], ends, old)
    if step is None and not failed:
        raise InputError(
            f"job {job_id} is {old['status']}, and no step of it failed{_because(old)}; name the step to retry from"
        )
    start = [name for name, row in rows.items() if name == step or name in failed or row["undone"]]
    again = steps_to_run_again(found["definition"], {name: end.end for name, end in ends.items()}, start)
    kept: dict[str, Any] = {}
    for name, row in rows.items():
        if name in again:
            continue
        if row["document"] is not None:
            kept[name] = row["document"]
        elif row["state"] != TaskRowState.SKIPPED or row["is_left_out"]:
            # a failure without consequence, or canceled by cancel_rest; here or in the job that this one retried
            kept[name] = {"skipped_by_failure": ends[name].end is StepEnd.FAILED}
    return kept


def _check_steps(job_id: UUID, step: str | None, old: dict[str, Any], rows: Mapping[str, dict[str, Any]]) -> None:
    """Raise InputError unless the step exists and the steps of the old job are still stored."""
    if step is not None and step not in rows:
        raise InputError(f"workflow {old['workflow']!r} has no step {step!r}; it has {', '.join(rows)}")
    missing = [name for name, row in rows.items() if row["is_missing"]]
    if missing == list(rows) and old["event"] == JobEvent.REJECT:
        raise InputError(f"job {job_id} was rejected and cannot be retried: {old['reason']}; submit it anew")
    if missing:
        raise InputError(
            f"job {job_id} cannot be retried: its steps were pruned ({', '.join(missing[:5])}), and their results are "
            "not known any more; submit it anew"
        )


def _end(row: dict[str, Any]) -> EndedJobStep:
    end = step_end(
        row["state"], skipped_by_failure=row["skipped_by_failure"], superseded=row["superseded"], reused=row["reused"]
    )
    return EndedJobStep(end, ran=row["state"] != TaskRowState.SKIPPED or row["reused"])


def _because(old: dict[str, Any]) -> str:
    return f" ({old['reason']})" if old["reason"] else ""


def _failed_steps(definition: Mapping[str, Any], ends: Mapping[str, EndedJobStep], old: dict[str, Any]) -> set[str]:
    """List the steps whose failure failed the job; of a job that was canceled, at least the steps that were."""
    failed = standing_failures(definition, ends)
    if failed or old["status"] != JobState.CANCELED:
        return failed
    return {name for name, step in ends.items() if step.end is StepEnd.FAILED and step.ran}


def steps_to_run_again(definition: Mapping[str, Any], ends: Mapping[str, StepEnd], start: Iterable[str]) -> set[str]:
    """Return these steps and the steps after them, without done steps that a partial join ran in spite of a failure."""
    downstreams: dict[str, list[str]] = {}
    for edge in edges(definition):
        is_success = edge.condition in {AFTER, RECOVERY}
        if is_success and ends[edge.upstream] is StepEnd.FAILED and ends[edge.downstream] is StepEnd.DONE:
            continue
        downstreams.setdefault(edge.upstream, []).append(edge.downstream)
    seen = set(start)
    left = list(seen)
    while left:
        for name in downstreams.get(left.pop(), ()):
            if name not in seen:
                seen.add(name)
                left.append(name)
    return seen
