"""The page of a job: why it does not move, its steps as a graph, attempts over time, the chosen step, its history."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from starlette.responses import Response

from interlock.client.explain import ExplainedKind
from interlock.client.job_handle import unknown_job_error
from interlock.dashboard.format import parse_time, seconds
from interlock.dashboard.pages import View, page_response, page_router
from interlock.dashboard.payload import error_view, explain_view, payload
from interlock.dashboard.render import render_macro
from interlock.dashboard.svg.dag import DrawnGraph, StepView, draw_graph, workflow_graph
from interlock.dashboard.svg.gantt import Gantt, GanttRow, attempt_row, draw_gantt, wait_span
from interlock.dashboard.topics import Moment, Topic, topics
from interlock.dashboard.views.jobs import job_progress
from interlock.errors import InputError
from interlock.lifecycle import JOB, TASK_ROW, JobState, TaskRowState
from interlock.store.details import read_latest_job_moves, read_latest_task_moves, read_step_moves
from interlock.store.jobs import JobFilter, find_job_page, read_jobs
from interlock.store.live import LiveParameters, read_live
from interlock.store.tasks import read_tasks
from interlock.store.workflows import read_workflow
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from interlock.dashboard.pages import PageView
    from interlock.postgres.connection import Connection

router = page_router()
PARTS = "job_parts.html"
SECTIONS = frozenset({"jobs", "job_steps", "parts"})
HISTORY_SIZE = 20
CHILDREN_SIZE = 20
MAX_GRAPHS = 64  # definitions whose graph is kept for live updates
SIGNAL_KINDS = ("signal", "approval")
WAITS = {
    "signal": "signal",
    "sleep": "sleep",
    "job": "child job",
    "parts": "parts",
    "limit": "limit",
    "namespace": "paused",
    "worker_count": "worker count",
}
WINDOWS_S = {"all": None, "10s": 10.0, "1m": 60.0, "10m": 600.0}

_documents: dict[str, Mapping[str, Any]] = {}  # by id of a job whose page was opened lately, for live updates


class OpenAnswer(NamedTuple):
    """A step that waits for a signal or an approval."""

    step: str
    kind: str
    signal: str


class JobData(NamedTuple):
    """The data of a job's page and of its live updates."""

    row: dict[str, Any]
    steps: list[dict[str, Any]]
    parts: dict[str, dict[str, dict[str, Any]]]  # of each map: rows by state


def job_data(sections: Mapping[str, Sequence[dict[str, Any]]], job_id: str) -> JobData | None:
    """Take the rows of one job from a reading."""
    row = next((row for row in sections.get("jobs", ()) if row["id"] == job_id), None)
    if row is None:
        return None
    parts: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for part in sections.get("parts", ()):
        parts[part["part_of"]][part["state"]] = part
    steps = [step for step in sections.get("job_steps", ()) if step["job_id"] == job_id]
    return JobData(row, steps, parts)


def job_version(data: JobData) -> str:
    """Return a text that changes when the job or a step moves."""
    digest = hashlib.sha256(f"{data.row['status']} {data.row['ending']} {data.row['reason']}".encode())
    for step in data.steps:
        digest.update(f"{step['id']} {step['state']} {step['attempt']} {step['held_by']} {step['reason']}".encode())
    for by_state in data.parts.values():
        digest.update(repr(sorted((state, row["parts"]) for state, row in by_state.items())).encode())
    return digest.hexdigest()[:12]


def draw_steps(document: Mapping[str, Any], data: JobData, now: datetime) -> DrawnGraph:
    """Draw the graph of the job's steps with their states."""
    rows = {step["step"]: step for step in data.steps}
    kinds = {step["name"]: step.get("kind") or "plain" for step in document["steps"]}
    needed = {step["name"]: len(step.get("after") or ()) for step in document["steps"]}

    def view(name: str) -> StepView:
        row = rows.get(name)
        if row is None:
            return StepView("waiting", "not started")
        return StepView(row["state"], step_note(row, kinds.get(name, "plain"), needed.get(name, 0), data, now))

    return draw_graph(workflow_graph(document), view)


