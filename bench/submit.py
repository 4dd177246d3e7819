"""Benchmark of submitting work: concurrent and single enqueues, jobs one by one and in lots, REST, due schedules.

Run: `./dev bench submit`. One durable embedded server in a temporary directory; nothing runs the tasks. Each paired
round measures Interlock and then what it is compared with. Only ratios within one run are comparable; see README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from interlock import Interlock
from interlock.config import Config
from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.store.schedules import Schedule, put_schedules
from interlock.telemetry import configure_logging
from interlock.worker.maintenance.leader import SchedulesDuty
from machine import described

sys.path.insert(0, str(Path(__file__).parent / "peers"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from field import QUEUES, Entrant, Field, Queue

from api import compare
from api_support import supervisor_at
from report import SETTINGS, Row, head, line, run_in_scratch, turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

OURS = QUEUES["interlock"]
PGQUEUER = QUEUES["pgqueuer"]
ALONE = Entrant("alone", "interlock")  # each call with a connection and a commit of its own
DBOS = Queue("dbos", "dbos")
CALLERS = (1, 8, 50, 200)
LOT = 1_000  # jobs of one submit_many


class DbosClient(Queue):
    """DBOS, whose driver of the workflow benchmark makes the schema."""

    __slots__ = ()
    script = "flows"


@dataclass(frozen=True, slots=True)
class Bench:
    """One run of the benchmark."""

    field: Field
    rounds: int
    seconds: float
    schedules: int

    def concurrent(self) -> list[Row]:
        """Measure `enqueue` by some callers in one process, against a commit for each call."""
        rows = []
        for callers in CALLERS:
            row = Row(f"enqueue, {callers} concurrent", "tasks/s", ratios={"alone": 8.0} if callers == 50 else {})  # noqa: PLR2004 - the goal is for fifty
            for way in turns((OURS, ALONE), self.rounds):
                with self.field.database(OURS) as database:
                    row.add(way.name, asyncio.run(self._enqueue(database, callers, alone=way is ALONE)))
            rows.append(row)
        return rows

    async def _enqueue(self, database: str, callers: int, *, alone: bool) -> float:
        async with opened(self.field.url(database)) as app:
            noop = app.tasks["noop"]

            async def enqueue() -> None:
                if not alone:
                    await noop.enqueue()
                    return
                async with app.connection() as connection:
                    await noop.enqueue_with(connection)

            return await calls_per_second(enqueue, callers, self.seconds)

    def singly(self) -> list[Row]:
        """Measure enqueues one by one, against PgQueuer."""
        row = Row("enqueue, one by one", "tasks/s", ratios={"pgqueuer": 1.0})
        for queue in turns((OURS, PGQUEUER), self.rounds * 2):
            with self.field.database(queue) as database:
                row.add(queue.name, 300 / queue.ask("singly", url=self.field.url(database), tasks=300))
        return [row]

    def submit(self) -> list[Row]:
        """Measure `submit` of jobs of three steps, against DBOS."""
        row = Row("submit, 3 steps", "jobs/s", ratios={"dbos": 1.5})
        dbos = DbosClient("dbos", "dbos")
        for entrant in turns((OURS, dbos), self.rounds):
            with self.field.database(entrant) as database:
                url = self.field.url(database)
                measure = self._submit(url) if entrant is OURS else self._enqueue_in_dbos(url)
                row.add(entrant.name, asyncio.run(measure))
        return [row]

    async def _submit(self, url: str) -> float:
        async with opened(url) as app:
            return await calls_per_second(lambda: app.submit("three"), 1, self.seconds)

    async def _enqueue_in_dbos(self, url: str) -> float:
        client = importlib.import_module("dbos").DBOSClient(system_database_url=url)

        async def enqueue() -> None:
            client.enqueue({"workflow_name": "chain", "queue_name": "flows"})

        try:
            return await calls_per_second(enqueue, 1, self.seconds)
        finally:
            client.destroy()

    def many(self) -> list[Row]:
        """Measure `submit_many` of jobs of three steps, in lots of a thousand."""
        row = Row(f"submit_many, 3 steps, lots of {LOT:,}", "jobs/s", target="≥ 4,000")
        for _ in range(self.rounds):
            with self.field.database(OURS) as database:
                row.add(OURS.name, LOT * asyncio.run(self._submit_many(self.field.url(database))))
        return [row]

    async def _submit_many(self, url: str) -> float:
        jobs: Any = [{"workflow": "three", "input": {"number": number}} for number in range(LOT)]
        async with opened(url) as app:
            return await calls_per_second(lambda: app.submit_many(jobs), 1, self.seconds * 2)

    def rest(self) -> list[Row]:
        """Measure the share of a bare FastAPI app that inserts a row: an enqueue over REST, and one with a key."""
        rows = {
            "POST": Row("POST /api/tasks", "of a bare insert", target="≥ 0.65"),
            "POST with a key": Row("POST /api/tasks with a key", "of a bare insert", target="≥ 0.5"),
        }
        given = argparse.Namespace(clients=50, slices=self.rounds, seconds=self.seconds * 30)
        with self.field.database(OURS) as database:
            shares = asyncio.run(self._shares(given, self.field.url(database)))
        for kind, (ours, bare) in shares.items():
            if kind in rows:
                rows[kind].add(OURS.name, ours / bare)
        return list(rows.values())

    async def _shares(self, given: argparse.Namespace, url: str) -> dict[str, tuple[float, float]]:
        async with opened(url) as app:
            await app.tasks["noop"].enqueue()
        with supervisor_at(url) as (_, address, said):
            limits = httpx.Limits(max_connections=given.clients, max_keepalive_connections=given.clients)
            async with httpx.AsyncClient(base_url=address, headers=said.headers, limits=limits, timeout=30) as client:
                return await compare(given, url, client)

    def due(self) -> list[Row]:
        """Measure how long schedules take that are due at once."""
        row = Row(f"{self.schedules:,} schedules due at once", "s", target="< 1")
        for _ in range(self.rounds):
            with self.field.database(OURS) as database:
                row.add(OURS.name, asyncio.run(self._fire(self.field.url(database))))
        return [row]

    async def _fire(self, url: str) -> float:
        due = [Schedule(f"schedule {n}", "noop", cron="* * * * *") for n in range(self.schedules)]
        async with connect(url) as connection:
            await put_schedules(connection, due, now=datetime.now(UTC) - timedelta(minutes=1))
            await connection.execute("update interlock.schedules set next_at = now() - interval '1 second'")
            duty = SchedulesDuty("leader")
            began = time.perf_counter()
            while await duty.run_once(connection) == 0:
                pass
            return time.perf_counter() - began


def opened(url: str) -> Interlock:
    """Make an app with a task and a workflow of three steps."""
    app = Interlock(config=Config(database_url=url))

    @app.task
    async def noop() -> None: ...

    three = app.workflow("three")

    @three.step
    async def first() -> None: ...

    @three.step(after=[first])
    async def second() -> None: ...

    @three.step(after=[second])
    async def third() -> None: ...

    del third
    return app


async def calls_per_second(call: Callable[[], Awaitable[object]], callers: int, seconds: float) -> float:
    """Call over and over from some callers at once, after one warm-up each; return the calls a second."""
    await asyncio.gather(*(call() for _ in range(callers)))
    began = time.perf_counter()
    until = began + seconds

    async def repeat() -> int:
        calls = 0
        while time.perf_counter() < until:
            await call()
            calls += 1
        return calls

    calls = sum(await asyncio.gather(*(repeat() for _ in range(callers))))
    return calls / (time.perf_counter() - began)


MEASUREMENTS: dict[str, Callable[[Bench], list[Row]]] = {
    "concurrent": Bench.concurrent,
    "singly": Bench.singly,
    "submit": Bench.submit,
    "many": Bench.many,
    "rest": Bench.rest,
    "due": Bench.due,
}
NEEDS = {"singly": PGQUEUER, "submit": DBOS}  # measurements that are skipped without a peer


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="paired rounds of each measurement")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each sample")
    parser.add_argument("--schedules", type=int, default=5_000, help="that are due at once")
    parser.add_argument(
        "--only", action="append", choices=list(MEASUREMENTS), help="measure only this; can be repeated"
    )
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    return parser.parse_args()


def run(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure, print the table, and return all samples."""
    configure_logging("warning")
    with EmbeddedServer(scratch / "server", settings=SETTINGS) as server, ExitStack() as stack:
        stack.callback(server.stop)  # stop() waits: the directory is removed next
        arena = Field(server, scratch)
        commit = arena.commit_time()
        print(f"{described()}, durable, a commit takes {commit:.2f} ms; {given.rounds} rounds\n")
        wanted = given.only or list(MEASUREMENTS)
        missing = [name for name in wanted if name in NEEDS and NEEDS[name].version is None]
        for name in missing:
            print(f"- {name} is skipped: {NEEDS[name].name} is not installed (pip install 'interlock[bench]')")
        arena.prepare(OURS)
        for name in wanted:
            if name in NEEDS and name not in missing:
                arena.prepare(PGQUEUER if name == "singly" else DbosClient("dbos", "dbos"))
        bench = Bench(arena, given.rounds, given.seconds, given.schedules)
        entrants = (OURS, ALONE, PGQUEUER, DBOS)
        print(head(entrants), flush=True)
        rows = []
        for name in wanted:
            if name not in missing:
                for row in MEASUREMENTS[name](bench):
                    rows.append(row)
                    print(line(row, entrants), flush=True)
    return {"machine": described(), "commit_ms": commit, "missing": missing, "rows": [asdict(row) for row in rows]}


def main() -> None:
    """Run in a temporary directory."""
    run_in_scratch(options(), run)


if __name__ == "__main__":
    main()
