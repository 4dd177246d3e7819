"""The pool: reconciles the processes of the workers that this supervisor holds with the state of their rows.

The rows of pools are made and ended first, in `store/pools.py`. A supervisor that stopped to reconcile says so with
`is_stalled`.

Invariant: a row has at most one process of its present generation, and only the pool that holds the row's lease starts
or stops it. Exits during an outage of the database are recorded when it is back.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from interlock.errors import DisconnectedError, StoreError
from interlock.lifecycle import SupervisedWorkerState
from interlock.model.backoff import Backoff
from interlock.postgres.connection import connect
from interlock.postgres.notifier import CONTROL_CHANNEL
from interlock.postgres.retry import RetryState, keep_connected
from interlock.service import BackgroundService, wait_for_event
from interlock.store.leader import read_clock
from interlock.store.pools import delete_abandoned_pools, end_bound_pool, even_out_pools, hold_bound_pool
from interlock.store.supervision import HeldWorker, Supervision
from interlock.supervisor.pool import metrics
from interlock.supervisor.pool.process_info import host_id
from interlock.supervisor.pool.processes import WorkerProcesses
from interlock.supervisor.pool.reconcile import (
    Action,
    Kill,
    Observation,
    Pause,
    RecordExit,
    Release,
    ResetCrashes,
    Start,
    Stop,
    Terminate,
    after_crash,
    decide,
    describe_suspects,
)
from interlock.supervisor.pool.settings import PoolSettings, make_supervisor_id
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from datetime import datetime

    from interlock.config import Config
    from interlock.postgres.connection import Connection
    from interlock.postgres.notifier import Notifier
    from interlock.supervisor.pool.processes import WorkerProcess

RENEWALS_PER_LEASE = 3
# The cap stays well below the lease of the rows, so that a short outage does not lose them.
LEASED_RECONNECT_BACKOFF = Backoff.exponential(0.1, cap=1.0, jitter=0.5)
MIN_INTERVAL_S = 0.02  # between two reconciliations, however many notifications arrive
RELEASE_TIMEOUT_S = 3.0  # to record the exits and release the rows at the stop


class Pool(BackgroundService):
    """The worker processes of one supervisor.

    `stop` shuts the processes down, or leaves them running if the settings say so, and releases the rows.
    """

    stop_timeout_s = None  # each process has its own stop timeout

    def __init__(
        self,
        url: str,
        config: Config,
        settings: PoolSettings | None = None,
        *,
        notifier: Notifier,
        clock: Callable[[], datetime | None] = lambda: None,
    ) -> None:
        super().__init__("pool")
        self.id = make_supervisor_id(config.worker_name)
        self.settings = settings or PoolSettings.from_config(config)
        self.watched_since: datetime | None = None  # since when it has reconciled without a gap
        self._url = url
        self._notifier = notifier
        self._clock = clock
        self._rows = Supervision(self.id, host_id(), timedelta(seconds=self.settings.lease))
        self._processes = WorkerProcesses(self.id, self._rows.host, config, self.settings)
        self._bound_pool: tuple[str, int] | None = None  # name and desired number of the pool that ends with this one
        self._wake = asyncio.Event()
        self._reconnects = RetryState(LEASED_RECONNECT_BACKOFF)
        self._reconciled_at: datetime | None = None
        self._renewed_at = float("-inf")
        self._last_success = time.monotonic()
        self._actions: dict[type[Action], Callable[[Connection, HeldWorker, Any], Awaitable[None]]] = {
            Start: self._start_process,
            Stop: self._stop_process,
            Kill: self._kill_process,
            RecordExit: self._record_exit,
            Pause: self._pause,
            Terminate: self._terminate,
            ResetCrashes: self._reset_crashes,
            Release: self._release,
        }

    @property
    def processes(self) -> Mapping[str, WorkerProcess]:
        """The processes, by the ids of their rows."""
        return self._processes.by_worker

    @property
    def is_stalled(self) -> bool:
        """Whether the last reconciliation that succeeded is too long ago: the database is gone, or something hangs."""
        return time.monotonic() - self._last_success > self.settings.max_poll_gap

    async def hold_pool(self, name: str, desired: int) -> str:
        """Make a pool of workers that ends with this supervisor; return its name, another one if that is taken."""
        for candidate in (name, f"{name}-{secrets.token_hex(3)}"):
            self._bound_pool = (candidate, desired)
            async with connect(self._url) as connection:
                if await self._renew_bound_pool(connection):
                    break
        self._wake.set()
        return candidate

    def request_stop(self) -> None:
        """Ask for the stop without waiting."""
        super().request_stop()
        self._wake.set()

    def force_stop(self) -> None:
        """Stop now: processes do not wait for running tasks."""
        self._processes.force_stop()
        self.request_stop()

    async def run(self) -> None:
        """Reconcile until `stopping` is set, then stop the processes and release the rows."""
        subscription = self._notifier.subscribe({CONTROL_CHANNEL: self._on_notification}, self._wake.set)
        log.info("pool_started", supervisor_id=self.id, host=self._rows.host)
        try:
            await keep_connected(
                # A transaction of a supervisor that is frozen must not hold its locks for ever.
                lambda: connect(self._url, idle_timeout=f"{self.settings.lease:g}s"),
                self._reconcile_until_stopped,
                on_failure=self._log_interruption,
                state=self._reconnects,
                stopping=self.stopping,
            )
            await self._shut_down()
        finally:
            subscription.close()
            self._processes.close()
        log.info("pool_stopped", supervisor_id=self.id)

    def _on_notification(self, payload: str) -> None:
        if not payload.startswith("{"):  # a JSON object is a command to a running process
            self._wake.set()

    def _log_interruption(self, error: Exception, delay_s: float) -> None:
        del delay_s
        log.warning("pool_interrupted", supervisor_id=self.id, error=str(error) or type(error).__name__)

    # --- reconciliation

    async def _reconcile_until_stopped(self, connection: Connection) -> None:
        self.watched_since = self._reconciled_at = None
        self._renewed_at = float("-inf")
        while not self.stopping.is_set():
            self._wake.clear()
            await self._reconcile_all(connection)
            self._last_success = time.monotonic()
            self._reconnects.reset()
            await wait_for_event(self._wake, self.settings.poll_interval)
            await asyncio.sleep(MIN_INTERVAL_S)

    async def _reconcile_all(self, connection: Connection) -> None:
        renewal_due = time.monotonic() - self._renewed_at >= self.settings.lease / RENEWALS_PER_LEASE
        if renewal_due:
            await self._rows.renew_held_workers(connection, now=self._clock())
            await self._renew_bound_pool(connection)
            self._renewed_at = time.monotonic()
        await self._even_out_pools(connection)
        free = self.settings.max_processes - len(self._processes.by_worker)
        if free > 0:
            await self._rows.lease_workers(connection, limit=free, now=self._clock())
        self._detect_gap(await read_clock(connection, now=self._clock()))
        held = await self._rows.read_held_workers(connection, now=self._clock())
        self._processes.drop_reassigned({worker.id: worker.generation for worker in held})
        self._processes.measure_memory()
        observed = [(worker, self._processes.observe(worker)) for worker in held]
        for worker, observation in observed:
            await self._reconcile(connection, worker, observation)
        metrics.update_gauges(observed)
        if renewal_due:
            await self._record_memory(connection, observed)
            await self._terminate_silent_workers(connection)

    async def _renew_bound_pool(self, connection: Connection) -> bool:
        """Renew the lease of the pool that ends with this supervisor, or make it; False if its name is taken."""
        if self._bound_pool is None:
            return False
        name, desired = self._bound_pool
        lease = timedelta(seconds=self.settings.lease)
        return await hold_bound_pool(connection, name, desired, supervisor=self.id, lease=lease, now=self._clock())

    async def _even_out_pools(self, connection: Connection) -> None:
        """Add and end rows of pools; an error does not hold up the rows that are there."""
        try:
            for name, change in await even_out_pools(connection, self.id, now=self._clock()):
                log.info("pool_changed", supervisor_id=self.id, pool=name, change=change)
        except DisconnectedError:
            raise
        except StoreError as error:
            log.error("pools_not_reconciled", supervisor_id=self.id, error=str(error))

    def _detect_gap(self, now: datetime) -> None:
        """Restart the watched time after a gap, as when the host slept: all heartbeats seem missed then."""
        before, self._reconciled_at = self._reconciled_at, now
        if before is None or (now - before).total_seconds() > self.settings.max_poll_gap:
            self.watched_since = now

    async def _reconcile(self, connection: Connection, worker: HeldWorker, observation: Observation) -> None:
        """Apply the next action to one row; an error of one row does not hold up the others."""
        action = decide(worker, observation, self.settings, watched_since=self.watched_since)
        process = self._processes.by_worker.get(worker.id)
        try:
            if observation.alive and process is not None and worker.pid is None:
                # the connection was lost between the start of the process and the record of its pid
                await self._record_process(connection, process)
            if action is not None:
                await self._actions[type(action)](connection, worker, action)
        except DisconnectedError:
            raise
        except (StoreError, OSError) as error:
            log.error("worker_not_reconciled", supervisor_id=self.id, worker_id=worker.id, error=str(error))

    async def _record_process(self, connection: Connection, process: WorkerProcess) -> None:
        if not await self._rows.record_process(
            connection, process.worker_id, process.generation, process.pid, process.start_time
        ):
            # This supervisor was away after it announced the process, and the row has another one by now.
            process.kill()

    async def _record_memory(self, connection: Connection, observed: list[tuple[HeldWorker, Observation]]) -> None:
        used = {worker.id: observation.memory for worker, observation in observed if observation.memory is not None}
        if used:
            await self._rows.record_memory(connection, used)

    async def _terminate_silent_workers(self, connection: Connection) -> None:
        """Terminate workers of any host without heartbeats, also those that no supervisor holds."""
        if self.watched_since is None:
            return
        timeout = timedelta(seconds=self.settings.heartbeat_timeout)
        since, now = self.watched_since, self._clock()
        silent = await self._rows.terminate_silent_workers(
            connection, heartbeat_timeout=timeout, watched_since=since, now=now
        )
        await delete_abandoned_pools(connection, heartbeat_timeout=timeout, watched_since=since, now=now)
        for worker in silent:
            log.warning("worker_terminated", supervisor_id=self.id, worker_id=worker.id, reason="no heartbeat")

    # --- actions

    async def _start_process(self, connection: Connection, worker: HeldWorker, _: Start) -> None:
        instance = f"{worker.id}-{worker.generation + 1}-{secrets.token_hex(4)}"
        generation = await self._rows.announce_process(connection, worker, instance, now=self._clock())
        if generation is None:
            return  # the row has changed: the next reconciliation decides anew
        try:
            process = self._processes.start(worker, generation, instance)
        except OSError as error:
            announced = worker._replace(generation=generation, instance=instance)
            crash = after_crash(worker, f"the process cannot be started: {error}", worker.crashes + 1, self.settings)
            await self._record_exit(connection, announced, crash)
            return
        await self._record_process(connection, process)

    async def _stop_process(self, _: Connection, worker: HeldWorker, __: Stop) -> None:
        process = self._processes.by_worker[worker.id]
        process.draining = worker.status == SupervisedWorkerState.PAUSED  # stopped to free its memory
        process.terminate(time.monotonic())

    async def _kill_process(self, _: Connection, worker: HeldWorker, __: Kill) -> None:
        self._processes.kill(worker)

    async def _record_exit(self, connection: Connection, worker: HeldWorker, action: RecordExit) -> None:
        now, note, suspects = self._clock(), action.note, None
        async with self._rows.lock_held_worker(connection, worker, now=now) as held:
            if held:
                if action.is_crash:
                    found = await self._rows.read_tasks_of_process(connection, worker)
                    note = f"{action.note}{describe_suspects(found)}"
                    suspects = [task.id for task in found]
                await self._rows.record_process_end(
                    connection, worker, note, crashes=action.crashes, delay=action.delay, suspects=suspects, now=now
                )
                if action.failed:
                    await self._rows.fail(connection, worker, note or "", now=now)
                elif action.resumed is not None:
                    await self._rows.resume(connection, worker, action.resumed, now=now)
        self._processes.by_worker.pop(worker.id, None)
        if action.delay is not None:
            metrics.supervised_process_restarts_total.inc()
        (log.warning if action.is_crash else log.info)(
            "worker_process_ended",
            supervisor_id=self.id,
            worker_id=worker.id,
            note=note,
            failed=action.failed,
            restart_in=action.delay,
        )
        self._wake.set()

    async def _pause(self, connection: Connection, worker: HeldWorker, action: Pause) -> None:
        async with self._rows.lock_held_worker(connection, worker, now=self._clock()) as held:
            if held and await self._rows.pause(connection, worker, action.reason, now=self._clock()):
                self._processes.by_worker[worker.id].draining = True
                log.warning("worker_paused", supervisor_id=self.id, worker_id=worker.id, reason=action.reason)

    async def _terminate(self, connection: Connection, worker: HeldWorker, action: Terminate) -> None:
        async with self._rows.lock_held_worker(connection, worker, now=self._clock()) as held:
            if held and await self._rows.terminate(connection, worker, action.reason, now=self._clock()):
                log.warning("worker_terminated", supervisor_id=self.id, worker_id=worker.id, reason=action.reason)
        self._wake.set()

    async def _reset_crashes(self, connection: Connection, worker: HeldWorker, _: ResetCrashes) -> None:
        await self._rows.reset_crashes(connection, worker)

    async def _release(self, connection: Connection, worker: HeldWorker, _: Release) -> None:
        await self._rows.release_held_worker(connection, worker)

    # --- shutdown

    async def _shut_down(self) -> None:
        """Stop the processes, unless they are left running, and release the rows."""
        if not self.settings.leave_running:
            await self._processes.stop()
        with suppress(StoreError, OSError, TimeoutError):  # without a release, the leases expire
            async with asyncio.timeout(RELEASE_TIMEOUT_S), connect(self._url) as connection:
                if not self.settings.leave_running:
                    await self._rows.renew_held_workers(connection, now=self._clock())  # the stop may outlast a lease
                    await self._record_exits(connection)
                if self._bound_pool is not None:
                    await end_bound_pool(connection, self._bound_pool[0], supervisor=self.id, now=self._clock())
                await self._rows.release_held_workers(connection)

    async def _record_exits(self, connection: Connection) -> None:
        for worker in await self._rows.read_held_workers(connection, now=self._clock()):
            process = self._processes.by_worker.get(worker.id)
            if process is not None and process.generation == worker.generation and process.poll() is not None:
                await self._record_exit(connection, worker, RecordExit("the supervisor has stopped"))
