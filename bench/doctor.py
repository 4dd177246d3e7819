"""Benchmark of `interlock doctor`: a healthy database with a million tasks, examined quickly and fully.

Run: `./dev bench doctor`. One embedded server in a temporary directory. The tasks are made by legal moves, with the
guards on, so that each has its records: create, claim, succeed. One in a hundred is left pending. Exits with 1 when
something is found in the healthy database, or a planted corruption is not.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.migrate import migrate
from interlock.store.doctor import examine
from machine import described

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from doctor_support import plant

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

BATCH = 50_000
INSERT = "insert into interlock.tasks (type, namespace) select 'add', 'idle' from generate_series(1, %s)"
CLAIM = """
update interlock.tasks
set state = 'running', event = 'claim', attempt = 1, tries = 1, worker_id = 'w', started_at = now(),
    lease_expires_at = now() + interval '1 hour', updated_at = clock_timestamp()
where id = any (array(
    select id from interlock.tasks where state = 'pending' and limit_keys is null order by id desc limit %s
))
"""
SETTLE = """
update interlock.tasks
set state = 'done', event = 'succeed', settled_attempt = 1, lease_expires_at = null, finished_at = now(),
    updated_at = clock_timestamp()
where lease_expires_at is not null
"""


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    return parser.parse_args()


async def fill(connection: Connection, tasks: int) -> None:
    """Make tasks in batches by legal moves."""
    for first in range(0, tasks, BATCH):
        count = min(BATCH, tasks - first)
        await connection.execute(INSERT, [count])
        await connection.execute(CLAIM, [count - count // 100])
        await connection.execute(SETTLE)
    await connection.execute("vacuum (analyze) interlock.tasks")
    await connection.execute("vacuum (analyze) interlock.audit_logs")


async def measure(url: str, tasks: int) -> int:
    """Fill a database, examine it, plant a corruption and examine it again; return the number of faults."""
    faults = 0
    async with connect(url) as connection:
        await migrate(connection)
        began = time.monotonic()
        await fill(connection, tasks)
        (row,) = await (await connection.execute("select count(*) as records from interlock.audit_logs")).fetchall()
        print(f"{tasks:,} tasks with {row['records']:,} records made in {time.monotonic() - began:.0f} s")
        for full in (False, True, False, True):
            report = await examine(connection, full=full)
            # the pending tasks have no worker here, which is found rightly
            found = [each for each in report.findings if each.code not in {"workers_missing", "namespace_unserved"}]
            print(f"{'full' if full else 'quick'}: {report.duration_s:.2f} s, {len(found)} findings")
            for finding in found:
                print(f"  {finding.code}: {finding.message}")
            faults += len(found)
        await plant(
            connection,
            "update interlock.tasks set state = 'error' where id = (select id from interlock.tasks "
            "where state = 'done' limit 1)",
            {},
        )
        report = await examine(connection, full=True)
        has_found = "state_unrecorded" in {finding.code for finding in report.findings}
        print(f"one task of {tasks:,} changed past the guards: {'found' if has_found else 'NOT FOUND'}")
        return faults + (not has_found)


def main() -> int:
    """Run the benchmark."""
    arguments = options()
    print(described())
    with tempfile.TemporaryDirectory(prefix="interlock-bench-") as place:
        Path(place).chmod(0o711)  # as root, the server runs with another account
        server = EmbeddedServer(Path(place) / "db")
        server.acquire()
        try:
            return int(asyncio.run(measure(server.url("postgres"), arguments.tasks)) > 0)
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
