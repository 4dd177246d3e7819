"""Sorts that run on the engine, from their jobs: the phase, and the progress of every worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from starlette.responses import Response

from interlock.dashboard.format import parse_time
from interlock.dashboard.pages import View, list_version, page_router
from interlock.dashboard.render import render_macro
from interlock.dashboard.topics import Moment, Topic, always, topics
from interlock.lifecycle import JOB, JobState, SortWorkerState, TaskRowState
from interlock.store.live import LiveParameters, read_live
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from interlock.dashboard.counts import Namespaces

router = page_router(whole_system=True)
PARTS = "sorts_parts.html"
State = SortWorkerState
PHASES = ("Sampling", "Sorting", "Shuffling", "Merging")
# the phase of each state of a worker; a worker that waits has done its part of the phase
PHASE_OF = {
    State.INITIALIZING: 0,
    State.SAMPLING: 0,
    State.WAITING_FOR_PARTITION_CONFIG: 0,
    State.SORTING: 1,
    State.WAITING_FOR_SHUFFLE_SIGNAL: 1,
    State.SHUFFLING: 2,
    State.WAITING_FOR_MERGE_SIGNAL: 2,
    State.MERGING: 3,
    State.COMPLETED: len(PHASES),
}


class SortWorker(NamedTuple):
    """One worker of a sort: a part of the job's map."""

    number: int
    task_id: str
    task_state: str
    state: str  # of its lifecycle, as it reported last
    fraction: float
    message: str
    bytes_done: int
    attempt: int
    worker_id: str | None
    error: str | None

    @property
    def phase(self) -> int:
        """The number of phases that it has left behind."""
        return PHASE_OF.get(self.state, 0)  # type: ignore[call-overload,no-any-return] # a text


class SortRow(NamedTuple):
    """A sort as the pages show it."""

    id: str
    status: str
    reason: str | None
    output: str
    workers: list[SortWorker]
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None

    @property
    def fraction(self) -> float:
        """The part of the work that is done, from 0 to 1."""
        if self.status == JobState.COMPLETED:
            return 1.0
        return sum(worker.fraction for worker in self.workers) / len(self.workers) if self.workers else 0.0

    @property
    def phase(self) -> int:
        """The number of phases that all workers have left behind."""
        if self.status == JobState.COMPLETED:
            return len(PHASES)
        return min((worker.phase for worker in self.workers), default=0)

    @property
    def phases(self) -> list[tuple[str, str]]:
        """Each phase with `done`, `now`, `open` or `failed`."""
        found = []
        for at, name in enumerate(PHASES):
            if at < self.phase:
                found.append((name, "done"))
            elif at == self.phase and not self.has_ended:
                found.append((name, "now"))
            else:
                found.append((name, "failed" if at == self.phase and self.status == JobState.FAILED else "open"))
        return found

    @property
    def has_ended(self) -> bool:
        """Whether its job has ended."""
        return self.status in JOB.final


def make_row(row: Mapping[str, Any]) -> SortRow:
    """Make the row of a sort from the live section."""
    workers = []
    for part in row["workers"]:
        progress = part["progress"] or {}
        done = part["state"] == TaskRowState.DONE
        state = _worker_state(part["state"], progress)
        workers.append(
            SortWorker(
                part["part"],
                part["id"],
                part["state"],
                state,
                1.0 if done else float(progress.get("fraction") or 0.0),
                str(progress.get("message") or ""),
                int(progress.get("bytes_done") or 0),
                part["attempt"],
                part["worker_id"],
                part["error"],
            )
        )
    return SortRow(
        row["id"],
        row["status"],
        row["reason"],
        row["output"] or "",
        workers,
        parse_time(row["created_at"]),  # type: ignore[arg-type] # never null
        parse_time(row["started_at"]),
        parse_time(row["completed_at"]),
    )


def _worker_state(of_task: str, progress: Mapping[str, Any]) -> str:
    if of_task == TaskRowState.DONE:
        return State.COMPLETED
    return State.FAILED if of_task == TaskRowState.ERROR else str(progress.get("state", State.INITIALIZING))


def shown_sorts(sections: Mapping[str, list[dict[str, Any]]], namespaces: Namespaces) -> list[SortRow]:
    """Return the sorts that the viewer may see."""
    return [make_row(row) for row in sections.get("sorts", ()) if namespaces is None or row["namespace"] in namespaces]


@router.get("/sorts")
async def show_sorts(view: View) -> Response:
    """List the latest sorts."""
    async with view.app.connection() as connection:
        sections = await read_live(connection, frozenset({"sorts"}), LiveParameters(), now=view.app.now())
    rows = shown_sorts(sections, view.namespaces)
    return await view.page(
        "sorts.html",
        key="sorts",
        title="Sorts",
        topics=("sorts",),
        command="interlock jobs list --workflow distributed_sort",
        rows=rows,
        version=list_version([row.id for row in rows]),
    )


@router.get("/sorts/{sort_id}")
async def show_sort(view: View, sort_id: UUID) -> Response:
    """Show a sort: its phases, and one row for each worker."""
    async with view.app.connection() as connection:
        parameters = LiveParameters(job_ids=[sort_id])
        sections = await read_live(connection, frozenset({"sorts"}), parameters, now=view.app.now())
    found = [row for row in shown_sorts(sections, view.viewer.namespaces) if row.id == str(sort_id)]
    if not found:
        raise Problem("unknown_job", f"there is no sort {sort_id}")
    return await view.page(
        "sort.html",
        key="sorts",
        title=f"sort · {str(sort_id)[:8]}",
        crumbs=(("Sorts", "/sorts"),),
        topics=(f"sort:{sort_id}",),
        command=f"interlock jobs show {sort_id}",
        row=found[0],
    )


def _render_sorts(moment: Moment) -> dict[str, str]:
    rows = shown_sorts(moment.sections, moment.namespaces)
    fragments: dict[str, str] = {f"row-{row.id}": render_macro(PARTS, "line", row) for row in rows}
    version = list_version([row.id for row in rows])
    fragments["sorts-version"] = render_macro("parts.html", "list_version", "sorts-version", "#sorts", version)
    return fragments


def _render_sort(moment: Moment) -> dict[str, str]:
    for row in shown_sorts(moment.sections, moment.namespaces):
        if row.id == moment.argument:
            return {
                "sort-head": render_macro(PARTS, "head", row),
                "sort-phases": render_macro(PARTS, "phases_card", row),
                "sort-workers": render_macro(PARTS, "workers_card", row),
            }
    return {}


topics.add(Topic(name="sorts", render=_render_sorts, sections=frozenset({"sorts"}), whole_system=always))
topics.add(
    Topic(
        name="sort",
        render=_render_sort,
        sections=frozenset({"sorts"}),
        watches=("job_ids",),
        whole_system=always,
    )
)
