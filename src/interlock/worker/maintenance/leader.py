"""What one worker does for all: it takes part in the election of a leader, and does the duties while it leads.

Invariant: duties run only while this worker's lead holds; an error in one of them stops neither the others nor the
worker.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import SystemRandom
from typing import TYPE_CHECKING, Protocol

from interlock.config import FOREVER
from interlock.postgres.retry import raise_if_canceled
from interlock.store.leader import LEADER_LEASE, acquire_leadership, read_clock, resign_leadership
from interlock.store.limits import admit_limited_tasks, sweep_limits, sweep_namespaces
from interlock.store.retention import Retention
from interlock.store.schedules import fire_due_schedules, next_schedule_at
from interlock.telemetry import log
from interlock.worker.maintenance.callbacks import Callbacks, CallbackSettings
from interlock.worker.maintenance.retention import RetentionDuty

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta

    from interlock.config import Config
    from interlock.postgres.connection import Connection


# SECTION worker/limits
# Lets limited tasks in when there is room, and keeps paused namespaces still.
#
# Invariant: every round is complete in itself; hints and timers only decide how soon it comes.

SWEEP = 5.0  # seconds


class Limits:
    """The duty: admit at every hint and whenever a window frees a start; every few seconds look at everything."""

    name = "limits"

    def __init__(self, actor: str, *, clock: Callable[[], datetime | None] = lambda: None) -> None:
        self._actor = actor
        self._clock = clock
        self._next_sweep = 0.0

    async def act(self, connection: Connection) -> float:
        """Do one round; give the seconds until the next one."""
        now = self._clock()
        sweeps = time.monotonic() >= self._next_sweep
        if sweeps:
            await sweep_namespaces(connection, actor=self._actor, now=now)
            await sweep_limits(connection, actor=self._actor, now=now)
            self._next_sweep = time.monotonic() + SWEEP
        admission = await admit_limited_tasks(connection, actor=self._actor, explain=sweeps, now=now)
        if admission.more:
            return 0.0
        if admission.next_at is None:
            return SWEEP
        rest = (admission.next_at - await read_clock(connection, now=self._clock())).total_seconds()
        return min(max(rest, 0.0), SWEEP)


# SECTION worker/schedules
# Fires schedules when they are due.
#
# Invariant: a schedule that cannot be fired says why in its row and in the log, and holds up no other.

IDLE = 30.0  # seconds between looks, so that a schedule written without a hint is found too


class Schedules:
    """The duty: enqueue what is due, then rest until the next tick."""

    name = "schedules"

    def __init__(self, actor: str, *, clock: Callable[[], datetime | None] = lambda: None) -> None:
        self._actor = actor
        self._clock = clock

    async def act(self, connection: Connection) -> float:
        """Fire a batch; give the seconds until the next one."""
        for fired in await fire_due_schedules(connection, actor=self._actor, now=self._clock()):
            if fired.error is not None:
                log.error("schedule_failed", schedule=fired.name, error=fired.error)
            else:
                log.debug("schedule_fired", schedule=fired.name, tasks=len(fired.tasks))
        due = await next_schedule_at(connection)
        if due is None:
            return IDLE
        now = await read_clock(connection, now=self._clock())
        return min(max((due - now).total_seconds(), 0.0), IDLE)


# A duty that rests longer than this gives its connection back meanwhile.
KEEP_CONNECTION = 60.0
LONGEST_RETRY = 60.0
_random = SystemRandom()


@dataclass(frozen=True, slots=True)
class DutySettings:
    """How long a lead lasts unless renewed, how long things are kept, and how notices are posted."""

    lease: timedelta = LEADER_LEASE
    retention: Retention = field(default_factory=Retention)
    callbacks: CallbackSettings = field(default_factory=CallbackSettings)

    @classmethod
    def of(cls, config: Config) -> DutySettings:
        """Take from the configuration what it says about duties."""
        kept = {
            name: None if age == FOREVER else age
            for name, age in (
                ("done", config.retention_done),
                ("canceled", config.retention_canceled),
                ("skipped", config.retention_skipped),
                ("error", config.retention_error),
                ("records", config.retention_records),
            )
        }
        return cls(
            retention=Retention(**kept),
            callbacks=CallbackSettings(secret=config.callback_secret, allow_private=config.callback_allow_private),
        )


class Duty(Protocol):
    """Something that only the leader does, a step at a time."""

    @property
    def name(self) -> str:
        """What hints call it."""

    async def act(self, connection: Connection, /) -> float:
        """Do one step; give the seconds until the next one, unless a hint comes before."""


class Duties:
    """One worker's part in what is done once for all. `run` it as a task; `wake` it by hints from the database."""

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        *,
        actor: str,
        config: Config | None = None,
        settings: DutySettings | None = None,
        clock: Callable[[], datetime | None] = lambda: None,
    ) -> None:
        self._connect = connect
        self._actor = actor
        self._settings = settings or (DutySettings() if config is None else DutySettings.of(config))
        self._clock = clock
        self._hints = {name: asyncio.Event() for name in ("leader", "limits", "schedules", "callbacks", "retention")}
        self._term: list[asyncio.Task[None]] = []

    @property
    def leads(self) -> bool:
        """Whether this worker does the duties now."""
        return bool(self._term)

    def wake(self, duty: str) -> None:
        """Hear a hint that a duty has something to do; unknown names are no concern of this release."""
        hint = self._hints.get(duty)
        if hint is not None:
            hint.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Contend for the lead and do the duties while holding it, until `stop`; then resign."""
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self.wake("leader"))
        failures = 0
        try:
            while not stop.is_set():
                try:
                    async with self._connect() as connection:
                        failures = 0
                        await self._contend(connection, stop)
                except Exception as error:  # noqa: BLE001 - the worker goes on without a leader, and so does this
                    raise_if_canceled()
                    await self._end_term("leader_lost")
                    failures += 1
                    log.warning("election_failed", worker_id=self._actor, error=str(error) or type(error).__name__)
                    await self._rest("leader", _retry(failures, most=self._settings.lease.total_seconds()))
        finally:
            stopping.cancel()
            await self._end_term("leader_lost")

    async def _contend(self, connection: Connection, stop: asyncio.Event) -> None:
        """Take or renew the lead at a third of its lease. A renewal that hangs as long again ends the term in time."""
        third = self._settings.lease.total_seconds() / 3
        while not stop.is_set():
            async with asyncio.timeout(third):
                leads = await acquire_leadership(connection, self._actor, lease=self._settings.lease, now=self._clock())
            if leads and not self.leads:
                self._begin_term()
            elif not leads:
                await self._end_term("leader_lost")
            await self._rest("leader", third if leads else third * _random.uniform(1, 1.3))
        if self.leads:
            await self._end_term("leader_resigned")
            async with asyncio.timeout(third):
                await resign_leadership(connection, self._actor)

    def _begin_term(self) -> None:
        log.info("leader_elected", worker_id=self._actor)
        duties: list[Duty] = [
            Limits(self._actor, clock=self._clock),
            Schedules(self._actor, clock=self._clock),
            Callbacks(self._settings.callbacks, clock=self._clock),
            RetentionDuty(self._settings.retention, clock=self._clock),
        ]
        self._term = [asyncio.create_task(self._perform(duty), name=f"duty {duty.name}") for duty in duties]

    async def _end_term(self, event: str) -> None:
        """Stop all duties and wait until they have: what they had begun is rolled back."""
        if not self._term:
            return
        ended, self._term = set(self._term), []
        while ended:
            for task in ended:
                task.cancel()
            _, ended = await asyncio.wait(ended, timeout=1)
        log.info(event, worker_id=self._actor)

    async def _perform(self, duty: Duty) -> None:
        """Do one duty for as long as the term lasts, whatever goes wrong in it."""
        failures = 0
        while True:
            try:
                async with self._connect() as connection:
                    rest = await duty.act(connection)
                    failures = 0
                    while rest <= KEEP_CONNECTION:
                        await self._rest(duty.name, rest)
                        rest = await duty.act(connection)
            except Exception as error:  # noqa: BLE001 - it is tried again; the other duties must not suffer
                raise_if_canceled()
                failures += 1
                rest = _retry(failures, most=LONGEST_RETRY)
                said = str(error) or type(error).__name__
                log.warning("duty_failed", duty=duty.name, worker_id=self._actor, error=said, retry_in=round(rest, 1))
                await asyncio.sleep(rest)
            else:
                await self._rest(duty.name, rest)

    async def _rest(self, name: str, seconds: float) -> None:
        """Wait for a hint, at most so long."""
        hint = self._hints[name]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await hint.wait()
        hint.clear()


def _retry(failures: int, *, most: float) -> float:
    return min(0.5 * 2.0 ** min(failures, 20), most) * _random.uniform(0.5, 1)