def step_note(row: dict[str, Any], kind: str, needed: int, data: JobData, now: datetime) -> str:
    """Say in a few words how a step is."""
    state = row["state"]
    parts = data.parts.get(row["id"])
    if parts:
        total = sum(part["parts"] for part in parts.values())
        done = parts.get("done", {}).get("parts", 0)
        return f"{done} of {total} done"
    if row["reused"]:
        return f"{state} · reused"
    note = _wait_note(row, kind, needed) if state == TaskRowState.WAITING else _attempt_note(row, now)
    return f"{state} · {note}" if note else str(state)


def _wait_note(row: dict[str, Any], kind: str, needed: int) -> str:
    if row["held_by"] == "signal" and kind == "approval":
        return kind
    return WAITS.get(row["held_by"] or "", f"needs {needed}" if needed > 1 else "")


def _attempt_note(row: dict[str, Any], now: datetime) -> str:
    started, finished = parse_time(row["started_at"]), parse_time(row["finished_at"])
    if row["state"] == TaskRowState.RUNNING:
        return f"try {row['tries']} of {row['max_tries']}"
    if row["state"] == TaskRowState.PENDING:
        due = parse_time(row["run_at"])
        soon = "" if due is None or due <= now else f" in {seconds((due - now).total_seconds())}"
        return f"try {row['tries'] + 1}{soon}" if row["tries"] else ""
    return "" if started is None or finished is None else seconds((finished - started).total_seconds())


def open_answers(document: Mapping[str, Any], data: JobData) -> list[OpenAnswer]:
    """List the steps that wait for a signal or an approval now."""
    specs = {step["name"]: step for step in document["steps"]}
    found = []
    for row in data.steps:
        spec = specs.get(row["step"], {})
        if row["state"] == TaskRowState.WAITING and row["held_by"] == "signal" and spec.get("kind") in SIGNAL_KINDS:
            found.append(OpenAnswer(row["step"], spec["kind"], spec.get("signal") or row["step"]))
    return found


def draw_attempts(
    document: Mapping[str, Any], data: JobData, moves: Sequence[dict[str, Any]], now: datetime, window_s: float | None
) -> Gantt:
    """Draw the attempts of the steps over time, in the order in which they began."""
    by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for move in moves:
        by_task[str(move["task_id"])].append(move)
    kinds = {step["name"]: step.get("kind") or "plain" for step in document["steps"]}
    rows = [
        row
        for step in data.steps
        if (row := _gantt_row(step, kinds.get(step["step"], "plain"), by_task[step["id"]], data)) is not None
    ]
    rows.sort(key=lambda row: min([span.start for span in row.spans] + [start for start, _ in row.waits]))
    start = parse_time(data.row["started_at"]) or parse_time(data.row["created_at"]) or now
    ended = parse_time(data.row["completed_at"])
    end = max(ended or now, start)
    if window_s is not None and (end - start).total_seconds() > window_s:
        start = end - (end - start) * (window_s / (end - start).total_seconds())
    return draw_gantt(rows, start, end, running=ended is None)


def _gantt_row(step: dict[str, Any], kind: str, moves: Sequence[dict[str, Any]], data: JobData) -> GanttRow | None:
    """Make the row of a step; None if it has not begun in this job."""
    if step["reused"]:
        return None
    row = attempt_row(step["step"], moves)
    own = _own_wait(step, kind, data)
    if own is not None:
        row.spans.append(own)
        row.waits.clear()
    return row if row.spans or (row.waits and step["state"] == TaskRowState.PENDING) else None


def _own_wait(step: dict[str, Any], kind: str, data: JobData) -> Any:
    """Return the span of a step that waits for something of its own, or for its parts."""
    parts = data.parts.get(step["id"])
    finished = parse_time(step["finished_at"])
    if parts:
        starts = [moment for part in parts.values() if (moment := parse_time(part["started_at"])) is not None]
        if not starts:
            return None
        total, done = sum(part["parts"] for part in parts.values()), parts.get("done", {}).get("parts", 0)
        tone = "blue" if finished is None else "green" if step["state"] == TaskRowState.DONE else "red"
        return wait_span(step["step"], min(starts), finished, f"{done} of {total} parts", tone=tone)
    began = parse_time(step["wait_started_at"])
    if kind in SIGNAL_KINDS and began is not None:
        article = "an approval" if kind == "approval" else "a signal"
        text = f"waits for {article}" if finished is None else f"waited for {article}"
        return wait_span(step["step"], began, finished, text)
    return None


