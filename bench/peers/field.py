"""The setup of the comparison: one durable server, a fresh database for every run, separate worker processes.

Invariant: all queues have the same server, settings, number of processes and handler. A measurement starts with the
first handler and ends when the queue's own tables have nothing left to settle.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import psycopg
from driver import Board

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from interlock.postgres.embedded.server import EmbeddedServer

HERE = Path(__file__).parent
RUN_TIMEOUT_S = 600.0
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


@dataclass(frozen=True, slots=True)
class Entrant:
    """One engine to compare; a slow one gets only the part `share` of the work, to finish in time."""

    name: str
    distribution: str
    share: float = 1.0
    script: ClassVar[str] = "driver"
    timeout_s: ClassVar[float] = RUN_TIMEOUT_S

    @property
    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def command(self, command: str, **options: object) -> list[str]:
        """Return the command line of a command of its driver."""
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return [sys.executable, str(HERE / f"{self.name}_{self.script}.py"), command, *given]

    def ask(self, command: str, **options: object) -> Any:
        """Run a command of its driver and return the answer."""
        done = subprocess.run(  # noqa: S603 - our own scripts
            self.command(command, **options), capture_output=True, text=True, timeout=self.timeout_s, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{self.name} {command} failed:\n{done.stderr}")
        return json.loads(done.stdout) if done.stdout else None


class Queue(Entrant):
    """One queue."""

    __slots__ = ()


QUEUES = {
    queue.name: queue
    for queue in (
        Queue("interlock", "interlock"),
        Queue("pgqueuer", "pgqueuer"),
        Queue("awa", "awa-pg", share=0.5),
        Queue("procrastinate", "procrastinate", share=0.05),
    )
}


class Workers:
    """The processes of one entrant: started together, and terminated at the end."""

    def __init__(self, commands: Sequence[list[str]], board: Board) -> None:
        self.board = board
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own
            for command in commands
        ]

    def __enter__(self) -> Self:
        try:
            for process in self._processes:
                cast("Any", process.stdout).readline()
            for process in self._processes:
                cast("Any", process.stdin).write("go\n")
                cast("Any", process.stdin).flush()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def await_handled(self, tasks: int, timeout_s: float = RUN_TIMEOUT_S) -> None:
        """Wait until so many handlers have been started."""
        deadline = time.monotonic() + timeout_s
        while self.board.read()[0] < tasks:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"the workers stopped after {self.board.read()[0]} of {tasks} tasks")
            time.sleep(0.002)

    def cpu(self) -> float | None:
        """Return the processor time of the processes in seconds; None without /proc."""
        used = [usage(process.pid) for process in self._processes]
        return None if None in used else sum(own for _, own, _ in cast("Any", used))

    def memory(self) -> float:
        """Return the resident memory of the first process in megabytes."""
        pid = self._processes[0].pid
        status = Path(f"/proc/{pid}/status")
        if status.exists():
            line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmRSS:"))
            return int(line.split()[1]) / 1024
        shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)  # noqa: S603, S607 - a system tool, found where the system has it
        return int(shown.stdout) / 1024


def usage(pid: int) -> tuple[int, float, float] | None:
    """Return the parent of a process, its processor time in seconds, and that of its reaped children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks, (int(fields[13]) + int(fields[14])) / ticks


