"""Reads jobs and their steps; loads the statements of the aggregates job, step and orchestration.

The workflow engine (`interlock.workflow`) writes jobs with these statements.

Invariant: a transaction that changes a job, or moves its steps because of another, has locked the job's row first; an
ended job does not change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from interlock.postgres.query import as_json, load_statements, read_prepared, run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.postgres.connection import Connection

JOBS = load_statements("jobs")
ORCHESTRATION = load_statements("orchestration")
STEPS = load_statements("steps")


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Conditions on jobs; None means any. A job has all of the tags and all of the attributes."""

    statuses: Sequence[str] | None = None
    workflow: str | None = None
    version: str | None = None  # of the workflow
    namespace: str | None = None
    key: str | None = None
    tags: Sequence[str] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    parent: UUID | None = None
    created_after: datetime | None = None  # at this time or later
    created_before: datetime | None = None


async def read_jobs(connection: Connection, ids: Sequence[UUID]) -> list[dict[str, Any]]:
    """Read jobs by id, with all columns."""
    return await read_prepared(connection, JOBS["read_jobs"], {"ids": list(ids)})


async def find_jobs(
    connection: Connection,
    wanted: JobFilter | None = None,
    *,
    before: UUID | None = None,
    limit: int = 100,
) -> list[dict[str, Any]]:
    """Find jobs, newest first, without input and output; `before` is the cursor: the last id of the page before."""
    given = wanted or JobFilter()
    parameters = {
        **asdict(given),
        "statuses": None if given.statuses is None else list(given.statuses),
        "tags": list(given.tags) or None,
        "attributes": as_json(dict(given.attributes)) if given.attributes else None,
        "before": before,
        "limit": limit,
    }
    return await run(connection, JOBS["find_jobs"], parameters, prepare=False)


async def read_steps(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    """Read the steps of a job in the order of the definition, each map followed by its parts, compensations last."""
    return await run(connection, STEPS["read_steps"], {"job_id": job_id})


async def read_job_history(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    """Read the recorded moves of a job, oldest first."""
    return await run(connection, JOBS["read_job_history"], {"id": job_id})


async def until_next_due(connection: Connection, *, now: datetime | None = None) -> float:
    """Return the seconds until the next timeout of a job, end of a step's wait or retry of a job, at most a day."""
    (row,) = await run(connection, ORCHESTRATION["until_next_due"], {"now": now})
    return float(row["remaining"].total_seconds())
