"""Timed maintenance of jobs: starts, timeouts, expired signals, lost results and reasons of pending jobs.

Invariant: a sweep that fails holds up no other; it is retried with exponential backoff.
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

SLOW_SWEEP_INTERVAL_S = 30.0  # of sweeps for what is rare: lost results, outdated reasons


class _Sweep(NamedTuple):
    name: str  # of its count in the log
    work: Callable[..., Coroutine[Any, Any, int]]  # returns how many rows it changed
    takes_actor: bool = True
    interval_s: float = 0.0


_SWEEPS = (
    _Sweep("started", start_waiting_jobs),
    _Sweep("overdue", cancel_overdue_jobs),
    _Sweep("expired_signals", expire_overdue_signals),
    _Sweep("sent_again", resend_lost_results, takes_actor=False, interval_s=SLOW_SWEEP_INTERVAL_S),
    _Sweep("reasons", refresh_pending_reasons, takes_actor=False, interval_s=SLOW_SWEEP_INTERVAL_S),
)


class JobSweeps:
    """The timed sweeps of one orchestrator over all jobs; unlike a worker's duties, they need no leader."""

    def __init__(self, actor: str, settings: OrchestratorSettings) -> None:
        self._actor = actor
        self._retries = {sweep.name: RetryState(settings.backoff) for sweep in _SWEEPS}
        self._not_before = dict.fromkeys(self._retries, 0.0)  # by the monotonic clock

    async def run(self, connection: Connection, now: datetime | None) -> bool:
        """Run the sweeps that are due; tell whether any changed something."""
        changed = {sweep.name: await self._run_sweep(sweep, connection, now) for sweep in _SWEEPS}
        if not any(changed.values()):
            return False
        log.info("orchestrator_tended", orchestrator_id=self._actor, **changed)
        return True

    async def _run_sweep(self, sweep: _Sweep, connection: Connection, now: datetime | None) -> int:
        if time.monotonic() < self._not_before[sweep.name]:
            return 0
        retries = self._retries[sweep.name]
        try:
            changed = await sweep.work(connection, now=now, **({"actor": self._actor} if sweep.takes_actor else {}))
        except DisconnectedError:
            raise
        except Exception as error:  # noqa: BLE001 - the other sweeps do not depend on this one
            delay_s = retries.next_delay_s()
            self._not_before[sweep.name] = time.monotonic() + delay_s
            log.warning(
                "orchestrator_duty_failed",
                orchestrator_id=self._actor,
                duty=sweep.name,
                error=str(error) or type(error).__name__,
                retry_in=round(delay_s, 2),
            )
            return 0
        retries.reset()
        # each run changes a limited number of rows: after one that changed some, the next is due at once
        self._not_before[sweep.name] = 0.0 if changed else time.monotonic() + sweep.interval_s
        return changed
