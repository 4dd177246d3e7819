"""Benchmark of the task queue against peers: drain, few slots, enqueue, pickup, held snapshots, other types, memory.

Run: `./dev bench tasks`. One embedded server in a temporary directory. Each paired round runs Interlock and then every
peer. Only ratios within one run are comparable; see README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.store.tasks import claim_pending_tasks
from machine import described

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from field import QUEUES, Field, Queue, load

from report import SETTINGS, Row, asked, head, line, run_in_scratch, turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from field import Workers

OURS = QUEUES["interlock"]
CONCURRENCY = 1500
SINGLY = 500
PICKUPS = 250
SLOTS = {1: None, 10: 1.2, 20: 1.2, 100: 1.5}  # the least ratio to PgQueuer
SHARE_OF_SLOTS = {1: 0.05, 10: 0.4, 20: 0.6}  # of the tasks, to finish in time
TRANSACTIONAL = Queue("interlock_transactional", "interlock", share=0.1)
PGQUEUER_SLOTS = Queue("pgqueuer_slots", "pgqueuer")
CLAIMS = 100
REST_S = 20.0  # after which processes are at rest


@dataclass(frozen=True, slots=True)
class Bench:
    """One run of the benchmark."""

    field: Field
    queues: tuple[Queue, ...]
    tasks: int
    rounds: int
    finished: int

    def _drained(
        self, queue: Queue, processes: int, *, pinned: bool = False, slots: int = CONCURRENCY
    ) -> tuple[float, float | None]:
        """Return the tasks per second and the processor time per task in microseconds."""
        tasks = max(int(self.tasks * queue.share * SHARE_OF_SLOTS.get(slots, 1.0)), 100)
        with self.field.database(queue) as database:
            queue.ask("bulk", url=self.field.url(database), tasks=tasks)
            self.field.calm(database)
            with self.field.workers(queue, database, processes, slots) as workers, ExitStack() as stack:
                if pinned:
                    stack.enter_context(self.field.pinned(database))
                before = self._used(workers)
                workers.await_handled(tasks)
                ended = self.field.await_settled(queue, database)
                after = self._used(workers)
                rate = tasks / (ended - workers.board.read()[1]) * 1e9
        return rate, (after - before) / tasks * 1e6 if before is not None and after is not None else None

    def _used(self, workers: Workers) -> float | None:
        theirs, servers = workers.cpu(), self.field.cpu()
        return None if theirs is None or servers is None else theirs + servers

    def drain(self) -> list[Row]:
        """Measure how fast one and two worker processes drain a queue of no-op tasks with the best setting."""
        rows = []
        for processes, ratios in ((1, {"pgqueuer": 2.0, "awa": 4.0}), (2, {"pgqueuer": 1.7, "awa": 3.0})):
            name = f"drain, {processes} process{'es' * (processes > 1)}"
            rate, cost = Row(name, "tasks/s", ratios=ratios), Row(f"{name}, processor time", "µs/task")
            for queue in turns(self.queues, self.rounds):
                speed, used = self._drained(queue, processes)
                rate.add(queue.name, speed)
                if used is not None:
                    cost.add(queue.name, used)
            rows += [rate, cost]
        return rows

    def slots(self) -> list[Row]:
        """Measure how fast one worker process with few slots drains a queue.

        PgQueuer runs with as many slots (`max_concurrent_tasks`), and without a limit in batches of as many tasks.
        """
        rows = []
        entrants = [OURS]
        if any(queue.name == "pgqueuer" for queue in self.queues):
            self.field.prepare(PGQUEUER_SLOTS)
            entrants += [PGQUEUER_SLOTS, QUEUES["pgqueuer"]]
        for slots, least in SLOTS.items():
            name = f"drain, {slots} slot{'s' * (slots > 1)}"
            samples: dict[str, list[float]] = {queue.name: [] for queue in entrants}
            costs: dict[str, list[float]] = {queue.name: [] for queue in entrants}
            for queue in turns(entrants, self.rounds):
                speed, used = self._drained(queue, 1, slots=slots)
                samples[queue.name].append(speed)
                costs[queue.name] += [] if used is None else [used]
            for peer, way, target in (
                (PGQUEUER_SLOTS, "", least),
                (QUEUES["pgqueuer"], ", PgQueuer without a limit", None),
            ):
                ratios = {} if target is None else {"pgqueuer": target}
                for kind, unit, found in (("", "tasks/s", samples), (", processor time", "µs/task", costs)):
                    both = {OURS.name: found[OURS.name], "pgqueuer": found.get(peer.name, [])}
                    kept = {queue: values for queue, values in both.items() if values}
                    rows.append(Row(f"{name}{way}{kind}", unit, kept, ratios if not kind else {}))
        return rows

    def transactional(self) -> list[Row]:
        """Measure a drain of tasks whose one INSERT commits with their outcome, with 20 slots."""
        self.field.prepare(TRANSACTIONAL)
        rate, cost = (
            Row("transactional tasks, 20 slots", "tasks/s", target="≥ 800"),
            Row("its processor time", "µs/task"),
        )
        for _ in range(self.rounds):
            speed, used = self._drained(TRANSACTIONAL, 1, slots=20)
            rate.add(OURS.name, speed)
            if used is not None:
                cost.add(OURS.name, used)
        return [rate, cost]

    def types(self) -> list[Row]:
        """Measure an empty claim beside pending tasks of another type, for a worker of one type and of fifty."""
        rows = []
        for pending in (0, self.finished):
            with self.field.database(OURS) as database:
                load(self.field, database, 0, pending)
                self.field.calm(database)
                for types in (1, 50):
                    took = asyncio.run(claim_times(self.field.url(database), types))
                    name = f"empty claim of {types} type{'s' * (types > 1)}, {pending:,} of another"
                    rows.append(Row(name, "ms", {OURS.name: [took]}, target="flat"))
        return rows

    def held(self) -> list[Row]:
        """Measure claims and the pickup after a drain during which another transaction held a snapshot open."""
        rows = []
        for tasks in (0, self.finished):
            with self.field.database(OURS) as database, self.field.pinned(database):
                url = self.field.url(database)
                with self.field.workers(OURS, database, 1, CONCURRENCY) as workers:
                    if tasks:
                        OURS.ask("bulk", url=url, tasks=tasks)
                        workers.await_handled(tasks)
                        self.field.await_settled(OURS, database)
                    OURS.ask("pickup", url=url, tasks=5, board=self.field.board)
                    took = OURS.ask("pickup", url=url, tasks=PICKUPS, board=self.field.board)
                commits = [max(commit, 0.0) for _, commit in took]
                found = {
                    "empty claim of any age": asyncio.run(claim_times(url, 1, "noop")),
                    "empty claim of recent tasks": asyncio.run(claim_times(url, 1, "noop", recent_s=1.0)),
                    "pickup from commit, p50": statistics.median(commits),
                }
                rows += [
                    Row(f"{name}, a snapshot held for {tasks:,} tasks", "ms", {OURS.name: [value]})
                    for name, value in found.items()
                ]
        return rows

    def connections(self) -> list[Row]:
        """Count the connections of two workers at rest, one of which leads."""
        row = Row("connections of two workers at rest, one of them the leader", "", target="≤ 7")
        with self.field.database(OURS) as database, self.field.workers(OURS, database, 2, 10) as workers:
            OURS.ask("bulk", url=self.field.url(database), tasks=100)
            workers.await_handled(100)
            time.sleep(REST_S)
            counts = []
            with self.field.connect("postgres") as connection:
                for _ in range(20):
                    time.sleep(0.1)
                    counts += connection.execute(
                        "select count(*) from pg_stat_activity where datname = %s and backend_type = 'client backend'",
                        [database],
                    ).fetchall()
            row.add(OURS.name, statistics.median(count for (count,) in counts))
        return [row]

    def enqueue(self) -> list[Row]:
        """Measure bulk and single enqueues."""
        bulk = Row("enqueue, bulk", "tasks/s", ratios={"pgqueuer": 2.0})
        singly = Row("enqueue, one by one", "tasks/s", target="≥ 1200")
        for queue in turns(self.queues, self.rounds):
            with self.field.database(queue) as database:
                url = self.field.url(database)
                bulk.add(queue.name, self.tasks / queue.ask("bulk", url=url, tasks=self.tasks))
                singly.add(queue.name, SINGLY / queue.ask("singly", url=url, tasks=SINGLY))
        return [bulk, singly]

    def pickup(self) -> list[Row]:
        """Measure how soon after its commit an idle worker starts a task."""
        middle = Row("pickup from commit, p50", "ms", target="≤ 2.5")
        late = Row("pickup from commit, p99", "ms", target="≤ 10")
        called = Row("pickup from the call, p50", "ms")
        for queue in turns(self.queues, 1):
            with self.field.database(queue) as database:
                url = self.field.url(database)
                with self.field.workers(queue, database, 1, CONCURRENCY) as workers:
                    queue.ask("pickup", url=url, tasks=5, board=self.field.board)
                    took = queue.ask("pickup", url=url, tasks=PICKUPS, board=self.field.board)
                    del workers
            # A handler may start before the enqueueing process receives the acknowledgement of its commit: no delay.
            since_commit = sorted(max(commit, 0.0) for _, commit in took)
            middle.add(queue.name, statistics.median(since_commit))
            late.add(queue.name, since_commit[int(len(since_commit) * 0.99)])
            called.add(queue.name, statistics.median(call for call, _ in took))
        return [middle, late, called]

    def pinned(self) -> list[Row]:
        """Measure a drain while another transaction holds a snapshot open."""
        row = Row("loss while a snapshot is held open", "%", target="≤ 25")
        for queue in turns(self.queues[:2], self.rounds):
            free, _ = self._drained(queue, 1)
            held, _ = self._drained(queue, 1, pinned=True)
            row.add(queue.name, (1 - held / free) * 100)
        return [row]

    def big(self) -> list[Row]:
        """Compare a drain of a part of a big table with one of a table that holds nothing else."""
        pending = max(self.finished // 5, self.tasks)
        row = Row(f"speed with {self.finished:,} finished, {pending:,} pending", "of that with none", target="≥ 0.8")
        for _ in range(self.rounds):
            row.add(OURS.name, self._part(self.finished, pending) / self._part(0, self.tasks))
        return [row]

    def _part(self, finished: int, pending: int) -> float:
        with self.field.database(OURS) as database:
            load(self.field, database, finished, pending + CONCURRENCY * 2)
            self.field.calm(database)
            with self.field.workers(OURS, database, 1, CONCURRENCY) as workers:
                workers.await_handled(self.tasks)
                handled, first, latest = workers.board.read()
                return handled / (latest - first) * 1e9

    def memory(self) -> list[Row]:
        """Measure the memory of a worker process at concurrency 1, and at high concurrency over many tasks."""
        rows = [Row("memory at concurrency 1, idle", "MB", target="< 80")]
        with self.field.database(OURS) as database, self.field.workers(OURS, database, 1, 1) as workers:
            time.sleep(2)
            rows[0].add(OURS.name, workers.memory())
            rows += self._memory_over(workers, database, self.tasks // 4, "at concurrency 1", target="< 80")
        with self.field.database(OURS) as database, self.field.workers(OURS, database, 1, CONCURRENCY) as workers:
            rows += self._memory_over(
                workers, database, self.finished, f"at concurrency {CONCURRENCY:,}", target="flat"
            )
        return rows

    def _memory_over(self, workers: Workers, database: str, tasks: int, name: str, *, target: str) -> list[Row]:
        rows = []
        OURS.ask("bulk", url=self.field.url(database), tasks=tasks)
        for part in (tasks // 10, tasks // 2, tasks):
            workers.await_handled(part)
            rows.append(
                Row(f"memory {name} after {part:,} tasks", "MB", {OURS.name: [workers.memory()]}, target=target)
            )
        return rows


async def claim_times(url: str, types: int, *names: str, recent_s: float | None = None) -> float:
    """Return the median of the milliseconds of a claim that finds nothing."""
    wanted = [*names, *(f"type {number}" for number in range(types - len(names)))]
    took = []
    async with connect(url, few_statements=True) as connection:
        for _ in range(CLAIMS):
            began = time.perf_counter()
            if await claim_pending_tasks(connection, actor="bench", types=wanted, limit=10, recent_s=recent_s):
                raise RuntimeError("a claim found a task")
            took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took)


MEASUREMENTS: dict[str, Callable[[Bench], list[Row]]] = {
    "drain": Bench.drain,
    "slots": Bench.slots,
    "transactional": Bench.transactional,
    "types": Bench.types,
    "held": Bench.held,
    "connections": Bench.connections,
    "enqueue": Bench.enqueue,
    "pickup": Bench.pickup,
    "pinned": Bench.pinned,
    "big": Bench.big,
    "memory": Bench.memory,
}


def chosen(given: argparse.Namespace) -> tuple[tuple[Queue, ...], list[str]]:
    """Return the queues to compare, and the names of requested ones that are not installed."""
    wanted = asked(given.peers, QUEUES)
    missing = [queue.name for queue in wanted if queue.version is None]
    return (OURS, *(queue for queue in wanted if queue.version is not None)), missing


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20_000, help="tasks of one run")
    parser.add_argument("--rounds", type=int, default=3, help="paired rounds of each measurement")
    parser.add_argument(
        "--only", action="append", choices=list(MEASUREMENTS), help="measure only this; can be repeated"
    )
    parser.add_argument("--peers", default="pgqueuer,awa", help=f"of {', '.join(list(QUEUES)[1:])}; '' for none")
    parser.add_argument(
        "--big", type=int, default=200_000, help="tasks in the big table and in the measurement of memory"
    )
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    return parser.parse_args()


def run(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure, print the table, and return all samples."""
    queues, missing = chosen(given)
    with EmbeddedServer(scratch / "server", settings=SETTINGS) as server, ExitStack() as stack:
        stack.callback(server.stop)  # stop() waits: the directory is removed next
        arena = Field(server, scratch)
        with arena.connect("postgres") as connection:
            about = f"{described()}, PostgreSQL {connection.info.parameter_status('server_version')}"
        commit = arena.commit_time()
        print(f"{about}, durable, a commit takes {commit:.2f} ms; {given.tasks:,} tasks, {given.rounds} rounds\n")
        settings = {queue.name: f"{queue.version}: {arena.prepare(queue)}" for queue in queues}
        for name, setting in settings.items():
            print(f"- {name} {setting}")
        for name in missing:
            print(f"- {name} is not installed and is skipped (pip install 'interlock[bench]')")
        print(head(queues), flush=True)
        bench = Bench(arena, queues, given.tasks, given.rounds, given.big)
        rows = []
        for name in given.only or MEASUREMENTS:
            for row in MEASUREMENTS[name](bench):
                rows.append(row)
                print(line(row, queues), flush=True)
    return {
        "machine": about,
        "commit_ms": commit,
        "settings": settings,
        "missing": missing,
        "rows": [asdict(row) for row in rows],
    }


def main() -> None:
    """Run in a temporary directory."""
    run_in_scratch(options(), run)


if __name__ == "__main__":
    main()
