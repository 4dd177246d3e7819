"""The processes of the demo: several workers and an orchestrator, started, watched, killed and stopped.

Invariant: when the context ends, none of them is left, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from interlock.errors import InterlockError
from interlock.process_groups import ProcessGroup, describe_exit, open_stream_reader
from interlock.store.workers import list_live_workers

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

MODULE = "interlock.cli.demo.process_main"
ORCHESTRATOR = "orchestrator"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.05
KEPT_STDERR_LINES = 5


class DemoError(InterlockError):
    """The demo cannot run here; the message says why."""


@dataclass(slots=True, eq=False)
class DemoProcess:
    """One process. In the database it is identified by its name and process id."""

    name: str
    group: ProcessGroup
    killed: bool = False  # by the demo
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_STDERR_LINES))

    @property
    def pid(self) -> int:
        """The process id."""
        return self.group.pid

    def has_id(self, id_: str | None) -> bool:
        """Return whether the id of a worker or orchestrator is that of this process."""
        return id_ is not None and f"{self.name}-{self.pid}-" in id_

    async def collect_stderr(self) -> None:
        """Keep the last lines of standard error until it ends."""
        if self.group.process.stderr is not None:
            reader, transport = await open_stream_reader(self.group.process.stderr)
            try:
                async for line in reader:
                    self.stderr.append(line.decode(errors="replace").strip())
            finally:
                transport.close()


class DemoProcesses:
    """Workers of one namespace and an orchestrator, as an async context manager."""

    def __init__(self, url: str, namespace: str, *, workers: int) -> None:
        self._environment = os.environ | {"INTERLOCK_DATABASE_URL": url, "INTERLOCK_NAMESPACES": namespace}
        self._names = [*(f"worker-{number}" for number in range(1, workers + 1)), ORCHESTRATOR]
        self._readers: list[asyncio.Task[None]] = []
        self.all: list[DemoProcess] = []

    @property
    def workers(self) -> list[DemoProcess]:
        """All but the orchestrator."""
        return [process for process in self.all if process.name != ORCHESTRATOR]

    async def __aenter__(self) -> Self:
        try:
            for name in self._names:
                self._start(name)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait_until_registered(self, connection: Connection) -> None:
        """Wait until all of them are registered in the database."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._are_registered(connection):
                    self.check()
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            raise DemoError(f"the demo's processes did not start within {START_TIMEOUT_S:g} s") from None

    def check(self) -> None:
        """Raise DemoError if a process has exited that the demo did not kill."""
        for process in self.all:
            code = process.group.exit_code
            if code is not None and not process.killed:
                reason = f": {process.stderr[-1].removeprefix('interlock: ')}" if process.stderr else ""
                raise DemoError(f"the demo's {process.name} {describe_exit(code)}{reason}")

    def find_worker(self, id_: str | None) -> DemoProcess | None:
        """Return the worker with an id; None if it is not one of the demo's."""
        return next((worker for worker in self.workers if worker.has_id(id_)), None)

    async def stop(self) -> None:
        """Stop all processes: SIGTERM, and SIGKILL after a timeout."""
        await asyncio.gather(*(process.group.stop(STOP_TIMEOUT_S) for process in self.all))
        await asyncio.gather(*self._readers, return_exceptions=True)
        for process in self.all:
            if process.group.process.stdin is not None:
                process.group.process.stdin.close()

    def _start(self, name: str) -> None:
        role, instance = (name, "demo") if name == ORCHESTRATOR else ("worker", name)
        try:
            group = ProcessGroup.start(
                # -P: a file of the working directory must not shadow a module
                [sys.executable, "-P", "-m", MODULE, role],
                stdin=subprocess.PIPE,  # its end tells the process that the demo is gone
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=self._environment | {"INTERLOCK_WORKER_NAME": instance},
            )
        except OSError as error:
            raise DemoError(f"the demo's {name} cannot be started: {error.strerror}") from error
        process = DemoProcess(name, group)
        self.all.append(process)
        self._readers.append(asyncio.create_task(process.collect_stderr()))

    async def _are_registered(self, connection: Connection) -> bool:
        live = [process.id for process in await list_live_workers(connection)]
        return all(any(process.has_id(id_) for id_ in live) for process in self.all)
