"""The processes of the demo: several workers and an orchestrator, started, watched, killed and stopped.

Invariant: when the context ends, none of them is left, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from interlock.client.app import Interlock, load_app
from interlock.config import Config
from interlock.errors import InterlockError
from interlock.orchestrator.process import Orchestrator
from interlock.postgres.notifier import WakeMode
from interlock.store.workers import list_live_workers
from interlock.telemetry import configure_logging
from interlock.worker.process import WorkerStateMachine
from interlock.worker.settings import WorkerSettings, get_instance_name

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from interlock.postgres.connection import Connection


MODULE = "interlock.cli.demo.processes"
ORCHESTRATOR = "orchestrator"
START_TIMEOUT = 60.0
STOP_TIMEOUT = 5.0
LOOK = 0.05
LAST_LINES = 5


class DemoError(InterlockError):
    """The demo cannot be shown here; the message says why."""


@dataclass(slots=True, eq=False)
class Member:
    """One process. It is told apart in the database by its name and its process id."""

    name: str
    process: Process
    killed: bool = False
    said: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def is_called(self, id_: str | None) -> bool:
        """Tell whether a worker's or an orchestrator's id is that of this process."""
        return id_ is not None and f"{self.name}-{self.pid}-" in id_

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it is gone."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def listen(self) -> None:
        """Remember the last lines that it says."""
        if self.process.stderr is not None:
            async for line in self.process.stderr:
                self.said.append(line.decode(errors="replace").strip())


class Crew:
    """Workers of one namespace, and an orchestrator."""

    def __init__(self, url: str, namespace: str, *, workers: int) -> None:
        self._variables = {"INTERLOCK_DATABASE_URL": url, "INTERLOCK_NAMESPACES": namespace}
        self._names = [*(f"worker-{number}" for number in range(1, workers + 1)), ORCHESTRATOR]
        self._listening: list[asyncio.Task[None]] = []
        self.members: list[Member] = []

    @property
    def workers(self) -> list[Member]:
        """All but the orchestrator."""
        return [member for member in self.members if member.name != ORCHESTRATOR]

    async def __aenter__(self) -> Self:
        try:
            for name in self._names:
                await self._start(name)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def ready(self, connection: Connection) -> None:
        """Wait until all of them have said in the database that they are here."""
        try:
            async with asyncio.timeout(START_TIMEOUT):
                while not await self._are_here(connection):
                    self.check()
                    await asyncio.sleep(LOOK)
        except TimeoutError:
            raise DemoError(f"the demo's processes have not started within {START_TIMEOUT:g} s") from None

    def check(self) -> None:
        """See that nobody has ended whom nobody has killed."""
        for member in self.members:
            code = member.process.returncode
            if code is not None and not member.killed:
                said = member.said[-1].removeprefix("interlock: ") if member.said else "it said nothing"
                raise DemoError(f"the demo's {member.name} has ended with exit code {code}: {said}")

    def member(self, id_: str | None) -> Member | None:
        """Find the worker of an id; None when it is nobody of the crew."""
        return next((worker for worker in self.workers if worker.is_called(id_)), None)

    async def stop(self) -> None:
        """Ask them to stop, and see that they do."""
        left = [member for member in self.members if member.process.returncode is None]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for member in left:
                member.signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT):
                    await asyncio.gather(*(member.process.wait() for member in left), *self._listening)
                return

    async def _start(self, name: str) -> None:
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        role, named = (name, "demo") if name == ORCHESTRATOR else ("worker", name)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", MODULE, role),  # -P: a file in this directory must not take its place
                stdin=pipe,
                stdout=nothing,
                stderr=pipe,
                env=os.environ | self._variables | {"INTERLOCK_WORKER_NAME": named},
                start_new_session=True,  # Ctrl-C is for us to hear; we pass on what follows from it
            )
        except OSError as error:
            raise DemoError(f"the demo's {name} cannot be started: {error.strerror}") from error
        self.members.append(Member(name, process))
        self._listening.append(asyncio.create_task(self.members[-1].listen()))

    async def _are_here(self, connection: Connection) -> bool:
        live = [process.id for process in await list_live_workers(connection)]
        return all(any(member.is_called(id_) for id_ in live) for member in self.members)


# SECTION cli/demo_process
# One process of the demo: a real worker or orchestrator, set up to be quick.
#
# Invariant: it ends when its standard input does, so that nothing is left of a demo that was itself killed.

APP = "interlock.cli.demo.orders:app"
LEASE = 1.5  # seconds; 30 unless told otherwise, but nobody wants to watch that
EXIT_POLL_S = 0.25  # seconds between two looks for what dead workers left


def run_worker(config: Config) -> None:
    """Be a worker of the demo's workflow."""
    settings = WorkerSettings(
        namespaces=config.namespaces,
        lease=LEASE,
        grace=0.5,
        shutdown_limit=3,  # the embedded server may be gone with the demo
        cancel_grace=0.1,
        mode=WakeMode(config.wake_mode),
        poll_cap=EXIT_POLL_S,
        recovery_interval=EXIT_POLL_S,
        duties=False,  # they concern the whole database, which may be somebody's
    )
    WorkerStateMachine(get_instance_name(config.worker_name), load_app(APP), settings).run()


def run_orchestrator(config: Config) -> None:
    """Be the orchestrator."""
    asyncio.run(Orchestrator(Interlock(config=config)).serve())


def _end_with_the_demo() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(role: str) -> None:
    """Be what the demo asks for, until it says stop or is gone."""
    threading.Thread(target=_end_with_the_demo, name="interlock-demo", daemon=True).start()
    try:
        config = Config.load()
        configure_logging("warning")
        (run_worker if role == "worker" else run_orchestrator)(config)
    except InterlockError as error:
        sys.exit(f"interlock: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
