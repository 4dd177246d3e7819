"""Audit: who moved which task, job or worker, from which state to which, when and why."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from interlock.client.explain.explanation import shell_command
from interlock.dashboard.pages import View, page_router
from interlock.store.audit import KINDS, RecordFilter, find_records
from interlock.supervisor.http.pagination import decode_record_cursor, encode_record_cursor
from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

router = page_router(whole_system=True)
PAGE_ROWS = 50
DEFAULT_RANGE = timedelta(days=1)
FIRST_RECORD_AT = datetime(1970, 1, 1, tzinfo=UTC)
MAX_TEXT = 300
MACHINES = {"task": "task", "job": "job", "worker": "supervised-worker"}
FIELDS = ("id", "actor", "event", "from_state", "to_state", "database_role")
LABELS = {"id": "Id", "actor": "Actor", "event": "Event", "from_state": "From state", "to_state": "To state"}
PLACES = {"task": "/tasks/", "job": "/jobs/", "worker": "/workers/"}


@router.get("/audit")
async def show_audit(view: View) -> Response:
    """Search the records of all moves."""
    query = view.request.query_params
    texts = {name: _text(query, name) for name in FIELDS}
    kinds = [kind for kind in query.getlist("kind") if kind in KINDS]
    before, began_since = decode_record_cursor(query.get("cursor"))
    since, until = _range(view, is_of_one_row=texts["id"] is not None, begun_at=began_since)
    wanted = RecordFilter(
        since=since,
        until=until,
        kinds=kinds or list(KINDS),
        namespaces=None if view.namespace is None else [view.namespace],
        **texts,
    )
    async with view.app.connection() as connection:
        page = await find_records(connection, wanted, before=before, limit=PAGE_ROWS)
    following = None if page.next is None else encode_record_cursor(page.next, since)
    return await view.page(
        "audit.html",
        key="audit",
        title="Audit",
        command=shell_command("history", texts["id"] or "ID"),
        records=[
            {**record, "machine": MACHINES[record["kind"]], "url": f"{PLACES[record['kind']]}{record['id']}"}
            for record in page.items
        ],
        next_cursor=following,
        texts=texts,
        labels=LABELS,
        kinds=kinds,
        all_kinds=KINDS,
        since=since if since > FIRST_RECORD_AT else None,
        until=_time(query, "until"),
        given_since=_time(query, "since"),
        is_filtered=any(texts.values()) or bool(kinds),
    )


def _range(view: View, *, is_of_one_row: bool, begun_at: datetime | None) -> tuple[datetime, datetime | None]:
    """Return the time to search: the last day, unless the form, the page before or the id of a row says more."""
    query = view.request.query_params
    until = _time(query, "until")
    latest = until or view.now
    default = FIRST_RECORD_AT if is_of_one_row else latest - DEFAULT_RANGE
    since = _time(query, "since") or begun_at or default
    if since > latest:
        raise Problem("invalid_input", "the first time must not be later than the last one")
    return since, until


def _text(query: Mapping[str, str], name: str) -> str | None:
    text = query.get(name, "").strip()
    if "\0" in text or len(text) > MAX_TEXT:
        raise Problem("invalid_input", f"{name} must be at most {MAX_TEXT} characters without null characters")
    return text or None


def _time(query: Mapping[str, str], name: str) -> datetime | None:
    """Read a time of the form, which has no zone: UTC."""
    text: Any = query.get(name)
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise Problem("invalid_input", f"{name} must be a time such as 2026-05-01T12:00") from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found
