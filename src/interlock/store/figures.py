"""Table `figures`: moves, waits, runs and depths over time, for charts.

Invariant: counts of moves are replaced and so can be repeated; sums of processes are added once. Rows of ten and of
sixty minutes are sums of the finer ones.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import MACHINES
from interlock.postgres.connection import transaction
from interlock.postgres.query import as_json, load_statements, run
from interlock.store.stats import count_unfinished_tasks, read_refused_moves

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from interlock.postgres.connection import Connection

FIGURES = load_statements("figures")
MINUTE = timedelta(minutes=1)
MAX_PAIRS = 100  # of namespace and type, in one minute
COARSER_GRAINS = ((1, 10), (10, 60))  # minutes: finer, coarser


@dataclass(frozen=True, slots=True)
class Figure:
    """A sum of one process since it was written last."""

    kind: str  # run, wait or move
    machine: str
    total: int
    namespace: str = ""
    type: str = ""
    from_state: str = ""
    event: str = ""
    to_state: str = ""
    positions: Sequence[int] | None = None
    counts: Sequence[int] | None = None


async def add_figures(connection: Connection, figures: Sequence[Figure], *, now: datetime | None = None) -> None:
    """Add the sums of a process to those of the current minute."""
    if figures:
        rows = sorted((asdict(figure) for figure in figures), key=lambda row: [str(value) for value in row.values()])
        await run(connection, FIGURES["add_figures"], {"figures": as_json(rows), "now": now})


async def summarize_records(connection: Connection) -> int:
    """Keep the indexes by time of all records current; return the number of ranges that were added."""
    (row,) = await run(connection, FIGURES["summarize_records"], {})
    ranges: int = row["ranges"]
    return ranges


async def count_minute(connection: Connection, minute: datetime) -> int:
    """Count the moves recorded within a minute, in place of an earlier count; return their number."""
    async with transaction(connection):
        await run(connection, FIGURES["delete_move_figures"], {"at": minute})
        rows = await run(connection, FIGURES["insert_move_figures"], {"at": minute, "pairs": MAX_PAIRS})
    return int(sum(row["total"] for row in rows))


async def sample_depths(connection: Connection, minute: datetime, *, now: datetime | None = None) -> None:
    """Store the number of unfinished tasks by namespace and state, and the time of the oldest due one."""
    counted = await count_unfinished_tasks(connection, now=now)
    rows = [("depth", count.namespace, count.state, count.tasks) for count in counted]
    rows += [
        ("oldest", count.namespace, count.state, int(count.oldest_due_at.timestamp()))
        for count in counted
        if count.oldest_due_at is not None
    ]
    kinds, namespaces, states, totals = zip(*rows, strict=True) if rows else ((), (), (), ())
    parameters = {
        "at": minute,
        "kinds": list(kinds),
        "namespaces": list(namespaces),
        "states": list(states),
        "totals": list(totals),
    }
    await run(connection, FIGURES["put_sampled_figures"], parameters)


async def add_refused_figures(connection: Connection, minute: datetime) -> None:
    """Add the moves that the database refused since the last call."""
    refused = [found for found in await read_refused_moves(connection) if found.count]
    if not refused:
        return
    names = {machine.name: key for key, machine in MACHINES.items()}
    parameters = {
        "at": minute,
        "machines": [names.get(found.machine, found.machine) for found in refused],
        "from_states": [found.from_state or "" for found in refused],
        "to_states": [found.to_state or "" for found in refused],
        "totals": [found.count for found in refused],
    }
    await run(connection, FIGURES["add_refused_figures"], parameters)


async def roll_up(connection: Connection, moment: datetime) -> None:
    """Sum the figures around a moment into rows of ten and of sixty minutes."""
    for finer, grain in COARSER_GRAINS:
        at = floor_time(moment, timedelta(minutes=grain))
        await run(connection, FIGURES["roll_up_figures"], {"at": at, "finer": finer, "grain": grain})


async def read_last_counted_minute(connection: Connection, *, now: datetime | None = None) -> datetime | None:
    """Return the latest minute of the last hour whose moves were counted."""
    (row,) = await run(connection, FIGURES["read_last_counted_minute"], {"now": now})
    found: datetime | None = row["at"]
    return found


async def delete_old_figures(connection: Connection, *, now: datetime | None = None) -> int:
    """Delete figures past their age; return how many."""
    return len(await run(connection, FIGURES["delete_old_figures"], {"now": now}))


def floor_time(moment: datetime, step: timedelta) -> datetime:
    """Return the start of the step of time that a moment lies in, counted from the epoch."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return moment - (moment - epoch) % step


@dataclass(frozen=True, slots=True)
class FigureRange:
    """A range of time to read: the grain of the rows, and the step between two points of a chart."""

    since: datetime
    grain: int
    step: timedelta
    namespaces: Collection[str] | None = None

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the statements."""
        namespaces = None if self.namespaces is None else sorted(self.namespaces)
        return {"since": self.since, "grain": self.grain, "step": self.step, "namespaces": namespaces}


async def read_moves_over_time(
    connection: Connection, wanted: FigureRange, machines: Collection[str], *, kind: str = "move"
) -> list[dict[str, Any]]:
    """Read moves, or refused moves, by step of time."""
    parameters = wanted.parameters() | {"machines": list(machines), "kind": kind}
    return list(await run(connection, FIGURES["read_moves_over_time"], parameters))


async def read_histograms_over_time(connection: Connection, wanted: FigureRange) -> list[dict[str, Any]]:
    """Read the histograms of waits and runs by step of time."""
    return list(await run(connection, FIGURES["read_histograms_over_time"], wanted.parameters()))


async def read_depths_over_time(connection: Connection, wanted: FigureRange) -> list[dict[str, Any]]:
    """Read the depth of the queue by step of time."""
    return list(await run(connection, FIGURES["read_depths_over_time"], wanted.parameters()))


async def count_failures_by_type(
    connection: Connection,
    *,
    within: timedelta,
    namespaces: Collection[str] | None = None,
    limit: int = 3,
    now: datetime | None = None,
) -> list[dict[str, Any]]:
    """Count ended and failed attempts by namespace and type; those that failed most come first."""
    parameters = {
        "within": within,
        "namespaces": None if namespaces is None else sorted(namespaces),
        "limit": limit,
        "now": now,
    }
    return list(await run(connection, FIGURES["count_failures_by_type"], parameters))
