"""Benchmark of the bytes of a drained task: stored and written to the log, against other queues, and what each is for.

Run: `./dev bench footprint`. One embedded server in a temporary directory. Each queue enqueues tasks in bulk and drains
them with one worker process. Stored bytes are counted right after the drain, with the row versions that vacuum has not
removed yet, and at rest, after `vacuum full`. The log (WAL) has the pages that are written for the first time after a
checkpoint in full; there is one checkpoint before the tasks are enqueued.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.postgres.embedded.server import EmbeddedServer
from machine import described

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from field import QUEUES, Field

from report import OURS, SETTINGS, Row, asked, head, line, run_in_scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg
    from field import Queue

CONCURRENCY = 1_500
SIZES = """
select schemas.nspname || '.' || relations.relname, relations.relkind::text, pg_relation_size(relations.oid)
from pg_class as relations
    join pg_namespace as schemas on schemas.oid = relations.relnamespace
where schemas.nspname not in ('pg_catalog', 'information_schema') and schemas.nspname not like 'pg_temp%'
    and relations.relkind in ('r', 'i', 't', 'm')
"""
TABLES = ("interlock.tasks", "interlock.audit_logs")
ROW_HEADER, ITEM_POINTER, ALIGNMENT = 23, 4, 8
# The columns of a plain task and of a record, by what they are for.
PURPOSES = {
    "interlock.tasks": {
        "id": ("id",),
        "times: due, made, changed, started, finished": (
            "run_at", "created_at", "updated_at", "started_at", "finished_at", "lease_expires_at",
        ),
        "fence, tries and crashes": ("attempt", "settled_attempt", "tries", "max_tries", "crashes"),
        "order of the claim": ("priority",),
        "counters and flags of steps, 0 in others": (
            "unresolved", "taken", "failed", "skipped_by_failure", "superseded", "advanced", "reused", "capped",
        ),
        "namespace and type": ("namespace", "type"),
        "state, and the event that led to it": ("state", "event"),
        "worker of the latest attempt": ("worker_id",),
        "input": ("input",),
    },
    "interlock.audit_logs": {
        "id of the task": ("task_id",),
        "id and time: order of the records": ("id", "recorded_at"),
        "fence": ("attempt",),
        "states and event": ("from_state", "to_state", "event"),
        "actor": ("actor",),
        "database role": ("database_role",),
    },
}  # fmt: skip
INDEXES = {
    "tasks_pkey": "primary key: claim, settle and reads by id",
    "tasks_claim": "order of the claim; free again when the tasks are claimed",
    "tasks_lease": "running tasks, for recovery; free again when they are settled",
    "audit_logs": "records of a task",
}


def wal(connection: psycopg.Connection[Any]) -> int:
    """Return the position in the log."""
    (position,) = connection.execute("select pg_current_wal_insert_lsn() - '0/0'").fetchone() or (0,)
    return int(position)


def sizes(connection: psycopg.Connection[Any]) -> dict[tuple[str, str], int]:
    """Return the bytes of each table and index."""
    return {(name, kind): size for name, kind, size in connection.execute(SIZES).fetchall()}


class Footprint:
    """The bytes of one queue after a drain."""

    def __init__(self, field: Field, queue: Queue, tasks: int) -> None:
        self.field = field
        self.queue = queue
        self.tasks = max(int(tasks * queue.share), 100)
        self.figures: dict[str, float] = {}
        self.drained: dict[tuple[str, str], int] = {}
        self.parts: list[tuple[str, str, float]] = []

    def measure(self) -> None:
        """Enqueue, drain, and count the bytes."""
        with self.field.database(self.queue) as database, self.field.connect(database) as connection:
            connection.execute("checkpoint")
            before, began = sum(sizes(connection).values()), wal(connection)
            self.queue.ask("bulk", url=self.field.url(database), tasks=self.tasks)
            enqueued = wal(connection)
            with self.field.workers(self.queue, database, 1, CONCURRENCY) as workers:
                workers.await_handled(self.tasks)
                self.field.await_settled(self.queue, database)
            drained = wal(connection)
            self.drained = sizes(connection)
            connection.execute("vacuum full")
            rest = sizes(connection)
            self.figures = {
                "stored after the drain": (sum(self.drained.values()) - before) / self.tasks,
                "stored at rest": (sum(rest.values()) - before) / self.tasks,
                "log, enqueue": (enqueued - began) / self.tasks,
                "log, claim and settle": (drained - enqueued) / self.tasks,
            }
            if self.queue.name == OURS:
                self.parts = [part for table in TABLES for part in self._rows(connection, table, rest)]
                self.parts += self._indexes(rest)

    def _rows(
        self, connection: psycopg.Connection[Any], table: str, rest: dict[tuple[str, str], int]
    ) -> list[tuple[str, str, float]]:
        """Return what the bytes of the rows of a table are for, per task."""
        columns = [
            name
            for (name,) in connection.execute(
                "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped",
                [table],
            ).fetchall()
        ]
        sums = ", ".join(f"coalesce(sum(pg_column_size({name})), 0)" for name in columns)
        (rows, *values) = connection.execute(f"select count(*), {sums} from {table}".encode()).fetchone() or (0,)  # noqa: S608 - our own names
        by_column = dict(zip(columns, (float(value) / self.tasks for value in values), strict=True))
        header = -(-(ROW_HEADER + -(-len(columns) // 8)) // ALIGNMENT) * ALIGNMENT
        found = [(table, "row headers and pointers", rows * (header + ITEM_POINTER) / self.tasks)]
        for purpose, names in PURPOSES[table].items():
            found.append((table, purpose, sum(by_column.pop(name) for name in names)))
        found.append((table, "other columns", sum(by_column.values())))
        total = sum(size for (name, kind), size in rest.items() if kind == "r" and name.startswith(table)) / self.tasks
        found.append((table, "alignment of the rows, and the ends of pages", total - sum(size for *_, size in found)))
        return [(name, purpose, size) for name, purpose, size in found if size >= 0.5]  # noqa: PLR2004 - rounds to 1

    def _indexes(self, rest: dict[tuple[str, str], int]) -> list[tuple[str, str, float]]:
        found = []
        for part, purpose in INDEXES.items():
            for moment, counted in (("after the drain", self.drained), ("at rest", rest)):
                size = sum(size for (name, kind), size in counted.items() if kind == "i" and part in name) / self.tasks
                found.append((f"index {part}, {moment}", purpose, size))
        return found


def table_of(parts: Sequence[tuple[str, str, float]]) -> str:
    """Format what the bytes are for."""
    lines = ["\n| bytes of a task | for | |\n| --- | --- | ---: |"]
    lines += [f"| {place} | {purpose} | {size:.0f} |" for place, purpose, size in parts]
    return "\n".join(lines)


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=50_000, help="tasks of each queue")
    parser.add_argument("--peers", default="pgqueuer", help=f"of {', '.join(list(QUEUES)[1:])}; '' for none")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def run(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure all queues, and print the tables."""
    wanted = asked(given.peers, QUEUES)
    missing = [queue.name for queue in wanted if queue.version is None]
    queues = (QUEUES[OURS], *(queue for queue in wanted if queue.version is not None))
    with EmbeddedServer(scratch / "server", settings=SETTINGS) as server, ExitStack() as stack:
        stack.callback(server.stop)  # stop() waits: the directory is removed next
        field = Field(server, scratch)
        print(f"{described()}; {given.tasks:,} tasks\n")
        for queue in queues:
            print(f"- {queue.name} {queue.version}: {field.prepare(queue)}")
        for name in missing:
            print(f"- {name} is not installed and is skipped (pip install 'interlock[bench]')")
        rows: dict[str, Row] = {}
        parts: list[tuple[str, str, float]] = []
        for queue in queues:
            footprint = Footprint(field, queue, given.tasks)
            footprint.measure()
            parts += footprint.parts
            for name, value in footprint.figures.items():
                rows.setdefault(name, Row(name, "bytes/task")).add(queue.name, value)
        print(head(queues))
        for row in rows.values():
            print(line(row, queues))
        print(table_of(parts), flush=True)
    return {"rows": [asdict(row) for row in rows.values()], "parts": parts, "missing": missing}


def main() -> None:
    """Run in a temporary directory."""
    run_in_scratch(options(), run)


if __name__ == "__main__":
    main()
