"""A thread with an event loop of its own, for services that a handler blocking the worker's loop must not delay."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from interlock.errors import DisconnectedError
from interlock.service import cancel_and_wait
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from concurrent.futures import Future

    from interlock.service import Service


class LoopThread:
    """Starts services in a thread's own loop, and stops them in order.

    It is a service of the caller's loop that runs once: neither the thread nor its loop can start again.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._home = asyncio.get_running_loop()
        self._services: Sequence[Service] = ()
        self._stopping = asyncio.Event()  # of the thread's loop
        self._ended = asyncio.Event()  # of the caller's loop
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def host(self, *services: Service) -> None:
        """Set the services that run in the thread."""
        self._services = services

    async def start(self) -> None:
        """Start the thread and, in it, the services."""
        if self._thread.ident is None:
            self._thread.start()

    async def stop(self) -> None:
        """Stop the services and wait until the thread has ended; safe twice and before start."""
        if self._thread.is_alive():
            self.call(self._stopping.set)
            await self._ended.wait()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the thread's loop; does nothing once that is closed."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def call_home(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the loop of the caller; does nothing once that is closed."""
        with suppress(RuntimeError):
            self._home.call_soon_threadsafe(function, *arguments)

    def run_at_home(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run a coroutine in the loop of the caller; DisconnectedError once that is closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._home)
        except RuntimeError:
            work.close()
            raise DisconnectedError("the loop of the worker is closed") from None

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._run())
        finally:
            self.loop.close()
            self.call_home(self._ended.set)

    async def _run(self) -> None:
        for service in self._services:
            await service.start()
        await self._stopping.wait()
        for service in self._services:
            try:
                await service.stop()
            except Exception as error:  # noqa: BLE001 - the other services must be stopped too
                log.error("service_failed", service=type(service).__name__, error=str(error))
        await cancel_and_wait(asyncio.all_tasks() - {asyncio.current_task()})
