"""The start/stop contract of everything that runs in the background, and a base class for one asyncio task."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

CANCEL_INTERVAL_S = 1.0


class Service(Protocol):
    """A background part of a process.

    `start` returns once the service runs; a second call changes nothing. `stop` returns once the service has ended; it
    is safe to call twice, at the same time from several tasks, and before `start`. A stopped service can start again,
    unless its class says that it runs once.
    """

    async def start(self) -> None:
        """Start the service."""

    async def stop(self) -> None:
        """Stop the service and wait until it has ended."""


class BackgroundService(ABC):
    """A service that is one asyncio task.

    Subclasses implement `run`. By default `stop` cancels it. A subclass that finishes by itself sets `stop_timeout_s`
    and returns from `run` when `stopping` is set; `stop` cancels it only after that time (None: never). `stop` waits
    until the canceled `run` has ended, at most `cancel_timeout_s` if that is set. An error that leaves `run` is logged
    and ends the service.
    """

    stop_timeout_s: float | None = 0.0
    cancel_timeout_s: float | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._canceled = False
        self._lock = asyncio.Lock()  # a start during a stop waits until the service has ended

    @abstractmethod
    async def run(self) -> None:
        """Do the work of the service until it is canceled or `stopping` is set."""

    @property
    def is_running(self) -> bool:
        """Whether the service was started and has not ended."""
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Start the task of the service."""
        async with self._lock:
            if not self.is_running:
                self.stopping.clear()
                self._canceled = False
                self._task = asyncio.create_task(self.run(), name=f"interlock {self.name}")
                self._task.add_done_callback(_log_error)

    def request_stop(self) -> None:
        """Set `stopping`, for callers that cannot wait, such as signal handlers and `run` itself."""
        self.stopping.set()

    async def stop(self) -> None:
        """Stop the task of the service and wait until it has ended."""
        self.request_stop()
        async with self._lock:
            self.request_stop()  # a start that came before may have cleared it
            if self._task is not None and not self._task.done():
                if self.stop_timeout_s != 0 and not self._canceled:
                    await asyncio.wait([self._task], timeout=self.stop_timeout_s)
                await cancel_and_wait([self._task], timeout_s=self.cancel_timeout_s)

    async def join(self) -> None:
        """Wait until the service has ended; raise the error that ended it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def cancel(self) -> None:
        """Cancel `run` without waiting for it: for callers in a hurry that cannot wait. `stop` waits."""
        self.request_stop()
        self._canceled = True
        if self._task is not None:
            self._task.cancel()


class BackgroundTasks:
    """Short asyncio tasks beside a service, such as answers to commands; `stop` cancels those that still run."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in a task of its own; an error is logged with the name."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"interlock {name}")
        task.add_done_callback(_log_error)
        self._tasks.add(task)  # asyncio itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        await cancel_and_wait(self._tasks)


def _log_error(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("service_failed", service=task.get_name(), error=str(error) or type(error).__name__, exc_info=error)


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]], *, timeout_s: float | None = None) -> None:
    """Cancel tasks until each has ended; their results and errors are dropped.

    One cancel() may not be enough: psycopg turns the first into a server-side cancel and waits for the reply, which a
    server that is gone never sends; the second aborts that wait. With a timeout, tasks are canceled twice, at the
    start and after half of it; a task that swallows both is left running.
    """
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        task.add_done_callback(_retrieve_exception)
    interval_s = CANCEL_INTERVAL_S if timeout_s is None else max(timeout_s, 0.0) / 2
    cancels = 0
    while pending and (timeout_s is None or cancels < 2):  # noqa: PLR2004 - see above
        for task in pending:
            task.cancel()
        cancels += 1
        _, pending = await asyncio.wait(pending, timeout=interval_s)


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # or asyncio logs that it was never retrieved


async def wait_for_event(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for an event at most `timeout_s` seconds; tell whether it is set."""
    if event.is_set():
        return True
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
