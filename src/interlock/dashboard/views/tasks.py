"""The list of tasks: states with counts, filters, groups of errors, and acts on a selection or on all that match."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from starlette.responses import RedirectResponse, Response

from interlock.dashboard.filters import PAGE_SIZE, read_task_filters, task_filter_body
from interlock.dashboard.format import parse_time, seconds
from interlock.dashboard.pages import PAGE_HEADERS, View, page_response, page_router
from interlock.dashboard.render import render_macro
from interlock.dashboard.states import STYLES
from interlock.dashboard.topics import Moment, Topic, topics
from interlock.errors import InputError
from interlock.lifecycle import TaskRowEvent, TaskRowState
from interlock.store.access import read_job_namespace, read_task_namespace
from interlock.store.details import count_recent_errors
from interlock.store.live import LiveParameters, read_live
from interlock.store.task_actions import TaskAction, preview_task_action
from interlock.store.task_admin import TaskFilter, find_task_page
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from interlock.dashboard.counts import LiveCounts, Namespaces
    from interlock.dashboard.pages import PageView
    from interlock.postgres.connection import Connection

router = page_router()
PARTS = "tasks_parts.html"
STATES = tuple(str(state) for state in TaskRowState)
MAX_SELECTED = 200  # tasks that a selection names
COMMAND_FLAGS = {"type": "type", "tag": "tag", "unique_key": "unique-key", "worker": "worker", "job_id": "job"}


class TaskRow(NamedTuple):
    """A row of the list."""

    id: str
    name: str
    type: str
    state: str
    namespace: str
    tries: str
    at: datetime | None
    at_label: str
    took: str
    reason: str
    job_id: str | None
    step: str | None


def task_row(row: dict[str, Any], now: datetime) -> TaskRow:
    """Make a row of the live section `tasks`."""
    started, finished = parse_time(row["started_at"]), parse_time(row["finished_at"])
    took = "" if started is None else seconds(((finished or now) - started).total_seconds())
    if row["state"] == TaskRowState.RUNNING and started is not None:
        took = ""  # the page counts it
    error = ": ".join(part for part in (row["error_type"], row["error"]) if part)
    at, label = (finished, "ended") if finished else (started, "started")
    if row["state"] in {TaskRowState.PENDING, TaskRowState.WAITING} or at is None:
        at, label = parse_time(row["created_at"]), "enqueued"
    return TaskRow(
        row["id"],
        row["step"] or row["type"],
        row["type"],
        row["state"],
        row["namespace"],
        f"{row['tries']} / {row['max_tries']}",
        at,
        label,
        took,
        error or row["reason"] or "",
        row["job_id"],
        row["step"],
    )


async def read_task_rows(connection: Connection, ids: Sequence[UUID], view: PageView) -> list[TaskRow]:
    """Read the rows of a page, in the order of the ids."""
    if not ids:
        return []
    read = await read_live(connection, frozenset({"tasks"}), LiveParameters(task_ids=ids), now=view.app.now())
    rows = {row["id"]: task_row(row, view.now) for row in read["tasks"]}
    return [rows[str(id_)] for id_ in ids if str(id_) in rows]


def state_counts(counts: LiveCounts, namespaces: Namespaces) -> list[tuple[str, int]]:
    """Return the number of tasks in each state."""
    found = counts.states("task", namespaces)
    return [(state, found[state]) for state in STYLES["task"]]


@router.get("/tasks")
async def show_tasks(view: View) -> Response:
    """List tasks."""
    wanted, filters = read_task_filters(view)
    counts = await view.dashboard.hub.current(view.app, view.namespaces)
    async with view.app.connection() as connection:
        page = await find_task_page(connection, wanted, limit=PAGE_SIZE, before=filters.cursor, now=view.app.now())
        rows = await read_task_rows(connection, [task.id for task in page.items], view)
        groups = []
        if TaskRowState.ERROR in filters.states:
            groups = await count_recent_errors(
                connection, namespaces=view.namespaces, type_=wanted.type, tag=wanted.tag
            )
    states = state_counts(counts, view.namespaces)
    return await view.page(
        "tasks.html",
        key="tasks",
        title=" / ".join(filters.states) or "Tasks",
        crumbs=(("Tasks", "/tasks"),) if filters.states else (),
        topics=("task-states", "task-rows"),
        command=list_command(wanted, view),
        filters=filters,
        rows=rows,
        states=states,
        total=sum(count for state, count in states if not filters.states or state in filters.states),
        counted=filters.is_empty,
        next=page.next,
        groups=groups,
        page_size=PAGE_SIZE,
    )


def list_command(wanted: TaskFilter, view: PageView) -> str:
    """Return the command that lists the same tasks."""
    words = ["interlock", "tasks", "list"]
    for state in wanted.states or ():
        words += ["--state", state]
    for name, flag in COMMAND_FLAGS.items():
        value = getattr(wanted, name)
        if value is not None:
            words += [f"--{flag}", str(value)]
    if view.namespace is not None:
        words += ["--namespace", view.namespace]
    return shlex.join(words)


@router.get("/find")
async def find(view: View, q: str = "") -> Response:
    """Lead to the task or job with this id, or to the list of tasks with this key, type or tag."""
    text = q.strip()
    return RedirectResponse(await _find_url(view, text) if text else view.url("/tasks"), 303, PAGE_HEADERS)


async def _find_url(view: PageView, text: str) -> str:
    try:
        id_ = UUID(text)
    except ValueError:
        return view.url("/tasks", **{await _find_field(view, text): text})
    async with view.app.connection() as connection:
        if _may_see(view, await read_task_namespace(connection, id_)):
            return view.url(f"/tasks/{id_}")
        if _may_see(view, await read_job_namespace(connection, id_)):
            return view.url(f"/jobs/{id_}")
    return view.url("/tasks", correlation=str(id_))


def _may_see(view: PageView, namespace: str | None) -> bool:
    return namespace is not None and (view.viewer.namespaces is None or namespace in view.viewer.namespaces)


async def _find_field(view: PageView, text: str) -> str:
    """Return the filter that finds tasks by this text: unique key, type, or else tag."""
    namespaces = None if view.namespaces is None else tuple(sorted(view.namespaces))
    async with view.app.connection() as connection:
        for name, wanted in (
            ("key", TaskFilter(unique_key=text, namespaces=namespaces)),
            ("type", TaskFilter(type=text, namespaces=namespaces)),
        ):
            page = await find_task_page(connection, wanted, limit=1, now=view.app.now())
            if page.items:
                return name
    return "tag"


# --- acts on many tasks


@router.get("/ui/sheet/tasks/{action}")
async def show_bulk_sheet(view: View, action: TaskAction) -> Response:
    """Preview an act on a selection (`ids`) or on all tasks that match the filters of the list."""
    view.viewer.require_act("operate")
    wanted, _ = read_task_filters(view)
    body = task_filter_body(wanted, view)
    ids = _selected(view)
    if ids:
        wanted = TaskFilter(ids=ids, states=STATES, namespaces=wanted.namespaces)
        body = {"ids": [str(id_) for id_ in ids], "state": list(STATES)}
    elif action is TaskAction.REQUEUE and wanted.states is None:
        wanted = replace(wanted, states=(str(TaskRowState.ERROR),))
    async with view.app.connection() as connection:
        preview = await preview_task_action(connection, action, wanted, now=view.app.now())
    event = TaskRowEvent.CANCEL if action is TaskAction.CANCEL else TaskRowEvent.REQUEUE
    types = sorted({task.type for task in preview.sample})
    return page_response(
        view.request,
        "tasks_sheet.html",
        action=action,
        event=event,
        target=TaskRowState.CANCELED if action is TaskAction.CANCEL else TaskRowState.PENDING,
        preview=preview,
        types=types,
        url=f"/ui/act/api/tasks/{action}",
        body={"filter": body, "horizon": preview.horizon.isoformat(), "all": not body},
    )


def _selected(view: PageView) -> tuple[UUID, ...]:
    given = [part for part in view.request.query_params.get("ids", "").split(",") if part]
    try:
        ids = tuple(UUID(part) for part in given)
    except ValueError:
        raise InputError("ids must be a list of ids, separated by commas") from None
    if len(ids) > MAX_SELECTED:
        raise Problem("invalid_request", f"at most {MAX_SELECTED} tasks can be selected, got {len(ids)}")
    return ids


# --- live


def _render_states(moment: Moment) -> dict[str, str]:
    return {
        f"count-{state}": render_macro(PARTS, "state_count", state, count)
        for state, count in state_counts(moment.counts, moment.namespaces)
    }


def _render_rows(moment: Moment) -> dict[str, str]:
    return {
        f"row-{row['id']}": render_macro(PARTS, "task_row", task_row(row, moment.now), moment.now)
        for row in moment.rows("tasks")
    }


topics.add(Topic(name="task-states", render=_render_states))
topics.add(Topic(name="task-rows", render=_render_rows, sections=frozenset({"tasks"}), row_ids="task_ids"))
