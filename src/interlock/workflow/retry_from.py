"""Retries an ended job from one of its steps: a new job that reuses the results of the steps that need not run again.

Invariant: a result is not reused if its step comes after the given one, was compensated, or comes after a compensated
step; the old job stays as it ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.errors import InputError
from interlock.lifecycle import JOB
from interlock.postgres.connection import transaction
from interlock.postgres.query import run
from interlock.store.jobs import JOBS, STEPS
from interlock.workflow.activate import activate_root_steps
from interlock.workflow.new_job import NewJob, Submitted, find_submitted_jobs, find_workflows, insert_jobs, prepare_job

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection


async def retry_job_from(
    connection: Connection,
    job_id: UUID,
    step: str,
    *,
    actor: str,
    request_id: str | None = None,
    now: datetime | None = None,
) -> Submitted:
    """Submit an ended job again, in which this step and the steps after it run again, and done ones are reused."""
    old = await _read_ended_job(connection, job_id)
    reused = await _read_reusable_results(connection, job_id, step, old)
    (found,) = await find_workflows(connection, [(old["workflow"], old["version"])], now=now)
    new = NewJob(
        old["workflow"],
        old["input"],
        version=old["version"],
        request_id=request_id,
        worker_count=old["worker_count"],
        timeout=old["timeout_seconds"],
        correlation_id=old["correlation_id"],
    )
    job = prepare_job(new, found, retried_from=job_id, reused=reused)
    async with transaction(connection):
        inserted = await insert_jobs(connection, [job], actor=actor, now=now)
        if inserted and job.needs_activation:
            await activate_root_steps(connection, inserted, actor=actor, now=now)
    if inserted:
        return Submitted(job.id, created=True)
    existing = await find_submitted_jobs(connection, [job])
    return Submitted(existing.get(job.id, job.id), created=False)


async def _read_ended_job(connection: Connection, job_id: UUID) -> dict[str, Any]:
    rows = await run(connection, JOBS["read_jobs"], {"ids": [job_id]})
    if not rows or rows[0]["workflow"] is None:
        raise InputError(f"there is no job {job_id} that could be retried")
    if rows[0]["status"] not in JOB.final:
        raise InputError(f"job {job_id} is {rows[0]['status']}: it can be retried once it has ended; cancel it first")
    return rows[0]


async def _read_reusable_results(
    connection: Connection, job_id: UUID, step: str, old: dict[str, Any]
) -> dict[str, Any]:
    """Read the results that the new job takes over, by step."""
    rows = await run(connection, STEPS["read_reusable_steps"], {"job_id": job_id})
    names = [row["step"] for row in rows]
    if step not in names:
        raise InputError(f"workflow {old['workflow']!r} has no step {step!r}; it has {', '.join(names)}")
    missing = [row["step"] for row in rows if row["is_missing"]]
    if missing:
        raise InputError(
            f"job {job_id} cannot be retried: its steps were pruned ({', '.join(missing[:5])}), and their results are "
            "not known any more; submit it anew"
        )
    downstreams: dict[str, list[str]] = {}
    for edge in await run(connection, STEPS["read_job_edges"], {"job_id": job_id}):
        downstreams.setdefault(edge["upstream"], []).append(edge["downstream"])
    again = reachable(downstreams, [step, *(row["step"] for row in rows if row["undone"])])
    return {row["step"]: row["document"] for row in rows if row["document"] is not None and row["step"] not in again}


def reachable(downstreams: dict[str, list[str]], start: Iterable[str]) -> set[str]:
    """Return these steps and all steps downstream of them."""
    seen = set(start)
    left = list(seen)
    while left:
        for name in downstreams.get(left.pop(), ()):
            if name not in seen:
                seen.add(name)
                left.append(name)
    return seen
