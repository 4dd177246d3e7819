"""Cursor pagination: the cursor is an opaque string that holds the key of the last item of the page before.

Invariant: the order of a list is total and stable, so that pages neither repeat nor omit items that existed all along.
"""

from __future__ import annotations

import base64
import binascii
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import orjson
from fastapi import Query

from interlock.supervisor.http.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_LIMIT = 200
DEFAULT_LIMIT = 50
MAX_CURSOR_NUMBER = 2**63  # bigint

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Items per page at most.")]
Cursor = Annotated[
    str | None, Query(max_length=500, description="`next` of the page before; without it, the first page.")
]


def make_page(items: Sequence[Any], limit: int, key: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Make a page of items that were read with `limit + 1`; `key` gives the cursor's parts of the last item."""
    shown = list(items[:limit])
    following = _encode(key(shown[-1])) if len(items) > limit else None
    return {"items": shown, "next": following}


def slice_page(items: Sequence[Any], limit: int, cursor: str | None) -> dict[str, Any]:
    """Make a page of a whole list that only grows at its end."""
    start = decode_number(cursor)
    shown = list(items[start : start + limit])
    following = _encode([start + limit]) if len(items) > start + limit else None
    return {"items": shown, "next": following}


def decode_number(cursor: str | None) -> int:
    """Decode a cursor that is a number: a count of items or a key; 0 without a cursor."""
    number: int = 0 if cursor is None else _decode(cursor, int)[0]
    return number


def decode_id(cursor: str | None) -> UUID | None:
    """Decode a cursor that is an id."""
    return None if cursor is None else _decode(cursor, UUID)[0]


def decode_time_and_uuid(cursor: str | None) -> tuple[datetime, UUID] | None:
    """Decode a cursor that is a time and a UUID."""
    found = decode_time_and_id(cursor)
    try:
        return None if found is None else (found[0], UUID(found[1]))
    except ValueError:
        raise _invalid_cursor() from None


def decode_time_and_id(cursor: str | None) -> tuple[datetime, str] | None:
    """Decode a cursor that is a time and an id."""
    if cursor is None:
        return None
    at, id_ = _decode(cursor, datetime.fromisoformat, str)
    if at.tzinfo is None or "\0" in id_:
        raise _invalid_cursor()
    return at, id_


def _encode(parts: list[Any]) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([str(part) for part in parts])).decode().rstrip("=")


def _decode(cursor: str, *types: Callable[[str], Any]) -> list[Any]:
    try:
        parts = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        values = [type_(part) for type_, part in zip(types, parts, strict=True)]
    except (ValueError, TypeError, AttributeError, binascii.Error):
        raise _invalid_cursor() from None
    if any(isinstance(value, int) and not 0 <= value < MAX_CURSOR_NUMBER for value in values):
        raise _invalid_cursor()
    return values


def _invalid_cursor() -> Problem:
    message = "must be `next` of an earlier page of the same list"
    return Problem(
        "invalid_request", f"query.cursor: {message}", {"errors": [{"field": "query.cursor", "message": message}]}
    )
