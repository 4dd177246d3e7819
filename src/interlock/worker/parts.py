"""The parts of a worker that live as long as its process, made when the database is first reached.

Invariant: every background task of the worker is started here and ended here.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from interlock.store.database import connect
from interlock.worker.claims import Claims
from interlock.worker.duties import Duties
from interlock.worker.gauges import keep_gauges
from interlock.worker.leases import LeaseKeeper
from interlock.worker.listener import Listener
from interlock.worker.services import AttemptServices
from interlock.worker.settings import WakeMode
from interlock.worker.settler import Settler

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from interlock.client.app import Interlock
    from interlock.worker.attempt import TaskStateMachine
    from interlock.worker.settings import WorkerSettings


class Parts:
    """What a worker is made of."""

    def __init__(
        self,
        app: Interlock,
        worker_id: str,
        settings: WorkerSettings,
        active: dict[int, TaskStateMachine],
        *,
        reported: Callable[[TaskStateMachine, bool], None],
        cancel: Callable[[TaskStateMachine, str | None], None],
        wake: Callable[[], None],
    ) -> None:
        self.url = app.url
        self._worker_id = worker_id
        self._settings = settings
        self._config = app.config
        self._wake = wake
        self.claims = Claims(worker_id, settings, app.tasks)
        self.settler = Settler(worker_id, reported)
        self.keeper = LeaseKeeper(self.url, settings, active, cancel)
        self.services = AttemptServices(app, settings, self.settler, self.url)
        self.listener = Listener(self.url, self._hear, settings.probe_interval)
        self._duties = Duties(lambda: connect(self.url), actor=worker_id, config=app.config)
        self._stop_duties = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Start what runs beside the worker's own loop."""
        self.keeper.start()
        if self._settings.mode is not WakeMode.POLLING:
            self.spawn(self.listener.run())
        if self._settings.duties:
            self.spawn(self._duties.run(self._stop_duties))
        if self._config.metrics_port is not None:
            self.spawn(keep_gauges(lambda: connect(self.url)))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something in the background until it ends or the worker does."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _hear(self, channel: str, payload: str) -> None:
        if channel == "interlock_tasks" and (payload == "*" or payload in self._settings.namespaces):
            self._wake()
        elif channel == "interlock_duties":
            self._duties.wake(payload)
        elif channel == "interlock_control" and payload == self._worker_id:
            self.keeper.poke()
        elif channel == "interlock_control" and payload == "*":
            self.claims.reread_paused_namespaces()
            self._wake()

    def resign(self) -> None:
        """Give up leadership, so that another worker can take the duties over."""
        self._stop_duties.set()

    async def close(self, seconds: float) -> None:
        """End everything, within a time; safe twice."""
        self.keeper.stop()
        for task in self._background:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*self._background, return_exceptions=True)
                await self.services.close()
