"""Time limits for database work, and steps of a loop that can be cancelled from outside."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from interlock.service import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

T = TypeVar("T")

CANCEL_TIMEOUT_S = 1.0  # for the server to acknowledge a cancelled statement, and for a second cancel without that


async def run_within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a task of its own; cancel it and raise TimeoutError if it has not ended in time."""
    cancel_timeout_s = min(CANCEL_TIMEOUT_S, seconds / 2)
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=max(seconds - cancel_timeout_s, 0))
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        await cancel_and_wait([task], timeout_s=cancel_timeout_s)


class CancellableStep:
    """Awaits steps in the caller's own task, without a task for each; the current one can be cancelled from outside."""

    __slots__ = ("_cancels", "_delay_s", "_task")

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._task: asyncio.Task[Any] | None = None
        self._cancels = 0

    async def run(self, step: Awaitable[None]) -> None:
        """Await a step; return when it has ended or `cancel_later` has cancelled it."""
        task = self._task = asyncio.current_task()
        try:
            await step
        except asyncio.CancelledError:
            if not self._cancels:
                raise
        finally:
            self._task = None
            while task is not None and self._cancels:
                self._cancels -= 1
                task.uncancel()

    def cancel_later(self) -> None:
        """Cancel the current step if it has not ended after the delay, and repeat until it has."""
        if self._task is not None:
            self._task.get_loop().call_later(self._delay_s, self._cancel, self._task)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        if self._task is task:
            self._cancels += 1
            task.cancel()
            self.cancel_later()
