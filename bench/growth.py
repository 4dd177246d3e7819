"""Benchmark of what grows: how long operations take while a table grows from a thousand rows to a million.

Run: `./dev bench growth`. One embedded server in a temporary directory. Each table of the output grows one thing: ended
tasks, pending ones, pending ones of another type, namespaces, workers, tasks that a limit holds. Cells are
milliseconds, the shortest of several calls over one connection, which other processes of the machine disturb least. The
last column is the exponent e of the best fit of time = c · size^e from 10,000 rows on, where bounded reads have reached
their bound: 0 does not grow, 1 grows in proportion. Rows are loaded with the guards disabled; what is measured runs
with them.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.lifecycle import TaskRowEvent
from interlock.model.options import NewTask
from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.migrate import migrate
from interlock.store.enqueue import enqueue_task
from interlock.store.limits import admit_limited_tasks
from interlock.store.retention import Retention, delete_ended_tasks, first_id_at
from interlock.store.stats import read_overview
from interlock.store.task_admin import TaskFilter, find_task_page
from interlock.store.tasks import Outcome, claim_pending_tasks, settle_running_tasks
from machine import described
from report import SETTINGS, run_in_scratch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock.postgres.connection import Connection

SIZES = (1_000, 10_000, 100_000, 1_000_000)
CALLS = 7
BATCH = 100
FIRST_FITTED = 10_000
GROWS = 0.15  # an exponent from which on a cost grows
LOADED = datetime.now(UTC) - timedelta(days=30)  # creation of the ended rows: before all that is measured
MADE = "lpad(to_hex((extract(epoch from now()) * 1000)::bigint - 2592000000 + n / 100), 12, '0')"
OLD_ID = f"({MADE} || '70008000' || lpad(to_hex(n), 12, '0'))::uuid"
# Statements that add the rows from `above` to `upto` of each thing that grows.
FILLS = {
    "ended tasks": (
        "insert into interlock.tasks (id, created_at, type, state, event, attempt, tries, settled_attempt, worker_id,"  # noqa: S608 - our own texts
        f" started_at, finished_at) select {OLD_ID}, now() - interval '30 days', 'old',"
        " case when n % 1000 = 0 then 'error' else 'done' end, case when n % 1000 = 0 then 'fail' else 'succeed' end,"
        " 1, 1, 1, 'loader', now(), now() from generate_series({above} + 1, {upto}) as n"
    ),
    "pending tasks": "insert into interlock.tasks (type) select 'mine' from generate_series({above} + 1, {upto})",
    "pending tasks of another type": (
        "insert into interlock.tasks (type) select 'other' from generate_series({above} + 1, {upto})"
    ),
    "namespaces with a pending task": (
        "insert into interlock.tasks (type, namespace) select 'mine', 'space-' || n"
        " from generate_series({above} + 1, {upto}) as n"
    ),
    "workers": (
        "insert into interlock.workers (id, status, event, namespaces, types, seen_until)"
        " select 'worker-' || n, case when n % 1000 = 0 then 'RUNNING' else 'COMPLETED' end, 'start', '{{default}}',"
        " '{{mine}}', now() + interval '1 hour' from generate_series({above} + 1, {upto}) as n"
    ),
    "tasks held by a limit": (
        "insert into interlock.tasks (type, state, held_by, reason, limit_keys)"
        " select 'mine', 'waiting', 'limit', 'limit full', array['full'] from generate_series({above} + 1, {upto})"
    ),
}
MEASURED = ("enqueue", "claim 100", "empty claim", "settle 100", "list", "status", "admission", "retention, 100 tasks")


class Growth:
    """The operations on one database, and how long each call took."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.took: dict[str, list[float]] = {}

    async def timed(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Call and note the milliseconds."""
        began = time.perf_counter()
        found = await call()
        self.took.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
        return found

    async def measure(self) -> dict[str, float]:
        """Run each operation several times; return the shortest calls in milliseconds."""
        self.took = {}
        for _ in range(CALLS):
            await self._claims()
            await self._reads()
            await self._admission()
            await self._retention()
        return {name: min(took) for name, took in self.took.items()}

    async def _claims(self) -> None:
        """Enqueue, claim and settle tasks of a priority above those that were loaded, as a backlog has them."""
        task = NewTask("mine", {}, priority=1)
        await self.timed("enqueue", lambda: enqueue_task(self.connection, task, actor="bench"))
        for _ in range(BATCH - 1):
            await enqueue_task(self.connection, task, actor="bench")

        async def claim(type_: str) -> Any:
            return await claim_pending_tasks(self.connection, actor="bench", types=[type_], limit=BATCH)

        claimed = await self.timed("claim 100", lambda: claim("mine"))
        await self.timed("empty claim", lambda: claim("none"))
        outcomes = [Outcome(found.id, found.attempt, TaskRowEvent.SUCCEED) for found in claimed]
        await self.timed("settle 100", lambda: settle_running_tasks(self.connection, outcomes, actor="bench"))

    async def _reads(self) -> None:
        await self.timed("list", lambda: find_task_page(self.connection, TaskFilter(type="none"), limit=20))
        await self.timed("status", lambda: read_overview(self.connection))

    async def _admission(self) -> None:
        """Admit one task of a limit that has room, beside those of a limit that has none."""
        await self.connection.execute(
            "insert into interlock.tasks (type, state, held_by, reason, limit_keys)"
            " values ('limited', 'waiting', 'limit', 'new', array['open'])"
        )
        await self.timed("admission", lambda: admit_limited_tasks(self.connection, actor="bench"))

    async def _retention(self) -> None:
        """Delete a batch of tasks, older than those that were loaded."""
        await self.connection.execute("alter table interlock.tasks disable trigger user")
        await self.connection.execute(
            "insert into interlock.tasks (id, type, state, event, finished_at)"
            " select (lpad(to_hex(n), 12, '0') || '70008000000000000000')::uuid, 'gone', 'done', 'succeed',"
            " now() - interval '60 days' from generate_series(1, 100) as n"
        )
        await restore_guards(self.connection)
        await self.timed(
            "retention, 100 tasks",
            lambda: delete_ended_tasks(self.connection, Retention(), before=first_id_at(LOADED - timedelta(days=1))),
        )


GUARDS = "select tgname, tgenabled from pg_trigger where tgrelid = 'interlock.tasks'::regclass and not tgisinternal"


async def restore_guards(connection: Connection) -> None:
    """Enable all triggers of tasks as the schema does: those that guard and record always, the others normally."""
    for row in await (await connection.execute(GUARDS)).fetchall():
        how = "enable" if str(row["tgname"]).startswith("notify") else "enable always"
        await connection.execute(f"alter table interlock.tasks {how} trigger {row['tgname']}".encode())


async def grow(url: str, thing: str, sizes: list[int]) -> dict[str, list[float]]:
    """Return the milliseconds of each operation for each size."""
    found: dict[str, list[float]] = {name: [] for name in MEASURED}
    async with connect(url) as connection:
        await migrate(connection)
        await connection.execute(
            "insert into interlock.limits (key, max_running) values ('full', 1), ('open', 1000000)"
        )
        await connection.execute("alter table interlock.workers disable trigger user")
        await connection.execute("insert into interlock.tasks (type, limit_keys) values ('mine', array['full'])")
        above = 0
        for size in sizes:
            await connection.execute("alter table interlock.tasks disable trigger user")
            await connection.execute(FILLS[thing].format(above=above, upto=size).encode())
            await restore_guards(connection)
            await connection.execute("vacuum analyze")
            await connection.execute("checkpoint")
            above = size
            for name, took in (await Growth(connection).measure()).items():
                found[name].append(took)
    return found


def exponent(sizes: list[int], took: list[float]) -> float:
    """Return e of the best fit of time = c · size^e."""
    points = [(math.log(size), math.log(each)) for size, each in zip(sizes, took, strict=True) if size >= FIRST_FITTED]
    return statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else 0.0


def print_table(thing: str, sizes: list[int], found: dict[str, list[float]]) -> None:
    """Print one table; a cost that grows is marked."""
    print(f"\n| {thing}, ms | " + " | ".join(f"{size:,}" for size in sizes) + " | exponent |")
    print("| --- |" + " ---: |" * (len(sizes) + 1))
    for name, took in found.items():
        slope = exponent(sizes, took)
        mark = " grows" if slope >= GROWS else ""
        print(f"| {name} | " + " | ".join(f"{each:.2f}" for each in took) + f" | {slope:.2f}{mark} |", flush=True)


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(FILLS), help="grow only this; can be repeated")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="the largest size")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def run(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Grow one thing after the other, each in a database of its own."""
    sizes = [size for size in SIZES if size <= given.largest]
    tables: dict[str, Any] = {}
    with EmbeddedServer(scratch / "server", settings=SETTINGS) as server, ExitStack() as stack:
        stack.callback(server.stop)
        print(f"{described()}; the shortest of {CALLS} calls")
        for number, thing in enumerate(given.only or FILLS):
            print(f"\r  {thing}", end="\r", file=sys.stderr, flush=True)
            tables[thing] = asyncio.run(_in_new_database(server, f"growth_{number}", thing, sizes))
            print_table(thing, sizes, tables[thing])
    return {"sizes": sizes, "tables": tables}


async def _in_new_database(server: EmbeddedServer, name: str, thing: str, sizes: list[int]) -> dict[str, list[float]]:
    async with connect(server.url("postgres")) as admin:
        await admin.execute(f"create database {name}".encode())
        try:
            return await grow(server.url(name), thing, sizes)
        finally:
            await admin.execute(f"drop database {name} with (force)".encode())


def main() -> None:
    """Run in a temporary directory."""
    run_in_scratch(options(), run)


if __name__ == "__main__":
    main()
