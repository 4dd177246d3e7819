"""Moves jobs that wait to be validated or for their key: the orchestrator's part of a submit.

Jobs that SQL has submitted, and debounced ones when they are due, are validated and get their steps. Of the jobs with
one key, the next starts when no other runs; those that a later one replaces are canceled.

Invariant: of the unfinished jobs with one key, only the first in their order can start, so that two orchestrators do
not start two of them; the unique index `jobs_key_running` refuses a second one for every client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.lifecycle import JobState
from interlock.postgres.connection import transaction
from interlock.postgres.query import run, run_in_order
from interlock.store.jobs import JOBS, STEPS
from interlock.workflow.activate import apply_batch, start_pending_jobs
from interlock.workflow.batch import lock_jobs, run_all_jobs, run_each_job
from interlock.workflow.cancel import cancel_locked_job
from interlock.workflow.new_job import reject_statement

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

MAX_QUEUED_JOBS = 100  # that one call reads


async def cancel_replaced_jobs(connection: Connection, *, actor: str, now: datetime | None = None) -> int:
    """Cancel unfinished jobs that a later one with the same key replaces; return how many."""
    found = await run(connection, JOBS["read_replaced_jobs"], {"limit": MAX_QUEUED_JOBS, "now": now})
    replaced_by = {row["id"]: row["replaced_by"] for row in found}

    async def cancel(ids: Collection[UUID]) -> int:
        canceled = 0
        async with transaction(connection):
            batch = await lock_jobs(connection, ids, actor=actor, now=now, own=True)
            for job in batch.jobs.values():
                reason = f"replaced by job {replaced_by[job.id]}"
                canceled += await cancel_locked_job(connection, batch, job, reason=reason)
            await apply_batch(connection, batch)
        return canceled

    # one job per transaction: a transaction that requests many cancellations would hold up the workers of those steps
    return await run_each_job(connection, replaced_by, cancel, name="canceled for its replacement", now=now)


async def validate_submitted_jobs(connection: Connection, *, actor: str, now: datetime | None = None) -> int:
    """Check the input of due jobs that were stored without that, and insert their steps; return how many.

    A job with an invalid input fails with the reason.
    """
    found = await run(connection, JOBS["read_submitted_jobs"], {"limit": MAX_QUEUED_JOBS, "now": now})
    rows = {row["id"]: row for row in found}
    if not rows:
        return 0
    # not at the top: the schema library is slow to import, and most programs do not need it
    from interlock.model.json_schema import find_fault  # noqa: PLC0415 - heavy, and seldom needed

    async def validate(ids: Collection[UUID]) -> int:
        common = {"actor": actor, "now": now}
        async with transaction(connection):
            batch = await lock_jobs(connection, ids, actor=actor, now=now, own=True)
            reasons: dict[UUID, str | None] = {}
            for job in batch.jobs.values():
                row = rows[job.id]
                if job.status != JobState.SUBMITTED:
                    continue
                place = f"workflow {row['workflow']}: input"
                fault = None if row["schema"] is None else find_fault(place, row["schema"], row["input"])
                if fault is None:
                    reasons[job.id] = row["hold"]
                else:
                    notify = (JOBS["notify_ended_jobs"], {"ids": [job.id]})
                    await run_in_order(connection, [reject_statement(job.id, fault, common), notify])
            if reasons:
                parameters = {"ids": list(reasons), "reasons": list(reasons.values()), **common}
                steps: dict[str, Any] = {"ids": list(reasons), "now": now}
                await run_in_order(
                    connection, [(JOBS["validate_submitted_jobs"], parameters), (STEPS["insert_steps"], steps)]
                )
        return len(batch.jobs)

    return await run_all_jobs(connection, list(rows), validate, name="validated", now=now)


async def start_queued_jobs(connection: Connection, *, actor: str, now: datetime | None = None) -> int:
    """Start jobs that waited for their key, and are the next with it now; return how many."""
    found = await run(connection, JOBS["read_queued_jobs"], {"limit": MAX_QUEUED_JOBS, "now": now})

    async def start(ids: Collection[UUID]) -> int:
        async with transaction(connection):
            batch = await lock_jobs(connection, ids, actor=actor, now=now, own=True)
            return await start_pending_jobs(connection, list(batch.jobs), actor=actor, now=now)

    return await run_all_jobs(connection, [row["id"] for row in found], start, name="started", now=now) if found else 0
