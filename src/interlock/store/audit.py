"""The audit feed: recorded transitions of tasks, jobs and workers, newest first.

Records of one kind are read in the order of their ids, which the BRIN indexes find, and the kinds are merged by time.

Invariant: a page looks at no more than MAX_LOOKED_AT records of each kind, however many were made at one moment, and
its cursor goes on there. The records of one row are found by its index.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from interlock.postgres.connection import transaction
from interlock.postgres.query import load_statements, run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from interlock.postgres.connection import Connection

AUDIT = load_statements("audit")
KINDS = ("task", "job", "worker")
MAX_LOOKED_AT = 3_000  # records of one kind that a page looks at


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Conditions on records since a time; None means any."""

    since: datetime
    until: datetime | None = None
    kinds: Sequence[str] = KINDS
    id: str | None = None
    actor: str | None = None
    event: str | None = None
    from_state: str | None = None
    to_state: str | None = None
    database_role: str | None = None
    namespaces: Sequence[str] | None = None  # of the rows that still exist


class RecordCursor(NamedTuple):
    """The ids below which the records of each kind follow."""

    task: int = 0
    job: int = 0
    worker: int = 0


class RecordPage(NamedTuple):
    """One page of records; `next` is the cursor of the following page, None on the last one."""

    items: list[dict[str, Any]]
    next: RecordCursor | None


@dataclass(slots=True)
class _Stream:
    """The records of one kind: those that were found, and where others may follow."""

    kind: str
    below: int  # all records from this id on are on pages
    found: deque[dict[str, Any]] = field(default_factory=deque)
    rest_below: int = 0  # the records below this id were not looked at; 0 if there are none
    rest_at: datetime | None = None  # about the time of the first one of these

    @property
    def next_at(self) -> datetime | None:
        """The time of the next record, as far as it is known; None at the end."""
        return self.found[0]["recorded_at"] if self.found else self.rest_at


async def find_records(
    connection: Connection, wanted: RecordFilter, *, before: RecordCursor | None = None, limit: int
) -> RecordPage:
    """Find one page of records, newest first; a page with a `next` may be short, or empty."""
    async with transaction(connection):
        await run(connection, AUDIT["walk_ranges_of_records"], {})
        streams = await _open_streams(connection, wanted, before)
        for stream in streams:
            await _look(connection, wanted, stream, limit + 1)
    items = _merge(streams, limit)
    following = {stream.kind: stream.below if stream.found else stream.rest_below for stream in streams}
    return RecordPage(items, RecordCursor(**following) if any(following.values()) else None)


def _merge(streams: Sequence[_Stream], limit: int) -> list[dict[str, Any]]:
    """Take the newest records of all streams, up to the first one that was not looked at."""
    items: list[dict[str, Any]] = []
    while len(items) < limit:
        going_on = [(stream.next_at, stream) for stream in streams if stream.next_at is not None]
        newest = max(going_on, key=itemgetter(0))[1] if going_on else None
        if newest is None or not newest.found:
            break
        items.append(newest.found.popleft())
        newest.below = items[-1]["record"]
    return items


async def _open_streams(connection: Connection, wanted: RecordFilter, before: RecordCursor | None) -> list[_Stream]:
    """Return a stream for each kind, which begins at the cursor, or at the latest time that is wanted."""
    kinds = [kind for kind in KINDS if kind in wanted.kinds and (wanted.id is None or kind in _kinds_of(wanted.id))]
    if before is not None:
        places = before._asdict()
        return [_Stream(kind, places[kind]) for kind in kinds if places[kind] > 0]
    (last,) = await run(connection, AUDIT["read_last_record_ids"], {})
    streams = [_Stream(kind, last[kind] + 1) for kind in kinds]
    if wanted.until is not None and wanted.id is None:
        for stream in streams:
            stream.below = await _seek(connection, wanted, stream.kind, stream.below, MAX_LOOKED_AT)
    return streams


async def _look(connection: Connection, wanted: RecordFilter, stream: _Stream, limit: int) -> None:
    """Look at the next records of a stream."""
    while stream.below > 0:
        above = 0 if wanted.id is not None else max(0, stream.below - MAX_LOOKED_AT)
        rows = await _read(connection, wanted, stream, above, limit)
        stream.found.extend(row for row in rows if row.pop("matches"))
        if len(stream.found) == limit:
            return
        if rows:
            stream.rest_below = await _seek(connection, wanted, stream.kind, above, above) if above > 0 else 0
            stream.rest_at = rows[-1]["recorded_at"] if stream.rest_below > 0 else None
            return
        # transactions that were rolled back had the ids between
        stream.below = await _seek(connection, wanted, stream.kind, above, MAX_LOOKED_AT) if above > 0 else 0


async def _read(
    connection: Connection, wanted: RecordFilter, stream: _Stream, above: int, limit: int
) -> list[dict[str, Any]]:
    parameters = {
        **_given(wanted, stream.kind, stream.below),
        "id": wanted.id,
        "uuid": _as_uuid(wanted.id),
        "actor": wanted.actor,
        "event": wanted.event,
        "from_state": wanted.from_state,
        "to_state": wanted.to_state,
        "database_role": wanted.database_role,
        "namespaces": None if wanted.namespaces is None else list(wanted.namespaces),
        "above": above,
        "limit": limit,
    }
    return await run(connection, AUDIT["find_records"], parameters, prepare=False)


async def _seek(connection: Connection, wanted: RecordFilter, kind: str, below: int, window: int) -> int:
    """Return an id above the records of the wanted times below `below`, by at most `window`; 0 if there are none."""
    parameters = {**_given(wanted, kind, below), "window": window}
    (row,) = await run(connection, AUDIT["seek_records"], parameters, prepare=False)
    found: int = row["high"]
    return found


def _given(wanted: RecordFilter, kind: str, below: int) -> dict[str, Any]:
    return {"kind": kind, "below": below, "since": wanted.since, "until": wanted.until}


def _kinds_of(id_: str) -> tuple[str, ...]:
    """Return the kinds of rows that may have an id."""
    return KINDS if _as_uuid(id_) is not None else ("worker",)


def _as_uuid(text: str | None) -> UUID | None:
    try:
        return None if text is None else UUID(text)
    except ValueError:
        return None
