"""Waits for the database no longer than there is time.

Invariant: who is cancelled twice has ended: the driver hears the first as a wish to cancel the statement, and waits for
the server's answer, which may never come; the second ends that wait too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

T = TypeVar("T")

COURTESY = 0.5  # seconds that the server has to answer a cancelled statement


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Do some work in a task of its own; when it is not done by then, it was given up, and this is a TimeoutError."""
    courtesy = min(COURTESY, seconds / 4)
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=max(seconds - 2 * courtesy, 0))
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        await end(task, courtesy=courtesy)


async def end(*tasks: asyncio.Task[Any], courtesy: float = COURTESY) -> None:
    """Cancel tasks and wait until they have ended, but not for those that swallow it twice."""
    left = {task for task in tasks if not task.done()}
    for task in left:
        task.add_done_callback(_heard)
    for _ in range(2):
        if left:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=max(courtesy, 0))


class Breakable:
    """Awaits steps in the task of whoever calls, without a task of their own; the one under way can be broken off."""

    __slots__ = ("_cancelled", "_patience", "_task")

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = 0

    async def run(self, step: Awaitable[None]) -> None:
        """Await a step; return when it has ended or was broken off."""
        task = self._task = asyncio.current_task()
        try:
            await step
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
        finally:
            self._task = None
            while task is not None and self._cancelled:
                self._cancelled -= 1
                task.uncancel()

    def break_off_later(self) -> None:
        """Give the step that is under way some time to end by itself, and then cancel it, again and again."""
        if self._task is not None:
            self._task.get_loop().call_later(self._patience, self._break_off, self._task)

    def _break_off(self, task: asyncio.Task[Any]) -> None:
        if self._task is task:
            self._cancelled += 1
            task.cancel()
            self.break_off_later()


def _heard(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # nobody else asks for it
