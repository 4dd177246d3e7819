"""Leaked handlers: those that run on although their attempt is settled, because they ignored that they were stopped.

Invariant: a leaked handler holds no slot and writes nothing: its result is discarded, and its context is cut off from
the worker. It is counted until it ends.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.telemetry import handlers_leaked_total, log

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable, Hashable
    from types import FrameType

    from interlock.client.context import TaskContext

LEAK_GRACE_S = 2.0  # for a handler to end after it was stopped


class LeakedHandler(NamedTuple):
    """A handler that runs on."""

    task_id: str
    task_type: str
    attempt: int
    where: str | None


class LeakedHandlers:
    """The leaked handlers of one worker."""

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        self._running: dict[Hashable, LeakedHandler] = {}
        self._on_change = on_change

    def add(self, key: Hashable, context: TaskContext, where: str | None) -> None:
        """Report a handler, and cut its context off."""
        context.detach()
        leaked = LeakedHandler(str(context.task_id), context.task_type, context.attempt, where)
        self._running[key] = leaked
        handlers_leaked_total.labels(context.task_type).inc()
        log.error("handler_leaked", **leaked._asdict(), running=len(self._running))
        self._changed()

    def remove(self, key: Hashable) -> None:
        """Note that a handler has ended; nothing happens if it was not reported."""
        leaked = self._running.pop(key, None)
        if leaked is not None:
            log.warning("leaked_handler_ended", **leaked._asdict(), running=len(self._running))
            self._changed()

    def by_type(self) -> dict[str, int]:
        """Return how many run on, by type."""
        return dict(Counter(leaked.task_type for leaked in list(self._running.values())))

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()


def coroutine_position(task: asyncio.Task[Any] | None, function: Callable[..., Any]) -> str | None:
    """Return function and line at which a coroutine waits: in the handler if it is found, else at the innermost."""
    waiting: Any = None if task is None else task.get_coro()
    frame: FrameType | None = None
    code = getattr(inspect.unwrap(function), "__code__", None)
    while (inner := getattr(waiting, "cr_frame", None)) is not None:
        frame = inner
        if frame.f_code is code:
            break
        waiting = waiting.cr_await
    return _describe(frame)


def thread_position(thread: threading.Thread, function: Callable[..., Any]) -> str | None:
    """Return function and line that a thread executes: in the handler if it is found, else the innermost."""
    innermost = frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - the only way to see it
    code = getattr(inspect.unwrap(function), "__code__", None)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return _describe(frame or innermost)


def _describe(frame: FrameType | None) -> str | None:
    return None if frame is None else f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
