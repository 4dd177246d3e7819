"""The components and connections of a worker: how they are wired, started and stopped.

Invariant: every background service of the worker is started and stopped here. Outcomes are settled over one connection
at a time; when that is lost, `on_connection_lost` is called once.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from interlock.errors import DisconnectedError
from interlock.lifecycle import TaskEvent
from interlock.postgres.connection import connect
from interlock.postgres.notifier import (
    BROADCAST,
    CONTROL_CHANNEL,
    DUE_CHANNEL,
    DUTIES_CHANNEL,
    LIMITED_CHANNEL,
    RELEASED_CHANNEL,
    TASKS_CHANNEL,
    WakeMode,
)
from interlock.service import BackgroundService
from interlock.telemetry import log
from interlock.worker.cancellation import CANCEL_TIMEOUT_S, run_within
from interlock.worker.fetcher import Fetcher
from interlock.worker.isolation import Isolation
from interlock.worker.loop_thread import LoopThread
from interlock.worker.maintenance.leader import Maintenance
from interlock.worker.registration import Registration
from interlock.worker.runner import Runner
from interlock.worker.stats import QueueGauges

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection
    from interlock.postgres.notifier import Subscription
    from interlock.service import Service
    from interlock.worker.process import WorkerStateMachine
    from interlock.worker.settler import Settler

SETTLE_LOCK_TIMEOUT = "500ms"  # a locked row holds up the outcomes beside it for no longer


class WorkerComponents:
    """The services and state of a worker, which live from its first connection to its end, across reconnects."""

    def __init__(self, worker: WorkerStateMachine, app: Interlock) -> None:
        settings = worker.settings
        self.url = app.url
        self._worker = worker
        self._app = app
        self._thread = LoopThread("interlock-leases")
        self.fetcher = Fetcher(worker.worker_id, settings, app.tasks, app.config.callback_url)
        self.isolation = Isolation(worker.worker_id, self.fetcher, worker.context.active)
        self.runner = Runner(worker, app, self._thread, self.isolation)
        self.settler = self.runner.settler
        self.leases = self.runner.leases
        self.statistics = self.runner.statistics
        self.registration = Registration(worker, app, self.runner, self._thread)
        self._thread.host(self.leases, self.registration.heartbeat)
        self._maintenance = Maintenance(
            app.url, actor=worker.worker_id, config=app.config, lend=worker.connections.between_claims
        )
        self._services: list[Service] = [self._thread]
        if settings.duties:
            self._services.append(self._maintenance)
        if settings.gauges:
            self._services.append(QueueGauges(app.url))
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Start the background services and subscribe to notifications."""
        for service in self._services:
            await service.start()
        if self._worker.settings.mode is not WakeMode.POLLING:
            self._subscription = self._app.notifier.subscribe(
                {
                    TASKS_CHANNEL: self._on_tasks,
                    RELEASED_CHANNEL: self._on_released,
                    DUE_CHANNEL: self._on_due,
                    LIMITED_CHANNEL: self._on_limited_tasks,
                    CONTROL_CHANNEL: self._on_control,
                    DUTIES_CHANNEL: self._maintenance.wake,
                },
                self._worker.wake.set,
            )

    @property
    def is_listening(self) -> bool:
        """Whether notifications arrive, as far as is known."""
        return self._subscription is not None and self._subscription.is_listening

    def _on_tasks(self, namespace: str) -> None:
        if namespace == BROADCAST or namespace in self.registration.namespaces:
            self._worker.wake.set()

    def _on_released(self, namespace: str) -> None:
        if namespace in self.registration.namespaces:
            self.fetcher.expect_older_tasks()
            self._worker.wake.set()

    def _on_due(self, payload: str) -> None:
        due, _, namespace = payload.partition(" ")
        if namespace in self.registration.namespaces:
            self._worker.wake_in(self.fetcher.seconds_until(float(due)))

    def _on_limited_tasks(self, namespace: str) -> None:
        if namespace in self.registration.namespaces:
            self.fetcher.expect_limited_tasks()
            self._worker.wake.set()

    def _on_control(self, payload: str) -> None:
        """React to a changed row or a cancellation request (a worker's id), a changed pause ("*"), or a command."""
        if payload in {self._worker.worker_id, self.registration.row_id}:
            self.leases.renew_now()
            self.registration.reread()
        elif payload == BROADCAST:
            self.fetcher.reread_paused_namespaces()
            self.runner.return_waiting(TaskEvent.CLAIM_FAILED, "because a namespace was paused or resumed")
            self._worker.wake.set()
        else:
            self.registration.handle_command(payload)

    def resign(self) -> None:
        """Give up leadership without waiting, so that another worker takes over maintenance."""
        self._maintenance.request_stop()

    async def stop(self, seconds: float) -> None:
        """Stop everything within a time; safe twice."""
        if self._subscription is not None:
            self._subscription.close()
        self.registration.heartbeat.stop_timeout_s = seconds / 2
        with suppress(TimeoutError):
            await run_within(seconds, self._stop())

    async def _stop(self) -> None:
        try:
            stops = (self.registration.stop(), *(service.stop() for service in self._services))
            await asyncio.gather(*stops, return_exceptions=True)
        finally:
            await self.runner.close()