class Field:
    """The server, and the template database of each queue."""

    def __init__(self, server: EmbeddedServer, scratch: Path) -> None:
        self._server = server
        self._board = scratch / "board"
        self._described: dict[str, dict[str, str]] = {}
        with self.connect("postgres") as connection:
            shown = {name: connection.execute(f"show {name}").fetchone() for name in DURABLE}
            if shown != {name: (value,) for name, value in DURABLE.items()}:
                raise RuntimeError(f"the server is not durable: {shown}")

    def cpu(self) -> float | None:
        """Return the processor time of the server and its backends in seconds; None without /proc."""
        postmaster = self._server.status().pid
        own = usage(postmaster) if postmaster is not None else None
        if own is None:
            return None
        others = (usage(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit())
        return own[1] + own[2] + sum(found[1] for found in others if found is not None and found[0] == postmaster)

    def connect(self, database: str) -> psycopg.Connection[tuple[Any, ...]]:
        """Connect to a database, committing each statement."""
        return psycopg.connect(self._server.url(database), autocommit=True)

    def commit_time(self, commits: int = 200) -> float:
        """Return the milliseconds of the smallest durable commit: the lower bound of a single enqueue."""
        with self.connect("postgres") as connection:
            connection.execute("create table if not exists commits (number int)")
            took = []
            for number in range(commits):
                began = time.perf_counter()
                connection.execute("insert into commits values (%s)", [number])
                took.append((time.perf_counter() - began) * 1e3)
        return statistics.median(took)

    def prepare(self, queue: Queue) -> str:
        """Create the template database of a queue; return the description of its settings."""
        self._described[queue.name] = queue.ask("describe")
        self._run("postgres", f"create database {queue.name}_template")
        queue.ask("prepare", url=self._server.url(f"{queue.name}_template"))
        return self._described[queue.name]["setting"]

    @contextmanager
    def database(self, queue: Queue) -> Iterator[str]:
        """Yield the name of a fresh database of a queue."""
        name = f"{queue.name}_run"
        self._run("postgres", f"create database {name} template {queue.name}_template")
        try:
            yield name
        finally:
            self._run("postgres", f"drop database {name} with (force)")

    def url(self, database: str) -> str:
        """Return the URL of a database."""
        return self._server.url(database)

    def workers(self, queue: Queue, database: str, count: int, concurrency: int) -> Workers:
        """Start worker processes, which wait for the start signal."""
        given = {"url": self.url(database), "concurrency": concurrency, "board": self._board}
        board = Board.create(self._board, count)
        return Workers([queue.command("work", **given, slot=slot) for slot in range(count)], board)

    @property
    def board(self) -> Path:
        """The file of the board of the latest workers."""
        return self._board

    def calm(self, database: str) -> None:
        """Vacuum and checkpoint, so that neither runs during the measurement because of earlier writes."""
        self._run(database, "vacuum analyze")
        self._run(database, "checkpoint")

    def await_settled(self, queue: Queue, database: str) -> int:
        """Wait until the queue's tables have nothing left to settle; return the time in nanoseconds."""
        query = self._described[queue.name]["remaining"]
        deadline = time.monotonic() + RUN_TIMEOUT_S
        with self.connect(database) as connection:
            while time.monotonic() < deadline:
                row = connection.execute(query).fetchone()
                if row is None or row[0] <= 0:
                    return time.monotonic_ns()
                time.sleep(0.002)
        raise RuntimeError(f"{queue.name} has not settled its tasks")

    @contextmanager
    def pinned(self, database: str) -> Iterator[None]:
        """Hold a snapshot open, so that vacuum cannot remove row versions that die meanwhile."""
        with self.connect(database) as connection:
            connection.execute("begin isolation level repeatable read")
            connection.execute("select count(*) from pg_class")
            yield

    def _run(self, database: str, command: str) -> None:
        with self.connect(database) as connection:
            connection.execute(command)


def load(field: Field, database: str, finished: int, pending: int) -> None:
    """Insert ended and pending tasks with the guards disabled, then restore the guards and verify that."""
    with field.connect(database) as connection, connection.transaction():
        enabled = "select tgname, tgenabled from pg_trigger where tgrelid = 'interlock.tasks'::regclass order by 1"
        before = connection.execute(enabled).fetchall()
        connection.execute("alter table interlock.tasks disable trigger user")
        connection.execute(
            "insert into interlock.tasks (type, state, event, attempt, tries, worker_id, created_at, started_at,"
            " finished_at) select 'noop', 'done', 'succeed', 1, 1, 'loader', now(), now(), now()"
            " from generate_series(1, %s)",
            [finished],
        )
        connection.execute("insert into interlock.tasks (type) select 'noop' from generate_series(1, %s)", [pending])
        for name, how in before:
            word = {"A": "enable always", "R": "enable replica", "O": "enable", "D": "disable"}[how]
            if not name.startswith("RI_"):
                connection.execute(f"alter table interlock.tasks {word} trigger {name}")
        if connection.execute(enabled).fetchall() != before:
            raise RuntimeError("the guards were not restored")


def settle_environment() -> None:
    """Remove environment variables that would change the settings of the benchmark."""
    for name in [name for name in os.environ if name.startswith(("INTERLOCK_", "PGQUEUER_", "PG"))]:
        del os.environ[name]
