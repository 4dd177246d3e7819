"""Reads for open dashboards: one statement that combines the sections that some page needs.

Invariant: however many pages are open, one call of `read_live` is one statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from interlock.postgres.query import Statement, load_statements, run
from interlock.store.access import SESSION_IDLE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from interlock.postgres.connection import Connection

LIVE = load_statements("live")
PREFIX = "live_"
SECTIONS = frozenset(
    {
        "live_approvals",
        "live_clock",
        "live_held_tasks",
        "live_inbox",
        "live_job_moves",
        "live_job_states",
        "live_job_steps",
        "live_jobs",
        "live_namespaces",
        "live_parts",
        "live_paused_namespaces",
        "live_pools",
        "live_processes",
        "live_running_sorts",
        "live_sessions",
        "live_sorts",
        "live_steps",
        "live_task_moves",
        "live_task_states",
        "live_tasks",
        "live_worker_moves",
        "live_worker_states",
        "live_workers",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveParameters:
    """The parameters of the sections: how far back moves are read, and the rows that pages show."""

    window: timedelta = timedelta(seconds=3)
    by_namespace: bool = False
    task_ids: Sequence[UUID] = ()
    job_ids: Sequence[UUID] = ()
    step_job_ids: Sequence[UUID] = ()
    worker_ids: Sequence[str] = ()
    session_hashes: Sequence[bytes] = ()


@lru_cache(maxsize=64)
def _combined(sections: tuple[str, ...]) -> Statement:
    columns = ", ".join(
        f"(select coalesce(jsonb_agg(to_jsonb(section)), '[]') from ({LIVE[PREFIX + name].sql}) as section) as {name}"  # noqa: S608 - our own texts
        for name in sections
    )
    return Statement("read_live", f"select {columns}", ())


async def read_live(
    connection: Connection, sections: frozenset[str], parameters: LiveParameters, *, now: datetime | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Read sections of `live.sql` (names without `live_`) in one statement; times are texts."""
    unknown = {PREFIX + name for name in sections} - SECTIONS
    if unknown:
        raise ValueError(
            f"live.sql has no section {', '.join(sorted(unknown))}; there are {', '.join(sorted(SECTIONS))}"
        )
    values = {
        "window": parameters.window,
        "by_namespace": parameters.by_namespace,
        "task_ids": list(parameters.task_ids),
        "job_ids": list(parameters.job_ids),
        "step_job_ids": list(parameters.step_job_ids),
        "worker_ids": list(parameters.worker_ids),
        "session_hashes": list(parameters.session_hashes),
        "session_idle": SESSION_IDLE_LIMIT,
        "now": now,
    }
    (row,) = await run(connection, _combined(tuple(sorted(sections))), values)
    return dict(row)


async def read_server_version(connection: Connection) -> str:
    """Return the version of the PostgreSQL server."""
    (row,) = await run(connection, LIVE["read_server_version"], {})
    return str(row["version"])
