"""Reads jobs and their steps; loads the statements of the aggregates job, step and orchestration.

The workflow engine (`interlock.workflow`) writes jobs with these statements.

Invariant: a transaction that changes a job, or moves its steps because of another, has locked the job's row first; an
ended job does not change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import JobState
from interlock.postgres.query import as_json, load_statements, read_prepared, run
from interlock.store.lists import LISTS, MAX_LOOKED_AT, ListPage, collect_pages, id_bounds, run_list

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
    namespaces: Sequence[str] | None = None  # in one of these
    request_ids: Sequence[str] | None = None  # one of these
    correlation_id: UUID | None = None


async def read_jobs(connection: Connection, ids: Sequence[UUID]) -> list[dict[str, Any]]:
    """Read jobs by id, with all columns."""
    return await read_prepared(connection, JOBS["read_jobs"], {"ids": list(ids)})


async def find_job_page(
    connection: Connection,
    wanted: JobFilter | None = None,
    *,
    before: UUID | None = None,
    limit: int = 100,
    now: datetime | None = None,
) -> ListPage[dict[str, Any]]:
    """Find one page of jobs, newest first, without input and output, by one bounded statement.

    `before` is the cursor: `next` of the previous page.
    """
    given = wanted or JobFilter()
    labels = {
        "tags": list(given.tags) or None,
        "attributes": as_json(dict(given.attributes)) if given.attributes else None,
    }
    workflow_ids = await _read_workflow_ids(connection, given)
    source = await _indexed_condition(connection, given, labels)
    statuses = None if given.statuses is None else [str(status) for status in given.statuses]
    parameters = {
        **asdict(given),
        **labels,
        "statuses": statuses,
        "namespaces": None if given.namespaces is None else list(given.namespaces),
        "request_ids": None if given.request_ids is None else list(given.request_ids),
        "workflow_ids": workflow_ids,
        **id_bounds(given.created_after, given.created_before, before, now),
        "source": source,
        "indexed_statuses": statuses if source == "statuses" else None,
        "indexed_workflow_ids": workflow_ids if source == "workflow" else None,
    }
    statement = LISTS["find_jobs" if source is None else "find_jobs_by_index"]
    ensured = {"labels": ("tags", "attributes"), "workflow": ("workflow", "version")}.get(source or "", (source,))
    selective = given != JobFilter(**{name: getattr(given, name) for name in ensured if name is not None})
    return await run_list(
        connection, statement, parameters, dict, limit=limit, selective=selective, by_index=source is not None
    )


async def _read_workflow_ids(connection: Connection, wanted: JobFilter) -> list[UUID] | None:
    if wanted.workflow is None:
        return None
    parameters = {"workflow": wanted.workflow, "version": wanted.version}
    return [row["id"] for row in await run(connection, LISTS["read_workflow_ids"], parameters)]


async def _indexed_condition(connection: Connection, wanted: JobFilter, labels: Mapping[str, Any]) -> str | None:
    """Return the condition whose index to walk; None for the primary key.

    Jobs with the same tag have no order in its index, so that it is of use only if they are few.
    """
    for name in ("request_ids", "key", "parent", "correlation_id"):
        if getattr(wanted, name) is not None:
            return name
    if wanted.tags or wanted.attributes:
        ((plan,),) = [row.values() for row in await run(connection, LISTS["estimate_labeled_jobs"], labels)]
        if plan[0]["Plan"]["Plan Rows"] <= MAX_LOOKED_AT:
            return "labels"
    if wanted.statuses is not None and JobState.COMPLETED not in wanted.statuses:
        return "statuses"
    return None if wanted.workflow is None else "workflow"


async def find_jobs(
    connection: Connection,
    wanted: JobFilter | None = None,
    *,
    before: UUID | None = None,
    limit: int = 100,
    now: datetime | None = None,
) -> list[dict[str, Any]]:
    """Find up to `limit` jobs, newest first, by as many bounded statements as it takes."""

    async def read_page(cursor: UUID | None, left: int) -> ListPage[dict[str, Any]]:
        return await find_job_page(connection, wanted, before=cursor, limit=left, now=now)

    return await collect_pages(read_page, limit, before)


async def read_steps(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    """Read the steps of a job in the order of the definition, each map followed by its parts, compensations last."""
    return await run(connection, STEPS["read_steps"], {"job_id": job_id, "ids": None})


async def read_step_page(
    connection: Connection, job_id: UUID, *, after: UUID | None = None, limit: int
) -> list[dict[str, Any]]:
    """Read one page of the steps of a job in the same order; `after` is the id of the last step of the page before."""
    found = await run(connection, STEPS["find_steps"], {"job_id": job_id, "after": after, "limit": limit})
    if not found:
        return []
    return await run(connection, STEPS["read_steps"], {"job_id": job_id, "ids": [row["id"] for row in found]})


async def read_job_history(
    connection: Connection, job_id: UUID, *, after: int = 0, limit: int | None = None
) -> list[dict[str, Any]]:
    """Read the recorded moves of a job, oldest first, after the record with the id `after`."""
    return await run(connection, JOBS["read_job_history"], {"id": job_id, "after": after, "limit": limit})


async def until_next_due(connection: Connection, *, now: datetime | None = None) -> float:
    """Return the seconds until the next timeout of a job, end of a step's wait or retry of a job, at most a day."""
    (row,) = await run(connection, ORCHESTRATION["until_next_due"], {"now": now})
    return float(row["remaining"].total_seconds())
