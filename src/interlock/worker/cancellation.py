"""Bounded waits for database work, and cancellation that ends it.

Invariant: a task that is cancelled twice has ended, unless it swallows cancellation itself. psycopg turns the first
cancel() into a server-side cancel and waits for the reply, which may never come; the second aborts that wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

T = TypeVar("T")

CANCEL_REPLY_TIMEOUT_S = 0.5  # for the server to acknowledge a cancelled statement


async def run_within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a task of its own; cancel it and raise TimeoutError if it has not ended in time."""
    reply_timeout_s = min(CANCEL_REPLY_TIMEOUT_S, seconds / 4)
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=max(seconds - 2 * reply_timeout_s, 0))
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        await cancel_tasks(task, reply_timeout_s=reply_timeout_s)


async def cancel_tasks(*tasks: asyncio.Task[Any], reply_timeout_s: float = CANCEL_REPLY_TIMEOUT_S) -> None:
    """Cancel tasks, twice if needed, and wait until they have ended; not for one that swallows both."""
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        task.add_done_callback(_retrieve_exception)
    for _ in range(2):
        if pending:
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=max(reply_timeout_s, 0))


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


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # or asyncio logs that it was never retrieved
