"""The audit feed: recorded transitions of tasks, jobs and workers, newest first.

Invariant: a page of one row's records is found by its index. Every other page looks at slices of time, which become
longer while they hold few records, until it is full or has looked at MAX_LOOKED_AT records; its cursor goes on there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from interlock.postgres.query import load_statements, run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from interlock.postgres.connection import Connection

AUDIT = load_statements("audit")
KINDS = ("task", "job", "worker")
MAX_LOOKED_AT = 20_000  # records, after which a page ends
FIRST_SLICE = timedelta(seconds=5)
MAX_PLACE = 3  # of the tables of records


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Conditions on records between two times; None means any."""

    since: datetime
    until: datetime
    kinds: Sequence[str] = KINDS
    id: str | None = None
    actor: str | None = None
    event: str | None = None
    from_state: str | None = None
    to_state: str | None = None
    database_role: str | None = None
    namespaces: Sequence[str] | None = None  # of the rows that still exist


class RecordCursor(NamedTuple):
    """The last record of a page: records before it follow."""

    recorded_at: datetime
    place: int
    record: int


class RecordPage(NamedTuple):
    """One page of records; `next` is the cursor of the following page, None on the last one."""

    items: list[dict[str, Any]]
    next: RecordCursor | None


async def find_records(
    connection: Connection, wanted: RecordFilter, *, before: RecordCursor | None = None, limit: int
) -> RecordPage:
    """Find one page of records, newest first; a page with a `next` may be short, or empty."""
    cursor = before or RecordCursor(wanted.until, 0, 0)
    found: list[dict[str, Any]] = []
    if wanted.id is not None:
        found = await _read_slice(connection, wanted, wanted.since, cursor, limit + 1)
        return _make_page(found, limit, None)
    looked_at = 0
    length = FIRST_SLICE
    while cursor.recorded_at > wanted.since or cursor.place > 0:
        since = max(wanted.since, cursor.recorded_at - length)
        found += await _read_slice(connection, wanted, since, cursor, limit + 1 - len(found))
        if len(found) > limit:
            return _make_page(found, limit, None)
        counted = await _count(connection, wanted, since, cursor.recorded_at)
        cursor = RecordCursor(since, 0, 0)
        looked_at += counted
        if looked_at >= MAX_LOOKED_AT:
            break
        # twice as long, but with no more records than are left to look at, if they are as dense as in this slice
        length *= min(2.0, (MAX_LOOKED_AT - looked_at) / counted) if counted else 2.0
    return _make_page(found, limit, cursor if cursor.recorded_at > wanted.since else None)


def _make_page(found: list[dict[str, Any]], limit: int, following: RecordCursor | None) -> RecordPage:
    if len(found) > limit:
        last = found[limit - 1]
        following = RecordCursor(last["recorded_at"], last["place"], last["record"])
    items = [{name: value for name, value in row.items() if name != "place"} for row in found[:limit]]
    return RecordPage(items, following)


async def _read_slice(
    connection: Connection, wanted: RecordFilter, since: datetime, cursor: RecordCursor, limit: int
) -> list[dict[str, Any]]:
    uuid = _as_uuid(wanted.id)
    kinds = [kind for kind in wanted.kinds if wanted.id is None or kind == "worker" or uuid is not None]
    parameters = {
        **asdict(wanted),
        "kinds": kinds,
        "uuid": uuid,
        "namespaces": None if wanted.namespaces is None else list(wanted.namespaces),
        "since": since,
        "until": cursor.recorded_at,
        "before_place": cursor.place,
        "before_record": cursor.record,
        "limit": limit,
    }
    return await run(connection, AUDIT["find_records"], parameters, prepare=False)


async def _count(connection: Connection, wanted: RecordFilter, since: datetime, until: datetime) -> int:
    parameters = {"kinds": list(wanted.kinds), "since": since, "until": until}
    (row,) = await run(connection, AUDIT["count_records"], parameters, prepare=False)
    records: int = row["records"]
    return records


def _as_uuid(text: str | None) -> UUID | None:
    try:
        return None if text is None else UUID(text)
    except ValueError:
        return None
