"""What an orchestrator does because of the time, and not because of a message.

Invariant: a duty that fails keeps no other from being done; it is tried again after a pause, which grows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from interlock.errors import DisconnectedError
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

SWEEP = 30.0  # seconds between two looks for what got lost


class _Duty(NamedTuple):
    name: str  # what is counted
    work: Callable[..., Coroutine[Any, Any, int]]
    is_act: bool = True  # it acts in the name of the orchestrator
    every: float = 0.0  # seconds


_DUTIES = (
    _Duty("started", start_waiting_jobs),
    _Duty("overdue", cancel_overdue_jobs),
    _Duty("expired_signals", expire_overdue_signals),
    _Duty("sent_again", resend_lost_results, is_act=False, every=SWEEP),
    _Duty("reasons", refresh_pending_reasons, is_act=False, every=SWEEP),
)


class Duties:
    """The duties of one orchestrator."""

    def __init__(self, actor: str, settings: OrchestratorSettings) -> None:
        self._actor = actor
        self._settings = settings
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    async def tend(self, connection: Connection, now: datetime | None) -> bool:
        """Do what is due, each duty by itself; tell whether any found something to do."""
        done = {duty.name: await self._do(duty, connection, now) for duty in _DUTIES}
        if not any(done.values()):
            return False
        log.info("orchestrator_tended", orchestrator_id=self._actor, **done)
        return True

    async def _do(self, duty: _Duty, connection: Connection, now: datetime | None) -> int:
        if time.monotonic() < self._not_before.get(duty.name, 0.0):
            return 0
        try:
            done = await duty.work(connection, now=now, **({"actor": self._actor} if duty.is_act else {}))
        except DisconnectedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, the other duties have nothing to do with it
            self._put_off(duty.name, error)
            return 0
        self._failures.pop(duty.name, None)
        # they come some at a time
        self._not_before[duty.name] = time.monotonic() + duty.every if not done else 0.0
        return done

    def _put_off(self, name: str, error: Exception) -> None:
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        pause = min(self._settings.retry_base * 2 ** min(failures, 20), self._settings.retry_cap)
        self._not_before[name] = time.monotonic() + pause
        said = str(error) or type(error).__name__
        log.warning(
            "orchestrator_duty_failed", orchestrator_id=self._actor, duty=name, error=said, retry_in=round(pause, 2)
        )
