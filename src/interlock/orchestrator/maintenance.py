"""Timed maintenance of jobs: replacements, starts, timeouts, sleeps, signals, lost messages, reasons of pending jobs.

Invariant: a sweep that fails holds up no other; it is retried with exponential backoff. The next run comes when
something is due.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

from interlock.errors import DisconnectedError, StatementError
from interlock.postgres.retry import RetryState
from interlock.store.jobs import until_next_due
from interlock.store.step_results import refresh_pending_reasons, resend_lost_results
from interlock.telemetry import log
from interlock.workflow.advance import cancel_overdue_jobs, resend_cancellations, start_waiting_jobs
from interlock.workflow.queued_jobs import cancel_replaced_jobs, start_queued_jobs, validate_submitted_jobs
from interlock.workflow.signals import end_due_waits

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from datetime import datetime
    from typing import Any

    from interlock.orchestrator.settings import OrchestratorSettings
    from interlock.postgres.connection import Connection

SLOW_SWEEP_INTERVAL_S = 30.0  # of sweeps for what is rare: lost results, outdated reasons
MIN_REST_S = 0.001  # before a due time, which a timer may miss by a moment


class _Sweep(NamedTuple):
    name: str  # of its count in the log
    work: Callable[..., Coroutine[Any, Any, int]]  # returns how many rows it changed
    takes_actor: bool = True
    interval_s: float = 0.0
    can_repeat: bool = True  # at once, after a run that changed something: each run changes a limited number of rows


_SWEEPS = (
    _Sweep("replaced", cancel_replaced_jobs),
    _Sweep("validated", validate_submitted_jobs),
    _Sweep("queued", start_queued_jobs),
    _Sweep("started", start_waiting_jobs),
    _Sweep("overdue", cancel_overdue_jobs),
    _Sweep("due_waits", end_due_waits),
    _Sweep("sent_again", resend_lost_results, takes_actor=False, interval_s=SLOW_SWEEP_INTERVAL_S),
    # not repeated: it finds the same jobs until their messages are handled
    _Sweep(
        "cancellations", resend_cancellations, takes_actor=False, interval_s=SLOW_SWEEP_INTERVAL_S, can_repeat=False
    ),
    _Sweep("reasons", refresh_pending_reasons, takes_actor=False, interval_s=SLOW_SWEEP_INTERVAL_S),
)


class JobSweeps:
    """The timed sweeps of one orchestrator over all jobs; unlike a worker's duties, they need no leader."""

    def __init__(self, actor: str, settings: OrchestratorSettings) -> None:
        self._actor = actor
        self._retries = {sweep.name: RetryState(settings.backoff) for sweep in _SWEEPS}
        self._not_before = dict.fromkeys(self._retries, 0.0)  # by the monotonic clock

    async def run(self, connection: Connection, now: datetime | None) -> float:
        """Run the sweeps; return the seconds until the next due time, 0 if there may be more to do already."""
        # before the sweeps, so that a time that comes while they run is either handled by them or waited for
        due_in_s = await _seconds_until_due(connection, now)
        changed = {sweep.name: await self._run_sweep(sweep, connection, now) for sweep in _SWEEPS}
        if any(changed.values()):
            log.info("orchestrator_tended", orchestrator_id=self._actor, **changed)
            return 0.0
        present = time.monotonic()
        return min([due_in_s, *(at - present for at in self._not_before.values() if at > present)])

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
        self._not_before[sweep.name] = 0.0 if changed and sweep.can_repeat else time.monotonic() + sweep.interval_s
        return changed


async def _seconds_until_due(connection: Connection, now: datetime | None) -> float:
    try:
        return max(await until_next_due(connection, now=now), MIN_REST_S)
    except DisconnectedError:
        raise
    except StatementError as error:  # the sweeps do not depend on it, and the next tick reads it again
        log.warning("orchestrator_duty_failed", duty="due_times", error=str(error))
        return math.inf