# --- pages


@router.get("/jobs/{job_id}")
async def show_job(view: View, job_id: UUID) -> Response:
    """Show a job."""
    zoom = view.request.query_params.get("zoom", "all")
    zoom = zoom if zoom in WINDOWS_S else "all"
    async with view.app.connection() as connection:
        data, job, document = await read_job_page(connection, view, job_id)
        moves = await read_step_moves(connection, job_id)
        children = await find_job_page(connection, JobFilter(parent=job_id), limit=CHILDREN_SIZE, now=view.app.now())
        chosen = _chosen_step(view, data, document)
        step = await _read_step(connection, view, chosen, data)
        history = await _read_history(connection, view, job_id, step)
    explained = await view.app.explain(job_id, kind=ExplainedKind.JOB)
    _remember(str(job_id), document)
    done, total = job_progress(data.row)
    name = job["workflow"] or data.row["name"]
    return await view.page(
        "job.html",
        key="jobs",
        title=f"{name} · {str(job_id)[:8]}",
        crumbs=(("Jobs", "/jobs"),),
        topics=(f"job:{job_id}",),
        command=f"interlock jobs show {job_id} --history",
        name=name,
        job=job,
        version=job_version(data),
        row=data.row,
        has_ended=job["status"] in JOB.final,
        done=done,
        total=total,
        graph=draw_steps(document, data, view.now) if document["steps"] else None,
        gantt=draw_attempts(document, data, moves, view.now, WINDOWS_S[zoom]),
        zoom=zoom,
        zooms=tuple(WINDOWS_S),
        chosen=chosen,
        step=step,
        history=history,
        explained=explain_view(explained),
        answers=open_answers(document, data),
        children=children.items,
        input=payload("input", job["input"]),
        output=payload("output", job["output"]),
        error=error_view(job["error"], job["reason"]),
    )


async def read_job_page(
    connection: Connection, view: PageView, job_id: UUID
) -> tuple[JobData, dict[str, Any], Mapping[str, Any]]:
    """Read a job that the viewer may see, its steps and its definition."""
    jobs = await read_jobs(connection, [job_id])
    visible = view.viewer.namespaces
    if not jobs or (visible is not None and jobs[0]["namespace"] not in visible):
        raise unknown_job_error(job_id)
    job = jobs[0]
    ids = [job_id]
    read = await read_live(connection, SECTIONS, LiveParameters(job_ids=ids, step_job_ids=ids), now=view.app.now())
    data = job_data(read, str(job_id))
    if data is None:
        raise unknown_job_error(job_id)
    stored = None if job["workflow"] is None else await read_workflow(connection, job["workflow"], job["version"])
    return data, job, {"steps": []} if stored is None else stored.definition


def _chosen_step(view: PageView, data: JobData, document: Mapping[str, Any]) -> str | None:
    """Return the step of the URL, or the one that tells most."""
    given = view.request.query_params.get("step")
    known = [step["step"] for step in data.steps]
    if given is not None:
        if given not in known and given not in {step["name"] for step in document["steps"]}:
            raise Problem("unknown_path", f"the job has no step {given}")
        return given
    for state in (TaskRowState.ERROR, TaskRowState.RUNNING, TaskRowState.PENDING, TaskRowState.WAITING):
        found = next((step["step"] for step in data.steps if step["state"] == state), None)
        if found is not None:
            return str(found)
    return known[-1] if known else None


async def _read_step(connection: Connection, view: PageView, name: str | None, data: JobData) -> dict[str, Any] | None:
    row = next((step for step in data.steps if step["step"] == name), None)
    if row is None:
        return None
    (task,) = await read_tasks(connection, [UUID(row["id"])])
    output = task["output"]
    result = output.get("result") if isinstance(output, dict) else output
    return {
        **task,
        "payloads": [
            shown
            for shown in (
                payload("input", task["input"] or None),
                payload("result", result),
                payload("progress", task["progress"]),
            )
            if shown is not None
        ],
        "error_view": error_view(task["error"], task["reason"]),
        "has_ended": task["state"] in TASK_ROW.final,
        "lease_s": _left(task["lease_expires_at"], view.now),
    }


def _left(moment: datetime | None, now: datetime) -> str | None:
    return None if moment is None else seconds(max(0.0, (moment - now).total_seconds()))


