"""Bounded lists: a statement looks at a limited number of rows and says where to go on.

Invariant: rows are looked at in the order of their ids or of a time, without gaps. A page that is short because few of
the rows that it looked at meet the conditions has a cursor; a page without a cursor is the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

from interlock.postgres.connection import transaction
from interlock.postgres.query import load_statements, run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from interlock.postgres.connection import Connection
    from interlock.postgres.query import Statement

T = TypeVar("T")

LISTS = load_statements("lists")
MAX_LOOKED_AT = 10_000  # rows that one statement of a list looks at, when it walks the primary key
COST_BY_INDEX = 2  # of a row that another index finds and that is then read by its id, at least
# Ids are made from the clock of a client or of the server, created_at is the start of the transaction: the two may
# differ by this much.
CREATION_TOLERANCE = timedelta(minutes=10)
FIRST_ID, LAST_ID = UUID(int=0), UUID(int=2**128 - 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ListPage(Generic[T]):
    """One page of a list; `next` is the `before` of the following page, None on the last one."""

    items: list[T]
    next: UUID | None


@dataclass(frozen=True, slots=True)
class TimePage:
    """One page of a list in the order of a time; `next` is the time and the id to go on from, None on the last one."""

    items: list[dict[str, Any]]
    next: tuple[datetime, Any] | None


def id_bounds(
    created_after: datetime | None, created_before: datetime | None, before: UUID | None, now: datetime | None
) -> dict[str, UUID]:
    """Return the ids between which a list looks: below the cursor, and within the time of creation.

    Ids of version 7 begin with the time. Under the clock of a test (`now`) they tell nothing about `created_at`.
    """
    above, below = FIRST_ID, LAST_ID if before is None else before
    if now is None and created_after is not None:
        above = _first_id_at(created_after - min(CREATION_TOLERANCE, created_after - _EPOCH))
    if now is None and created_before is not None:
        below = min(below, _first_id_at(created_before + CREATION_TOLERANCE))
    return {"above": above, "below": below}


def _first_id_at(moment: datetime) -> UUID:
    milliseconds = max(0, (moment - _EPOCH) // timedelta(milliseconds=1))
    return UUID(int=min(milliseconds, 2**48 - 1) << 80)


async def run_list(
    connection: Connection,
    statement: Statement,
    parameters: Mapping[str, Any],
    make: Callable[[dict[str, Any]], T],
    *,
    limit: int,
    selective: bool,
    by_index: bool = False,
) -> ListPage[T]:
    """Run the statement of a list. With `selective`, conditions apply that the source of its rows does not ensure.

    `by_index`: an index finds the rows, which are then read one by one.

    The statement returns the rows that meet the conditions (`matches`), at most one more than `limit`, and the last row
    that it may look at. It is not prepared, so that the planner knows which conditions are null. Sequential scans are
    off in its transaction: the planner would prefer to read and sort a table whose statistics are out of date.
    """
    most = MAX_LOOKED_AT // COST_BY_INDEX if by_index else MAX_LOOKED_AT
    window = most if selective else limit + 1
    async with transaction(connection):
        await run(connection, LISTS["walk_indexes_of_lists"], {})
        rows = await run(connection, statement, {**parameters, "window": window, "limit": limit + 1}, prepare=False)
    matching = [row for row in rows if row.pop("matches")]
    looked_at = [row.pop("looked_at") for row in rows]
    if len(matching) > limit:
        following = matching[limit - 1]["id"] if limit else parameters["below"]
    elif looked_at and looked_at[-1] == window:
        following = rows[-1]["id"]
    else:
        following = None
    return ListPage([make(row) for row in matching[:limit]], following)


async def run_time_list(
    connection: Connection, statement: Statement, parameters: Mapping[str, Any], *, time: str, limit: int
) -> TimePage:
    """Run the statement of a list in the order of the column `time`, as `run_list` does."""
    async with transaction(connection):
        await run(connection, LISTS["walk_indexes_of_lists"], {})
        given = {**parameters, "window": MAX_LOOKED_AT, "limit": limit + 1}
        rows = await run(connection, statement, given, prepare=False)
    matching = [row for row in rows if row.pop("matches")]
    looked_at = [row.pop("looked_at") for row in rows]
    last = None
    if len(matching) > limit:
        last = matching[limit - 1]
    elif looked_at and looked_at[-1] == MAX_LOOKED_AT:
        last = rows[-1]
    return TimePage(matching[:limit], None if last is None else (last[time], last["id"]))


async def collect_pages(read_page: Callable[[Any, int], Any], limit: int, before: Any = None) -> list[Any]:
    """Read pages until there are `limit` items or no more."""
    found: list[Any] = []
    while len(found) < limit:
        page: ListPage[Any] | TimePage = await read_page(before, limit - len(found))
        found += page.items
        if page.next is None:
            break
        before = page.next
    return found
