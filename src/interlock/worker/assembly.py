"""The parts of a worker that live as long as its process, made when the database is first reached.

Invariant: every background task of the worker is started here and ended here.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interlock.postgres.connection import connect
from interlock.postgres.notifier import WakeMode
from interlock.store.workers import RegisteredProcess
from interlock.telemetry import log
from interlock.worker.cancellation import COURTESY, end, within
from interlock.worker.fetcher import Claims
from interlock.worker.leases import LeaseKeeper
from interlock.worker.maintenance.leader import Duties
from interlock.worker.registration import Registration
from interlock.worker.runner import AttemptServices, Running
from interlock.worker.settler import Settler, largest_batch
from interlock.worker.stats import WorkerStatistics, keep_gauges

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection
    from interlock.postgres.notifier import Subscription
    from interlock.worker.runner import WorkerContext
    from interlock.worker.settings import WorkerSettings


class Parts:
    """What a worker is made of."""

    def __init__(
        self,
        app: Interlock,
        worker_id: str,
        settings: WorkerSettings,
        context: WorkerContext,
        *,
        wake: asyncio.Event,
        slot_freed: asyncio.Event,
        dismissed: Callable[[], None],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self.url = app.url
        self._worker_id = worker_id
        self._settings = settings
        self._types = app.tasks
        self._wake = wake
        self._slot_freed = slot_freed
        self.running = Running(
            self,
            context,
            worker_id=worker_id,
            cancel_grace=settings.cancel_grace,
            wake=wake,
            slot_freed=slot_freed,
        )
        self._callback_url = app.config.callback_url
        self.claims = Claims(worker_id, settings, self._types, self._callback_url)
        self.settler = Settler(
            worker_id, self.running.reported, largest_batch(settings.concurrency), settings.largest_result
        )
        self.services = AttemptServices(app, settings, self.settler, self.url)
        self._notifier = app.notifier
        self.subscription: Subscription | None = None
        self.statistics = WorkerStatistics(self.services.events.statistics)
        self._row = RegisteredProcess(
            settings.row or worker_id,
            namespaces=settings.namespaces,
            types=tuple(sorted(self._types)),
            generation=settings.generation,
        )
        self.registration = Registration(
            self._row,
            self.statistics,
            connect=lambda: connect(self.url),
            clock=app.now,
            changed=self._change,
            dismissed=dismissed,
            describe=describe,
        )
        self.keeper = LeaseKeeper(
            self.url, settings, context.active, self.running.cancel, beside=self.registration.keep
        )
        self._duties = Duties(lambda: connect(self.url), actor=worker_id, config=app.config)
        self._stop_duties = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Start what runs beside the worker's own loop."""
        self.keeper.start()
        if self._settings.mode is not WakeMode.POLLING:
            self.subscription = self._notifier.subscribe(
                {
                    "interlock_tasks": self._on_tasks,
                    "interlock_control": self._obey,
                    "interlock_duties": self._duties.wake,
                },
                self._look_once,
            )
        if self._settings.duties:
            self._spawn(self._duties.run(self._stop_duties))
        if self._settings.gauges:
            self._spawn(keep_gauges(lambda: connect(self.url)))

    def _look_once(self) -> None:
        """Find what was sent while nobody listened."""
        self._on_tasks("*")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background until it ends or the worker does."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _change(self) -> None:
        """Deal with the queue otherwise from now on, as the registration says; nothing that was read before counts."""
        settings = replace(self._settings, namespaces=self.registration.namespaces)
        self.claims = Claims(self._worker_id, settings, self._types, self._callback_url)
        self._wake.set()
        self._slot_freed.set()

    @property
    def is_listening(self) -> bool:
        """Whether notifications arrive, as far as is known."""
        return self.subscription is not None and self.subscription.is_listening

    def _on_tasks(self, payload: str) -> None:
        if payload == "*" or payload in self.registration.namespaces:
            self._wake.set()

    def _obey(self, payload: str) -> None:
        if payload in {self._worker_id, self._row.id}:
            self.keeper.poke()
            self.registration.poke()
        elif payload == "*":
            self.claims.reread_paused_namespaces()
            self._wake.set()
        else:
            answer = self.registration.hear(payload)
            if answer is not None:
                self._spawn(self.registration.answer(answer))

    def resign(self) -> None:
        """Give up leadership, so that another worker can take the duties over."""
        self._stop_duties.set()

    async def close(self, seconds: float) -> None:
        """End everything, within a time; safe twice."""
        if self.subscription is not None:
            self.subscription.close()
        for task in self._background:
            task.cancel()
        with suppress(TimeoutError):
            await within(seconds, self._end(seconds))

    async def _end(self, seconds: float) -> None:
        try:
            await asyncio.gather(self.keeper.stop(seconds), *self._background, return_exceptions=True)
        finally:
            await self.services.close()


# SECTION worker/connections
# The two connections of a worker's own loop: one to claim over and one to settle over, because the two overlap.
#
# Invariant: outcomes are settled over one connection at a time; when that is lost, the worker is told, once.


class Connections:
    """Both connections: open or closed together."""

    def __init__(self, told: Callable[[Exception], None]) -> None:
        self._told = told
        self._stack = AsyncExitStack()
        self._settler: asyncio.Task[None] | None = None
        self.claiming: Connection | None = None
        self.lost = asyncio.Event()

    @property
    def are_up(self) -> bool:
        """Whether both are open, as far as is known."""
        return self.claiming is not None and not self.lost.is_set()

    async def open(self, url: str, settle: Callable[[Connection], Coroutine[Any, Any, None]]) -> Connection:
        """Connect anew, begin to settle, and give the connection for claiming."""
        await self.close()
        async with AsyncExitStack() as stack:
            claiming = await stack.enter_async_context(connect(url, few_statements=True))
            settling = await stack.enter_async_context(connect(url, few_statements=True))
            self.lost.clear()
            self._settler = asyncio.create_task(self._guard(settle(settling)))
            stack.push_async_callback(_hang_up, claiming, settling)
            self.claiming = claiming
            self._stack = stack.pop_all()
        return claiming

    async def close(self, courtesy: float = COURTESY) -> None:
        """Close both, soon; safe twice, and before they were open."""
        self.claiming = None
        if self._settler is not None:
            await end(self._settler, courtesy=courtesy)  # before its connection is closed under it
        await self._stack.aclose()

    async def _guard(self, settling: Coroutine[Any, Any, None]) -> None:
        try:
            await settling
        except Exception as error:  # noqa: BLE001 - whatever ended it, a new connection is a new beginning
            log.warning("settling_interrupted", error=str(error) or type(error).__name__)
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Hear that a connection is gone, or is of no use."""
        self.lost.set()
        self._told(error)


async def _hang_up(*connections: Connection) -> None:
    """Close connections without a word to a server that may be gone."""
    for connection in connections:
        await connection.close()