class HistoryView(NamedTuple):
    """One page of recorded moves, newest first, of the job or of its chosen step."""

    machine: str
    title: str
    moves: list[dict[str, Any]]
    next: int | None


async def _read_history(
    connection: Connection, view: PageView, job_id: UUID, step: dict[str, Any] | None
) -> HistoryView:
    of_job = view.request.query_params.get("history") == "job" or step is None
    before = read_before(view)
    if of_job or step is None:
        moves = await read_latest_job_moves(connection, job_id, before=before, limit=HISTORY_SIZE + 1)
        return history_view("job", "the job", moves)
    moves = await read_latest_task_moves(connection, step["id"], before=before, limit=HISTORY_SIZE + 1)
    return history_view("task", step["step"], moves)


def read_before(view: PageView) -> int | None:
    """Read the cursor of a history from the URL."""
    given = view.request.query_params.get("before")
    if given is None:
        return None
    if not given.isdecimal() or len(given) > 18:  # noqa: PLR2004 - digits of a bigint
        raise InputError(f"before must be the number of a record, got {given!r}")
    return int(given)


def history_view(machine: str, title: str, moves: list[dict[str, Any]]) -> HistoryView:
    """Make a page of moves, of which one more than shown was read."""
    more = len(moves) > HISTORY_SIZE
    shown = moves[:HISTORY_SIZE]
    return HistoryView(machine, title, shown, shown[-1]["id"] if more else None)


# --- sheets


@router.get("/ui/sheet/jobs/{job_id}/{act}")
async def show_job_sheet(view: View, job_id: UUID, act: str, step: str | None = None) -> Response:
    """Show the confirm sheet of an act on a job: cancel, retry, signal, approve or refuse."""
    view.viewer.require_act("operate")
    if act not in {"cancel", "retry", "signal", "approve", "refuse"}:
        raise Problem("unknown_path", f"there is no act {act}")
    async with view.app.connection() as connection:
        data, job, document = await read_job_page(connection, view, job_id)
    answers = open_answers(document, data)
    open_states: dict[str, int] = defaultdict(int)
    for row in data.steps:
        if row["state"] not in TASK_ROW.final:
            open_states[row["state"]] += 1
    return page_response(
        view.request,
        "job_sheet.html",
        act=act,
        job=job,
        name=job["workflow"] or data.row["name"],
        step=step,
        steps=[row["step"] for row in data.steps],
        answer=next((answer for answer in answers if answer.step == step), None),
        signals=sorted({spec["signal"] for spec in document["steps"] if spec.get("kind") == "signal"}),
        open_states=dict(open_states),
        has_ended=job["status"] in JOB.final,
        failed=job["status"] != JobState.COMPLETED,
    )


# --- live


def _remember(job_id: str, document: Mapping[str, Any]) -> None:
    _documents.pop(job_id, None)
    _documents[job_id] = document
    while len(_documents) > MAX_GRAPHS:
        del _documents[next(iter(_documents))]


async def _read_document(connection: Connection, moment: Moment) -> Mapping[str, Any]:
    """Read the definition of a job once; a definition does not change."""
    document = _documents.get(moment.argument)
    if document is not None:
        return document
    data = job_data(moment.sections, moment.argument)
    stored = None
    if data is not None and data.row["workflow"] is not None:
        stored = await read_workflow(connection, data.row["workflow"], data.row["version"])
    _remember(moment.argument, {"steps": []} if stored is None else stored.definition)
    return _documents[moment.argument]


def _render_job(moment: Moment) -> dict[str, str]:
    data = job_data({name: moment.rows(name) for name in SECTIONS}, moment.argument)
    if data is None:
        return {}
    done, total = job_progress(data.row)
    has_ended = data.row["status"] in JOB.final
    fragments: dict[str, str] = {
        "job-state": render_macro(PARTS, "job_state", data.row, job_version(data), has_ended, done, total),
    }
    document: Mapping[str, Any] = moment.data
    if document["steps"]:
        graph = draw_steps(document, data, moment.now)
        fragments["job-graph"] = render_macro(PARTS, "job_graph", graph, moment.argument)
    return fragments


topics.add(
    Topic(
        name="job",
        render=_render_job,
        read=_read_document,
        sections=SECTIONS,
        watches=("job_ids", "step_job_ids"),
    )
)