class SettlingLoop(BackgroundService):
    """Settles outcomes over one connection until that is lost or of no use; then the worker opens new ones."""

    def __init__(self, settler: Settler, connection: Connection, on_error: Callable[[Exception], None]) -> None:
        super().__init__("settling")
        self._settler = settler
        self._connection = connection
        self._on_error = on_error

    async def run(self) -> None:
        """Settle until an error; any is answered with a new connection."""
        try:
            await self._settler.run(self._connection)
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("settling_interrupted", error=str(error) or type(error).__name__)
            self._on_error(error)


class WorkerConnections:
    """The two connections of the worker's loop, opened and closed together: claims and settles overlap."""

    def __init__(self, worker: WorkerStateMachine) -> None:
        self._worker = worker
        self._stack = AsyncExitStack()
        self._settling: SettlingLoop | None = None
        self.claiming: Connection | None = None
        self.lost = asyncio.Event()
        self.in_use = asyncio.Lock()  # the claiming connection: a claim, or what others run between two claims

    @property
    def are_open(self) -> bool:
        """Whether both are open, as far as is known."""
        return self.claiming is not None and not self.lost.is_set()

    @asynccontextmanager
    async def between_claims(self) -> AsyncIterator[Connection]:
        """Lend the claiming connection for a moment; DisconnectedError while there is none."""
        async with self.in_use:
            if self.claiming is None or self.lost.is_set():
                raise DisconnectedError("the worker is not connected")
            yield self.claiming

    async def open(self, url: str, settler: Settler) -> Connection:
        """Open new connections, start to settle over one, and return the other, for claiming."""
        await self.close()
        async with AsyncExitStack() as stack:
            claiming = await stack.enter_async_context(connect(url, few_statements=True))
            settling = await stack.enter_async_context(
                connect(url, few_statements=True, lock_timeout=SETTLE_LOCK_TIMEOUT)
            )
            self.lost.clear()
            self._settling = SettlingLoop(settler, settling, self.mark_lost)
            await self._settling.start()
            stack.push_async_callback(_close_silently, claiming, settling)
            self.claiming = claiming
            self._stack = stack.pop_all()
        return claiming

    async def close(self, timeout_s: float = CANCEL_TIMEOUT_S) -> None:
        """Close both; safe twice and before they were opened."""
        self.claiming = None
        if self._settling is not None:
            self._settling.cancel_timeout_s = timeout_s
            await self._settling.stop()  # before its connection is closed
        await self._stack.aclose()

    def mark_lost(self, error: Exception) -> None:
        """Make the worker reconnect, because a connection is gone or of no use."""
        self.lost.set()
        self._worker.on_connection_lost(error)


async def _close_silently(*connections: Connection) -> None:
    """Close connections without a message to a server that may be gone."""
    for connection in connections:
        await connection.close()
