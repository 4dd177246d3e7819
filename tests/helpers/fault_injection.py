"""Faults to inject: locked rows, killed backends, and a network that drops, hangs or breaks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

from interlock import Interlock, TaskContext
from interlock.config import Config
from interlock.postgres.connection import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from interlock.postgres.connection import Connection


class Gate:
    """Events by attempt number: the handler of a gated task sets `entered` and waits for `opened`."""

    def __init__(self) -> None:
        self.entered: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.opened: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)


def gated_app(url: str) -> tuple[Interlock, Gate]:
    """Make an app with one task, `gated`, and its gate."""
    app, gate = Interlock(config=Config(database_url=url, worker_name="test-worker")), Gate()

    @app.task
    async def gated(ctx: TaskContext) -> int:
        gate.entered[ctx.attempt].set()
        await gate.opened[ctx.attempt].wait()
        return ctx.attempt

    return app, gate


def fail_with_nul() -> None:
    """Raise an error with NUL characters, which PostgreSQL cannot store; a handler for the process executor."""
    raise ValueError("a \0")


@asynccontextmanager
async def locked(url: str, task: UUID) -> AsyncIterator[Connection]:
    """Hold the lock of a task's row until the block ends."""
    async with connect(url) as holder, holder.transaction():
        await holder.execute("select from interlock.tasks where id = %s for update", [task])
        yield holder


async def blocked_by(watcher: Connection, holder: Connection, *, but: int = 0) -> int:
    """Wait until a backend other than `but` waits for a lock of another; return its process id."""
    query = "select pid from pg_stat_activity where %s = any (pg_blocking_pids(pid)) and pid <> %s"
    async with asyncio.timeout(60):
        while True:
            found = await (await watcher.execute(query, [holder.info.backend_pid, but])).fetchall()
            if found:
                return int(found[0]["pid"])
            await asyncio.sleep(0.005)


async def until_no_transaction_is_open(watcher: Connection) -> None:
    """Wait until no backend is idle in a transaction; one may be so for a moment between two statements."""
    query = "select from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'"
    async with asyncio.timeout(60):
        while await (await watcher.execute(query)).fetchall():
            await asyncio.sleep(0.005)


async def kill(watcher: Connection, backend: int) -> None:
    """Terminate a backend."""
    await watcher.execute("select pg_terminate_backend(%s)", [backend])


class NetworkMode(Enum):
    """How a FaultyProxy treats traffic."""

    PASSING = "data is forwarded"
    HANGING = "data is dropped without an error"
    REFUSING = "new connections are refused"


class FaultyProxy:
    """A TCP proxy between a worker and its database server, with faults that the test injects."""

    def __init__(self, url: str) -> None:
        parts = conninfo_to_dict(url)
        self._socket = f"{parts['host']}/.s.PGSQL.{parts['port']}"
        self._user, self._database = str(parts["user"]), str(parts["dbname"])
        self._port = 0
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[Any]] = set()
        self.mode = NetworkMode.PASSING
        self.refused = 0
        self.delayed: bytes | None = None  # the reply to a message with these bytes comes after `release`
        self.delaying = asyncio.Event()
        self.release = asyncio.Event()
        self.fatal: bytes | None = None  # the reply to a message with these bytes is lost, and the connection with it

    @property
    def url(self) -> str:
        """The URL of the server through this proxy."""
        return f"postgresql://{quote(self._user)}@127.0.0.1:{self._port}/{quote(self._database)}?sslmode=disable"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Break all connections, and refuse new ones."""
        self.mode = NetworkMode.REFUSING
        for line in self._lines:
            line.cancel()
        await asyncio.gather(*self._lines, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = asyncio.current_task()
        if line is None or self.mode is NetworkMode.REFUSING:
            self.refused += 1
            writer.close()
            return
        self._lines.add(line)
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(self._socket)
            doomed, late = asyncio.Event(), asyncio.Event()
            ways = [
                asyncio.create_task(self._carry(reader, server_writer, doomed, late, answers=False)),
                asyncio.create_task(self._carry(server_reader, writer, doomed, late, answers=True)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                server_writer.close()
        finally:
            self._lines.discard(line)
            writer.close()

    async def _carry(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        doomed: asyncio.Event,
        late: asyncio.Event,
        *,
        answers: bool,
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if self.mode is NetworkMode.HANGING:
                    continue
                if answers and doomed.is_set():
                    return
                if not answers and self.fatal is not None and self.fatal in data:
                    self.fatal = None
                    doomed.set()
                if not answers and self.delayed is not None and self.delayed in data:
                    self.delayed = None
                    late.set()
                    self.delaying.set()
                if answers and late.is_set():
                    await self.release.wait()
                sink.write(data)
                await sink.drain()
