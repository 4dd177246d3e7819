"""The worker process: the WorkerStateMachine, which connects, recovers, claims, rests and shuts down.

Invariant: a task is started only in RUNNING; once a shutdown is asked for, the process reaches STOPPED within 30 s,
and every task it held is by then reported or back in the queue.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from interlock.errors import DisconnectedError, InvariantError, MigrationError, StatementError, StoreError
from interlock.lifecycle import WORKER, TaskRowEvent, TaskState, WorkerEvent, WorkerState
from interlock.machine import StateMachine
from interlock.store.database import connect
from interlock.telemetry import WorkerTelemetry, log
from interlock.worker.attempt import Interruption, TaskStateMachine
from interlock.worker.claims import backoff
from interlock.worker.parts import Parts
from interlock.worker.settings import WakeMode, WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from interlock.client.app import Interlock
    from interlock.store.database import Connection
    from interlock.store.tasks import ClaimedTask

LONGEST_SHUTDOWN = 30.0
LAST_MOMENTS = 5.0  # of the 30 s, kept for reporting and closing
GATHERING = 0.002


@dataclass(slots=True)
class WorkerContext:
    """What a worker process has at hand."""

    connection: Connection | None = None
    backoff_count: int = 0
    last_recovery_time: datetime | None = None
    shutdown_requested: bool = False
    current_task_sm: TaskStateMachine | None = None
    tasks_processed: int = 0
    tasks_failed: int = 0
    # all attempts under way, by the number of their task's id, whose hash is Python's own and fast;
    # at the default concurrency of 1 that is current_task_sm and nothing else
    active: dict[int, TaskStateMachine] = field(default_factory=dict)


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
        self._lost = asyncio.Event()
        self._hurry = asyncio.Event()
        self._parts: Parts | None = None
        self._stack = AsyncExitStack()
        self._steps: dict[WorkerState, Callable[[], Awaitable[None]]] = {
            WorkerState.CONNECTING: self._connect,
            WorkerState.RECOVERING: self._recover,
            WorkerState.RUNNING: self._poll,
            WorkerState.BACKING_OFF: self._rest,
            WorkerState.SHUTTING_DOWN: self._shut_down,
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
        with asyncio.Runner() as runner:
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
            while self.is_running():
                await self._steps[self.state]()
        finally:
            await self._app.close()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # not the main thread, or a platform without signals: whoever runs us asks by request_shutdown()
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self.request_shutdown)

    def request_shutdown(self) -> None:
        """Stop claiming and finish; asked a second time, stop at once."""
        if self.context.shutdown_requested:
            self._hurry.set()
            return
        self.context.shutdown_requested = True
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
        """Connect twice, for claiming and for settling, which overlap; begin to settle, and give the other."""
        await self._stack.aclose()
        self.context.connection = None
        parts = await self._begin()
        claiming = await self._stack.enter_async_context(connect(parts.url))
        settling = await self._stack.enter_async_context(connect(parts.url))
        self._lost.clear()
        flushing = parts.spawn(self._guarded(parts.settler.run(settling)))
        self._stack.push_async_callback(_ended, flushing)  # before its connection is closed under it
        return claiming

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
                self.context.active,
                reported=self._reported,
                cancel=self._begin_cancel,
                wake=self._wake.set,
            )
            self._parts.start()
        return self._parts

    @property
    def parts(self) -> Parts:
        """What the worker is made of, once it has been connected."""
        if self._parts is None:
            raise InvariantError(f"a worker in state {self.state} was never connected")
        return self._parts

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Do background work on a connection; when that is lost, have the worker connect anew."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever ended it, a new connection is a new beginning
            log.warning("settling_interrupted", error=str(error) or type(error).__name__)
            self._disconnect(error)

    def _disconnect(self, error: Exception) -> None:
        self._lost.set()
        self._wake.set()
        self._slot_freed.set()
        if self.can_transition(WorkerEvent.ERROR):
            self.transition(WorkerEvent.ERROR, str(error))

    # --- RECOVERING

    async def _recover(self) -> None:
        """Take back what dead workers held, unless that was looked after a moment ago."""
        if self._lost.is_set():
            # The settling connection went while the worker rested, where the table knows no error.
            self.transition(WorkerEvent.ERROR, "the settling connection was lost")
            return
        try:
            await self._look_after_others()
        except (DisconnectedError, StatementError) as error:
            await self._stumble(error)
            return
        if self.state is WorkerState.RECOVERING:
            self.transition(WorkerEvent.RECOVERY_COMPLETE)

    async def _look_after_others(self) -> None:
        if await self.parts.claims.recover(self.connection):
            self.context.last_recovery_time = datetime.now(UTC)

    async def _stumble(self, error: Exception) -> None:
        """Go back to connecting; when the connection is good and it is the statement that is refused, not at once."""
        self._disconnect(error)
        if isinstance(error, StatementError):
            self.context.backoff_count += 1
            await self._sleep(backoff(self.settings, self.context.backoff_count))

    # --- RUNNING

    async def _poll(self) -> None:
        """Claim as many tasks as there are free slots, and start them."""
        free = await self._free_slots()
        if free <= 0 or self.state is not WorkerState.RUNNING:
            return
        self._wake.clear()
        began = time.monotonic()
        try:
            await self._look_after_others()  # a worker that always finds tasks must not leave it to those that rest
            claimed = await self.parts.claims.claim(self.connection, free)
        except (DisconnectedError, StatementError) as error:
            await self._stumble(error)
            return
        if not self.is_accepting_tasks():
            await self.parts.claims.give_back(self.context.connection, claimed)
            return
        if claimed:
            self.context.backoff_count = 0
        for task in claimed:
            self._start(task, began + self.settings.lease)
        self.transition(WorkerEvent.POLL_CYCLE_COMPLETE if claimed else WorkerEvent.NO_TASKS_AVAILABLE)

    async def _free_slots(self) -> int:
        """Wait until there is a free slot; if only few of many are, a moment longer for others to claim along."""
        most, active = self.settings.concurrency, self.context.active
        while len(active) >= most and self.state is WorkerState.RUNNING:
            self._slot_freed.clear()
            await self._slot_freed.wait()
        if most - len(active) < most // 8:
            await asyncio.sleep(GATHERING)
        return most - len(active)

    @property
    def connection(self) -> Connection:
        """The connection for claiming; in RECOVERING and RUNNING there always is one."""
        if self.context.connection is None:
            raise InvariantError(f"a worker in state {self.state} has no connection")
        return self.context.connection

    def _start(self, claimed: ClaimedTask, lease_until: float) -> None:
        active, parts, number = self.context.active, self.parts, claimed.id.int
        if not self.is_accepting_tasks() or len(active) >= self.settings.concurrency:
            raise InvariantError(f"a worker in state {self.state} with {len(active)} tasks starts another")
        definition = parts.services.definition(claimed.type)
        attempt = TaskStateMachine.of_claim(
            claimed, self.worker_id, definition, lease_until=lease_until, line=parts.keeper
        )
        if number in active:
            active[number].interrupt(Interruption.LEASE_LOST, "this worker has claimed the task anew")
        active[number] = self.context.current_task_sm = attempt
        attempt.running = start_task(self._execute(attempt))
        if claimed.extras is not None and claimed.extras["unwanted"]:
            self._begin_cancel(attempt, None)

    async def _execute(self, attempt: TaskStateMachine) -> None:
        """Run one attempt up to its report. A plain outcome is written with others, and heard of in _reported."""
        try:
            outcome = await attempt.process(self.parts.services)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever it is, the slot must not leak
            outcome = attempt.fail(error)
        if outcome is None:
            await self.parts.services.abandon(attempt)
            self._finish(attempt)
        elif outcome.event is TaskRowEvent.CANCEL or attempt.is_transactional:
            self._reported(attempt, await self.parts.services.settle(attempt, outcome))
        else:
            self.parts.settler.report(attempt, outcome)

    def _reported(self, attempt: TaskStateMachine, written: bool) -> None:  # noqa: FBT001 - the settler's one word
        attempt.reported(written=written)
        self._finish(attempt)

    def _finish(self, attempt: TaskStateMachine) -> None:
        context, number = self.context, attempt.key[0].int
        if context.active.get(number) is attempt:
            del context.active[number]
        if context.current_task_sm is attempt:
            context.current_task_sm = next(iter(context.active.values()), None)
        context.tasks_processed += 1
        if attempt.has_failed:
            context.tasks_failed += 1
            self._wake.set()  # it may be due again before this worker would look
        self._slot_freed.set()

    def _begin_cancel(self, attempt: TaskStateMachine, reason: str | None) -> None:
        """Tell a handler that it is not wanted any more; stop it if it does not stop by itself."""
        if attempt.ask_to_stop(reason):
            self.parts.services.pass_on_cancel(attempt)
            later = asyncio.get_running_loop().call_later
            later(self.settings.cancel_grace, attempt.interrupt, Interruption.CANCELED, reason)

    # --- BACKING_OFF

    async def _rest(self) -> None:
        """Sleep until something is heard, the next task is due, or it is time to look again."""
        self.context.backoff_count += 1
        pause = backoff(self.settings, self.context.backoff_count)
        if self.settings.mode is WakeMode.EVENTS and self.parts.listener.is_hearing:
            pause = self.settings.poll_cap * 12  # only in case that everything else fails
        pause = await self.parts.claims.until_next(self.context.connection, pause)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), pause)
        if self.state is WorkerState.BACKING_OFF:
            self.transition(WorkerEvent.BACKOFF_COMPLETE)

    # --- SHUTTING_DOWN

    async def _shut_down(self) -> None:
        """Let running tasks finish within the grace, return the others, and close everything."""
        began = time.monotonic()
        if self._parts is not None:
            await self._wind_up(self._parts, began)
        self.context.connection = None
        log.info(
            "worker_stopped",
            worker_id=self.worker_id,
            tasks_processed=self.context.tasks_processed,
            tasks_failed=self.context.tasks_failed,
            seconds=round(time.monotonic() - began, 3),
        )
        self.transition(WorkerEvent.SHUTDOWN_COMPLETE)

    async def _wind_up(self, parts: Parts, began: float) -> None:
        parts.resign()
        if self._lost.is_set() or self.context.connection is None:
            await self._reach_out()
        await self._until_idle(min(self.settings.grace, LONGEST_SHUTDOWN - LAST_MOMENTS), self._hurry)
        for attempt in list(self.context.active.values()):
            attempt.interrupt(Interruption.SHUTDOWN)
        await self._until_idle(min(LAST_MOMENTS / 2, LONGEST_SHUTDOWN - (time.monotonic() - began)), None)
        await self._return_the_rest()
        await parts.close(LAST_MOMENTS / 5)
        with suppress(TimeoutError, StoreError, OSError):
            async with asyncio.timeout(LAST_MOMENTS / 5):
                await self._stack.aclose()

    async def _reach_out(self) -> None:
        """Try once more to reach the database, so that what is finished can still be reported."""
        with suppress(TimeoutError, StoreError, OSError):
            async with asyncio.timeout(LAST_MOMENTS / 2):
                self.context.connection = await self._open_connections()

    async def _until_idle(self, seconds: float, hurry: asyncio.Event | None) -> None:
        """Wait until no attempt is under way, at most so long, and not at all in a hurry."""
        deadline = time.monotonic() + seconds
        while self.context.active and time.monotonic() < deadline:
            if (hurry is not None and hurry.is_set()) or self._lost.is_set():
                return
            self._slot_freed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._slot_freed.wait(), min(0.1, deadline - time.monotonic()))

    async def _return_the_rest(self) -> None:
        """Put back what could not be stopped: a thread that will not end, a coroutine that swallows everything."""
        left = [attempt for attempt in self.context.active.values() if attempt.state is TaskState.PROCESSING]
        claimed = [attempt.claimed for attempt in left if attempt.claimed is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_MOMENTS / 5):
                await self.parts.claims.give_back(self.context.connection, claimed)

    async def _sleep(self, seconds: float) -> None:
        self._wake.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    await asyncio.wait([task])


if sys.version_info >= (3, 12):

    def start_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task at once: a handler that never waits is then done without a turn of the loop."""
        return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)

else:

    def start_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task with the next turn of the loop."""
        return asyncio.Task(work, loop=asyncio.get_running_loop())
