"""Cancels jobs by filter: a preview that counts, then batches that cancel what the preview counted.

Invariant: a batch cancels only jobs that were submitted before the horizon, which is the time of the preview.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import JOB, JobState
from interlock.store.jobs import JobFilter, find_job_page
from interlock.store.task_actions import MAX_COUNTED, SAMPLE_SIZE, read_horizon
from interlock.workflow.cancel import cancel_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

PAGE_SIZE = 500  # jobs that one statement finds
UNFINISHED = tuple(state for state in JobState if state in JOB.unfinished)


@dataclass(slots=True)
class JobCancelPreview:
    """The jobs that match a filter at `horizon`: how many can be canceled, and why the others cannot.

    Counting stops at MAX_COUNTED; then there are more (`capped`). `states` counts the possible ones.
    """

    horizon: datetime
    matched: int = 0
    possible: int = 0
    capped: bool = False
    states: Counter[str] = field(default_factory=Counter)
    obstacles: Counter[str] = field(default_factory=Counter)
    sample: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class JobCancelBatch:
    """The result of one batch; `next_before` is the cursor of the next one, None when no matching job is left."""

    horizon: datetime
    matched: int = 0
    changed: int = 0
    next_before: UUID | None = None
    sample: list[dict[str, Any]] = field(default_factory=list)


async def preview_job_cancel(
    connection: Connection, wanted: JobFilter, *, now: datetime | None = None
) -> JobCancelPreview:
    """Count the jobs that match, unfinished ones unless the filter names states, and those that can be canceled."""
    preview = JobCancelPreview(await read_horizon(connection, now=now))
    async for job in _iterate_jobs(connection, _resolve(wanted), preview.horizon, None, now):
        if preview.matched == MAX_COUNTED:
            preview.capped = True
            break
        preview.matched += 1
        obstacle = _find_obstacle(job)
        if obstacle is not None:
            preview.obstacles[obstacle] += 1
            continue
        preview.possible += 1
        preview.states[job["status"]] += 1
        if len(preview.sample) < SAMPLE_SIZE:
            preview.sample.append(job)
    return preview


async def cancel_matching_jobs(
    connection: Connection,
    wanted: JobFilter,
    *,
    limit: int,
    actor: str,
    horizon: datetime | None = None,
    before: UUID | None = None,
    reason: str | None = None,
    now: datetime | None = None,
) -> JobCancelBatch:
    """Cancel the next matching jobs, at most `limit`, newest first, in one transaction; `before` continues a batch."""
    batch = JobCancelBatch(horizon or await read_horizon(connection, now=now))
    found: list[dict[str, Any]] = []
    async for job in _iterate_jobs(connection, _resolve(wanted), batch.horizon, before, now):
        if len(found) == limit:
            batch.next_before = found[-1]["id"]
            break
        found.append(job)
    batch.matched = len(found)
    ids = [job["id"] for job in found if _find_obstacle(job) is None]
    canceled = set(await cancel_jobs(connection, ids, actor=actor, reason=reason, now=now)) if ids else set()
    batch.changed = len(canceled)
    batch.sample = [job for job in found if job["id"] in canceled][:SAMPLE_SIZE]
    return batch


def _resolve(wanted: JobFilter) -> JobFilter:
    return wanted if wanted.statuses is not None else replace(wanted, statuses=UNFINISHED)


def _find_obstacle(job: dict[str, Any]) -> str | None:
    """Say why a job cannot be canceled. A failing job that waits for child jobs can: these are canceled."""
    if job["status"] in JOB.final:
        return f"is {job['status']}"
    if job["ending"] == JobState.CANCELED:
        return "is being canceled"
    return None


async def _iterate_jobs(
    connection: Connection, wanted: JobFilter, horizon: datetime, before: UUID | None, now: datetime | None
) -> AsyncIterator[dict[str, Any]]:
    while True:
        page = await find_job_page(connection, wanted, before=before, limit=PAGE_SIZE, now=now)
        for job in page.items:
            if job["created_at"] <= horizon:
                yield job
        if page.next is None:
            return
        before = page.next
