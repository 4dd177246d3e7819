"""A worker's row in the database: its registration, heartbeat and deregistration, and the remote commands to it.

Invariant: a paused or disabled worker claims no new tasks and keeps those it runs. A worker whose row has reached a
final state shuts down. A failed heartbeat costs the worker no task: it goes on working and registers again as soon as
the database can be reached.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from interlock.errors import InputError, StatementError, StoreError
from interlock.lifecycle import SUPERVISED_WORKER, SupervisedWorkerState
from interlock.postgres.connection import connect
from interlock.postgres.retry import RetryState, retry
from interlock.service import BackgroundService, BackgroundTasks, wait_for_event
from interlock.store.figures import add_figures
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
    RegisteredProcess,
    deregister_worker,
    detach_process,
    ensure_registered,
    notify_jobs_of_worker,
)
from interlock.telemetry import log
from interlock.worker.maintenance.retention import backlog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime, timedelta

    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection
    from interlock.store.figures import Figure
    from interlock.store.remote_commands import Command
    from interlock.worker.loop_thread import LoopThread
    from interlock.worker.process import WorkerStateMachine
    from interlock.worker.runner import Runner

DEREGISTER_TIMEOUT_S = 2.0
LEND_TIMEOUT_S = 1.0  # for the worker's loop, which a handler may block
BEATS_PER_FIGURES = 2


class Lend(Protocol):
    """Runs work over a connection that is there anyway; StoreError or OSError if that cannot be had soon."""

    async def __call__(self, work: Callable[[Connection], Awaitable[None]], /) -> None:
        """Run the work."""


class HeartbeatOwner(Protocol):
    """The process that a heartbeat speaks for."""

    def now(self) -> datetime | None:
        """Return the time of a controlled clock; None for the server's clock."""

    def statistics_document(self) -> Mapping[str, Any]:
        """Return the statistics to store in the row."""

    def take_figures(self) -> Sequence[Figure]:
        """Return the sums since the last call, to add to the history of figures."""

    def on_status(self, status: str, /) -> None:
        """Receive the status of the row whenever a heartbeat finds it changed."""


