"""The pool: keeps the processes of the workers that it holds in the state that their rows ask for.

Invariant: a row has at most one process of its present generation, and the pool that holds the row's lease is the only
one that starts or stops it. What the database does not hear of while it is away is written when it is back.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from interlock.errors import DisconnectedError, StoreError
from interlock.postgres.connection import connect
from interlock.postgres.retry import raise_if_canceled
from interlock.store.leader import read_clock
from interlock.store.supervision import HeldWorker, Supervision
from interlock.supervisor.pool import settings as metrics
from interlock.supervisor.pool.processes import Crew, name_host
from interlock.supervisor.pool.reconcile import (
    Forgive,
    Instruction,
    Kill,
    LetGo,
    Note,
    Pause,
    Sight,
    Start,
    Stop,
    Terminate,
    after_crash,
    decide,
)
from interlock.supervisor.pool.settings import PoolSettings, name_supervisor
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from datetime import datetime

    from interlock.config import Config
    from interlock.postgres.connection import Connection
    from interlock.postgres.notifier import Notifier
    from interlock.supervisor.pool.processes import Child

CHANNELS = ("interlock_control",)
RENEWALS = 3  # in the time for which a row is held
REPAIR_PAUSE = 0.5
BREATH = 0.02  # between two looks, however many hints come
LAST_WORD = 3.0  # seconds that the farewell to the database may take


class Pool:
    """One supervisor's processes. `run` it as a task until `stop`."""

    def __init__(
        self,
        url: str,
        config: Config,
        settings: PoolSettings | None = None,
        *,
        notifier: Notifier,
        clock: Callable[[], datetime | None] = lambda: None,
    ) -> None:
        self.id = name_supervisor(config.worker_name)
        self.settings = settings or PoolSettings.of(config)
        self._url = url
        self._notifier = notifier
        self._clock = clock
        self._rows = Supervision(self.id, name_host(), timedelta(seconds=self.settings.lease))
        self._crew = Crew(self.id, self._rows.host, config, self.settings)
        self._bound: list[str] = []
        self._wake = asyncio.Event()
        self.watched_since: datetime | None = None  # since when it has looked without a gap
        self._looked_at: datetime | None = None
        self._renewed_at = float("-inf")
        self._acts: dict[type[Instruction], Callable[[Connection, HeldWorker, Any], Awaitable[None]]] = {
            Start: self._start,
            Stop: self._ask_to_stop,
            Kill: self._kill,
            Note: self._note,
            Pause: self._pause,
            Terminate: self._terminate,
            Forgive: self._forgive,
            LetGo: self._let_go,
        }

    @property
    def children(self) -> Mapping[str, Child]:
        """The processes, by the ids of their rows."""
        return self._crew.children

    # --- from outside

    async def add(self, count: int, spec: Mapping[str, Any] | None = None) -> list[str]:
        """Make rows that end with this pool, and have processes started for them; give their ids."""
        async with connect(self._url) as connection:
            made = [await self._rows.add_bound_worker(connection, spec or {}, now=self._clock()) for _ in range(count)]
        self._bound += made
        self._wake.set()
        return made

    def hurry(self) -> None:
        """Have a stop that is under way not wait for running tasks."""
        self._crew.hurry()
        self._wake.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the processes until `stop`; then end them in good order, or leave them if the settings say so."""
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self._wake.set())
        subscription = self._notifier.subscribe(dict.fromkeys(CHANNELS, self._hear), self._wake.set)
        log.info("pool_started", supervisor_id=self.id, host=self._rows.host)
        try:
            await self._persist(stop)
            await self._wind_up()
        finally:
            subscription.close()
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            self._crew.disband()
        log.info("pool_stopped", supervisor_id=self.id)

    def _hear(self, payload: str) -> None:
        if not payload.startswith("{"):  # those are commands to running processes
            self._wake.set()

    # --- the loop

    async def _persist(self, stop: asyncio.Event) -> None:
        """Look and act, over one connection after another."""
        while not stop.is_set():
            try:
                async with connect(self._url) as connection:
                    self.watched_since = self._looked_at = None
                    self._renewed_at = float("-inf")
                    while not stop.is_set():
                        self._wake.clear()
                        await self._look(connection)
                        await self._rest(self.settings.tick)
                        await asyncio.sleep(BREATH)
            except (StoreError, OSError) as error:
                raise_if_canceled()
                log.warning("pool_interrupted", supervisor_id=self.id, error=str(error) or type(error).__name__)
                await asyncio.sleep(REPAIR_PAUSE)

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _look(self, connection: Connection) -> None:
        """Look at all rows once, and do what each needs."""
        is_time = time.monotonic() - self._renewed_at >= self.settings.lease / RENEWALS
        if is_time:
            await self._rows.renew_leases(connection, now=self._clock())
            self._renewed_at = time.monotonic()
        free = self.settings.most - len(self._crew.children)
        if free > 0:
            await self._rows.lease_workers(connection, limit=free, now=self._clock())
        self._note_time(await read_clock(connection, now=self._clock()))
        held = await self._rows.read_held_workers(connection, now=self._clock())
        self._crew.keep_only({worker.id: worker.generation for worker in held})
        seen = [(worker, self._crew.see(worker)) for worker in held]
        for worker, sight in seen:
            await self._tend(connection, worker, sight)
        metrics.show(seen)
        if is_time:
            await self._look_around(connection, seen)

    def _note_time(self, moment: datetime) -> None:
        """Note since when this pool has looked without a gap: after one, as when the host slept, all seem silent."""
        before, self._looked_at = self._looked_at, moment
        if before is None or (moment - before).total_seconds() > self.settings.gap:
            self.watched_since = moment

    async def _tend(self, connection: Connection, worker: HeldWorker, sight: Sight) -> None:
        """Do what one row needs; what is refused about it holds up no other."""
        instruction = decide(worker, sight, self.settings, watched_since=self.watched_since)
        child = self._crew.children.get(worker.id)
        try:
            if sight.alive and child is not None and worker.pid is None:  # the database was away when it was started
                await self._rows.record_process(connection, child.worker_id, child.generation, child.pid, child.birth)
            if instruction is not None:
                await self._acts[type(instruction)](connection, worker, instruction)
        except DisconnectedError:
            raise
        except (StoreError, OSError) as error:
            log.error("worker_not_reconciled", supervisor_id=self.id, worker_id=worker.id, error=str(error))

    async def _look_around(self, connection: Connection, seen: list[tuple[HeldWorker, Sight]]) -> None:
        """Do what need not be done at every look: write memory down, and end what was not heard of."""
        used = {worker.id: sight.memory for worker, sight in seen if sight.memory is not None}
        if used:
            await self._rows.record_memory(connection, used)
        if self.watched_since is not None:
            silent = await self._rows.terminate_silent_workers(
                connection,
                patience=timedelta(seconds=self.settings.silence),
                watched_since=self.watched_since,
                now=self._clock(),
            )
            for worker in silent:
                log.warning("worker_terminated", supervisor_id=self.id, worker_id=worker.id, reason="no heartbeat")

    # --- what is done

    async def _start(self, connection: Connection, worker: HeldWorker, _: Start) -> None:
        instance = f"{worker.id}-{worker.generation + 1}-{secrets.token_hex(4)}"
        generation = await self._rows.announce_process(connection, worker, instance, now=self._clock())
        if generation is None:
            return  # its row has changed meanwhile: the next look sees how
        begun = worker._replace(generation=generation, instance=instance)
        try:
            child = self._crew.start(worker, generation, instance)
        except OSError as error:
            trouble = after_crash(f"it cannot be started: {error}", worker.crashes + 1, self.settings)
            await self._note(connection, begun, trouble)
            return
        await self._rows.record_process(connection, worker.id, generation, child.pid, child.birth)

    async def _ask_to_stop(self, _: Connection, worker: HeldWorker, __: Stop) -> None:
        self._crew.children[worker.id].ask_to_stop(time.monotonic())

    async def _kill(self, _: Connection, worker: HeldWorker, __: Kill) -> None:
        self._crew.kill(worker)

    async def _note(self, connection: Connection, worker: HeldWorker, note: Note) -> None:
        now = self._clock()
        async with self._rows.lock_held_worker(connection, worker, now=now) as held:
            if held:
                await self._rows.record_process_end(
                    connection, worker, note.text, crashes=note.crashes, delay=note.delay, now=now
                )
                if note.failed is not None:
                    await self._rows.fail(connection, worker, note.failed, now=now)
        self._crew.children.pop(worker.id, None)
        if note.delay is not None:
            metrics.supervised_process_restarts_total.inc()
        log.info(
            "worker_process_ended",
            supervisor_id=self.id,
            worker_id=worker.id,
            note=note.text,
            failed=note.failed is not None,
            restart_in=note.delay,
        )
        self._wake.set()

    async def _pause(self, connection: Connection, worker: HeldWorker, pause: Pause) -> None:
        async with self._rows.lock_held_worker(connection, worker, now=self._clock()) as held:
            if held and await self._rows.pause(connection, worker, pause.reason, now=self._clock()):
                self._crew.children[worker.id].draining = True
                log.warning("worker_paused", supervisor_id=self.id, worker_id=worker.id, reason=pause.reason)

    async def _terminate(self, connection: Connection, worker: HeldWorker, end: Terminate) -> None:
        async with self._rows.lock_held_worker(connection, worker, now=self._clock()) as held:
            if held and await self._rows.terminate(connection, worker, end.reason, now=self._clock()):
                log.warning("worker_terminated", supervisor_id=self.id, worker_id=worker.id, reason=end.reason)
        self._wake.set()

    async def _forgive(self, connection: Connection, worker: HeldWorker, _: Forgive) -> None:
        await self._rows.reset_crashes(connection, worker)

    async def _let_go(self, connection: Connection, worker: HeldWorker, _: LetGo) -> None:
        await self._rows.release_worker(connection, worker)

    # --- the end

    async def _wind_up(self) -> None:
        """Stop what is here, unless it is to be left, and leave the rows to others."""
        if not self.settings.leave:
            await self._crew.stop()
        with suppress(StoreError, OSError, TimeoutError):  # without it, the leases run out
            async with asyncio.timeout(LAST_WORD), connect(self._url) as connection:
                if not self.settings.leave:
                    await self._rows.renew_leases(connection, now=self._clock())  # stopping may outlast a lease
                    await self._note_all(connection)
                await self._rows.release_workers(connection, self._bound, now=self._clock())

    async def _note_all(self, connection: Connection) -> None:
        for worker in await self._rows.read_held_workers(connection, now=self._clock()):
            child = self._crew.children.get(worker.id)
            if child is not None and child.generation == worker.generation and child.look() is not None:
                await self._note(connection, worker, Note("its supervisor has stopped"))
