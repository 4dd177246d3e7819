"""Timed maintenance of jobs: starts, timeouts, expired signals, lost results and reasons of pending jobs.

Invariant: a duty that fails holds up no other; it is retried with exponential backoff.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from interlock.errors import DisconnectedError
from interlock.postgres.retry import RetryState
from interlock.store.step_results import refresh_pending_reasons, resend_lost_results
from interlock.telemetry import log
from interlock.workflow.advance import cancel_overdue_jobs, start_waiting_jobs
from interlock.workflow.signals import expire_overdue_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from datetime import datetime
    from typing import Any

    from interlock.orchestrator.settings import OrchestratorSettings
    from interlock.postgres.connection import Connection

SWEEP_INTERVAL_S = 30.0  # between two searches for lost results


class _Duty(NamedTuple):
    name: str  # of its count in the log
    work: Callable[..., Coroutine[Any, Any, int]]  # returns how many rows it changed
    takes_actor: bool = True
    interval_s: float = 0.0


_DUTIES = (
    _Duty("started", start_waiting_jobs),
    _Duty("overdue", cancel_overdue_jobs),
    _Duty("expired_signals", expire_overdue_signals),
    _Duty("sent_again", resend_lost_results, takes_actor=False, interval_s=SWEEP_INTERVAL_S),
    _Duty("reasons", refresh_pending_reasons, takes_actor=False, interval_s=SWEEP_INTERVAL_S),
)


class JobMaintenance:
    """The timed duties of one orchestrator."""

    def __init__(self, actor: str, settings: OrchestratorSettings) -> None:
        self._actor = actor
        self._retries = {duty.name: RetryState(settings.backoff) for duty in _DUTIES}
        self._not_before = dict.fromkeys(self._retries, 0.0)  # by the monotonic clock

    async def run(self, connection: Connection, now: datetime | None) -> bool:
        """Do the duties that are due; tell whether any changed something."""
        changed = {duty.name: await self._run_duty(duty, connection, now) for duty in _DUTIES}
        if not any(changed.values()):
            return False
        log.info("orchestrator_tended", orchestrator_id=self._actor, **changed)
        return True

    async def _run_duty(self, duty: _Duty, connection: Connection, now: datetime | None) -> int:
        if time.monotonic() < self._not_before[duty.name]:
            return 0
        retries = self._retries[duty.name]
        try:
            changed = await duty.work(connection, now=now, **({"actor": self._actor} if duty.takes_actor else {}))
        except DisconnectedError:
            raise
        except Exception as error:  # noqa: BLE001 - the other duties do not depend on this one
            delay_s = retries.next_delay_s()
            self._not_before[duty.name] = time.monotonic() + delay_s
            log.warning(
                "orchestrator_duty_failed",
                orchestrator_id=self._actor,
                duty=duty.name,
                error=str(error) or type(error).__name__,
                retry_in=round(delay_s, 2),
            )
            return 0
        retries.reset()
        # each run changes a limited number of rows: after one that changed some, the next is due at once
        self._not_before[duty.name] = 0.0 if changed else time.monotonic() + duty.interval_s
        return changed
