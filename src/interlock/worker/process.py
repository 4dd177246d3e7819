"""The WorkerStateMachine: the worker process, which connects, recovers, claims, backs off and shuts down.

Invariant: a task is started only in RUNNING. Once a shutdown is requested, the process reaches STOPPED within 30 s, and
every task it held is by then settled or back in the queue.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from interlock.errors import DisconnectedError, InvariantError, MigrationError, StoreError
from interlock.lifecycle import WORKER, TaskEvent, WorkerEvent, WorkerState
from interlock.machine import StateMachine
from interlock.postgres.notifier import WakeMode
from interlock.postgres.retry import RetryState
from interlock.process_groups import Descendants
from interlock.service import wait_for_event
from interlock.store.tasks import find_claims_without_reply
from interlock.telemetry import WorkerTelemetry, log, shutdown_duration_seconds, shutdown_tasks_total
from interlock.worker.assembly import WorkerComponents, WorkerConnections
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.cancellation import CancellableStep, run_within
from interlock.worker.fetcher import poll_interval
from interlock.worker.lifespan import LifespanRunner
from interlock.worker.settings import WorkerSettings
from interlock.worker.settler import return_attempts
from interlock.worker.shutdown import SIGNALS, Shutdown, Watchdog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from interlock.client.app import Interlock
    from interlock.postgres.connection import Connection
    from interlock.store.tasks import ClaimedTask

SLOT_GATHER_S = 0.002
# Attempts that run or whose outcome is not settled, for each slot; and for each task that may wait for a slot, with it.
MAX_HELD_PER_SLOT = 2
MAX_IDLE_WAIT_S = 60.0  # later due times are not notified: sql/functions/notify_pending.sql
NOTIFICATION_WAIT_S = 0.01  # before asking for the next due time: the next step of a job follows within it
CANCEL_STEP_AFTER_S = 2.0  # for the current step of the loop, after a shutdown was requested
CLOCK_TOLERANCE_S = 1.0
CHILD_GRACE_S = 2.0  # for processes that handlers left behind, to end after SIGTERM
# For closing the app at the end of a shutdown. Cleanups get what is left of the limit before it, at least the second.
CLOSE_TIMEOUT_S = 0.5
MIN_CLOSE_S = 0.2
FATAL_ERRORS = (MigrationError, InvariantError)  # a new connection does not help


@dataclass(slots=True)
class WorkerContext:
    """The data of a worker process: its connection, counters and running attempts."""

    connection: Connection | None = None
    backoff_count: int = 0
    rested: bool = False  # before the last claim that found tasks: no backlog was waiting
    last_recovery_time: datetime | None = None
    shutdown_requested: bool = False
    current_task_sm: TaskStateMachine | None = None
    tasks_processed: int = 0
    tasks_failed: int = 0
    # All attempts that are not settled, by `slot_key`, and how many of them occupy a slot: their handlers run.
    active: dict[int, TaskStateMachine] = field(default_factory=dict)
    occupied: int = 0


class WorkerStateMachine(StateMachine[WorkerState, WorkerEvent]):
    """One worker process, from STARTING to STOPPED.

    Components set `wake` when there may be tasks to claim, and `slot_freed` when an attempt has ended.
    """

    def __init__(self, worker_id: str, app: Interlock | None = None, settings: WorkerSettings | None = None) -> None:
        super().__init__(WORKER, observer=WorkerTelemetry(worker_id))
        self.worker_id = worker_id
        self.context = WorkerContext()
        self.settings = settings or WorkerSettings()
        self.wake = asyncio.Event()
        self.slot_freed = asyncio.Event()
        self.stop_now = asyncio.Event()  # the shutdown was requested twice
        self.started = asyncio.Event()  # connected for the first time, after the lifespan of the app had started
        self.connections = WorkerConnections(self)
        self._lifespan = LifespanRunner(app)
        self._app = app
        self._components: WorkerComponents | None = None
        self._watchdog: Watchdog | None = None
        self._shutdown_requested_at: float | None = None
        self._signal_follows = False  # its row has ended, and the supervisor's SIGTERM for that has not come yet
        self._due_timer: asyncio.TimerHandle | None = None
        self._woke_by_polling = False
        self._queue_exhausted = False  # the last claim took every due task
        self._claim_sent_at: float | None = None  # of a claim without a reply
        self._reconnects = RetryState()
        self._step = CancellableStep(CANCEL_STEP_AFTER_S)
        self._steps: dict[WorkerState, Callable[[], Awaitable[None]]] = {
            WorkerState.CONNECTING: self._connect,
            WorkerState.RECOVERING: self._recover,
            WorkerState.RUNNING: self._poll,
            WorkerState.BACKING_OFF: self._back_off,
        }

    def is_accepting_tasks(self) -> bool:
        """Tell whether tasks may be started."""
        return self.state is WorkerState.RUNNING

    def is_running(self) -> bool:
        """Tell whether the process has not stopped yet."""
        return self.state is not WorkerState.STOPPED

    @property
    def components(self) -> WorkerComponents:
        """The worker's components; InvariantError before the first connection."""
        if self._components is None:
            raise InvariantError(f"a worker in state {self.state} was never connected")
        return self._components

    @property
    def connection(self) -> Connection:
        """The connection for claiming, which exists in RECOVERING and RUNNING."""
        if self.context.connection is None:
            raise InvariantError(f"a worker in state {self.state} has no connection")
        return self.context.connection

    # --- the life of the process

    def run(self) -> None:
        """Run from STARTING to STOPPED in a process that belongs to the worker alone."""
        # Imported modules stay for ever: keep the garbage collector from scanning them again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        # In another thread than the main one, the process has other code, whose children are not ours to end.
        children = Descendants() if threading.current_thread() is threading.main_thread() else None
        kill = None if children is None else children.kill
        watchdog = Watchdog(self.worker_id, self.settings.shutdown_limit, kill)
        with watchdog as self._watchdog, asyncio.Runner() as runner:
            try:
                runner.run(self.serve())
            finally:
                if children is not None and (ended := children.end(CHILD_GRACE_S)):
                    log.info("child_processes_ended", worker_id=self.worker_id, pids=ended)
            if any(not task.done() for task in asyncio.all_tasks(runner.get_loop())):
                # The runner would wait for ever for a coroutine that swallows its cancellation; its task is returned.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)

    async def serve(self, *, signals: bool = True) -> None:
        """Run from STARTING to STOPPED in the caller's event loop."""
        if self._app is None:
            raise ValueError("a worker needs an app whose tasks it can run")
        if signals:
            self._handle_signals()
        self.transition(WorkerEvent.INITIALIZED)
        if self.context.shutdown_requested:
            self.transition(WorkerEvent.SHUTDOWN_REQUESTED)
        try:
            while self.state is not WorkerState.SHUTTING_DOWN:
                await self._step.run(self._steps[self.state]())
            await self._shut_down()
        finally:
            await self._lifespan.stop(CLOSE_TIMEOUT_S)
            await self._app.close()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            # Outside the main thread, or without signals on the platform, callers use request_shutdown().
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self.request_shutdown)
        if self._watchdog is not None:
            self._watchdog.intercept_signals(loop)

    def dismiss(self) -> None:
        """Shut down because the row has ended. The SIGTERM of a supervisor for the same reason is no second request."""
        if not self.context.shutdown_requested:
            self._signal_follows = self.settings.generation is not None
            self.request_shutdown()

    def request_shutdown(self) -> None:
        """Stop claiming and let running tasks finish; the second request stops at once."""
        if self.context.shutdown_requested:
            if self._signal_follows:
                self._signal_follows = False
                return
            self.stop_now.set()
            self.slot_freed.set()
            return
        self.context.shutdown_requested = True
        self._shutdown_requested_at = time.monotonic()
        if self._watchdog is not None:
            self._watchdog.arm(signal_follows=self._signal_follows)
            # A signal may have reached the watchdog long before this loop was free to run.
            self._shutdown_requested_at = self._watchdog.requested_at or self._shutdown_requested_at
        # else the app is being opened, which is bounded and must not be cut off
        if self._components is not None or self._lifespan.is_starting:
            self._step.cancel_later()
        if self.can_transition(WorkerEvent.SHUTDOWN_REQUESTED):
            self.transition(WorkerEvent.SHUTDOWN_REQUESTED)
        self.wake.set()
        self.slot_freed.set()

    # --- CONNECTING

    async def _connect(self) -> None:
        """Open new connections; running handlers go on meanwhile, and their outcomes are kept."""
        try:
            claiming = await self.open_connections()
        except MigrationError:
            raise
        except (StoreError, OSError) as error:
            self.context.backoff_count += 1
            if self.state is WorkerState.CONNECTING:
                self.transition(WorkerEvent.CONNECTION_FAILED, str(error))
                await self._wait_before_reconnect()
            return
        if self.state is WorkerState.CONNECTING:
            self.context.connection = claiming
            self.transition(WorkerEvent.CONNECTED)
            self.started.set()

    async def open_connections(self) -> Connection:
        """Open the claiming and the settling connection, and return the first; at first also start the components."""
        self.context.connection = None
        if self._components is None:
            if self._app is None:
                raise InvariantError("a worker without an app has nothing to run")
            await self._app.open(keep_connection=False)
            await self._lifespan.start()
            self._components = WorkerComponents(self, self._app)
            await self._components.start()
        return await self.connections.open(self._components.url, self._components.settler)

    def on_connection_lost(self, error: Exception) -> None:
        """Go back to CONNECTING where the table allows it."""
        self.wake.set()
        self.slot_freed.set()
        if self.can_transition(WorkerEvent.ERROR):
            self.transition(WorkerEvent.ERROR, str(error))

    async def _reconnect_after(self, error: Exception) -> None:
        """Go back to CONNECTING; after a pause if the connection itself is not at fault."""
        if isinstance(error, FATAL_ERRORS):
            raise error
        self.connections.mark_lost(error)
        if not isinstance(error, DisconnectedError):
            self.context.backoff_count += 1
            await self._wait_before_reconnect()

    async def _wait_before_reconnect(self) -> None:
        self.wake.clear()
        await wait_for_event(self.wake, self._reconnects.next_delay_s())

    # --- RECOVERING

    async def _recover(self) -> None:
        """Recover tasks of dead workers, unless that was done within the recovery interval."""
        if self.connections.lost.is_set():
            # The settling connection was lost in BACKING_OFF, where the table has no error.
            self.transition(WorkerEvent.ERROR, "the settling connection was lost")
            return
        try:
            async with self.connections.in_use:
                await self._recover_expired()
        except Exception as error:  # noqa: BLE001 - any error is answered with a new connection
            await self._reconnect_after(error)
            return
        if self.state is WorkerState.RECOVERING:
            self.transition(WorkerEvent.RECOVERY_COMPLETE)

    async def _recover_expired(self) -> None:
        if await self.components.fetcher.recover(self.connection):
            self.context.last_recovery_time = datetime.now(UTC)
            await self.components.isolation.exonerate(self.connection)

    # --- RUNNING

    async def _poll(self) -> None:
        """Claim as many tasks as there is room for, and start them."""
        room = await self._wait_for_room()
        if self.state is not WorkerState.RUNNING:
            return
        if not self._should_claim():
            reason = "the last claim took every due task" if self._accepts_tasks else "the worker accepts no tasks"
            self.transition(WorkerEvent.NO_TASKS_AVAILABLE, reason)
            return
        try:
            async with self.connections.in_use:
                began, requested_at = time.monotonic(), time.time()
                claimed = await self._claim(room, began)
        except Exception as error:  # noqa: BLE001 - any error is answered with a new connection
            await self._reconnect_after(error)
            return
        lease_until = began + self.settings.lease
        if not self.is_accepting_tasks():  # a shutdown was requested during the claim
            shutdown_tasks_total.labels("returned").inc(len(claimed))
            await self._return_unstarted(claimed, TaskEvent.SHUTDOWN_REQUESTED, "which shuts down", requested_at)
        elif claimed and time.monotonic() >= lease_until:
            await self._return_unstarted(
                claimed, TaskEvent.CLAIM_FAILED, "whose claim took longer than the lease", requested_at
            )
        elif claimed:
            await self._start(claimed, lease_until, requested_at)
        elif self.components.runner.prefetch:  # they are started in RUNNING
            self._queue_exhausted = True
        elif not self._must_wait():  # else the worker makes room for a task that must run alone
            self.transition(WorkerEvent.NO_TASKS_AVAILABLE)

    async def _claim(self, room: int, began: float) -> list[ClaimedTask]:
        await self._recover_expired()  # a worker that always finds tasks must recover too
        if self._claim_sent_at is not None:
            await self._return_claims_without_reply(began - self._claim_sent_at)
        self._claim_sent_at = began
        claimed = await self.components.isolation.claim(self.connection)
        if claimed is None:
            free = max(min(room, self.settings.concurrency - self.context.occupied), 0)
            claimed = await self.components.fetcher.claim(self.connection, free, room - free)
        self._claim_sent_at = None
        self._reconnects.reset()  # not once connected: the server may accept connections and refuse the claims
        return claimed

    async def _return_unstarted(
        self, claimed: Iterable[ClaimedTask], event: TaskEvent, reason: str, requested_at: float
    ) -> None:
        async with self.connections.in_use:
            await self._return(claimed, event, reason, requested_at)

    async def _return(
        self, claimed: Iterable[ClaimedTask], event: TaskEvent, reason: str, requested_at: float | None = None
    ) -> None:
        """Put claimed tasks that are not started back into the queue."""
        attempts = [
            TaskStateMachine.not_started(task, self.worker_id, event, reason, requested_at=requested_at)
            for task in claimed
        ]
        await return_attempts(self.context.connection, attempts, actor=self.worker_id)

    async def _return_claims_without_reply(self, seconds: float) -> None:
        """Return the tasks of a claim whose reply was lost with the connection: they run nowhere."""
        within = timedelta(seconds=seconds + CLOCK_TOLERANCE_S)
        found = await find_claims_without_reply(self.connection, self.worker_id, within)
        lost = [task for task in found if task.id.int not in self.context.active]
        self._claim_sent_at = None
        await self._return(lost, TaskEvent.CLAIM_FAILED, "which lost the reply to its claim")

    async def _wait_for_room(self) -> int:
        """Wait for room; if that is less than an eighth of the slots, a moment longer, to claim more at once.

        While a task must run alone, or room is made for one, no slot is free.
        """
        while self._must_wait() and self.state is WorkerState.RUNNING and self._accepts_tasks:
            self.slot_freed.clear()
            if self._room() <= 0 or self._only_starts_waiting():
                await self.slot_freed.wait()
            else:
                await wait_for_event(self.slot_freed, self.components.isolation.seconds_to_wait())
        if self._room() < self.settings.concurrency // 8:
            await asyncio.sleep(SLOT_GATHER_S)
        return self._room()

    def _room(self) -> int:
        """Return how many tasks may be claimed: for the free slots and ahead of them, as far as more may be held.

        Nothing is claimed ahead while a slot is kept for tasks with a limit, which must not be claimed ahead.
        """
        context, components = self.context, self.components
        free = self.settings.concurrency - context.occupied
        ahead = 0 if components.fetcher.expects_limited_tasks() else components.runner.prefetch.room()
        return min(free + ahead, self._max_held(components.runner.prefetch.limit()) - len(context.active))

    def _max_held(self, ahead: int) -> int:
        """Return how many attempts may be held, `ahead` of which may wait for a slot."""
        slots = self.settings.concurrency
        # a worker of one slot has one attempt at a time, from the claim to the settle (W-INV5)
        return (slots + ahead) * MAX_HELD_PER_SLOT if slots > 1 else 1

    def _only_starts_waiting(self) -> bool:
        """Tell whether the queue is empty, and tasks that were claimed ahead wait for a slot."""
        return self._queue_exhausted and not self.wake.is_set() and bool(self.components.runner.prefetch)

    def _must_wait(self) -> bool:
        is_allowed = self.components.isolation.seconds_to_wait() == 0
        return self._room() <= 0 or not is_allowed or self._only_starts_waiting()

    def _should_claim(self) -> bool:
        """Tell whether tasks may be due beyond those of the last claim; a needless claim would delay running them."""
        exhausted, self._queue_exhausted = self._queue_exhausted and not self.wake.is_set(), False
        self.wake.clear()
        return self._accepts_tasks and (not exhausted or self.components.isolation.is_wanted)

    @property
    def _accepts_tasks(self) -> bool:
        return self.components.registration.accepts_tasks

    async def _start(self, claimed: list[ClaimedTask], lease_until: float, requested_at: float) -> None:
        held, components = len(self.context.active), self.components
        if not self.is_accepting_tasks() or held + len(claimed) > self._max_held(self.settings.concurrency):
            raise InvariantError(f"a worker in state {self.state} with {held} tasks starts {len(claimed)} more")
        self.context.rested = self.context.backoff_count > 0
        self.context.backoff_count = 0
        self._queue_exhausted = components.fetcher.is_exhausted
        components.statistics.tasks.received += len(claimed)
        if self._woke_by_polling:
            components.statistics.tasks.fallback_hits += len(claimed)
        self._woke_by_polling = False
        components.runner.start(claimed, lease_until, requested_at)
        if self._queue_exhausted:
            # Two turns of the loop: handlers that never wait end, and their outcomes are sent, before anything else.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if self.is_accepting_tasks():
            self.transition(WorkerEvent.POLL_CYCLE_COMPLETE)

    def reset_polling(self) -> None:
        """Poll anew with the namespaces of the registration; nothing that was read before counts.

        Tasks that wait for a slot go back: the worker may be paused, or work for other namespaces now.
        """
        self.components.runner.return_waiting(TaskEvent.CLAIM_FAILED, "which begins to poll anew")
        self.components.fetcher.serve(self.components.registration.namespaces)
        self.wake.set()
        self.slot_freed.set()

    def wake_in(self, seconds: float) -> None:
        """Look for tasks when one becomes due. Only the earliest time is kept: after each look the next one is read."""
        loop = asyncio.get_running_loop()
        timer, due_at = self._due_timer, loop.time() + seconds
        if timer is not None and not timer.cancelled() and loop.time() < timer.when() <= due_at:
            return
        if timer is not None:
            timer.cancel()
        self._due_timer = loop.call_at(due_at, self.wake.set)

    # --- BACKING_OFF

    async def _back_off(self) -> None:
        """Wait for a notification, for the next due time, or for the next poll."""
        self.context.backoff_count += 1
        pause = poll_interval(self.settings, self.context.backoff_count)
        if self.settings.mode is WakeMode.EVENTS and self.components.is_listening:
            pause = self.settings.events_poll
        pause = min(pause, MAX_IDLE_WAIT_S, self.components.isolation.seconds_until_turn())
        await wait_for_event(self.wake, min(pause, NOTIFICATION_WAIT_S))
        if self._accepts_tasks and not self.wake.is_set():
            async with self.connections.in_use:
                pause = await self.components.fetcher.seconds_until_due(self.context.connection, pause)
        await wait_for_event(self.wake, pause)
        self._woke_by_polling = self.settings.mode is not WakeMode.POLLING and not self.wake.is_set()
        if self.state is WorkerState.BACKING_OFF:
            self.transition(WorkerEvent.BACKOFF_COMPLETE)

    # --- SHUTTING_DOWN

    async def _shut_down(self) -> None:
        """Let running tasks finish within the grace, return the others, and close everything."""
        requested_at = time.monotonic() if self._shutdown_requested_at is None else self._shutdown_requested_at
        if self._components is not None:
            await Shutdown(self, requested_at).run()
        await self._close_resources(requested_at + self.settings.shutdown_limit - CLOSE_TIMEOUT_S)
        self.context.connection = None
        seconds = time.monotonic() - requested_at
        shutdown_duration_seconds.observe(seconds)
        log.info(
            "worker_stopped",
            worker_id=self.worker_id,
            tasks_processed=self.context.tasks_processed,
            tasks_failed=self.context.tasks_failed,
            seconds=round(seconds, 3),
        )
        self.transition(WorkerEvent.SHUTDOWN_COMPLETE)

    async def _close_resources(self, deadline: float) -> None:
        """Clean up after the last task: the dependencies of handlers, then the lifespan of the app."""
        if self._components is not None:
            try:
                await run_within(
                    max(deadline - time.monotonic(), MIN_CLOSE_S), self.components.runner.resources.close()
                )
            except TimeoutError:
                log.error("dependency_cleanup_timed_out", worker_id=self.worker_id)
        await self._lifespan.stop(max(deadline - time.monotonic(), MIN_CLOSE_S))

    def describe(self) -> dict[str, Any]:
        """Describe the process for the remote command `status`."""
        context, settings = self.context, self.settings
        return {
            "state": self.state.value,
            "mode": settings.mode.value,
            "hearing": self.components.is_listening,
            "concurrency": settings.concurrency,
            "active": len(context.active),
            "tasks_processed": context.tasks_processed,
            "tasks_failed": context.tasks_failed,
        }
