"""Leader election among the workers, and the maintenance duties that the leader runs.

Invariant: duties run only while this worker holds the lead; an error in one stops neither the others nor the worker.
Each run of a duty is complete in itself: hints and timers only decide how soon the next one comes.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import SystemRandom
from typing import TYPE_CHECKING, Protocol, TypeVar

from interlock.config import FOREVER
from interlock.errors import DisconnectedError
from interlock.model.backoff import Backoff
from interlock.postgres.connection import connect
from interlock.postgres.retry import RetryState, retry
from interlock.service import BackgroundService, BackgroundTasks, wait_for_event
from interlock.store.leader import LEADER_LEASE, acquire_leadership, resign_leadership, seconds_until
from interlock.store.limits import admit_limited_tasks, sweep_limits, sweep_namespaces
from interlock.store.retention import Retention
from interlock.store.schedules import next_schedule_at
from interlock.telemetry import log
from interlock.worker.maintenance.figures import FiguresDuty
from interlock.worker.maintenance.retention import RetentionDuty, backlog
from interlock.worker.maintenance.webhooks import WebhooksDuty, WebhookSettings
from interlock.workflow.fire_schedules import fire_due_schedules

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta

    from interlock.config import Config
    from interlock.postgres.connection import Connection

SWEEP_INTERVAL_S = 5.0
SCHEDULE_POLL_INTERVAL_S = 30.0  # finds schedules that were written without a hint
KEEP_CONNECTION_S = SWEEP_INTERVAL_S  # a duty that rests longer closes its connection meanwhile
RESIGN_TIMEOUT_S = 1.0
LEND_TIMEOUT_S = RESIGN_TIMEOUT_S / 2  # then the election opens a connection of its own
RETRY_BASE_S = 0.5
DUTY_BACKOFF = Backoff.exponential(RETRY_BASE_S, cap=60.0, jitter=0.5)
_random = SystemRandom()
T = TypeVar("T")


class Duty(Protocol):
    """Maintenance that only the leader does, a bounded amount per run."""

    @property
    def name(self) -> str:
        """The name that hints use."""

    async def run_once(self, connection: Connection, /) -> float:
        """Run once; return the seconds until the next run, unless a hint comes before."""


class LimitsDuty:
    """Admits limited tasks at each hint and whenever a rate window frees a start; sweeps everything every 5 s."""

    name = "limits"

    def __init__(self, actor: str) -> None:
        self._actor = actor
        self._next_sweep = 0.0

    async def run_once(self, connection: Connection, *, now: datetime | None = None) -> float:
        """Sweep if that is due, and admit one batch; return the seconds until the next run."""
        sweeps = time.monotonic() >= self._next_sweep
        if sweeps:
            await sweep_namespaces(connection, actor=self._actor, now=now)
            await sweep_limits(connection, actor=self._actor, served_only=True, now=now)
            self._next_sweep = time.monotonic() + SWEEP_INTERVAL_S
        admission = await admit_limited_tasks(connection, actor=self._actor, explain=sweeps, served_only=True, now=now)
        if admission.more:
            return 0.0
        return await seconds_until(connection, admission.next_at, limit=SWEEP_INTERVAL_S, now=now)


class SchedulesDuty:
    """Makes the tasks and jobs of due schedules.

    A schedule that cannot be fired records the error in its row and in the log, and holds up no other.
    """

    name = "schedules"

    def __init__(self, actor: str) -> None:
        self._actor = actor

    async def run_once(self, connection: Connection, *, now: datetime | None = None) -> float:
        """Fire one batch of due schedules; return the seconds until the next run."""
        for fired in await fire_due_schedules(connection, actor=self._actor, now=now):
            if fired.error is not None:
                log.error("schedule_failed", schedule=fired.name, error=fired.error)
            else:
                log.debug("schedule_fired", schedule=fired.name, made=len(fired.ids))
        due = await next_schedule_at(connection)
        return await seconds_until(connection, due, limit=SCHEDULE_POLL_INTERVAL_S, now=now)


@dataclass(frozen=True, slots=True)
class MaintenanceSettings:
    """The lease of the lead, retention ages, and webhook settings."""

    lease: timedelta = LEADER_LEASE
    retention: Retention = field(default_factory=Retention)
    webhooks: WebhookSettings = field(default_factory=WebhookSettings)

    @classmethod
    def of(cls, config: Config) -> MaintenanceSettings:
        """Take the settings from the configuration."""
        ages = {
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
            retention=Retention(**ages),
            webhooks=WebhookSettings(secret=config.callback_secret, allow_private=config.callback_allow_private),
        )


class Maintenance(BackgroundService):
    """One worker's part in the election, and its duties while it leads; `stop` resigns the lead."""

    stop_timeout_s = RESIGN_TIMEOUT_S

    def __init__(
        self,
        url: str,
        *,
        actor: str,
        config: Config | None = None,
        settings: MaintenanceSettings | None = None,
        lend: Callable[[], AbstractAsyncContextManager[Connection]] | None = None,
    ) -> None:
        super().__init__("maintenance")
        self._url = url
        self._lend = lend  # lends a connection for the election
        self._actor = actor
        self._settings = settings or (MaintenanceSettings() if config is None else MaintenanceSettings.of(config))
        self._hints = {
            name: asyncio.Event() for name in ("leader", "limits", "schedules", "callbacks", "retention", "figures")
        }
        self._retries = RetryState(
            Backoff.exponential(RETRY_BASE_S, cap=self._settings.lease.total_seconds(), jitter=0.5)
        )
        self._duties = BackgroundTasks()
        self.is_leader = False  # runs the duties

    def wake(self, duty: str) -> None:
        """Run a duty now; a name that this release does not know is ignored."""
        hint = self._hints.get(duty)
        if hint is not None:
            hint.set()

    def request_stop(self) -> None:
        """Set `stopping` and end the pause between renewals of the lead."""
        super().request_stop()
        self.wake("leader")

    async def run(self) -> None:
        """Take part in the election, and run the duties while leading, until `stopping`; then resign."""
        await retry(
            self._campaign,
            on_failure=self._on_election_failed,
            state=self._retries,
            retry_on=(Exception,),  # the worker goes on without a leader
            stopping=self.stopping,
        )

    async def _campaign(self) -> None:
        """Take or renew the lead each third of its lease; a renewal that hangs so long ends the lead in time."""
        third_s = self._settings.lease.total_seconds() / 3
        try:
            while not self.stopping.is_set():
                async with asyncio.timeout(third_s):
                    leads = await self._run_election(
                        lambda connection: acquire_leadership(connection, self._actor, lease=self._settings.lease)
                    )
                self._retries.reset()
                if leads and not self.is_leader:
                    self._start_duties()
                elif not leads:
                    await self._stop_duties("leader_lost")
                await self._wait("leader", third_s if leads else third_s * _random.uniform(1, 1.3))
            if self.is_leader:
                await self._stop_duties("leader_resigned")
                async with asyncio.timeout(third_s):
                    await self._run_election(lambda connection: resign_leadership(connection, self._actor))
        finally:
            await self._stop_duties("leader_lost")

    async def _run_election(self, statement: Callable[[Connection], Awaitable[T]]) -> T:
        """Run a statement over the lent connection; over one of its own while that is lost, or in use for long."""
        if self._lend is not None:
            with suppress(DisconnectedError, TimeoutError):
                async with asyncio.timeout(LEND_TIMEOUT_S), self._lend() as connection:
                    return await statement(connection)
        async with connect(self._url) as connection:
            return await statement(connection)

    def _on_election_failed(self, error: Exception, _: float) -> None:
        log.warning("election_failed", worker_id=self._actor, error=str(error) or type(error).__name__)

    def _start_duties(self) -> None:
        log.info("leader_elected", worker_id=self._actor)
        duties: list[Duty] = [
            LimitsDuty(self._actor),
            SchedulesDuty(self._actor),
            WebhooksDuty(self._settings.webhooks),
            RetentionDuty(self._settings.retention),
            FiguresDuty(),
        ]
        self.is_leader = True
        for duty in duties:
            self._duties.spawn(f"duty {duty.name}", self._keep_running(duty))

    async def _stop_duties(self, event: str) -> None:
        """Cancel all duties and wait until they have ended; their open transactions are rolled back."""
        was_leader, self.is_leader = self.is_leader, False
        await self._duties.stop()
        if was_leader:
            backlog.clear()
            log.info(event, worker_id=self._actor)

    async def _keep_running(self, duty: Duty) -> None:
        """Run one duty again and again, with backoff after errors."""
        retries = RetryState(DUTY_BACKOFF)

        def on_failure(error: Exception, delay_s: float) -> None:
            log.warning(
                "duty_failed",
                duty=duty.name,
                worker_id=self._actor,
                error=str(error) or type(error).__name__,
                retry_in=round(delay_s, 1),
            )

        while True:
            await retry(
                lambda: self._run_connected(duty, retries),
                on_failure=on_failure,
                state=retries,
                retry_on=(Exception,),  # the other duties must not suffer
            )

    async def _run_connected(self, duty: Duty, retries: RetryState) -> None:
        """Run a duty over one connection until it rests for long; then close the connection and rest."""
        async with connect(self._url) as connection:
            rest_s = await duty.run_once(connection)
            retries.reset()
            while rest_s <= KEEP_CONNECTION_S:
                await self._wait(duty.name, rest_s)
                rest_s = await duty.run_once(connection)
        await self._wait(duty.name, rest_s)

    async def _wait(self, name: str, seconds: float) -> None:
        """Wait for a hint, at most so long."""
        hint = self._hints[name]
        await wait_for_event(hint, seconds)
        hint.clear()
