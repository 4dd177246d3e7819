"""Where the queues compete: one durable server, a fresh database for every run, workers in processes of their own.

Invariant: all queues meet the same server, settings, number of processes and handler; what is measured begins with the
first handler's start and ends when the queue's own tables say that nothing is left to settle.
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
PATIENCE = 600.0
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


@dataclass(frozen=True, slots=True)
class Entrant:
    """One that takes part; `share` is the part of the work that a slow one gets, so that it is done in time."""

    name: str
    distribution: str
    share: float = 1.0
    script: ClassVar[str] = "driver"
    patience: ClassVar[float] = PATIENCE

    @property
    def version(self) -> str | None:
        """The installed version, if it is installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def command(self, command: str, **options: object) -> list[str]:
        """Spell out a command of its driver."""
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return [sys.executable, str(HERE / f"{self.name}_{self.script}.py"), command, *given]

    def ask(self, command: str, **options: object) -> Any:
        """Run a command of its driver and give the answer."""
        done = subprocess.run(  # noqa: S603 - our own scripts
            self.command(command, **options), capture_output=True, text=True, timeout=self.patience, check=False
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
    """The processes of one entrant, which begin all at once and are gone in the end."""

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

    def await_handled(self, tasks: int, patience: float = PATIENCE) -> None:
        """Wait until so many handlers have been started."""
        deadline = time.monotonic() + patience
        while self.board.read()[0] < tasks:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"the workers stopped after {self.board.read()[0]} of {tasks} tasks")
            time.sleep(0.002)

    def cpu(self) -> float | None:
        """Seconds of processor time that the processes have used, where the kernel tells."""
        used = [usage(process.pid) for process in self._processes]
        return None if None in used else sum(own for _, own, _ in cast("Any", used))

    def memory(self) -> float:
        """Megabytes that the first process has in memory."""
        pid = self._processes[0].pid
        status = Path(f"/proc/{pid}/status")
        if status.exists():
            line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmRSS:"))
            return int(line.split()[1]) / 1024
        shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)  # noqa: S603, S607 - a system tool, found where the system has it
        return int(shown.stdout) / 1024


def usage(pid: int) -> tuple[int, float, float] | None:
    """Tell a process's parent, its own seconds of processor time and those of the children it has buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks, (int(fields[13]) + int(fields[14])) / ticks


class Field:
    """The server and what was prepared on it."""

    def __init__(self, server: EmbeddedServer, scratch: Path) -> None:
        self._server = server
        self._board = scratch / "board"
        self._described: dict[str, dict[str, str]] = {}
        with self.connect("postgres") as connection:
            shown = {name: connection.execute(f"show {name}").fetchone() for name in DURABLE}
            if shown != {name: (value,) for name, value in DURABLE.items()}:
                raise RuntimeError(f"the server is not durable: {shown}")

    def cpu(self) -> float | None:
        """Seconds of processor time that the server and all its backends have used, where the kernel tells."""
        postmaster = self._server.status().pid
        own = usage(postmaster) if postmaster is not None else None
        if own is None:
            return None
        everybody = (usage(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit())
        return own[1] + own[2] + sum(found[1] for found in everybody if found is not None and found[0] == postmaster)

    def connect(self, database: str) -> psycopg.Connection[tuple[Any, ...]]:
        """Connect to a database, committing each statement."""
        return psycopg.connect(self._server.url(database), autocommit=True)

    def commit_time(self, commits: int = 200) -> float:
        """Milliseconds that the smallest durable commit takes here and now: what one by one can cost at the least."""
        with self.connect("postgres") as connection:
            connection.execute("create table if not exists commits (number int)")
            took = []
            for number in range(commits):
                began = time.perf_counter()
                connection.execute("insert into commits values (%s)", [number])
                took.append((time.perf_counter() - began) * 1e3)
        return statistics.median(took)

    def prepare(self, queue: Queue) -> str:
        """Make the database that a queue's runs start from; tell its setting."""
        self._described[queue.name] = queue.ask("describe")
        self._run("postgres", f"create database {queue.name}_template")
        queue.ask("prepare", url=self._server.url(f"{queue.name}_template"))
        return self._described[queue.name]["setting"]

    @contextmanager
    def database(self, queue: Queue) -> Iterator[str]:
        """Lend a fresh database of a queue."""
        name = f"{queue.name}_run"
        self._run("postgres", f"create database {name} template {queue.name}_template")
        try:
            yield name
        finally:
            self._run("postgres", f"drop database {name} with (force)")

    def url(self, database: str) -> str:
        """Tell where a database is."""
        return self._server.url(database)

    def workers(self, queue: Queue, database: str, count: int, concurrency: int) -> Workers:
        """Get worker processes ready."""
        given = {"url": self.url(database), "concurrency": concurrency, "board": self._board}
        board = Board.create(self._board, count)
        return Workers([queue.command("work", **given, slot=slot) for slot in range(count)], board)

    @property
    def board(self) -> Path:
        """Where the latest workers' board is."""
        return self._board

    def calm(self, database: str) -> None:
        """Leave nothing to do to autovacuum and the checkpointer that the run before, or filling, has caused."""
        self._run(database, "vacuum analyze")
        self._run(database, "checkpoint")

    def await_settled(self, queue: Queue, database: str) -> int:
        """Wait until the queue's tables say that nothing is left; give the time in nanoseconds."""
        query = self._described[queue.name]["remaining"]
        deadline = time.monotonic() + PATIENCE
        with self.connect(database) as connection:
            while time.monotonic() < deadline:
                row = connection.execute(query).fetchone()
                if row is None or row[0] <= 0:
                    return time.monotonic_ns()
                time.sleep(0.002)
        raise RuntimeError(f"{queue.name} has not settled its tasks")

    @contextmanager
    def pinned(self, database: str) -> Iterator[None]:
        """Hold a snapshot open, so that no row version that dies from now on can be removed."""
        with self.connect(database) as connection:
            connection.execute("begin isolation level repeatable read")
            connection.execute("select count(*) from pg_class")
            yield

    def _run(self, database: str, command: str) -> None:
        with self.connect(database) as connection:
            connection.execute(command)


def load(field: Field, database: str, finished: int, pending: int) -> None:
    """Fill Interlock's table with tasks that ended and tasks to do, past its guards, which are then as before."""
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
            raise RuntimeError("the guards are not as they were")


def settle_environment() -> None:
    """Keep settings of whoever runs the benchmark out of it."""
    for name in [name for name in os.environ if name.startswith(("INTERLOCK_", "PGQUEUER_", "PG"))]:
        del os.environ[name]
