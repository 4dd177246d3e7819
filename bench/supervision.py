"""Benchmark of supervision: how fast processes follow their rows, and one process per row under random kills.

Run: `./dev bench supervision`. One embedded server in a temporary directory. Real supervisors and workers are killed
with SIGKILL and frozen for longer than their leases. Needs /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.migrate import migrate
from machine import described

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from pool_support import Event, Fleet, fleet_at, kill, pooling

if TYPE_CHECKING:
    from collections.abc import Awaitable

TESTS = Path(__file__).parent.parent / "tests" / "helpers"
POOL_SETTINGS = ("lease=1.0", "max_restarts=1000", "stable_after=0.2", "max_restart_backoff=0.5")
FREEZE_S = 1.5  # longer than that lease


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="pauses and resumes to measure")
    parser.add_argument("--seconds", type=float, default=60, help="duration of the random faults")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--supervisors", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random faults")
    return parser.parse_args()


async def timed(work: Awaitable[object]) -> float:
    """Return the seconds that an awaitable takes."""
    began = time.monotonic()
    await work
    return time.monotonic() - began


async def measure(fleet: Fleet, rounds: int) -> None:
    """Measure the process of one worker with the settings of production."""
    worker = await fleet.add()
    async with pooling(fleet.url, poll_interval=0.5, lease=10.0, restart_backoff=0.5):
        print(f"start to first heartbeat    {await timed(fleet.alive(worker)):6.2f} s")

        async def obeyed(event: Event) -> None:
            await fleet.move(worker, event)
            await fleet.obeys(worker, paused=event is Event.PAUSE)

        times = [await timed(obeyed(event)) for _ in range(rounds) for event in (Event.PAUSE, Event.RESUME)]
        print(f"pause or resume to obeyed   {statistics.median(times):6.3f} s, at most {max(times):.3f} s")
        kill(fleet.row(worker)["pid"])
        print(
            f"kill -9 to a new heartbeat  {await timed(fleet.alive(worker, 2)):6.2f} s, of which 0.5 s are the backoff"
        )
        await fleet.move(worker, Event.TERMINATE)
        print(f"terminate to gone           {await timed(fleet.seen(worker, lambda row: row['pid'] is None)):6.2f} s")


def processes_of(rows: list[str]) -> dict[str, list[int]]:
    """Return the live processes of each of these rows."""
    found: dict[str, list[int]] = defaultdict(list)
    for place in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (place / "cmdline").read_text(errors="replace").split("\0")
            state = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue
        if "--row" in arguments and arguments[arguments.index("--row") + 1] in rows and state != "Z":
            found[arguments[arguments.index("--row") + 1]].append(int(place.name))
    return found


class Faults:
    """Supervisors and workers, and the faults injected into them."""

    def __init__(self, fleet: Fleet, given: argparse.Namespace) -> None:
        self._fleet = fleet
        self._given = given
        self._random = random.Random(given.seed)  # noqa: S311 - not for security
        self._supervisors: list[subprocess.Popen[bytes]] = []
        self.counts: Counter[str] = Counter()

    async def run(self) -> bool:
        """Inject faults for a while; return True when no task was lost and no row ever had two processes."""
        rows = [await self._fleet.add(concurrency=2) for _ in range(self._given.workers)]
        self._supervisors = [self._supervise() for _ in range(self._given.supervisors)]
        try:
            tasks = await self._inject_faults(rows)
            began = time.monotonic()
            for task in tasks:
                await self._fleet.state_of(task, "done")
            print(f"{len(tasks)} tasks were done {time.monotonic() - began:.1f} s after the last fault")
            return await self._is_tidy(rows)
        finally:
            for supervisor in self._supervisors:
                supervisor.kill()
                supervisor.wait()

    async def _inject_faults(self, rows: list[str]) -> list[object]:
        end, tasks = time.monotonic() + self._given.seconds, list[object]()
        while time.monotonic() < end:
            tasks.append(await self._fleet.enqueue("nap", seconds=0.3))
            await asyncio.sleep(self._random.uniform(0.2, 1.2))
            alive = processes_of(rows)
            self.counts["rows with two processes"] += sum(len(found) > 1 for found in alive.values())
            what = self._random.choice(("kill supervisor", "freeze supervisor", "kill worker", "nothing"))
            self.counts[what] += 1
            await self._do(what, [pid for found in alive.values() for pid in found])
        return tasks

    async def _do(self, what: str, workers: list[int]) -> None:
        place = self._random.randrange(len(self._supervisors))
        supervisor = self._supervisors[place]
        if what == "kill supervisor":
            supervisor.kill()
            supervisor.wait()
            self._supervisors[place] = self._supervise()
        elif what == "freeze supervisor":
            os.kill(supervisor.pid, signal.SIGSTOP)
            await asyncio.sleep(FREEZE_S)
            os.kill(supervisor.pid, signal.SIGCONT)
        elif what == "kill worker" and workers:
            kill(self._random.choice(workers))

    async def _is_tidy(self, rows: list[str]) -> bool:
        for row in rows:
            await self._fleet.seen(row, lambda seen: seen["pid"] is not None)
        alive = processes_of(rows)
        return not self.counts["rows with two processes"] and all(
            alive[row] == [self._fleet.row(row)["pid"]] for row in rows
        )

    def _supervise(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(TESTS / "supervisor_process.py"), self._fleet.url, *POOL_SETTINGS]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)  # noqa: S603 - our own


async def play(given: argparse.Namespace, url: str) -> bool:
    """Measure, then inject faults."""
    async with connect(url) as connection:
        await migrate(connection)
    with fleet_at(url) as fleet:
        await measure(fleet, given.rounds)
        faults = Faults(fleet, given)
        fine = await faults.run()
        print(", ".join(f"{what}: {count}" for what, count in sorted(faults.counts.items())))
        return fine


def main() -> None:
    """Run on a dedicated server."""
    given = options()
    print(described())
    with tempfile.TemporaryDirectory(prefix="il-") as place:
        Path(place).chmod(0o755)
        server = EmbeddedServer(Path(place) / "db")
        server.acquire()
        try:
            fine = asyncio.run(play(given, server.url()))
        finally:
            server.stop()
    print("every row has its one process, and no task was lost" if fine else "something went wrong")
    sys.exit(not fine)


if __name__ == "__main__":
    main()
