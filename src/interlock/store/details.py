"""Reads for pages about one task or one job: checkpoint and webhook, moves of steps, groups of errors, inputs of jobs.

Invariant: every statement is bounded, by the number of rows that it looks at or returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.postgres.query import load_statements, run

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from uuid import UUID

    from interlock.postgres.connection import Connection

DETAILS = load_statements("details")
MAX_STEP_MOVES = 5_000  # of one job
MAX_MOVES_OF_STEP = 200
MAX_ERRORS_LOOKED_AT = 1_000
MAX_ERROR_GROUPS = 6


async def read_task_page_details(connection: Connection, task_id: UUID) -> dict[str, Any]:
    """Read what lists of tasks leave out: checkpoint, webhook, cancel request, name of the job; {} without a task."""
    rows = await run(connection, DETAILS["read_task_page_details"], {"id": task_id})
    return dict(rows[0]) if rows else {}


async def read_step_moves(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    """Read the recorded moves of the steps of a job, step by step, each oldest first."""
    parameters = {"job_id": job_id, "limit": MAX_STEP_MOVES, "moves_of_step": MAX_MOVES_OF_STEP}
    return await run(connection, DETAILS["read_step_moves"], parameters)


async def read_latest_task_moves(
    connection: Connection, task_id: UUID, *, before: int | None = None, limit: int
) -> list[dict[str, Any]]:
    """Read the latest moves of a task, newest first."""
    return await run(connection, DETAILS["read_latest_task_moves"], {"id": task_id, "before": before, "limit": limit})


async def read_latest_job_moves(
    connection: Connection, job_id: UUID, *, before: int | None = None, limit: int
) -> list[dict[str, Any]]:
    """Read the latest moves of a job, newest first."""
    return await run(connection, DETAILS["read_latest_job_moves"], {"id": job_id, "before": before, "limit": limit})


async def count_recent_errors(
    connection: Connection,
    *,
    namespaces: Collection[str] | None = None,
    type_: str | None = None,
    tag: str | None = None,
) -> list[dict[str, Any]]:
    """Count the latest tasks in error by type and kind of error, the largest group first."""
    parameters = {
        "namespaces": None if namespaces is None else sorted(namespaces),
        "type": type_,
        "tag": tag,
        "window": MAX_ERRORS_LOOKED_AT,
        "limit": MAX_ERROR_GROUPS,
    }
    return await run(connection, DETAILS["count_recent_errors"], parameters, prepare=False)


async def read_job_inputs(connection: Connection, ids: Sequence[UUID], *, size: int) -> dict[UUID, str]:
    """Read the inputs of jobs as JSON, each cut at `size` characters."""
    rows = await run(connection, DETAILS["read_job_inputs"], {"ids": list(ids), "size": size})
    return {row["id"]: row["input"] for row in rows}
