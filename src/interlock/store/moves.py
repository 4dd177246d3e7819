"""Moves of workers and jobs as figures: how many, and how long the state before each of them lasted.

Invariant: what is counted are the records, whoever made the move. A stretch of time is counted once its end has passed
by as long as a transaction may take, so that none of its records is still to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from interlock.store.database import run
from interlock.store.statements import load_statements

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from interlock.store.database import Connection

MOVES = load_statements("moves")


class CountedMove(NamedTuple):
    """Moves between two states that took about as long: `bucket` is how many of the bounds they reached."""

    from_state: str
    to_state: str
    bucket: int
    moves: int
    seconds: float


async def read_measured_moment(connection: Connection, lag: timedelta) -> datetime:
    """Give the moment up to which all records are there."""
    (row,) = await run(connection, MOVES["read_measured_moment"], {"lag": lag})
    moment: datetime = row["moment"]
    return moment


async def count_moves(
    connection: Connection, machine: str, *, since: datetime, until: datetime, bounds: Sequence[float]
) -> list[CountedMove]:
    """Count the moves of workers, or of jobs, that were recorded in a stretch of time."""
    parameters = {"since": since, "until": until, "bounds": list(bounds)}
    return [CountedMove(**row) for row in await run(connection, MOVES[f"count_{machine}_moves"], parameters)]
