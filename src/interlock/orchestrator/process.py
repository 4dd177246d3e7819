"""The orchestrator process: advances jobs by the results of their steps, and does the timed maintenance of jobs.

Invariant: everything it does is one transaction of the workflow engine. An orchestrator that dies at any moment leaves
nothing half done, and any number of them work at once.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from interlock.errors import InputError, MigrationError, StoreError
from interlock.lifecycle import SUPERVISED_WORKER, SupervisedWorkerState
from interlock.orchestrator.maintenance import JobSweeps
from interlock.orchestrator.settings import OrchestratorSettings, name_orchestrator
from interlock.orchestrator.stats import EventStatistics, show_queue
from interlock.postgres.connection import connect
from interlock.postgres.notifier import CONTROL_CHANNEL, ORCHESTRATION_CHANNEL, WakeMode
from interlock.postgres.retry import RetryState, retry
from interlock.service import BackgroundService, BackgroundTasks, wait_for_event
from interlock.store.remote_commands import Enable, Refresh, Status, parse_command, send_answer
from interlock.store.step_results import read_queue_state
from interlock.store.workers import HEARTBEATS_PER_LEASE, RegisteredProcess, deregister_worker, ensure_registered
from interlock.telemetry import log
from interlock.tracing import BatchSpan, find_tracer, parse_all
from interlock.workflow.advance import advance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection
    from interlock.postgres.notifier import Subscription
    from interlock.store.remote_commands import Command

LEAVE_TIMEOUT_S = 2.0  # to end the orchestrator's row at the stop
NEVER = -math.inf


class Orchestrator:
    """One orchestrator. `start` and `stop` it, or `serve` until a signal or `request_stop`."""

    def __init__(self, app: Interlock, settings: OrchestratorSettings | None = None) -> None:
        self.id = name_orchestrator(app.config.worker_name)
        self.settings = settings or OrchestratorSettings.of(app.config)
        self.statistics = EventStatistics()
        self.enabled = True
        self.subscription: Subscription | None = None
        self._app = app
        self._maintenance = JobSweeps(self.id, self.settings)
        self._connection: Connection | None = None  # of the advancing loop
        self._in_use = asyncio.Lock()  # that connection: a batch, or what runs between two batches
        self._lock = asyncio.Lock()  # a start during a stop waits until the orchestrator has ended
        self._started = False
        self._stop_requested = asyncio.Event()
        self._loops = (
            _WorkLoop(self, "advancing", self._keep_advancing),
            _WorkLoop(self, "tending", self._keep_tending),
        )
        self._answers = BackgroundTasks()
        self._messages_arrived = asyncio.Event()
        self._maintenance_due = asyncio.Event()
        self._has_more_messages = False
        self._announced: set[int | None] = set()  # messages since the last batch; None stands for any number of them
        self._maintenance_in_s = 0.0
        self._paused = False
        self._heartbeat_at = NEVER

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not stopped."""
        return self._started

    @property
    def is_working(self) -> bool:
        """Whether it takes messages: it is neither disabled nor paused."""
        return self.enabled and not self._paused

    @property
    def is_listening(self) -> bool:
        """Whether notifications arrive, as far as is known."""
        return self.subscription is not None and self.subscription.is_listening

    # --- start and stop

    async def start(self) -> None:
        """Start to work; the database must be reachable. Safe twice."""
        async with self._lock:
            if self._started:
                return
            await self._app.open(keep_connection=False)
            self._started = True
            self._wake()
            for loop in self._loops:
                await loop.start()
            if self.settings.mode is not WakeMode.POLLING:
                self.subscription = self._app.notifier.subscribe(
                    {ORCHESTRATION_CHANNEL: self._on_orchestration, CONTROL_CHANNEL: self._on_control},
                    self._wake,
                )
            log.info("orchestrator_started", orchestrator_id=self.id, mode=self.settings.mode.value)

    async def stop(self, *, at_once: bool = False) -> None:
        """Finish the current batch, or roll it back if `at_once`, and wait until ended. Safe twice and before start."""
        self._end_loops(at_once=at_once)
        async with self._lock:
            if not self._started:
                return
            await asyncio.gather(*(loop.stop() for loop in self._loops))
            if self.subscription is not None:
                self.subscription.close()
                self.subscription = None
            await self._answers.stop()
            self._started = False
            await self._app.close()
            log.info("orchestrator_stopped", orchestrator_id=self.id, **self.statistics.document()["orchestration"])

    def request_stop(self) -> None:
        """Ask for the stop without waiting; the second call rolls the current batch back."""
        self._end_loops(at_once=self._stop_requested.is_set())
        self._stop_requested.set()

    def _end_loops(self, *, at_once: bool) -> None:
        for loop in self._loops:
            if at_once:
                loop.cancel()
            else:
                loop.request_stop()
        self._wake()

    async def serve(self, *, signals: bool = True) -> None:
        """Work in the caller's event loop until SIGTERM, SIGINT or `request_stop`; wait for an unreachable database."""
        if signals:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                # outside of the main thread, and on platforms without signals, the caller uses request_stop()
                with suppress(NotImplementedError, RuntimeError, ValueError):
                    loop.add_signal_handler(number, self.request_stop)
        try:
            await retry(
                self.start,
                on_failure=self.log_interruption("starting"),
                state=RetryState(self.settings.backoff),
                give_up_on=(MigrationError,),
                stopping=self._stop_requested,
            )
            await self._stop_requested.wait()
        finally:
            await self.stop()

    def log_interruption(self, work: str) -> Callable[[Exception, float], None]:
        """Make the function that logs the failures of one kind of work."""

        def on_failure(error: Exception, delay_s: float) -> None:
            log.warning(
                "orchestrator_interrupted",
                orchestrator_id=self.id,
                work=work,
                error=str(error) or type(error).__name__,
                retry_in=round(delay_s, 2),
            )

        return on_failure

    @property
    def url(self) -> str:
        """The URL of the database, while the orchestrator runs."""
        return self._app.url

    @asynccontextmanager
    async def between_batches(self) -> AsyncIterator[Connection]:
        """Lend the connection of the advancing loop; a new one while that loop has none, or has batch after batch."""
        if self._connection is not None and not self._has_more_messages:
            async with self._in_use:
                if self._connection is not None:  # the loop may have ended meanwhile
                    yield self._connection
                    return
        async with connect(self.url) as connection:
            yield connection

    # --- advancing

    async def _keep_advancing(self, work_loop: _WorkLoop) -> None:
        async with connect(self.url) as connection:
            self._connection = connection
            try:
                while not work_loop.stopping.is_set():
                    await self._advance(connection, work_loop.stopping)
                    work_loop.retries.reset()
            finally:
                async with self._in_use:  # before it is closed, those that use it between batches end
                    self._connection = None

    async def _advance(self, connection: Connection, stopping: asyncio.Event) -> None:
        """Wait for messages and advance the jobs of one batch."""
        was_idle = not self._has_more_messages and not self._announced
        notified = self._has_more_messages or await wait_for_event(self._messages_arrived, self._poll_interval_s())
        if stopping.is_set():
            return
        # one notification to an idle orchestrator names the only message that waits; under load it reads batches
        msg_id = self._announced.pop() if was_idle and len(self._announced) == 1 else None
        self._announced.clear()
        self._messages_arrived.clear()
        self._has_more_messages = self.is_working  # unless the batch succeeds
        if not self.is_working:
            return
        tracer = find_tracer(enabled=self._app.config.tracing)
        traceparents: list[str] = []
        began, began_at = time.perf_counter(), time.time()
        async with self._in_use:
            done = await advance(
                connection,
                actor=self.id,
                limit=self.settings.batch,
                msg_id=msg_id,
                visibility=self.settings.visibility,
                now=self._app.now(),
                traceparents=traceparents,
            )
        if tracer is not None and (related := parse_all(traceparents)):
            details = {
                "messaging.destination.name": self._app.config.orchestration_queue,
                "messaging.client.id": self.id,
            }
            with BatchSpan(
                tracer, "advance", "process", related, count=done.received, began_s=began_at, attributes=details
            ):
                pass
        took_s = time.perf_counter() - began
        subscribes = self.settings.mode is not WakeMode.POLLING
        self.statistics.count(done, seconds=took_s, by_polling=subscribes and not notified)
        # a full batch means that there are more; without notifications, poll again at once while there is anything
        self._has_more_messages = done.received >= (self.settings.batch if subscribes else 1)
        if done.received:
            log.debug("orchestration_batch", orchestrator_id=self.id, seconds=round(took_s, 4), **done._asdict())
        if done.failed:
            log.error("orchestration_messages_failed", orchestrator_id=self.id, messages=done.failed)

    def _poll_interval_s(self) -> float:
        relies_on_events = self.settings.mode is WakeMode.EVENTS and self.is_listening
        return self.settings.events_tick if relies_on_events else self.settings.tick

    # --- maintenance and heartbeat

    async def _keep_tending(self, work_loop: _WorkLoop) -> None:
        while not work_loop.stopping.is_set():
            await self._maintain(work_loop.stopping)
            work_loop.retries.reset()
        await self._leave()

    async def _maintain(self, stopping: asyncio.Event) -> None:
        """Send the heartbeat; start jobs that waited for a worker; end jobs and waits that are due."""
        heartbeat_interval_s = self.settings.presence / HEARTBEATS_PER_LEASE
        heartbeat_in_s = self._heartbeat_at + heartbeat_interval_s - time.monotonic()
        await wait_for_event(self._maintenance_due, min(self._maintenance_in_s, max(heartbeat_in_s, 0.0)))
        self._maintenance_due.clear()
        self._maintenance_in_s = 0.0  # unless this round succeeds
        if stopping.is_set():
            return
        async with self.between_batches() as connection:
            if time.monotonic() - self._heartbeat_at >= heartbeat_interval_s:
                await self._send_heartbeat(connection)
            due_in_s = await self._maintenance.run(connection, self._app.now()) if self.is_working else math.inf
        self._maintenance_in_s = min(due_in_s, self.settings.tick)

    async def _send_heartbeat(self, connection: Connection) -> None:
        process = RegisteredProcess(self.id, "orchestrator", statistics=self.statistics.document())
        lease = timedelta(seconds=self.settings.presence)
        self._follow_status(await ensure_registered(connection, process, lease=lease, now=self._app.now()))
        show_queue(await read_queue_state(connection))
        self._heartbeat_at = time.monotonic()

    def _follow_status(self, status: str) -> None:
        """Pause, resume or stop as the orchestrator's row says."""
        paused = status == SupervisedWorkerState.PAUSED
        if paused is not self._paused:
            self._paused = paused
            self._announce_message(None)
        if SupervisedWorkerState(status) in SUPERVISED_WORKER.final:
            log.warning("orchestrator_dismissed", orchestrator_id=self.id, status=status)
            self.request_stop()

    async def _leave(self) -> None:
        async with asyncio.timeout(LEAVE_TIMEOUT_S), self.between_batches() as connection:
            await deregister_worker(connection, self.id, now=self._app.now())
        self._heartbeat_at = NEVER

    # --- notifications and commands

    def _wake(self) -> None:
        self._announce_message(None)
        self._maintenance_due.set()

    def _announce_message(self, msg_id: int | None) -> None:
        self._announced.add(msg_id)
        self._messages_arrived.set()

    def _on_orchestration(self, payload: str) -> None:
        if payload.isdecimal():
            self._announce_message(int(payload))
        elif payload == "messages":
            self._announce_message(None)
        else:  # a worker came, or a due time before all others was stored
            self._maintenance_due.set()

    def _on_control(self, payload: str) -> None:
        if payload == self.id:  # its row was changed
            self._heartbeat_at = NEVER
            self._maintenance_due.set()
            return
        try:
            request = parse_command(payload, self.id)
        except InputError as error:
            log.warning("command_refused", orchestrator_id=self.id, error=str(error))
            return
        if request is not None:
            answer = self.execute(request.command)
            if request.token is not None:
                self._answers.spawn("command answer", self._send_answer(request.token, answer))

    def execute(self, command: Command) -> dict[str, Any]:
        """Execute a remote command and return the answer; an orchestrator knows only the system commands."""
        if isinstance(command, Enable):
            self.enabled = command.enabled
            self._wake()
            log.info("orchestrator_enabled" if command.enabled else "orchestrator_disabled", orchestrator_id=self.id)
        elif isinstance(command, Refresh):
            self._wake()
        elif not isinstance(command, Status):
            return {"error": "this is an orchestrator: it takes status, refresh and enable"}
        return self.status()

    def status(self) -> dict[str, Any]:
        """Describe the orchestrator, as the answer to a command."""
        return {
            "role": "orchestrator",
            "enabled": self.enabled,
            "paused": self._paused,
            "mode": self.settings.mode.value,
            "hearing": self.is_listening,
            "statistics": self.statistics.document(),
        }

    async def _send_answer(self, token: str, answer: dict[str, Any]) -> None:
        with suppress(StoreError):  # the sender of the command repeats it
            async with self._app.connection() as connection:
                await send_answer(connection, token, self.id, answer)


class _WorkLoop(BackgroundService):
    """Repeats one kind of work; a stop waits for the current round."""

    stop_timeout_s = None

    def __init__(self, orchestrator: Orchestrator, name: str, work: Callable[[_WorkLoop], Awaitable[None]]) -> None:
        super().__init__(f"orchestrator {name}")
        self._work = work
        self.retries = RetryState(orchestrator.settings.backoff)
        self._on_failure = orchestrator.log_interruption(name)

    async def run(self) -> None:
        """Do the work until `stopping`; after any error, anew."""
        await retry(
            lambda: self._work(self),
            on_failure=self._on_failure,
            state=self.retries,
            retry_on=(Exception,),
            stopping=self.stopping,
        )
