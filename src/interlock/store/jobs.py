"""Jobs: submitting, reading and canceling them. What carries them on is in `orchestration.py`.

Invariant: whoever changes a job, or moves its steps because of it, has locked its row first; an ended job stays as it
is.
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
    """Read whole jobs by id."""
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
    """Find jobs, newest first, without their documents; `before` is the last id of the page before."""
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
    """Read the steps of a job as they were declared, each map with its parts behind it, compensations last."""
    return await run(connection, STEPS["read_steps"], {"job_id": job_id})


async def read_job_history(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    """Read every move that a job made, oldest first."""
    return await run(connection, JOBS["read_job_history"], {"id": job_id})
