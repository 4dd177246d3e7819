"""The worker process: the WorkerStateMachine, which connects, recovers, claims, rests and shuts down.

Invariant: a task is started only in RUNNING; once a shutdown is asked for, the process reaches STOPPED within 30 s,
and every task it held is by then reported or back in the queue.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from interlock.errors import DisconnectedError, InvariantError, MigrationError, StoreError
from interlock.lifecycle import WORKER, WorkerEvent, WorkerState
from interlock.machine import StateMachine
from interlock.postgres.notifier import WakeMode
from interlock.telemetry import WorkerTelemetry, log
from interlock.worker.assembly import Connections, Parts
from interlock.worker.cancellation import Breakable
from interlock.worker.fetcher import backoff
from interlock.worker.runner import WorkerContext
from interlock.worker.settings import WorkerSettings
from interlock.worker.shutdown import SIGNALS, Shutdown, Watchdog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask

GATHERING = 0.002
MOMENT = 0.01  # to wait for news before asking when the next task is due: what follows from a step comes at once
FATAL = (MigrationError, InvariantError)  # what a new connection does not mend
PATIENCE = 2.0  # with what is under way when a shutdown is asked for


class WorkerStateMachine(StateMachine[WorkerState, WorkerEvent]):
    """One worker process, from its start to its stop."""

    def __init__(self, worker_id: str, app: Interlock | None = None, settings: WorkerSettings | None = None) -> None:
        super().__init__(WORKER, observer=WorkerTelemetry(worker_id))
        self.worker_id = worker_id
        self.context = WorkerContext()
        self.settings = settings or WorkerSettings()
        self._app = app
        self._wake = asyncio.Event()
        self._slot_freed = asyncio.Event()
        self._hurry = asyncio.Event()
        self._connections = Connections(self._disconnected)
        self._parts: Parts | None = None
        self._watchdog: Watchdog | None = None
        self._asked_at: float | None = None
        self._by_looking = False
        self._has_all = False  # the latest claim left nothing that was due
        self._breakable = Breakable(PATIENCE)
        self._steps: dict[WorkerState, Callable[[], Awaitable[None]]] = {
            WorkerState.CONNECTING: self._connect,
            WorkerState.RECOVERING: self._recover,
            WorkerState.RUNNING: self._poll,
            WorkerState.BACKING_OFF: self._rest,
        }

    def is_accepting_tasks(self) -> bool:
        """Tell whether tasks may be started."""
        return self.state is WorkerState.RUNNING

    def is_running(self) -> bool:
        """Tell whether the process has not stopped yet."""
        return self.state is not WorkerState.STOPPED

    def run(self) -> None:
        """Live from STARTING to STOPPED, in a process that is the worker's alone."""
        # What was imported stays: there is no garbage in it to look for again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        with Watchdog(self.worker_id, self.settings.shutdown_limit) as self._watchdog, asyncio.Runner() as runner:
            runner.run(self.serve())
            if any(not task.done() for task in asyncio.all_tasks(runner.get_loop())):
                # A coroutine that swallows its cancellation would be waited for without end; its task is returned.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)

    async def serve(self, *, signals: bool = True) -> None:
        """Live from STARTING to STOPPED, in the loop of the caller."""
        if self._app is None:
            raise ValueError("a worker needs an app whose tasks it can run")
        if signals:
            self._handle_signals()
        self.transition(WorkerEvent.INITIALIZED)
        if self.context.shutdown_requested:
            self.transition(WorkerEvent.SHUTDOWN_REQUESTED)
        try:
            while self.state is not WorkerState.SHUTTING_DOWN:
                await self._breakable.run(self._steps[self.state]())
            await self._shut_down()
        finally:
            await self._app.close()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            # not the main thread, or a platform without signals: whoever runs us asks by request_shutdown()
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self.request_shutdown)
        if self._watchdog is not None:
            self._watchdog.overhear(loop)

    def request_shutdown(self) -> None:
        """Stop claiming and finish; asked a second time, stop at once."""
        if self.context.shutdown_requested:
            self._hurry.set()
            self._slot_freed.set()
            return
        self.context.shutdown_requested = True
        self._asked_at = time.monotonic()
        if self._watchdog is not None:
            self._watchdog.arm()
            self._asked_at = self._watchdog.asked_at or self._asked_at  # it may have heard of it long before
        if self._parts is not None:  # else the app is being opened, which bounds itself, and leaves nothing half open
            self._breakable.break_off_later()
        if self.can_transition(WorkerEvent.SHUTDOWN_REQUESTED):
            self.transition(WorkerEvent.SHUTDOWN_REQUESTED)
        self._wake.set()
        self._slot_freed.set()

    # --- CONNECTING

    async def _connect(self) -> None:
        """Open the connections anew; handlers that run on meanwhile keep their outcomes."""
        try:
            claiming = await self._open_connections()
        except MigrationError:
            raise
        except (StoreError, OSError) as error:
            self.context.backoff_count += 1
            if self.state is WorkerState.CONNECTING:
                self.transition(WorkerEvent.CONNECTION_FAILED, str(error))
                await self._sleep(backoff(self.settings, self.context.backoff_count))
            return
        if self.state is WorkerState.CONNECTING:
            self.context.connection = claiming
            self.transition(WorkerEvent.CONNECTED)

    async def _open_connections(self) -> Connection:
        self.context.connection = None
        parts = await self._begin()
        return await self._connections.open(parts.url, parts.settler.run)

    async def _begin(self) -> Parts:
        """Make the parts once the database has been reached for the first time."""
        if self._parts is None:
            if self._app is None:
                raise InvariantError("a worker without an app has nothing to run")
            await self._app.open()
            self._parts = Parts(
                self._app,
                self.worker_id,
                self.settings,
                self.context,
                wake=self._wake,
                slot_freed=self._slot_freed,
                dismissed=self._dismissed,
                describe=self._describe,
            )
            self._parts.start()
        return self._parts

    @property
    def parts(self) -> Parts:
        """What the worker is made of, once it has been connected."""
        if self._parts is None:
            raise InvariantError(f"a worker in state {self.state} was never connected")
        return self._parts

    def _disconnected(self, error: Exception) -> None:
        self._wake.set()
        self._slot_freed.set()
        if self.can_transition(WorkerEvent.ERROR):
            self.transition(WorkerEvent.ERROR, str(error))

    # --- RECOVERING

    async def _recover(self) -> None:
        """Take back what dead workers held, unless that was looked after a moment ago."""
        if self._connections.lost.is_set():
            # The settling connection went while the worker rested, where the table knows no error.
            self.transition(WorkerEvent.ERROR, "the settling connection was lost")
            return
        try:
            await self._look_after_others()
        except Exception as error:  # noqa: BLE001 - whatever it was, a new connection is a new beginning
            await self._stumble(error)
            return
        if self.state is WorkerState.RECOVERING:
            self.transition(WorkerEvent.RECOVERY_COMPLETE)

    async def _look_after_others(self) -> None:
        if await self.parts.claims.recover(self.connection):
            self.context.last_recovery_time = datetime.now(UTC)

    async def _stumble(self, error: Exception) -> None:
        """Go back to connecting; when it is not the connection that was at fault, not at once."""
        if isinstance(error, FATAL):
            raise error
        self._connections.lose(error)
        if not isinstance(error, DisconnectedError):
            self.context.backoff_count += 1
            await self._sleep(backoff(self.settings, self.context.backoff_count))

    # --- RUNNING

    async def _poll(self) -> None:
        """Claim as many tasks as there are free slots, and start them."""
        free = await self._free_slots()
        if self.state is not WorkerState.RUNNING:
            return
        if not self._is_to_ask():
            self.transition(WorkerEvent.NO_TASKS_AVAILABLE, "there is nothing to ask for")
            return
        began = time.monotonic()
        try:
            await self._look_after_others()  # a worker that always finds tasks must not leave it to those that rest
            claimed = await self.parts.claims.claim(self.connection, free)
        except Exception as error:  # noqa: BLE001 - whatever it was, a new connection is a new beginning
            await self._stumble(error)
            return
        if not self.is_accepting_tasks():
            await self.parts.claims.give_back(self.context.connection, claimed)
        elif claimed:
            await self._take_on(claimed, began)
        else:
            self.transition(WorkerEvent.NO_TASKS_AVAILABLE)

    async def _take_on(self, claimed: list[ClaimedTask], began: float) -> None:
        self._has_all = self.parts.claims.is_exhausted
        self._count(len(claimed))
        self._start(claimed, began + self.settings.lease)
        if self._has_all:
            await self.parts.running.give_way()
        if self.is_accepting_tasks():
            self.transition(WorkerEvent.POLL_CYCLE_COMPLETE)

    def _is_to_ask(self) -> bool:
        """Tell whether there may be more than the latest claim got; if not, to ask keeps only that from running."""
        has_all, self._has_all = self._has_all and not self._wake.is_set(), False
        self._wake.clear()
        return self._takes_tasks and not has_all

    async def _free_slots(self) -> int:
        """Wait until there is a free slot; if only few of many are, a moment longer for others to claim along."""
        most, active = self.settings.concurrency, self.context.active
        while len(active) >= most and self.state is WorkerState.RUNNING and self._takes_tasks:
            self._slot_freed.clear()
            await self._slot_freed.wait()
        if most - len(active) < most // 8:
            await asyncio.sleep(GATHERING)
        return most - len(active)

    @property
    def _takes_tasks(self) -> bool:
        return self.parts.registration.takes_tasks

    def _count(self, claimed: int) -> None:
        self.context.backoff_count = 0
        seen = self.parts.statistics.tasks
        seen.received += claimed
        if self._by_looking:
            seen.fallback_hits += claimed
        self._by_looking = False

    @property
    def connection(self) -> Connection:
        """The connection for claiming; in RECOVERING and RUNNING there always is one."""
        if self.context.connection is None:
            raise InvariantError(f"a worker in state {self.state} has no connection")
        return self.context.connection

    def _start(self, claimed: list[ClaimedTask], lease_until: float) -> None:
        active = len(self.context.active)
        if not self.is_accepting_tasks() or active + len(claimed) > self.settings.concurrency:
            raise InvariantError(f"a worker in state {self.state} with {active} tasks starts {len(claimed)} more")
        self.parts.running.start(claimed, lease_until)

    # --- BACKING_OFF

    async def _rest(self) -> None:
        """Sleep until something is heard, the next task is due, or it is time to look again."""
        self.context.backoff_count += 1
        pause = backoff(self.settings, self.context.backoff_count)
        if self.settings.mode is WakeMode.EVENTS and self.parts.is_listening:
            pause = self.settings.poll_cap * 12  # only in case that everything else fails
        await self._heard(min(pause, MOMENT))
        if self._takes_tasks and not self._wake.is_set():
            pause = await self.parts.claims.until_next(self.context.connection, pause)
        await self._heard(pause)
        self._by_looking = self.settings.mode is not WakeMode.POLLING and not self._wake.is_set()
        if self.state is WorkerState.BACKING_OFF:
            self.transition(WorkerEvent.BACKOFF_COMPLETE)

    # --- SHUTTING_DOWN

    async def _shut_down(self) -> None:
        """Let running tasks finish within the grace, return the others, and close everything."""
        asked_at = time.monotonic() if self._asked_at is None else self._asked_at
        if self._parts is not None:
            await Shutdown(
                self._parts,
                self.settings,
                self.context.active,
                self._connections,
                asked_at=asked_at,
                connect=self._open_connections,
                hurry=self._hurry,
                changed=self._slot_freed,
            ).run()
        self.context.connection = None
        log.info(
            "worker_stopped",
            worker_id=self.worker_id,
            tasks_processed=self.context.tasks_processed,
            tasks_failed=self.context.tasks_failed,
            seconds=round(time.monotonic() - asked_at, 3),
        )
        self.transition(WorkerEvent.SHUTDOWN_COMPLETE)

    # --- what others ask

    def _dismissed(self) -> None:
        if not self.context.shutdown_requested:
            self.request_shutdown()

    def _describe(self) -> dict[str, Any]:
        context, settings = self.context, self.settings
        return {
            "state": self.state.value,
            "mode": settings.mode.value,
            "hearing": self.parts.is_listening,
            "concurrency": settings.concurrency,
            "active": len(context.active),
            "tasks_processed": context.tasks_processed,
            "tasks_failed": context.tasks_failed,
        }

    async def _sleep(self, seconds: float) -> None:
        self._wake.clear()
        await self._heard(seconds)

    async def _heard(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
