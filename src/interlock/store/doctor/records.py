"""Checks of recorded moves: every chain is complete and legal by the lifecycle, and ends in the state of its row.

Quickly, the newest and the unfinished rows are examined; fully, all records, in ranges of ids. Each range is one
statement in a transaction of its own, so that a long examination holds no snapshot, and sees rows and records of one
moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.postgres.guards import GUARDS
from interlock.postgres.query import load_statements, run
from interlock.store.doctor.findings import SAMPLE_SIZE, make_finding, number
from interlock.store.retention import CLOCK_SLACK, first_id_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from interlock.postgres.connection import Connection
    from interlock.postgres.guards import Guard
    from interlock.store.doctor.findings import Finding

RECORDS = load_statements("doctor_records")
RANGE_SIZE = 200_000  # records that one statement reads
QUICK_ROWS = 5_000  # of each kind of unfinished rows
RECORD_TIME_SLACK = timedelta(minutes=1)  # a clock may be set back by so much

_NOUNS = {"tasks": "task", "jobs": "job", "workers": "worker"}
_MESSAGES = {
    "records_missing": "without records of the beginning",
    "records_broken": "with a gap or an extra record in the chain of records",
    "records_illegal": "with a recorded move that the lifecycle does not have",
    "records_misnumbered": "whose attempts do not rise by one with every claim",
    "records_mistimed": "with records out of the order of time",
    "row_mistimed": "with impossible times",
    "state_unrecorded": "whose state is not that of the last record",
    "row_deleted": "deleted before the end",
}


class _Statements(NamedTuple):
    check: str
    ids: str  # of the rows that are examined quickly
    range: str


_STATEMENTS = {
    "tasks": _Statements("check_task_records", "read_open_task_ids", "read_task_range"),
    "jobs": _Statements("check_job_records", "read_open_job_ids", "read_job_range"),
    "workers": _Statements("check_worker_records", "read_newest_worker_ids", "read_worker_range"),
}


@dataclass(slots=True)
class _Faults:
    rows: int = 0
    sample: tuple[str, ...] = ()


class RecordFaults:
    """The faults found so far, by table and code."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], _Faults] = {}

    def add(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Add the rows of one check."""
        for row in rows:
            faults = self._found.setdefault((table, row["code"]), _Faults())
            faults.rows += row["rows"]
            faults.sample = (*faults.sample, *row["sample"])[:SAMPLE_SIZE]

    def findings(self) -> list[Finding]:
        """Make one finding for each table and code."""
        return [
            make_finding(
                code, f"{number(faults.rows, _NOUNS[table])} {_MESSAGES[code]}", rows=faults.rows, sample=faults.sample
            )
            for (table, code), faults in self._found.items()
        ]


async def read_horizons(connection: Connection) -> dict[str, datetime]:
    """Read since when all records of each table are kept."""
    return {row["records"]: row["horizon"] for row in await run(connection, RECORDS["read_record_horizons"], {})}


async def check_open_records(connection: Connection, now: datetime | None) -> list[Finding]:
    """Check the chains of the newest and the unfinished rows, a bounded number of each."""
    horizons = await read_horizons(connection)
    faults = RecordFaults()
    for guard in GUARDS:
        statements = _STATEMENTS[guard.table]
        ids = [row["id"] for row in await run(connection, RECORDS[statements.ids], {"limit": QUICK_ROWS})]
        if ids:
            parameters = _parameters(guard, horizons, now) | {"ids": ids, "after": None, "last": None}
            faults.add(guard.table, await run(connection, RECORDS[statements.check], parameters, prepare=False))
    return faults.findings()


async def check_all_records(
    connection: Connection,
    now: datetime | None,
    snapshot: Callable[[], AbstractAsyncContextManager[None]],
    *,
    size: int = RANGE_SIZE,
    progress: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Check all chains, in ranges of about `size` records, each in a `snapshot` of its own."""
    async with snapshot():
        horizons = await read_horizons(connection)
    faults = RecordFaults()
    for guard in GUARDS:
        statements = _STATEMENTS[guard.table]
        bounds: dict[str, Any] = {"after": None, "last": None}
        while True:
            if progress is not None:
                progress(f"records of {guard.table}" + (f" after {bounds['after']}" if bounds["after"] else ""))
            async with snapshot():
                limits = {"after": bounds["after"], "limit": size}
                rows = await run(connection, RECORDS[statements.range], limits, prepare=False)
                bounds["last"] = rows[0]["last"] if rows else None
                parameters = _parameters(guard, horizons, now) | {"ids": None, **bounds}
                faults.add(guard.table, await run(connection, RECORDS[statements.check], parameters, prepare=False))
            if bounds["last"] is None:
                break
            bounds["after"] = bounds["last"]
    return faults.findings()


def _parameters(guard: Guard, horizons: dict[str, datetime], now: datetime | None) -> dict[str, Any]:
    machine = guard.machine
    horizon = horizons.get(guard.records)
    return {
        "moves": [f"create {state}" for state in machine.initial]
        + [f"{source} {event} {target}" for source, event, target in machine.rows],
        "final": sorted(machine.final),
        "horizon": horizon,
        "horizon_id": None if horizon is None else first_id_at(horizon + CLOCK_SLACK),
        "slack": RECORD_TIME_SLACK,
        "sample": SAMPLE_SIZE,
        "now": now,
    }
