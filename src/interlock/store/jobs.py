"""Reads jobs and their steps; loads the statements of the aggregates job, step and orchestration.

The workflow engine (`interlock.workflow`) writes jobs with these statements.

Invariant: a transaction that changes a job, or moves its steps because of another, has locked the job's row first; an
ended job does not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.postgres.query import load_statements, read_prepared, run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from interlock.postgres.connection import Connection

JOBS = load_statements("jobs")
ORCHESTRATION = load_statements("orchestration")
STEPS = load_statements("steps")


async def read_jobs(connection: Connection, ids: Sequence[UUID]) -> list[dict[str, Any]]:
    """Read jobs by id, with all columns."""
    return await read_prepared(connection, JOBS["read_jobs"], {"ids": list(ids)})


async def find_jobs(
    connection: Connection,
    *,
    status: str | None = None,
    workflow: str | None = None,
    namespace: str | None = None,
    parent: UUID | None = None,
    before: UUID | None = None,
    limit: int = 100,
) -> list[dict[str, Any]]:
    """Find jobs, newest first, without input and output; `before` is the cursor: the last id of the page before."""
    parameters = {
        "status": status,
        "workflow": workflow,
        "namespace": namespace,
        "parent": parent,
        "before": before,
        "limit": limit,
    }
    return await run(connection, JOBS["find_jobs"], parameters)


async def read_steps(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    """Read the steps of a job in the order of the definition, each map followed by its parts, compensations last."""
    return await run(connection, STEPS["read_steps"], {"job_id": job_id})


async def read_job_history(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    """Read the recorded moves of a job, oldest first."""
    return await run(connection, JOBS["read_job_history"], {"id": job_id})
