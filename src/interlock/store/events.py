"""Recorded transitions of tasks, jobs and workers in the order of their transactions.

Invariant: records are read in the order of their positions, below a horizon under which every transaction has ended.
A reader that goes on after the position of a record therefore neither omits a record that commits late nor reads one
twice, in this process or in another one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from interlock.postgres.query import load_statements, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.postgres.connection import Connection

EVENTS = load_statements("events")
MAX_BATCH = 2_000  # events that one statement reads
MAX_BIGINT = 2**63 - 1
# The clock of the server may be set back a little.
CLOCK_TOLERANCE = timedelta(seconds=1)
_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class EventPosition(NamedTuple):
    """The place of a record in the order of events: its transaction, the table and the id of the record."""

    xid: int
    place: int
    record: int


@dataclass(frozen=True, slots=True)
class EventCursor:
    """A position, and a time before which there is no record after it."""

    position: EventPosition
    since: datetime

    def encode(self) -> str:
        """Return the text that is the id of an event."""
        return "-".join(str(part) for part in (*self.position, (self.since - _EPOCH) // _MICROSECOND))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the cursor of an event id; ValueError if it is none."""
        parts = text.split("-")
        if len(parts) != 4 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):  # noqa: PLR2004 - as encode writes it
            raise ValueError("must be the id of an event")
        xid, place, record, since = map(int, parts)
        try:
            return cls(EventPosition(xid, place, record), _EPOCH + since * _MICROSECOND)
        except OverflowError:
            raise ValueError("must be the id of an event") from None


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A recorded transition with its cursor; `namespaces` are those of the task, the job or the worker."""

    cursor: EventCursor
    document: dict[str, Any]
    namespaces: frozenset[str]


class Horizon(NamedTuple):
    """All transactions below `horizon` have ended; none from `next_xid` on had begun to write at `moment`."""

    horizon: int
    next_xid: int
    moment: datetime

    @property
    def start(self) -> EventCursor:
        """The cursor of all transactions that begin to write from now on."""
        return EventCursor(EventPosition(self.next_xid, 0, 0), self.moment - CLOCK_TOLERANCE)

    def has_reached(self, cursor: EventCursor) -> bool:
        """Tell whether a cursor can come from this database: one from before a restore or a failover may be ahead."""
        return cursor.position.xid <= self.next_xid


async def read_horizon(connection: Connection) -> Horizon:
    """Read the horizon up to which events are complete."""
    (row,) = await run(connection, EVENTS["read_horizon"], {})
    return Horizon(**row)


async def read_events(
    connection: Connection, after: EventCursor, horizon: Horizon, *, until: EventPosition | None = None
) -> list[RecordedEvent]:
    """Read events after a cursor, up to a position and below a horizon, at most MAX_BATCH."""
    last = until or EventPosition(MAX_BIGINT, 0, 0)
    parameters = {
        "horizon": horizon.horizon,
        "since": after.since,
        "after_xid": after.position.xid,
        "after_place": after.position.place,
        "after_record": after.position.record,
        "until_xid": last.xid,
        "until_place": last.place,
        "until_record": last.record,
        "limit": MAX_BATCH,
    }
    return [_make_event(row, after.since) for row in await run(connection, EVENTS["read_events"], parameters)]


def _make_event(row: dict[str, Any], since: datetime) -> RecordedEvent:
    position = EventPosition(row.pop("xid"), row.pop("place"), row["record"])
    served = row.pop("namespaces") or ()
    own = () if row["namespace"] is None else (row["namespace"],)
    return RecordedEvent(EventCursor(position, since), row, frozenset((*own, *served)))


class SinceTimes:
    """Remembers when which transactions had not begun: the times before which later records cannot be."""

    def __init__(self, start: EventCursor) -> None:
        self._known = deque([(start.position.xid, start.since)])

    def add(self, horizon: Horizon) -> None:
        """Remember that at this moment no transaction from `next_xid` on had begun to write."""
        self._known.append((horizon.next_xid, horizon.moment - CLOCK_TOLERANCE))

    def since(self, xid: int) -> datetime:
        """Return a time before which no transaction from `xid` on has written a record."""
        while len(self._known) > 1 and self._known[1][0] <= xid:
            self._known.popleft()
        return self._known[0][1]


async def read_usable_tokens(connection: Connection, hashes: Sequence[bytes]) -> set[bytes]:
    """Return those of these token hashes whose tokens are neither revoked nor expired."""
    rows = await run(connection, EVENTS["read_usable_tokens"], {"hashes": list(hashes)})
    return {bytes(row["token_hash"]) for row in rows}
