"""The inbox: steps that wait for an approval or a signal, those with the nearest deadline first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.responses import Response

from interlock.dashboard.format import parse_time
from interlock.dashboard.pages import View, page_router
from interlock.dashboard.payload import Payload, cut
from interlock.dashboard.render import render_macro
from interlock.dashboard.topics import Moment, Topic, topics
from interlock.store.details import read_job_inputs
from interlock.store.signals import InboxFilter, read_inbox_page

if TYPE_CHECKING:
    from datetime import datetime

router = page_router()
PARTS = "approvals_parts.html"
MAX_ITEMS = 100
MAX_INPUT = 4096  # characters of a job's input beside its approval


class InboxItemView(NamedTuple):
    """A step that waits for a signal or an approval."""

    id: str
    job_id: str
    workflow: str
    namespace: str
    step: str
    kind: str
    signal: str
    assignee: str | None
    since: datetime | None
    until: datetime | None
    input: Payload | None = None


@router.get("/approvals")
async def show_approvals(view: View) -> Response:
    """Show what waits for an approval or a signal."""
    params = view.request.query_params
    assignee, kind = params.get("assignee") or None, params.get("kind") or None
    kind = kind if kind in {"approval", "signal"} else None
    namespaces = None if view.namespaces is None else sorted(view.namespaces)
    async with view.app.connection() as connection:
        page = await read_inbox_page(connection, InboxFilter(assignee, None, kind, namespaces), limit=MAX_ITEMS)
        inputs = await read_job_inputs(connection, [row["job_id"] for row in page.items], size=MAX_INPUT)
    items = [inbox_item(row, inputs.get(row["job_id"])) for row in page.items]
    items.sort(key=lambda item: (item.until is None, item.until, item.since))
    return await view.page(
        "approvals.html",
        key="approvals",
        title="Approvals",
        topics=("inbox",),
        command="interlock jobs inbox",
        items=items,
        more=page.next is not None,
        kind=kind,
        assignee=assignee,
        version=inbox_version([item.id for item in items]),
    )


def inbox_item(row: dict[str, Any], text: str | None) -> InboxItemView:
    """Make an item of a row of the inbox."""
    return InboxItemView(
        str(row["id"]),
        str(row["job_id"]),
        row["workflow"],
        row["namespace"],
        row["step"],
        row["kind"],
        row["signal"],
        row["assignee"],
        parse_time(row["wait_started_at"]),
        parse_time(row["wait_until"]),
        None if text is None else cut("input", text),
    )


def inbox_version(ids: list[str]) -> str:
    """Return a text that changes with the items."""
    return f"{len(ids)}-{hash(frozenset(ids)) & 0xFFFFFFFF:x}"


def _render_inbox(moment: Moment) -> dict[str, str]:
    ids = [row["id"] for row in moment.rows("inbox")]
    return {"inbox-state": render_macro(PARTS, "inbox_state", len(ids), inbox_version(ids))}


topics.add(Topic(name="inbox", render=_render_inbox, sections=frozenset({"inbox"})))
