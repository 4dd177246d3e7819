"""Prefetch: how many tasks a worker claims ahead of its free slots, and those that wait for a slot.

Invariant: a task is claimed ahead only while tasks are settled faster than it can wait. If it has waited for
MAX_PREFETCH_WAIT_S all the same, it is handed back to the runner, which returns it to the queue, and nothing is claimed
ahead for a while. A worker of one slot claims nothing ahead.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from interlock.worker.attempt import TaskStateMachine

PACE_WINDOW_S = 0.05  # at most as many tasks wait as were settled within this time
MAX_PREFETCH_WAIT_S = 0.1
MAX_PREFETCHED = 100  # the gain is in small batches
PREFETCH_PAUSE_S = 10.0  # after tasks had to be returned


class Prefetch:
    """The attempts of one worker that wait for a slot, in the order of their claims."""

    def __init__(self, concurrency: int, on_overdue: Callable[[list[TaskStateMachine]], None]) -> None:
        self._concurrency = concurrency
        self._on_overdue = on_overdue
        self._waiting: deque[tuple[float, TaskStateMachine]] = deque()  # with the time since when
        self._timer: asyncio.TimerHandle | None = None
        self._paused_until = 0.0
        self._window_began = 0.0
        self._settled_before = 0  # tasks in the window before this one
        self.settled = 0  # tasks in this window

    def __len__(self) -> int:
        return len(self._waiting)

    def limit(self) -> int:
        """Return how many tasks may wait: as many as were settled within a window, at most one for each slot."""
        now = time.monotonic()
        if self._concurrency == 1 or now < self._paused_until:
            return 0
        if (elapsed := now - self._window_began) >= PACE_WINDOW_S:
            self._settled_before, self.settled = int(self.settled * PACE_WINDOW_S / elapsed), 0
            self._window_began = now
        return min(self._concurrency, MAX_PREFETCHED, max(self._settled_before, self.settled))

    def room(self) -> int:
        """Return how many tasks to claim beside those that wait; 0 until half of the limit is left."""
        limit = self.limit()
        left = limit - len(self._waiting)
        return left if left * 2 >= limit else 0

    def add(self, attempts: Iterable[TaskStateMachine]) -> None:
        """Let attempts wait for a slot."""
        now = time.monotonic()
        self._waiting.extend((now, attempt) for attempt in attempts)

    def take(self) -> TaskStateMachine:
        """Remove the attempt that has waited for longest."""
        return self._waiting.popleft()[1]

    def take_all(self) -> list[TaskStateMachine]:
        """Remove all attempts."""
        taken = [attempt for _, attempt in self._waiting]
        self._waiting.clear()
        return taken

    def remove(self, attempt: TaskStateMachine) -> None:
        """Remove an attempt if it waits."""
        self._waiting = deque(each for each in self._waiting if each[1] is not attempt)

    def watch(self) -> None:
        """Hand back the attempts that will have waited for too long."""
        if self._waiting and self._timer is None:
            left = self._waiting[0][0] + MAX_PREFETCH_WAIT_S - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._hand_back)

    def _hand_back(self) -> None:
        self._timer = None
        now = time.monotonic()
        overdue = []
        while self._waiting and self._waiting[0][0] + MAX_PREFETCH_WAIT_S <= now:
            overdue.append(self.take())
        if overdue:
            self._paused_until = now + PREFETCH_PAUSE_S
            self._on_overdue(overdue)
        self.watch()
