"""The page of a task: why it does not move, attempts over time, input and outcome, history, webhook."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any
from uuid import UUID

from starlette.responses import Response

from interlock.client.explain import ExplainedKind
from interlock.client.task_handle import unknown_task_error
from interlock.dashboard.format import parse_time, seconds
from interlock.dashboard.pages import View, page_response, page_router
from interlock.dashboard.payload import error_view, explain_view, payload
from interlock.dashboard.render import render_macro
from interlock.dashboard.svg.gantt import attempt_row, draw_gantt
from interlock.dashboard.topics import Moment, Topic, topics
from interlock.dashboard.views.job import HISTORY_SIZE, history_view, read_before
from interlock.lifecycle import TASK_ROW, TaskRowEvent, TaskRowState
from interlock.store.details import read_latest_task_moves, read_task_page_details
from interlock.store.tasks import read_tasks
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.dashboard.pages import PageView
    from interlock.postgres.connection import Connection

router = page_router()
PARTS = "task_parts.html"
MAX_ATTEMPT_MOVES = 200
ACTS = ("cancel", "force", "requeue")


def task_version(row: Mapping[str, Any]) -> str:
    """Return a text that changes when the task moves or reports progress."""
    text = f"{row['state']} {row['attempt']} {row['held_by']} {row['reason']} {row['run_at']} {row['progress']}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def progress_parts(progress: Any) -> tuple[float | None, Any]:
    """Return the fraction of a reported progress, if it has one, and what is to be shown beside a bar."""
    if not isinstance(progress, dict) or not isinstance(progress.get("fraction"), (int, float)):
        return None, progress
    rest = {name: value for name, value in progress.items() if name not in {"fraction", "message"}}
    return min(1.0, max(0.0, progress["fraction"])), rest or None


async def read_visible_task(connection: Connection, view: PageView, task_id: UUID) -> dict[str, Any]:
    """Read a task that the viewer may see."""
    rows = await read_tasks(connection, [task_id])
    visible = view.viewer.namespaces
    if not rows or (visible is not None and rows[0]["namespace"] not in visible):
        raise unknown_task_error(task_id)
    return rows[0]


@router.get("/tasks/{task_id}")
async def show_task(view: View, task_id: UUID) -> Response:
    """Show a task."""
    async with view.app.connection() as connection:
        task = await read_visible_task(connection, view, task_id)
        details = await read_task_page_details(connection, task_id)
        latest = await read_latest_task_moves(connection, task_id, limit=MAX_ATTEMPT_MOVES)
        before = read_before(view)
        shown = latest[: HISTORY_SIZE + 1]
        if before is not None:
            shown = await read_latest_task_moves(connection, task_id, before=before, limit=HISTORY_SIZE + 1)
    explained = await view.app.explain(task_id, kind=ExplainedKind.STEP if task["job_id"] else ExplainedKind.TASK)
    state = task["state"]
    has_ended = state in TASK_ROW.final
    row = attempt_row("attempts", latest[::-1])
    start = min([task["created_at"], *(move["recorded_at"] for move in latest[-1:])])
    end = max(task["finished_at"] if has_ended and task["finished_at"] else view.now, start)
    fraction, reported = progress_parts(task["progress"])
    payloads = (
        payload("input", task["input"] or None),
        payload("result", task["output"]),
        payload("details of the progress" if fraction is not None else "progress", reported),
        payload("checkpoint", details["checkpoint"]),
    )
    name = task["step"] or task["type"]
    return await view.page(
        "task.html",
        key="tasks",
        title=f"{name} · {str(task_id)[:8]}",
        crumbs=(("Tasks", "/tasks"),),
        topics=(f"task:{task_id}",),
        command=f"interlock explain {task_id}",
        name=name,
        task=task,
        details=details,
        version=task_version(task),
        has_ended=has_ended,
        gantt=draw_gantt([row], start, end, running=not has_ended),
        fraction=fraction,
        payloads=[each for each in payloads if each is not None],
        error=error_view(task["error"], task["reason"]),
        history=history_view("task", name, shown),
        explained=explain_view(explained),
        can_cancel=TASK_ROW.can(state, TaskRowEvent.CANCEL),
        can_force=state == TaskRowState.RUNNING,
        can_requeue=task["job_id"] is None and TASK_ROW.can(state, TaskRowEvent.REQUEUE),
        lease_s=None
        if task["lease_expires_at"] is None
        else seconds(max(0.0, (task["lease_expires_at"] - view.now).total_seconds())),
        webhook=_webhook(details),
    )


def _webhook(details: Mapping[str, Any]) -> dict[str, Any] | None:
    """Say how the webhook of a task is: it is kept until it is delivered."""
    if details["callback_url"] is None:
        return None
    notice = details["webhook"]
    found = {"url": details["callback_url"], "error": None, "next_at": None, "tone": "slate", "text": "sent at its end"}
    if notice is None:
        return found
    times = f"after {notice['tries']} tries" if notice["tries"] != 1 else "after 1 try"
    if notice["given_up_at"] is not None:
        return {**found, "tone": "red", "text": f"given up {times}", "error": notice["error"]}
    text = f"tried again, {times}" if notice["tries"] else "waits to be sent"
    return {
        **found,
        "tone": "amber",
        "text": text,
        "error": notice["error"],
        "next_at": parse_time(notice["next_try_at"]),
    }


@router.get("/ui/sheet/task/{task_id}/{act}")
async def show_task_sheet(view: View, task_id: UUID, act: str) -> Response:
    """Show the confirm sheet of an act on a task: cancel, force or requeue."""
    view.viewer.require_act("operate")
    if act not in ACTS:
        raise Problem("unknown_path", f"there is no act {act}")
    async with view.app.connection() as connection:
        task = await read_visible_task(connection, view, task_id)
    return page_response(view.request, "task_sheet.html", act=act, task=task, name=task["step"] or task["type"])


# --- live


def _render_task(moment: Moment) -> dict[str, str]:
    row = next((row for row in moment.rows("tasks") if row["id"] == moment.argument), None)
    if row is None:
        return {}
    has_ended = row["state"] in TASK_ROW.final
    return {"task-state": render_macro(PARTS, "task_state", row["state"], task_version(row), has_ended)}


topics.add(Topic(name="task", render=_render_task, sections=frozenset({"tasks"}), watches=("task_ids",)))
