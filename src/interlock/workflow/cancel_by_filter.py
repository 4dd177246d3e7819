"""Cancels jobs by filter: a preview that counts, then batches that cancel what the preview counted.

Invariant: a batch cancels only jobs that were submitted before the horizon, which is the time of the preview.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import JOB, JobState
from interlock.postgres.query import run
from interlock.store.jobs import ORCHESTRATION, JobFilter, find_job_page
from interlock.store.task_actions import MAX_COUNTED, SAMPLE_SIZE, read_horizon
from interlock.workflow.cancel import cancel_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

PAGE_SIZE = 500  # jobs that one statement finds
BEING_CANCELED = "is being canceled"
BEING_FAILED = "has failed and ends by itself"
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
    connection: Connection, wanted: JobFilter, *, horizon: datetime | None = None, now: datetime | None = None
) -> JobCancelPreview:
    """Count the jobs that match, unfinished ones unless the filter names states, and those that can be canceled."""
    preview = JobCancelPreview(horizon or await read_horizon(connection, now=now))
    async for page in _iterate_job_pages(connection, _resolve(wanted), preview.horizon, None, now):
        obstacles = await _find_obstacles(connection, page)
        for job in page:
            if preview.matched == MAX_COUNTED:
                preview.capped = True
                return preview
            preview.matched += 1
            if job["id"] in obstacles:
                preview.obstacles[obstacles[job["id"]]] += 1
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
    async for page in _iterate_job_pages(connection, _resolve(wanted), batch.horizon, before, now):
        rest = limit - len(found)
        found += page[:rest]
        if len(page) > rest:
            batch.next_before = found[-1]["id"]
            break
    batch.matched = len(found)
    obstacles = await _find_obstacles(connection, found)
    ids = [job["id"] for job in found if job["id"] not in obstacles]
    canceled = set(await cancel_jobs(connection, ids, actor=actor, reason=reason, now=now)) if ids else set()
    batch.changed = len(canceled)
    batch.sample = [job for job in found if job["id"] in canceled][:SAMPLE_SIZE]
    return batch


def _resolve(wanted: JobFilter) -> JobFilter:
    return wanted if wanted.statuses is not None else replace(wanted, statuses=UNFINISHED)


async def _find_obstacles(connection: Connection, jobs: Sequence[dict[str, Any]]) -> dict[UUID, str]:
    """Say why jobs cannot be canceled. A failing job that waits for child jobs can: these are canceled."""
    obstacles = {job["id"]: f"is {job['status']}" for job in jobs if job["status"] in JOB.final}
    rest = [job for job in jobs if job["id"] not in obstacles]
    obstacles |= {job["id"]: BEING_CANCELED for job in rest if job["ending"] == JobState.CANCELED}
    failing = [job["id"] for job in rest if job["ending"] == JobState.FAILED]
    if failing:
        for row in await run(connection, ORCHESTRATION["read_failing_jobs"], {"ids": failing}):
            if row["compensating"] or not row["has_children"]:
                obstacles[row["id"]] = BEING_FAILED
            elif row["cancel_reason"] is not None:
                obstacles[row["id"]] = BEING_CANCELED
    return obstacles


async def _iterate_job_pages(
    connection: Connection, wanted: JobFilter, horizon: datetime, before: UUID | None, now: datetime | None
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the jobs that were submitted before the horizon, newest first."""
    while True:
        page = await find_job_page(connection, wanted, before=before, limit=PAGE_SIZE, now=now)
        jobs = [job for job in page.items if job["created_at"] <= horizon]
        if jobs:
            yield jobs
        if page.next is None:
            return
        before = page.next