class Heartbeat(BackgroundService):
    """Registers a process, renews its row's liveness, and ends the row when it is stopped."""

    stop_timeout_s = DEREGISTER_TIMEOUT_S

    def __init__(
        self,
        url: str,
        process: RegisteredProcess,
        owner: HeartbeatOwner,
        *,
        lease: timedelta = HEARTBEAT_LEASE,
        lend: Lend | None = None,
    ) -> None:
        super().__init__("heartbeat")
        self._url = url
        self._lend = lend
        self.process = process
        self._owner = owner
        self._lease = lease
        self._beat_requested = asyncio.Event()
        self._retries = RetryState()
        self._beats = 0
        self._unwritten: Sequence[Figure] = ()  # taken for a heartbeat that was cut short
        self.status: str | None = None  # of the row, as the last heartbeat found it

    def serve(self, namespaces: tuple[str, ...]) -> None:
        """Register other namespaces at once."""
        self.process = replace(self.process, namespaces=namespaces)
        self.beat_now()

    def beat_now(self) -> None:
        """Send the next heartbeat at once."""
        self._beat_requested.set()

    def request_stop(self) -> None:
        """Set `stopping` and end the pause between heartbeats."""
        super().request_stop()
        self.beat_now()

    async def run(self) -> None:
        """Send heartbeats until `stopping`, then end the row."""
        await retry(
            self._beat_until_stopped,
            on_failure=self._on_failure,
            state=self._retries,
            retry_on=(Exception,),  # a live worker must stay registered, whatever went wrong
            stopping=self.stopping,
        )

    async def _beat_until_stopped(self) -> None:
        while not self.stopping.is_set():
            self._beat_requested.clear()
            await self._run(self._beat)
            self._retries.reset()
            if not self.stopping.is_set():
                await wait_for_event(self._beat_requested, self._lease.total_seconds() / HEARTBEATS_PER_LEASE)
        with suppress(StoreError, OSError):  # without it the row expires soon
            async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                await self._run(self._end_row)

    async def _run(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        """Run work over the process's own connection, or over a new one while that is not to be had."""
        if self._lend is not None:
            try:
                return await self._lend(work)
            except (StoreError, OSError):  # not connected, or busy: TimeoutError is an OSError
                pass
        async with connect(self._url) as connection:
            return await work(connection)

    async def _end_row(self, connection: Connection) -> None:
        if self.process.generation is None:
            await deregister_worker(connection, self.process.id, now=self._owner.now())
        else:
            await detach_process(connection, self.process, now=self._owner.now())

    async def _beat(self, connection: Connection) -> None:
        process = replace(self.process, statistics=self._owner.statistics_document())
        async with asyncio.timeout(self._lease.total_seconds()):
            status = await ensure_registered(connection, process, lease=self._lease, now=self._owner.now())
        await self._write_figures(connection)
        if status == self.status:
            return
        log.info("worker_presence", worker_id=process.id, status=status)
        if status == SupervisedWorkerState.RUNNING and (self.status is not None or process.generation is not None):
            await notify_jobs_of_worker(connection)  # only the insert of a new row notifies the orchestrators by itself
        self.status = status
        self._owner.on_status(status)

    async def _write_figures(self, connection: Connection) -> None:
        """Add the process's sums to the history every second heartbeat, and those of one that was cut short.

        Sums that the database refuses, or that a lost connection takes along, are lost.
        """
        self._beats += 1
        if self._beats % BEATS_PER_FIGURES and not self._unwritten:
            return
        figures, self._unwritten = self._unwritten or self._owner.take_figures(), ()
        try:
            async with asyncio.timeout(self._lease.total_seconds()):
                await add_figures(connection, figures, now=self._owner.now())
        except StatementError as error:
            log.warning("figures_not_written", worker_id=self.process.id, error=str(error))
        except (TimeoutError, asyncio.CancelledError):
            self._unwritten = figures
            raise

    def _on_failure(self, error: Exception, _: float) -> None:
        log.warning("heartbeat_failed", worker_id=self.process.id, error=str(error) or type(error).__name__)


class CommandTarget(Protocol):
    """Executes remote commands.

    `subscribe` and `unsubscribe` concern event system 1 (which tasks come to the worker), `event_status` event system 2
    (the worker and its handlers), the others the process as a whole.
    """

    def subscribe(self, namespace: str, /) -> Sequence[str]:
        """Claim from one more namespace; return all that are served."""

    def unsubscribe(self, namespace: str, /) -> Sequence[str]:
        """Claim no more from a namespace; return those that are still served. InputError if none would be left."""

    def event_status(self) -> dict[str, Any]:
        """Return the statistics of the event system between the worker and its handlers."""

    def status(self) -> dict[str, Any]:
        """Describe the worker."""

    def refresh(self) -> None:
        """Drop what was read from the database, and poll."""

    def enable(self, enabled: bool, /) -> None:  # noqa: FBT001 - the command's only argument
        """Claim new tasks, or none until enabled again."""


class Answer(NamedTuple):
    """The reply to a remote command; without a token the sender does not wait for it."""

    token: str | None
    document: dict[str, Any]


class RemoteCommands:
    """Reads the commands to one worker from notifications, executes and answers them; an error is an answer too."""

    def __init__(self, worker_id: str, target: CommandTarget) -> None:
        self._worker_id = worker_id
        self._target = target

    def handle(self, payload: str) -> Answer | None:
        """Execute the command in a notification and return the answer; None if it is not for this worker."""
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
        """Execute a command and return the document of the answer."""
        target = self._target
        match command:
            case Subscribe(namespace):
                return {"namespaces": list(target.subscribe(namespace))}
            case Unsubscribe(namespace):
                return {"namespaces": list(target.unsubscribe(namespace))}
            case EventStatus():
                return target.event_status()
            case Status():
                return target.status()
            case Refresh():
                target.refresh()
                return {"refreshed": True}
            case Enable(enabled):
                target.enable(enabled)
                return {"enabled": enabled}


class Registration:
    """The part of a worker that other processes see and change: its row, its namespaces, and whether it claims tasks.

    The heartbeat runs in a LoopThread, so that a handler which blocks the worker's loop does not make it look dead.
    """

    def __init__(self, worker: WorkerStateMachine, app: Interlock, runner: Runner, thread: LoopThread) -> None:
        settings = worker.settings
        self._worker = worker
        self._app = app
        self._statistics = runner.statistics
        self._figures = runner.figures
        self._thread = thread
        self.row_id = settings.row or worker.worker_id
        self.namespaces = settings.namespaces
        self.heartbeat = Heartbeat(
            app.url,
            RegisteredProcess(
                self.row_id,
                namespaces=settings.namespaces,
                types=tuple(sorted(app.tasks)),
                generation=settings.generation,
                slots=settings.concurrency,
            ),
            self,
            lend=self._run_at_home,
        )
        self._commands = RemoteCommands(self.row_id, self)
        self._answers = BackgroundTasks()
        self._enabled = True
        self._paused = False

    @property
    def accepts_tasks(self) -> bool:
        """Whether new tasks are to be claimed."""
        return self._enabled and not self._paused

    async def stop(self) -> None:
        """Cancel the answers that are still being sent."""
        await self._answers.stop()

    async def _run_at_home(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        """Run work of the heartbeat's thread in the worker's loop, over its claiming connection."""
        async with asyncio.timeout(LEND_TIMEOUT_S):
            await asyncio.wrap_future(self._thread.run_at_home(self._run_between_claims(work)))

    async def _run_between_claims(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        async with self._worker.connections.between_claims() as connection:
            await work(connection)

    # --- the row; called by the heartbeat, in its thread or in the worker's

    def now(self) -> datetime | None:
        """Return the time of the app's clock; None for the server's clock."""
        return self._app.now()

    def statistics_document(self) -> Mapping[str, Any]:
        """Return the worker's statistics, its slots, and the states of the machines in its memory."""
        attempts = Counter(str(attempt.state) for attempt in list(self._worker.context.active.values()))
        return {
            **self._statistics.document(),
            **backlog.document(),
            "slots": self._worker.settings.concurrency,
            "machines": {"worker": {str(self._worker.state): 1}, "task-attempt": dict(attempts)},
        }

    def take_figures(self) -> Sequence[Figure]:
        """Return the sums of this process since the last call."""
        return self._figures.take()

    def on_status(self, status: str) -> None:
        """Apply a changed status in the worker's loop."""
        self._thread.call_home(self._apply_status, SupervisedWorkerState(status))

    def _apply_status(self, status: SupervisedWorkerState) -> None:
        if status in SUPERVISED_WORKER.final:
            log.warning("worker_dismissed", worker_id=self.row_id, status=status.value)
            self._worker.dismiss()
        paused = status is SupervisedWorkerState.PAUSED
        if paused is not self._paused:
            self._paused = paused
            self._worker.reset_polling()

    def reread(self) -> None:
        """Read the row now, because it may have changed."""
        self._thread.call(self.heartbeat.beat_now)

    # --- remote commands

    def handle_command(self, payload: str) -> None:
        """Execute a notification that is a command to this worker, and send the answer in the background."""
        answer = self._commands.handle(payload)
        if answer is not None and answer.token is not None:
            self._answers.spawn("answer", self._send_answer(answer.token, answer.document))

    async def _send_answer(self, token: str, document: dict[str, Any]) -> None:
        with suppress(StoreError, OSError):  # the sender asks again
            async with connect(self._app.url) as connection:
                await send_answer(connection, token, self.row_id, document)

    def subscribe(self, namespace: str) -> tuple[str, ...]:
        """Claim from one more namespace; return all that are served."""
        return self._serve((*self.namespaces, namespace) if namespace not in self.namespaces else self.namespaces)

    def unsubscribe(self, namespace: str) -> tuple[str, ...]:
        """Claim no more from a namespace; return those that are still served."""
        left = tuple(name for name in self.namespaces if name != namespace)
        if not left:
            raise InputError(f"a worker needs at least one namespace, and {namespace!r} is its last one")
        return self._serve(left)

    def _serve(self, namespaces: tuple[str, ...]) -> tuple[str, ...]:
        if namespaces != self.namespaces:
            self.namespaces = namespaces
            self._thread.call(self.heartbeat.serve, namespaces)
            self._worker.reset_polling()
        return namespaces

    def event_status(self) -> dict[str, Any]:
        """Return the statistics of the event system between the worker and its handlers."""
        return self._statistics.document()["handlers"]

    def status(self) -> dict[str, Any]:
        """Describe the worker."""
        return {
            "role": "worker",
            "enabled": self._enabled,
            "paused": self._paused,
            "namespaces": list(self.namespaces),
            "statistics": self._statistics.document(),
            **self._worker.describe(),
        }

    def refresh(self) -> None:
        """Drop what was read from the database, and poll."""
        self.reread()
        self._worker.reset_polling()

    def enable(self, enabled: bool) -> None:  # noqa: FBT001 - the command's only argument
        """Claim new tasks, or none until enabled again."""
        self._enabled = enabled
        self._worker.reset_polling()
