"""The list of jobs: filters, progress, and the reason of each."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from starlette.responses import Response

from interlock.dashboard.filters import PAGE_SIZE, read_job_filters
from interlock.dashboard.format import parse_time
from interlock.dashboard.pages import View, page_router
from interlock.dashboard.render import render_macro
from interlock.dashboard.states import STYLES
from interlock.dashboard.svg.charts import stacked
from interlock.dashboard.topics import Moment, Topic, topics
from interlock.lifecycle import JOB, JobState
from interlock.store.jobs import find_job_page
from interlock.store.live import LiveParameters, read_live

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from interlock.dashboard.counts import LiveCounts, Namespaces
    from interlock.dashboard.pages import PageView
    from interlock.postgres.connection import Connection
    from interlock.store.jobs import JobFilter

router = page_router()
PARTS = "jobs_parts.html"


class JobRow(NamedTuple):
    """A row of the list."""

    id: str
    name: str
    version: str
    state: str
    namespace: str
    done: int
    steps: int
    parts: list[tuple[str, float, float]]
    created_at: datetime | None
    ended_at: datetime | None
    reason: str
    has_ended: bool


def job_progress(row: dict[str, Any]) -> tuple[int, int]:
    """Return how many steps of a job have ended, and how many it has."""
    steps = row["steps"] or 0
    if row["status"] == JobState.COMPLETED:
        return steps, steps
    if row["status"] in {JobState.SUBMITTED, JobState.PENDING}:
        return 0, steps
    if row["ended_steps"] is not None:
        return min(row["ended_steps"], steps), steps
    return max(0, steps - row["open_steps"]), steps


def job_row(row: dict[str, Any]) -> JobRow:
    """Make a row of the live section `jobs`."""
    done, steps = job_progress(row)
    failed = min(row["failed_steps"], done)
    reason = row["reason"] or ""
    if row["ending"]:
        reason = f"becomes {row['ending']}: {row['ending_reason'] or reason}"
    return JobRow(
        row["id"],
        row["workflow"] or row["name"],
        row["version"] or "",
        row["status"],
        row["namespace"],
        done,
        steps,
        stacked([("green", done - failed), ("red", failed), ("none", steps - done)], least=20),
        parse_time(row["created_at"]),
        parse_time(row["completed_at"]),
        reason,
        row["status"] in JOB.final,
    )


async def read_job_rows(connection: Connection, ids: Sequence[UUID], view: PageView) -> list[JobRow]:
    """Read the rows of a page, in the order of the ids."""
    if not ids:
        return []
    read = await read_live(connection, frozenset({"jobs"}), LiveParameters(job_ids=ids), now=view.app.now())
    rows = {row["id"]: job_row(row) for row in read["jobs"]}
    return [rows[str(id_)] for id_ in ids if str(id_) in rows]


def state_counts(counts: LiveCounts, namespaces: Namespaces) -> list[tuple[str, int]]:
    """Return the number of jobs in each state."""
    found = counts.states("job", namespaces)
    return [(state, found[state]) for state in STYLES["job"]]


@router.get("/jobs")
async def show_jobs(view: View) -> Response:
    """List jobs."""
    wanted, filters = read_job_filters(view)
    counts = await view.dashboard.hub.current(view.app, view.namespaces)
    async with view.app.connection() as connection:
        page = await find_job_page(connection, wanted, limit=PAGE_SIZE, before=filters.cursor, now=view.app.now())
        rows = await read_job_rows(connection, [job["id"] for job in page.items], view)
    states = state_counts(counts, view.namespaces)
    return await view.page(
        "jobs.html",
        key="jobs",
        title=" / ".join(filters.states) or "Jobs",
        crumbs=(("Jobs", "/jobs"),) if filters.states else (),
        topics=("job-states", "job-rows"),
        command=list_command(wanted, view),
        filters=filters,
        rows=rows,
        states=states,
        total=sum(count for state, count in states if not filters.states or state in filters.states),
        next=page.next,
        page_size=PAGE_SIZE,
    )


def list_command(wanted: JobFilter, view: PageView) -> str:
    """Return the command that lists the same jobs."""
    words = ["interlock", "jobs", "list"]
    for status in wanted.statuses or ():
        words += ["--status", status]
    for flag, value in (
        ("workflow", wanted.workflow),
        ("key", wanted.key),
        ("parent", wanted.parent),
        ("namespace", view.namespace),
        *(("tag", tag) for tag in wanted.tags),
    ):
        if value is not None:
            words += [f"--{flag}", str(value)]
    return shlex.join(words)


# --- live


def _render_states(moment: Moment) -> dict[str, str]:
    return {
        f"count-{state}": render_macro("tasks_parts.html", "state_count", state, count)
        for state, count in state_counts(moment.counts, moment.namespaces)
    }


def _render_rows(moment: Moment) -> dict[str, str]:
    return {f"row-{row['id']}": render_macro(PARTS, "job_row", job_row(row), moment.now) for row in moment.rows("jobs")}


topics.add(Topic(name="job-states", render=_render_states))
topics.add(Topic(name="job-rows", render=_render_rows, sections=frozenset({"jobs"}), row_ids="job_ids"))
