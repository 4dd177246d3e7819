"""What a worker is to others: a row that says for whom it works, and somebody who can be told to work otherwise.

Invariant: a worker that is paused or disabled takes no new tasks; those that it has are not touched. One whose row has
ended shuts down.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from interlock.errors import InputError, StoreError
from interlock.lifecycle import SUPERVISED_WORKER, SupervisedWorkerState
from interlock.postgres.retry import raise_if_canceled
from interlock.store.remote_commands import (
    Enable,
    EventStatus,
    Refresh,
    Status,
    Subscribe,
    Unsubscribe,
    parse_command,
    send_answer,
)
from interlock.store.workers import (
    HEARTBEAT_LEASE,
    HEARTBEATS_PER_LEASE,
    RUNNING,
    deregister_worker,
    detach_process,
    ensure_registered,
    notify_jobs_of_worker,
)
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta

    from interlock.postgres.connection import Connection
    from interlock.store.remote_commands import Command, HandlerCommand, OrchestrationCommand, SystemCommand
    from interlock.store.workers import RegisteredProcess
    from interlock.worker.stats import WorkerStatistics


# SECTION worker/presence
# Keeps the worker's row in the database: says that it is here, for whom it works, and in the end that it has gone.
#
# Invariant: a heartbeat that fails costs the worker no task: it goes on working, and says again that it is here as soon
# as the database can be reached.

LAST_WORD = 2.0  # seconds that the farewell may take


class Presence:
    """One worker's row. `run` it as a task until `stop`; `poke` it when what the worker serves has changed."""

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        process: RegisteredProcess,
        *,
        statistics: Callable[[], Mapping[str, Any]] = dict,
        told: Callable[[str], None] = lambda _: None,
        lease: timedelta = HEARTBEAT_LEASE,
        clock: Callable[[], datetime | None] = lambda: None,
    ) -> None:
        self._connect = connect
        self.process = process
        self._statistics = statistics
        self._told = told
        self._lease = lease
        self._clock = clock
        self._poked = asyncio.Event()
        self.status: str | None = None  # of the row, as the latest heartbeat found it

    def serve(self, namespaces: tuple[str, ...]) -> None:
        """Serve other namespaces from now on, and say so at once."""
        self.process = replace(self.process, namespaces=namespaces)
        self.poke()

    def poke(self) -> None:
        """Have the next heartbeat come at once."""
        self._poked.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Say that the worker is here, again and again, until `stop`; then end its row."""
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self.poke())
        try:
            while not stop.is_set():
                try:
                    async with self._connect() as connection:
                        await self._beat(connection, stop)
                except (StoreError, OSError, TimeoutError) as error:
                    raise_if_canceled()
                    log.warning("heartbeat_failed", worker_id=self.process.id, error=str(error) or "it took too long")
                    if not stop.is_set():
                        self._poked.clear()  # it was not heard, and is not to be repeated without a pause
                        await self._rest()
        finally:
            stopping.cancel()

    async def _beat(self, connection: Connection, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._poked.clear()
            said = replace(self.process, statistics=self._statistics())
            async with asyncio.timeout(self._lease.total_seconds()):
                status = await ensure_registered(connection, said, lease=self._lease, now=self._clock())
            if status != self.status:
                log.info("worker_presence", worker_id=self.process.id, status=status)
                if status == RUNNING and (self.status is not None or self.process.generation is not None):
                    await notify_jobs_of_worker(connection)  # no row was made for it, which would have told of it
                self.status = status
                self._told(status)
            await self._rest()
        with suppress(StoreError, TimeoutError):  # without it, the row is not live for long anyway
            async with asyncio.timeout(LAST_WORD):
                await self._leave(connection)

    async def _leave(self, connection: Connection) -> None:
        if self.process.generation is None:
            await deregister_worker(connection, self.process.id, now=self._clock())
        else:
            await detach_process(connection, self.process, now=self._clock())

    async def _rest(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._lease.total_seconds() / HEARTBEATS_PER_LEASE):
                await self._poked.wait()


# SECTION worker/control
# What a running worker can be told over NOTIFY, each group of commands answered by the side that it concerns.
#
# Invariant: the two event systems stay apart: a command of the orchestration side never reaches the handler side,
# nor the
# other way round; whatever a command asks for, it is answered, an error included.


class OrchestrationSide(Protocol):
    """Event system 1: which tasks come to this worker."""

    def subscribe(self, namespace: str, /) -> Sequence[str]:
        """Take tasks of a namespace too; give all namespaces that are served now."""

    def unsubscribe(self, namespace: str, /) -> Sequence[str]:
        """Take no more tasks of a namespace; give those that are still served. InputError if none would be."""


class HandlerSide(Protocol):
    """Event system 2: what goes on between this worker and its handlers."""

    def event_status(self) -> dict[str, Any]:
        """Give the statistics of the event system."""


class SystemSide(Protocol):
    """The process as a whole."""

    def status(self) -> dict[str, Any]:
        """Tell how the worker is."""

    def refresh(self) -> None:
        """Read anew what is kept in memory of the database, and look for tasks."""

    def enable(self, enabled: bool, /) -> None:  # noqa: FBT001 - the one word of the command
        """Take on new tasks, or none until told otherwise."""


class Answer(NamedTuple):
    """What is to be said to whoever asked; without a token nobody waits for it."""

    token: str | None
    document: dict[str, Any]


class Control:
    """Takes the commands of one worker and hands each to its side."""

    def __init__(
        self, worker_id: str, *, orchestration: OrchestrationSide, handlers: HandlerSide, system: SystemSide
    ) -> None:
        self._worker_id = worker_id
        self._orchestration = orchestration
        self._handlers = handlers
        self._system = system

    def hear(self, payload: str) -> Answer | None:
        """Obey a notification that is a command to this worker; None when it is not."""
        try:
            request = parse_command(payload, self._worker_id)
        except InputError as error:
            log.warning("command_refused", worker_id=self._worker_id, error=str(error))
            return None
        if request is None:
            return None
        try:
            document = self.execute(request.command)
        except InputError as error:
            document = {"error": str(error)}
        log.info("command_executed", worker_id=self._worker_id, command=repr(request.command), answer=document)
        return Answer(request.token, document)

    def execute(self, command: Command) -> dict[str, Any]:
        """Hand a command to the side that it concerns, and give the answer."""
        match command:
            case Subscribe() | Unsubscribe():
                return self._of_orchestration(command)
            case EventStatus():
                return self._of_handlers(command)
            case Status() | Refresh() | Enable():
                return self._of_system(command)

    def _of_orchestration(self, command: OrchestrationCommand) -> dict[str, Any]:
        act = self._orchestration.subscribe if isinstance(command, Subscribe) else self._orchestration.unsubscribe
        return {"namespaces": list(act(command.namespace))}

    def _of_handlers(self, _: HandlerCommand) -> dict[str, Any]:
        return self._handlers.event_status()

    def _of_system(self, command: SystemCommand) -> dict[str, Any]:
        if isinstance(command, Status):
            return self._system.status()
        if isinstance(command, Refresh):
            self._system.refresh()
            return {"refreshed": True}
        self._system.enable(command.enabled)
        return {"enabled": command.enabled}


REPAIR_PAUSE = 1.0


class Registration:
    """The row of one worker, and the three sides of it that commands reach."""

    def __init__(
        self,
        row: RegisteredProcess,
        statistics: WorkerStatistics,
        *,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        clock: Callable[[], datetime | None],
        changed: Callable[[], None],
        dismissed: Callable[[], None],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self._worker_id = row.id
        self.namespaces = row.namespaces
        self._statistics = statistics
        self._connect = connect
        self._changed = changed
        self._dismissed = dismissed
        self._describe = describe
        self._enabled = True
        self._paused = False
        self._control = Control(row.id, orchestration=self, handlers=self, system=self)
        self._presence = Presence(
            connect,
            row,
            statistics=statistics.document,
            told=self._hear_status,
            clock=clock,
        )
        self._home = asyncio.get_running_loop()
        self._away: asyncio.AbstractEventLoop | None = None  # where the heartbeat is

    @property
    def takes_tasks(self) -> bool:
        """Whether new tasks are to be claimed."""
        return self._enabled and not self._paused

    # --- the row

    async def keep(self, stop: asyncio.Event) -> None:
        """Keep the row until `stop`, and then end it. Runs in a loop that no handler can block."""
        self._away = asyncio.get_running_loop()
        while not stop.is_set():
            try:
                await self._presence.run(stop)
            except Exception as error:  # noqa: BLE001 - a worker that is here has to say so
                raise_if_canceled()
                log.error("heartbeat_failed", worker_id=self._worker_id, error=str(error) or type(error).__name__)
                await asyncio.sleep(REPAIR_PAUSE)

    def poke(self) -> None:
        """Look at the row now, because somebody may have changed it."""
        self._beside(self._presence.poke)

    def _beside(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._away is not None:
            with suppress(RuntimeError):  # its loop is closed: the row has ended
                self._away.call_soon_threadsafe(function, *arguments)

    def _hear_status(self, status: str) -> None:
        with suppress(RuntimeError):  # the worker's loop is closed
            self._home.call_soon_threadsafe(self._heed, SupervisedWorkerState(status))

    def _heed(self, status: SupervisedWorkerState) -> None:
        if status in SUPERVISED_WORKER.final:
            log.warning("worker_dismissed", worker_id=self._worker_id, status=status.value)
            self._dismissed()
        paused = status is SupervisedWorkerState.PAUSED
        if paused is not self._paused:
            self._paused = paused
            self._changed()

    # --- commands

    def hear(self, payload: str) -> Answer | None:
        """Obey a notification that is a command to this worker; give the answer."""
        return self._control.hear(payload)

    async def answer(self, answer: Answer) -> None:
        """Say to whoever asked what came of it."""
        if answer.token is not None:
            with suppress(StoreError, OSError):  # whoever asked asks again
                async with self._connect() as connection:
                    await send_answer(connection, answer.token, self._worker_id, answer.document)

    def subscribe(self, namespace: str) -> tuple[str, ...]:
        """Take tasks of a namespace too; give all namespaces that are served now."""
        return self._serve((*self.namespaces, namespace) if namespace not in self.namespaces else self.namespaces)

    def unsubscribe(self, namespace: str) -> tuple[str, ...]:
        """Take no more tasks of a namespace; give those that are still served."""
        left = tuple(name for name in self.namespaces if name != namespace)
        if not left:
            raise InputError(f"a worker needs at least one namespace, and {namespace!r} is its last one")
        return self._serve(left)

    def _serve(self, namespaces: tuple[str, ...]) -> tuple[str, ...]:
        if namespaces != self.namespaces:
            self.namespaces = namespaces
            self._beside(self._presence.serve, namespaces)
            self._changed()
        return namespaces

    def event_status(self) -> dict[str, Any]:
        """Give the statistics of the event system between the worker and its handlers."""
        return self._statistics.document()["handlers"]

    def status(self) -> dict[str, Any]:
        """Tell how the worker is."""
        return {
            "role": "worker",
            "enabled": self._enabled,
            "paused": self._paused,
            "namespaces": list(self.namespaces),
            "statistics": self._statistics.document(),
            **self._describe(),
        }

    def refresh(self) -> None:
        """Read anew what is kept in memory of the database, and look for tasks."""
        self.poke()
        self._changed()

    def enable(self, enabled: bool) -> None:  # noqa: FBT001 - the one word of the command
        """Take on new tasks, or none until told otherwise."""
        self._enabled = enabled
        self._changed()
