"""The orchestrator process: takes step results as they come, and tends to what only time brings about.

Invariant: everything that it does is one transaction of the store's; an orchestrator that dies at any moment leaves
nothing half done, and any number of them can work at once.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from interlock.errors import InputError, MigrationError, StoreError
from interlock.lifecycle import SUPERVISED_WORKER, SupervisedWorkerState
from interlock.orchestrator.maintenance import Duties
from interlock.orchestrator.settings import OrchestratorSettings, name_orchestrator
from interlock.orchestrator.stats import EventStatistics, show_queue
from interlock.postgres.connection import connect
from interlock.postgres.notifier import Listener, WakeMode, heed_cancellation
from interlock.store.remote_commands import Enable, Refresh, Status, parse_command, send_answer
from interlock.store.step_results import queue_state
from interlock.store.workers import HEARTBEATS_PER_LEASE, RegisteredProcess, deregister_worker, ensure_registered
from interlock.telemetry import log
from interlock.workflow.advance import advance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection
    from interlock.store.remote_commands import Command

CHANNELS = ("interlock_orchestration", "interlock_control")
LAST_WORD = 2.0  # seconds that the farewell may take


class Orchestrator:
    """One orchestrator. `start` and `stop` it, or `serve` until somebody asks it to stop."""

    def __init__(self, app: Interlock, settings: OrchestratorSettings | None = None) -> None:
        self.id = name_orchestrator(app.config.worker_name)
        self.settings = settings or OrchestratorSettings.of(app.config)
        self.statistics = EventStatistics()
        self._duties = Duties(self.id, self.settings)
        self.enabled = True
        self.listener: Listener | None = None
        self._app = app
        self._contract = asyncio.Lock()  # of start and stop
        self._stopping = asyncio.Event()
        self._asked = asyncio.Event()
        self._news = asyncio.Event()  # messages may be there
        self._tending = asyncio.Event()  # jobs may be waiting for just what happened
        self._more = False
        self._paused = False
        self._beaten_at = float("-inf")
        self._work: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not stopped."""
        return bool(self._work)

    @property
    def is_working(self) -> bool:
        """Whether it takes messages: it is neither disabled nor paused."""
        return self.enabled and not self._paused

    # --- start and stop

    async def start(self) -> None:
        """Begin to work. Safe twice; the database must be there."""
        async with self._contract:
            if self._work:
                return
            await self._app.open()
            self._stopping.clear()
            self._news.set()
            self._tending.set()
            self._work = [
                asyncio.create_task(self._persist("advancing", self._advance)),
                asyncio.create_task(self._persist("tending", self._tend, self._leave)),
            ]
            if self.settings.mode is not WakeMode.POLLING:
                self.listener = Listener(
                    self._app.url, CHANNELS, self._hear, self._wake, probe_interval=self.settings.probe_interval
                )
                self._spawn(self.listener.run())
            log.info("orchestrator_started", orchestrator_id=self.id, mode=self.settings.mode.value)

    async def stop(self, *, at_once: bool = False) -> None:
        """Finish the batch and stop; `at_once` rolls it back. Waits until it has; safe twice, and before start."""
        self._stopping.set()
        self._wake()
        if at_once:
            for task in self._work:
                task.cancel()
        async with self._contract:
            if not self._work:
                return
            await asyncio.gather(*self._work, return_exceptions=True)
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            self._work, self.listener = [], None
            await self._app.close()
            log.info("orchestrator_stopped", orchestrator_id=self.id, **self.statistics.document()["orchestration"])

    def request_stop(self) -> None:
        """Ask for the end; asked a second time, what is under way is rolled back."""
        if self._asked.is_set():
            for task in self._work:
                task.cancel()
        self._asked.set()
        self._stopping.set()
        self._wake()

    async def serve(self, *, signals: bool = True) -> None:
        """Work until somebody asks for the end, in the loop of the caller."""
        if signals:
            self._handle_signals()
        try:
            await self._begin()
            await self._asked.wait()
        finally:
            await self.stop()

    async def _begin(self) -> None:
        """Start; as long as the database cannot be reached, try again."""
        failures = 0
        while not self._asked.is_set():
            try:
                await self.start()
            except MigrationError:
                raise
            except (StoreError, OSError) as error:
                failures += 1
                await self._interrupted("starting", error, failures, self._asked)
            else:
                return

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # not the main thread, or a platform without signals: whoever runs us asks by request_stop()
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self.request_stop)

    # --- the two loops

    async def _persist(
        self,
        name: str,
        work: Callable[[Connection], Awaitable[None]],
        farewell: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> None:
        """Do one kind of work over and over until the stop, over one connection after another."""
        failures = 0
        while not self._stopping.is_set():
            try:
                async with connect(self._app.url) as connection:
                    while not self._stopping.is_set():
                        await work(connection)
                        failures = 0
                    if farewell is not None:
                        await farewell(connection)
            except Exception as error:  # noqa: BLE001 - whatever it was, a new connection is a new beginning
                heed_cancellation()
                failures += 1
                await self._interrupted(name, error, failures, self._stopping)

    async def _interrupted(self, name: str, error: Exception, failures: int, stop: asyncio.Event) -> None:
        grown = min(self.settings.retry_base * 2 ** min(failures, 20), self.settings.retry_cap)
        pause = grown * random.uniform(0.5, 1)  # noqa: S311 - jitter
        said = str(error) or type(error).__name__
        log.warning(
            "orchestrator_interrupted", orchestrator_id=self.id, work=name, error=said, retry_in=round(pause, 2)
        )
        await _heard(stop, pause)

    async def _advance(self, connection: Connection) -> None:
        """Wait for messages, and act on one batch of them."""
        told = self._more or await _heard(self._news, self._until_next_look())
        if self._stopping.is_set():
            return
        self._news.clear()
        self._more = False
        if not self.is_working:
            return
        began = time.perf_counter()
        done = await advance(
            connection,
            actor=self.id,
            limit=self.settings.batch,
            visibility=self.settings.visibility,
            now=self._app.now(),
        )
        took = time.perf_counter() - began
        is_listening = self.settings.mode is not WakeMode.POLLING
        self.statistics.count(done, seconds=took, by_looking=is_listening and not told)
        # a full batch means that there are more; and who does not listen looks again while there is anything
        self._more = done.received >= (self.settings.batch if is_listening else 1)
        if done.received:
            log.debug("orchestration_batch", orchestrator_id=self.id, seconds=round(took, 4), **done._asdict())
        if done.failed:
            log.error("orchestration_messages_failed", orchestrator_id=self.id, messages=done.failed)

    def _until_next_look(self) -> float:
        hears = self.listener is not None and self.listener.is_hearing
        rare = self.settings.mode is WakeMode.EVENTS and hears
        return self.settings.events_tick if rare else self.settings.tick

    async def _tend(self, connection: Connection) -> None:
        """Start what waited for a worker, end what has taken too long, and say that this orchestrator is here."""
        await _heard(self._tending, self.settings.tick)
        self._tending.clear()
        if self._stopping.is_set():
            return
        await self._beat(connection)
        if not self.is_working:
            return
        if await self._duties.tend(connection, self._app.now()):
            self._tending.set()  # there may be more

    async def _beat(self, connection: Connection) -> None:
        if time.monotonic() - self._beaten_at < self.settings.presence / HEARTBEATS_PER_LEASE:
            return
        process = RegisteredProcess(self.id, "orchestrator", statistics=self.statistics.document())
        lease = timedelta(seconds=self.settings.presence)
        self._heed(await ensure_registered(connection, process, lease=lease, now=self._app.now()))
        show_queue(await queue_state(connection))
        self._beaten_at = time.monotonic()

    def _heed(self, status: str) -> None:
        """Do as the row says, which somebody may have paused or ended."""
        paused = status == SupervisedWorkerState.PAUSED
        if paused is not self._paused:
            self._paused = paused
            self._news.set()
        if SupervisedWorkerState(status) in SUPERVISED_WORKER.final:
            log.warning("orchestrator_dismissed", orchestrator_id=self.id, status=status)
            self.request_stop()

    async def _leave(self, connection: Connection) -> None:
        async with asyncio.timeout(LAST_WORD):
            await deregister_worker(connection, self.id, now=self._app.now())
        self._beaten_at = float("-inf")

    # --- what is heard

    def _wake(self) -> None:
        self._news.set()
        self._tending.set()

    def _hear(self, channel: str, payload: str) -> None:
        if channel == "interlock_control":
            self._obey(payload)
        elif payload.isdecimal():  # the number of a message
            self._news.set()
        else:
            self._wake()

    def _obey(self, payload: str) -> None:
        """Do what a command says; only those of the system concern an orchestrator."""
        if payload == self.id:  # its row was changed
            self._beaten_at = float("-inf")
            self._tending.set()
            return
        try:
            request = parse_command(payload, self.id)
        except InputError as error:
            log.warning("command_refused", orchestrator_id=self.id, error=str(error))
            return
        if request is not None:
            document = self.execute(request.command)
            if request.token is not None:
                self._spawn(self._answer(request.token, document))

    def execute(self, command: Command) -> dict[str, Any]:
        """Carry out a command of the system, and give the answer."""
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
        """Tell how this orchestrator is."""
        return {
            "role": "orchestrator",
            "enabled": self.enabled,
            "paused": self._paused,
            "mode": self.settings.mode.value,
            "hearing": self.listener is not None and self.listener.is_hearing,
            "statistics": self.statistics.document(),
        }

    async def _answer(self, token: str, document: dict[str, Any]) -> None:
        with suppress(StoreError):  # whoever asked asks again
            async with self._app.connection() as connection:
                await send_answer(connection, token, self.id, document)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _heard(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most so long; tell whether it came."""
    if event.is_set():
        return True
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
