"""Tasks by filter: finding them page by page, and acting on what was found.

Invariant: an act by filter is a series of small statements by id, so that it never locks more than a batch, and what
changed since it was found is left alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from interlock.store.acts import requeue_ended_tasks
from interlock.store.database import run, transaction
from interlock.store.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from interlock.store.database import Connection

PAGE = 500


@dataclass(frozen=True, slots=True)
class Filter:
    """Which tasks are meant; None means any."""

    states: tuple[str, ...] | None = None
    namespace: str | None = None
    type: str | None = None
    tag: str | None = None
    standalone: bool = False  # only tasks that belong to no job


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """What a list of tasks tells of each."""

    id: UUID
    namespace: str
    type: str
    state: str
    reason: str | None
    priority: int
    run_at: datetime
    attempt: int
    tries: int
    max_tries: int
    created_at: datetime
    finished_at: datetime | None
    tags: list[str] | None


async def find_tasks(
    connection: Connection, wanted: Filter, *, limit: int = PAGE, before: UUID | None = None
) -> list[TaskSummary]:
    """Find tasks, newest first; `before` is the last id of the page before."""
    parameters = _parameters(wanted) | {"limit": limit, "before": before}
    return [TaskSummary(**row) for row in await run(connection, TASKS["find_tasks"], parameters)]


async def count_steps(connection: Connection, wanted: Filter) -> int:
    """Count the tasks of a filter that belong to a job."""
    (row,) = await run(connection, TASKS["count_steps"], _parameters(wanted))
    steps: int = row["steps"]
    return steps


def _parameters(wanted: Filter) -> dict[str, Any]:
    return {**asdict(wanted), "states": None if wanted.states is None else list(wanted.states)}


async def find_pages(connection: Connection, wanted: Filter, limit: int | None) -> AsyncIterator[list[TaskSummary]]:
    """Find all tasks of a filter, a page at a time, up to a limit."""
    left = limit
    before: UUID | None = None
    while left is None or left > 0:
        size = PAGE if left is None else min(PAGE, left)
        page = await find_tasks(connection, wanted, limit=size, before=before)
        if page:
            yield page
        if len(page) < size:
            return
        before = page[-1].id
        left = None if left is None else left - len(page)


async def requeue_what_can_be(
    connection: Connection, ids: Sequence[UUID], *, actor: str, reason: str | None, now: datetime | None
) -> list[UUID]:
    """Requeue tasks; one whose unique key another task has taken stays where it is, and holds up no other."""
    try:
        async with transaction(connection):  # a refusal leaves the caller's transaction, if there is one, as it was
            return await requeue_ended_tasks(connection, ids, actor=actor, reason=reason, now=now)
    except Exception as error:
        if not isinstance(error.__cause__ or error, psycopg.errors.UniqueViolation):
            raise
    if len(ids) == 1:
        return []
    requeued = []
    for id_ in ids:
        requeued += await requeue_what_can_be(connection, [id_], actor=actor, reason=reason, now=now)
    return requeued
