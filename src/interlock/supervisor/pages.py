"""Lists, a page at a time: where the next one begins is in a cursor that only this side reads.

Invariant: the order is total and does not change, so that pages neither repeat nor leave out what was there all along.
"""

from __future__ import annotations

import base64
import binascii
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import orjson
from fastapi import Query

from interlock.supervisor.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST = 200
USUAL = 50

Limit = Annotated[int, Query(ge=1, le=MOST, description="At most so many.")]
Cursor = Annotated[
    str | None, Query(max_length=500, description="`next` of the page before; without it, the first page.")
]


def page(items: Sequence[Any], limit: int, place: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Make a page of what was found, one more than asked for if there is more."""
    shown = list(items[:limit])
    following = _written(place(shown[-1])) if len(items) > limit else None
    return {"items": shown, "next": following}


def slice_of(items: Sequence[Any], limit: int, cursor: str | None) -> dict[str, Any]:
    """Make a page of something that is there as a whole, and only grows at its end."""
    start = read_number(cursor)
    shown = list(items[start : start + limit])
    following = _written([start + limit]) if len(items) > start + limit else None
    return {"items": shown, "next": following}


def read_number(cursor: str | None) -> int:
    """Read a cursor that is a number: how many came before, or the last of them."""
    number: int = 0 if cursor is None else _read(cursor, int)[0]
    return number


def read_id(cursor: str | None) -> UUID | None:
    """Read a cursor that is an id."""
    return None if cursor is None else _read(cursor, UUID)[0]


def read_time_and_id(cursor: str | None) -> tuple[datetime, str] | None:
    """Read a cursor that is a time and an id."""
    if cursor is None:
        return None
    at, id_ = _read(cursor, datetime.fromisoformat, str)
    if at.tzinfo is None or "\0" in id_:
        raise _unreadable()
    return at, id_


def _written(parts: list[Any]) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([str(part) for part in parts])).decode().rstrip("=")


def _read(cursor: str, *kinds: Callable[[str], Any]) -> list[Any]:
    try:
        parts = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        read = [kind(part) for kind, part in zip(kinds, parts, strict=True)]
    except (ValueError, TypeError, AttributeError, binascii.Error):
        raise _unreadable() from None
    if any(isinstance(part, int) and not 0 <= part < 2**63 for part in read):
        raise _unreadable()
    return read


def _unreadable() -> Problem:
    message = "must be `next` of a page that was given for the same list"
    return Problem(
        "invalid_request", f"query.cursor: {message}", {"errors": [{"field": "query.cursor", "message": message}]}
    )
