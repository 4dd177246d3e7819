"""The two connections of a worker's own loop: one to claim over and one to settle over, because the two overlap.

Invariant: outcomes are settled over one connection at a time; when that is lost, the worker is told, once.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from interlock.store.database import connect
from interlock.telemetry import log
from interlock.worker.patience import COURTESY, end

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from interlock.store.database import Connection


class Connections:
    """Both connections: open or closed together."""

    def __init__(self, told: Callable[[Exception], None]) -> None:
        self._told = told
        self._stack = AsyncExitStack()
        self._settler: asyncio.Task[None] | None = None
        self.claiming: Connection | None = None
        self.lost = asyncio.Event()

    @property
    def are_up(self) -> bool:
        """Whether both are open, as far as is known."""
        return self.claiming is not None and not self.lost.is_set()

    async def open(self, url: str, settle: Callable[[Connection], Coroutine[Any, Any, None]]) -> Connection:
        """Connect anew, begin to settle, and give the connection for claiming."""
        await self.close()
        async with AsyncExitStack() as stack:
            claiming = await stack.enter_async_context(connect(url, few_statements=True))
            settling = await stack.enter_async_context(connect(url, few_statements=True))
            self.lost.clear()
            self._settler = asyncio.create_task(self._guard(settle(settling)))
            stack.push_async_callback(_hang_up, claiming, settling)
            self.claiming = claiming
            self._stack = stack.pop_all()
        return claiming

    async def close(self, courtesy: float = COURTESY) -> None:
        """Close both, soon; safe twice, and before they were open."""
        self.claiming = None
        if self._settler is not None:
            await end(self._settler, courtesy=courtesy)  # before its connection is closed under it
        await self._stack.aclose()

    async def _guard(self, settling: Coroutine[Any, Any, None]) -> None:
        try:
            await settling
        except Exception as error:  # noqa: BLE001 - whatever ended it, a new connection is a new beginning
            log.warning("settling_interrupted", error=str(error) or type(error).__name__)
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Hear that a connection is gone, or is of no use."""
        self.lost.set()
        self._told(error)


async def _hang_up(*connections: Connection) -> None:
    """Close connections without a word to a server that may be gone."""
    for connection in connections:
        await connection.close()
