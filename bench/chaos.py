"""Chaos run: workflows while workers and orchestrators are killed at random; checks that no result is lost.

Run: `./dev bench chaos`. One durable embedded server in a temporary directory. Real processes are killed with SIGKILL,
frozen for longer than their leases, and disconnected from the database. See docs/chaos.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.migrate import migrate
from machine import described

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from chaos_support import Chaos

if TYPE_CHECKING:
    from collections import Counter

    from chaos_support import Findings

SETTINGS = {"shared_buffers": "256MB", "max_wal_size": "4GB"}
HOUR_S = 3600.0
FAULTS = ("killed workers", "killed orchestrators", "cut connections", "frozen", "repeated messages")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="total number of steps, in mixed workflows")
    parser.add_argument("--seconds", type=float, default=0.7, help="seconds between two injected faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random faults")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--orchestrators", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=50, help="slots of a worker")
    parser.add_argument("--within", type=float, default=4 * HOUR_S, help="seconds after which the run fails")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--logs", type=Path, help="keep the logs of the processes in this directory")
    return parser.parse_args()


def told(line: str) -> None:
    """Show the progress."""
    print(f"\r  {line:100}", end="", file=sys.stderr, flush=True)


async def play(given: argparse.Namespace, url: str, logs: Path) -> tuple[Findings, Counter[str]]:
    """Migrate the database and run the workflows with faults."""
    async with connect(url) as connection:
        await migrate(connection)
    chaos = Chaos(
        url,
        logs,
        seed=given.seed,
        workers=given.workers,
        orchestrators=given.orchestrators,
        concurrency=given.concurrency,
        told=told,
    )
    found = await chaos.run(given.steps, every=given.seconds, within=given.within)
    told("")
    return found, chaos.counts


def report(found: Findings, counts: Counter[str], seconds: float) -> None:
    """Print the injected faults and the findings."""
    lost = len(found.missing) + len(found.wrong)
    print(f"\n\n{found.steps:,} steps of {found.jobs:,} jobs in {seconds:,.0f} s")
    print(f"- injected faults: {', '.join(f'{counts[name]:,} {name}' for name in FAULTS)}")
    print(f"- expired leases that were recovered: {counts['recoveries']:,}")
    print(f"- attempts: {counts['attempts']:,}, of which {counts['recoveries']:,} were lost")
    print(f"- late outcomes that the fence refused: {counts['lost outcomes refused']:,}")
    print(f"- duplicates suppressed: {counts['repeated messages']:,} repeated messages without effect")
    print(f"- processes that did not stop on SIGTERM: {counts['hung']:,}")
    print(f"- jobs that ended exactly once: {found.jobs - lost - len(found.ends):,}")
    print(f"- lost: {lost:,}")
    for fault in found.faults:
        print(f"  ! {fault}")


def run(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run on a dedicated server."""
    logs = given.logs or scratch
    logs.mkdir(parents=True, exist_ok=True)
    print(
        f"{described()}; {given.steps:,} steps, {given.workers} workers, {given.orchestrators} orchestrators, "
        f"a fault every {given.seconds:g} s, seed {given.seed}"
    )
    with EmbeddedServer(scratch / "server", settings=SETTINGS) as server:
        began = time.monotonic()
        try:
            found, counts = asyncio.run(play(given, server.url("postgres"), logs))
        finally:
            server.stop()
        seconds = time.monotonic() - began
    report(found, counts, seconds)
    return {"seconds": seconds, "jobs": found.jobs, "steps": found.steps, "faults": found.faults, "counts": counts}


def main() -> None:
    """Run in a temporary directory; exit with 1 if a check failed."""
    given = options()
    with tempfile.TemporaryDirectory(prefix="interlock-bench-", ignore_cleanup_errors=True) as scratch:
        Path(scratch).chmod(0o755)  # the server may run as another user
        found = run(given, Path(scratch))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(1 if found["faults"] else 0)


if __name__ == "__main__":
    main()
