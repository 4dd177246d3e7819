"""Cursor pagination: the cursor is an opaque string that holds the key of the last item of the page before.

Invariant: the order of a list is total and stable, so that pages neither repeat nor omit items that existed all along.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import orjson
from fastapi import Query

from interlock.store.audit import RecordCursor
from interlock.store.history import read_history_page
from interlock.supervisor.http.problems import Problem
from interlock.supervisor.http.responses import document_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock.postgres.connection import Connection
    from interlock.store.lists import ListPage, TimePage

MAX_LIMIT = 200
DEFAULT_LIMIT = 50
MAX_CURSOR_NUMBER = 2**63  # bigint
CURSOR_FIELD = "query.cursor"

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Items per page at most.")]
Cursor = Annotated[
    str | None, Query(max_length=500, description="`next` of the page before; without it, the first page.")
]


def make_page(items: Sequence[Any], limit: int, key: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Make a page of items that were read with `limit + 1`; `key` gives the cursor's parts of the last item."""
    shown = list(items[:limit])
    following = encode_cursor(key(shown[-1])) if len(items) > limit else None
    return {"items": shown, "next": following}


def bounded_page(page: ListPage[Any]) -> dict[str, Any]:
    """Make a page of a bounded list, which may be short although others follow."""
    items = [document_of(item) for item in page.items]
    return {"items": items, "next": None if page.next is None else encode_cursor([page.next])}


def time_page(page: TimePage, document: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Make a page of a bounded list in the order of a time."""
    following = None if page.next is None else encode_cursor([page.next[0].isoformat(), page.next[1]])
    return {"items": [document(row) for row in page.items], "next": following}


def slice_page(items: Sequence[Any], limit: int, cursor: str | None) -> dict[str, Any]:
    """Make a page of a whole list that is short, such as that of the limits."""
    start = decode_number(cursor)
    shown = list(items[start : start + limit])
    following = encode_cursor([start + limit]) if len(items) > start + limit else None
    return {"items": shown, "next": following}


async def history_page(
    connection: Connection, kind: str, id_: UUID | str, limit: int, cursor: str | None
) -> dict[str, Any]:
    """Read a page of the checked history of one task, job or worker; the cursor is the id of a record."""
    records = await read_history_page(connection, kind, id_, after=decode_number(cursor), limit=limit + 1)
    return make_page([asdict(record) for record in records], limit, lambda last: [last["id"]])


def decode_number(cursor: str | None) -> int:
    """Decode a cursor that is a number: the key of a record or of a signal; 0 without a cursor."""
    number: int = 0 if cursor is None else _decode(cursor, int)[0]
    return number


def decode_text(cursor: str | None) -> str | None:
    """Decode a cursor that is a name."""
    if cursor is None:
        return None
    (text,) = _decode(cursor, str)
    if "\0" in text:
        raise _invalid_cursor(CURSOR_FIELD)
    return str(text)


def decode_id(cursor: str | None) -> UUID | None:
    """Decode a cursor that is an id."""
    return None if cursor is None else _decode(cursor, UUID)[0]


def decode_time_and_uuid(cursor: str | None, field: str = CURSOR_FIELD) -> tuple[datetime, UUID] | None:
    """Decode a cursor that is a time and a UUID."""
    found = decode_time_and_id(cursor, field)
    try:
        return None if found is None else (found[0], UUID(found[1]))
    except ValueError:
        raise _invalid_cursor(field) from None


def decode_time_and_id(cursor: str | None, field: str = CURSOR_FIELD) -> tuple[datetime, str] | None:
    """Decode a cursor that is a time and an id."""
    if cursor is None:
        return None
    at, id_ = _decode(cursor, datetime.fromisoformat, str, field=field)
    if at.tzinfo is None or "\0" in id_:
        raise _invalid_cursor(field)
    return at, id_


def decode_record_cursor(cursor: str | None) -> tuple[RecordCursor | None, datetime | None]:
    """Decode a cursor of the audit feed: the place of each kind of records, and the earliest time of the list."""
    if cursor is None:
        return None, None
    *places, since = _decode(cursor, int, int, int, datetime.fromisoformat)
    if since.tzinfo is None:
        raise _invalid_cursor(CURSOR_FIELD)
    return RecordCursor(*places), since


def encode_record_cursor(cursor: RecordCursor, since: datetime) -> str:
    """Encode a cursor of the audit feed."""
    return encode_cursor([*cursor, since.isoformat()])


def decode_name(cursor: str | None) -> str | None:
    """Decode a cursor that is a name."""
    name: str | None = None if cursor is None else _decode(cursor, str)[0]
    if name is not None and "\0" in name:
        raise _invalid_cursor(CURSOR_FIELD)
    return name


def encode_cursor(parts: list[Any]) -> str:
    """Encode the parts of a cursor."""
    return base64.urlsafe_b64encode(orjson.dumps([str(part) for part in parts])).decode().rstrip("=")


def _decode(cursor: str, *types: Callable[[str], Any], field: str = CURSOR_FIELD) -> list[Any]:
    try:
        parts = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        values = [type_(part) for type_, part in zip(types, parts, strict=True)]
    except (ValueError, TypeError, AttributeError, binascii.Error):
        raise _invalid_cursor(field) from None
    if any(isinstance(value, int) and not 0 <= value < MAX_CURSOR_NUMBER for value in values):
        raise _invalid_cursor(field)
    return values


def _invalid_cursor(field: str) -> Problem:
    message = "must be `next` of an earlier page of the same list"
    return Problem("invalid_request", f"{field}: {message}", {"errors": [{"field": field, "message": message}]})
