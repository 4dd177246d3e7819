"""Fires schedules when they are due.

Invariant: a schedule that cannot be fired says why in its row and in the log, and holds up no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.store.leaders import read_clock
from interlock.store.schedules import fire_due_schedules, next_schedule_at
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from interlock.store.database import Connection

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
