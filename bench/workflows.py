"""Benchmark of workflows against peers: chains of three steps, fan-outs 1 -> 100 -> 1, latency when idle, growth.

Run: `./dev bench workflows`. One embedded server, and one Redis for the peers that need it. Each paired round runs
Interlock and then every peer. Only ratios within one run are comparable; see README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg

from interlock.client.step_context import step_result
from interlock.lifecycle import TaskRowEvent
from interlock.postgres.connection import connect
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.store.tasks import Outcome, claim_pending_tasks, settle_running_tasks
from interlock.store.workers import RegisteredProcess, register_worker
from interlock.store.workflows import put_workflow
from interlock.workflow.new_job import NewJob
from interlock.workflow.submit import submit_job
from machine import described

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from driver import Board
from field import Entrant, Workers

from report import SETTINGS, Row, asked, head, line, run_in_scratch, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUN_TIMEOUT_S = 1_800.0
CONCURRENCY = 100
BOARD_SLOTS = 16  # at least as many as an engine has processes that run handlers
GROWTH = (1_000, 10_000, 100_000)


@dataclass(frozen=True, slots=True)
class Engine(Entrant):
    """One workflow engine to compare."""

    script: ClassVar[str] = "flows"
    timeout_s: ClassVar[float] = RUN_TIMEOUT_S
    needs_redis: bool = False
    has_orchestrator: bool = False


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("interlock", "interlock", has_orchestrator=True),
        Engine("dramatiq", "dramatiq", needs_redis=True),
        Engine("celery", "celery", share=0.5, needs_redis=True),
        Engine("absurd", "absurd-sdk", share=0.5),
        Engine("dbos", "dbos", share=0.2),
    )
}
OURS = ENGINES["interlock"]


class Arena:
    """The servers, and the template database of each engine."""

    def __init__(self, server: EmbeddedServer, redis_url: str | None, scratch: Path) -> None:
        self._server = server
        self._redis_url = redis_url
        self._board = scratch / "board"
        self._described: dict[str, dict[str, str]] = {}

    def prepare(self, engine: Engine) -> str:
        """Create the template database of an engine; return the description of its settings."""
        self._described[engine.name] = engine.ask("describe")
        if not engine.needs_redis:
            self._run(f"create database {engine.name}_template")
            engine.ask("prepare", url=self._server.url(f"{engine.name}_template"))
        return self._described[engine.name]["setting"]

    @contextmanager
    def place(self, engine: Engine) -> Iterator[str]:
        """Yield the URL of a fresh database, or of the emptied Redis."""
        if engine.needs_redis:
            assert self._redis_url is not None  # noqa: S101 - engines that need Redis are skipped without it
            subprocess.run(  # noqa: S603 - the tool beside the server that was found
                [str(shutil.which("redis-cli")), "-u", self._redis_url, "flushall"], check=True, capture_output=True
            )
            yield self._redis_url
            return
        name = f"{engine.name}_run"
        self._run(f"create database {name} template {engine.name}_template")
        try:
            yield self._server.url(name)
        finally:
            self._run(f"drop database {name} with (force)")

    def running(self, engine: Engine, url: str) -> Workers:
        """Start one worker process, and the orchestrator if the engine has one."""
        wanted = [engine.command("work", url=url, concurrency=CONCURRENCY, board=self._board)]
        wanted += [engine.command("orchestrate", url=url)] if engine.has_orchestrator else []
        return Workers(wanted, Board.create(self._board, BOARD_SLOTS))

    def await_ended(self, engine: Engine, url: str, workers: Workers, flows: int) -> float:
        """Wait until all flows have ended; return the seconds since the first step started."""
        workers.await_handled(flows * 2, RUN_TIMEOUT_S)
        _, first, latest = workers.board.read()
        query = self._described[engine.name]["remaining"]
        if query:
            with psycopg.connect(url, autocommit=True) as connection:
                while (row := connection.execute(query.encode()).fetchone()) is not None and row[0]:
                    time.sleep(0.002)
            latest = time.monotonic_ns()
        return (latest - first) / 1e9

    def _run(self, command: str) -> None:
        with psycopg.connect(self._server.url("postgres"), autocommit=True) as connection:
            connection.execute(command.encode())


@dataclass(frozen=True, slots=True)
class Bench:
    """One run of the benchmark."""

    arena: Arena
    engines: tuple[Engine, ...]
    flows: int
    rounds: int
    largest: int

    def _rate(self, engine: Engine, shape: str, flows: int) -> float:
        some = max(int(flows * engine.share), min(flows, 10))
        with self.arena.place(engine) as url:
            engine.ask("submit", url=url, shape=shape, flows=some)
            with self.arena.running(engine, url) as workers:
                return some / self.arena.await_ended(engine, url, workers, some)

    def chains(self) -> list[Row]:
        """Measure how fast submitted chains of three steps are drained."""
        row = Row("chains of 3", "chains/s", ratios={"dramatiq": 2.5, "celery": 8.0, "absurd": 8.0, "dbos": 20.0})
        for engine in turns(self.engines, self.rounds):
            row.add(engine.name, self._rate(engine, "chain", self.flows))
        return [row]

    def fans(self) -> list[Row]:
        """Measure how fast submitted fan-outs of a hundred parts are drained."""
        row = Row("fans 1 -> 100 -> 1", "fans/s", ratios={"celery": 8.0, "dbos": 20.0})
        for engine in turns(self.engines, self.rounds):
            row.add(engine.name, self._rate(engine, "fan", max(self.flows // 50, 5)))
        return [row]

    def latency(self) -> list[Row]:
        """Measure single chains in an idle system, from the commit of the submit to the end."""
        middle = Row("chain of 3, idle, p50", "ms", target="≤ 15")
        late = Row("chain of 3, idle, p99", "ms", target="≤ 50")
        for engine in turns(self.engines, 1):
            with self.arena.place(engine) as url, self.arena.running(engine, url):
                took = sorted(engine.ask("time", url=url, shape="chain", flows=200))
            middle.add(engine.name, statistics.median(took))
            late.add(engine.name, took[int(len(took) * 0.99)])
        return [middle, late]

    def growth(self) -> list[Row]:
        """Measure one job of many steps: the cost of a step must not grow with their number."""
        rows = []
        for kind, most in (("dag", 10_000), ("map", 100_000)):
            for size in (size for size in GROWTH if size <= min(most, self.largest)):
                rate = self._rate(OURS, f"{kind}:{size}", 1)
                rows.append(Row(f"{kind} of {size:,} steps", "µs/step", {OURS.name: [1e6 / rate / size]}))
        return rows

    def persistence(self) -> list[Row]:
        """Measure settling steps one at a time: result, state, record and message in one transaction."""
        middle = Row("persistence of a result, p50", "ms", target="< 10")
        late = Row("persistence of a result, p99", "ms")
        with self.arena.place(OURS) as url:
            took = sorted(asyncio.run(settled_singly(url, 300)))
        middle.add(OURS.name, statistics.median(took) * 1e3)
        late.add(OURS.name, took[int(len(took) * 0.99)] * 1e3)
        return [middle, late]


async def settled_singly(url: str, steps: int) -> list[float]:
    """Return the seconds that each settle of a result of two kilobytes takes."""
    names = [f"s{number}" for number in range(steps)]
    document = {
        "name": "wide",
        "version": "1",
        "namespace": "default",
        "steps": [{"name": name, "type": "noop"} for name in names],
    }
    took = []
    async with connect(url) as connection:
        await put_workflow(connection, document)
        await register_worker(connection, RegisteredProcess("bench", namespaces=("default",), types=("noop",)))
        await submit_job(connection, NewJob("wide", {}), actor="bench")
        claimed = await claim_pending_tasks(connection, actor="bench", types=["noop"], limit=steps)
        for task in claimed:
            result = step_result(task.step or "", success=True, result="x" * 2_000, attempt=task.attempt)
            outcome = Outcome(task.id, task.attempt, TaskRowEvent.SUCCEED, output=result)
            began = time.perf_counter()
            await settle_running_tasks(connection, [outcome], actor="bench")
            took.append(time.perf_counter() - began)
    return took


MEASUREMENTS: dict[str, Callable[[Bench], list[Row]]] = {
    "chains": Bench.chains,
    "fans": Bench.fans,
    "latency": Bench.latency,
    "growth": Bench.growth,
    "persistence": Bench.persistence,
}


def chosen(names: str) -> tuple[tuple[Engine, ...], list[str]]:
    """Return the engines to compare, and why the others are skipped."""
    wanted = asked(names, ENGINES)
    has_redis = shutil.which("redis-server") is not None and shutil.which("redis-cli") is not None
    left_out = [f"{engine.name} is not installed and is skipped" for engine in wanted if engine.version is None]
    left_out += [
        f"{engine.name} is skipped: redis-server or redis-cli is not on the PATH"
        for engine in wanted
        if engine.version is not None and engine.needs_redis and not has_redis
    ]
    fit = (engine for engine in wanted if engine.version is not None and (has_redis or not engine.needs_redis))
    return (OURS, *fit), left_out


@contextmanager
def redis(scratch: Path, *, wanted: bool) -> Iterator[str | None]:
    """Run Redis without persistence, as it is usually run for queues."""
    if not wanted:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [str(shutil.which("redis-server")), "--port", str(port), "--save", "", "--dir", str(scratch)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:  # noqa: S603 - the system's own server
        try:
            time.sleep(0.5)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--flows", type=int, default=2_000, help="chains of one run; a fiftieth of that number are fan-outs"
    )
    parser.add_argument("--rounds", type=int, default=3, help="paired rounds of each measurement")
    parser.add_argument(
        "--only", action="append", choices=list(MEASUREMENTS), help="measure only this; can be repeated"
    )
    parser.add_argument("--peers", default="dramatiq,celery,absurd,dbos", help="of these; '' for none")
    parser.add_argument("--largest", type=int, default=GROWTH[-1], help="steps of the largest job of `growth`")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    return parser.parse_args()


def run(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure, print the table, and return all samples."""
    engines, left_out = chosen(given.peers)
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(scratch / "server", settings=SETTINGS))
        stack.callback(server.stop)
        url = stack.enter_context(redis(scratch, wanted=any(engine.needs_redis for engine in engines)))
        arena = Arena(server, url, scratch)
        print(f"{described()}; {given.flows:,} flows, {given.rounds} rounds\n")
        settings = {engine.name: f"{engine.version}: {arena.prepare(engine)}" for engine in engines}
        for name, setting in settings.items():
            print(f"- {name} {setting}")
        for why in left_out:
            print(f"- {why}")
        print(head(engines), flush=True)
        bench = Bench(arena, engines, given.flows, given.rounds, given.largest)
        rows = []
        for name in given.only or MEASUREMENTS:
            for row in MEASUREMENTS[name](bench):
                rows.append(row)
                print(line(row, engines), flush=True)
    return {"settings": settings, "left_out": left_out, "rows": [asdict(row) for row in rows]}


def main() -> None:
    """Run in a temporary directory."""
    run_in_scratch(options(), run)


if __name__ == "__main__":
    main()
