"""Lets limited tasks in when there is room, and keeps paused namespaces still.

Invariant: every round is complete in itself; hints and timers only decide how soon it comes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from interlock.store.leaders import read_clock
from interlock.store.limits import admit_limited_tasks, sweep_limits, sweep_namespaces

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from interlock.store.database import Connection

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
