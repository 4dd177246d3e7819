"""A job again, from one of its steps on: a new job that takes over what needs not be done anew.

Invariant: nothing is taken over that comes after the step, that was undone by a compensation, or that comes after such
a step; the old job stays as it ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.errors import InputError
from interlock.postgres.connection import transaction
from interlock.postgres.query import run
from interlock.store.jobs import JOBS, STEPS
from interlock.workflow.activate import begin_jobs
from interlock.workflow.batch import ENDED
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
    """Submit an ended job anew; what is not this step or after it, and was done, is not run again."""
    old = await _ended_job(connection, job_id)
    reused = await _reusable(connection, job_id, step, old)
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
    row = prepare_job(new, found, retried_from=job_id, reused=reused)
    async with transaction(connection):
        made = await insert_jobs(connection, [row], actor=actor, now=now)
        if made and row.needs_activation:
            await begin_jobs(connection, made, actor=actor, now=now)
    if made:
        return Submitted(row.row["id"], created=True)
    there = await find_submitted_jobs(connection, [row])
    return Submitted(there.get(row.id, row.id), created=False)


async def _ended_job(connection: Connection, job_id: UUID) -> dict[str, Any]:
    rows = await run(connection, JOBS["read_jobs"], {"ids": [job_id]})
    if not rows or rows[0]["workflow"] is None:
        raise InputError(f"there is no job {job_id} that could be retried")
    if rows[0]["status"] not in ENDED:
        raise InputError(f"job {job_id} is {rows[0]['status']}: it can be retried once it has ended; cancel it first")
    return rows[0]


async def _reusable(connection: Connection, job_id: UUID, step: str, old: dict[str, Any]) -> dict[str, Any]:
    rows = await run(connection, STEPS["read_reusable_steps"], {"job_id": job_id})
    names = [row["step"] for row in rows]
    if step not in names:
        raise InputError(f"workflow {old['workflow']!r} has no step {step!r}; it has {', '.join(names)}")
    _check_complete(job_id, rows)
    edges = await run(connection, STEPS["read_job_edges"], {"job_id": job_id})
    downstream: dict[str, list[str]] = {}
    for edge in edges:
        downstream.setdefault(edge["upstream"], []).append(edge["downstream"])
    again = reachable(downstream, [step, *(row["step"] for row in rows if row["undone"])])
    return {row["step"]: row["document"] for row in rows if row["document"] is not None and row["step"] not in again}


def _check_complete(job_id: UUID, rows: Iterable[dict[str, Any]]) -> None:
    missing = [row["step"] for row in rows if row["is_missing"]]
    if missing:
        raise InputError(
            f"job {job_id} cannot be retried: its steps were pruned ({', '.join(missing[:5])}), and what they gave is "
            "not known any more; submit it anew"
        )


def reachable(downstream: dict[str, list[str]], start: Iterable[str]) -> set[str]:
    """Give these steps and all that come after them."""
    seen = set(start)
    left = list(seen)
    while left:
        for name in downstream.get(left.pop(), ()):
            if name not in seen:
                seen.add(name)
                left.append(name)
    return seen
