"""Dramatiq: pipelines and groups on Redis, https://pypi.org/project/dramatiq/."""

from __future__ import annotations

import asyncio
import importlib
import threading
from typing import TYPE_CHECKING, Any

from flows import CHAIN, WIDTH, main

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class _Defined:
    """The broker and the actors; imported lazily, since Dramatiq may not be installed."""

    def __init__(self, url: str, handled: Callable[[], None] | None = None) -> None:
        self.library: Any = importlib.import_module("dramatiq")
        brokers: Any = importlib.import_module("dramatiq.brokers.redis")
        results: Any = importlib.import_module("dramatiq.results")
        backends: Any = importlib.import_module("dramatiq.results.backends")
        limits: Any = importlib.import_module("dramatiq.rate_limits.backends")
        callbacks: Any = importlib.import_module("dramatiq.middleware.group_callbacks")
        self.broker = brokers.RedisBroker(url=url)
        self.broker.add_middleware(results.Results(backend=backends.RedisBackend(url=url)))
        self.broker.add_middleware(callbacks.GroupCallbacks(limits.RedisBackend(url=url)))
        self.library.set_broker(self.broker)

        def ends(*_: Any) -> int:
            if handled is not None:
                handled()
            return 1

        def noop(*_: Any) -> int:
            return 1

        def fan(*_: Any) -> int:
            ends()
            group = self.library.group([self.noop.message() for _ in range(WIDTH)])
            group.add_completion_callback(self.ends.message())
            group.run()
            return 1

        make = self.library.actor
        self.ends, self.noop, self.fan = (make(function, store_results=True) for function in (ends, noop, fan))

    def flow(self, shape: str) -> Any:
        """Return a flow that has not started."""
        if shape == CHAIN:
            return self.library.pipeline([self.ends.message(), self.noop.message(), self.ends.message()])
        return self.library.pipeline([self.fan.message()])


class DramatiqFlows:
    """Dramatiq."""

    setting = "one worker process of eight threads, Redis without persistence; a fan ends for its board, not its caller"
    remaining = ""

    async def prepare(self, url: str) -> None:
        """Do nothing: there is no schema."""

    async def submit(self, url: str, shape: str, flows: int) -> None:
        """Send one by one."""
        made = _Defined(url)
        for _ in range(flows):
            made.flow(shape).run()

    async def start_when_asked(
        self,
        url: str,
        shape: str,
        ask: Callable[[Callable[[], Awaitable[Callable[[], Awaitable[None]]]]], Awaitable[None]],
    ) -> None:
        """Wait on the result backend in a thread."""
        made = _Defined(url)

        async def start() -> Callable[[], Awaitable[None]]:
            running = made.flow(shape).run()

            async def finish() -> None:
                await asyncio.to_thread(running.get_result, block=True, timeout=60_000)

            return finish

        await ask(start)

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run a worker in this process."""
        del concurrency
        made = _Defined(url, handled)
        worker = made.library.Worker(made.broker, worker_threads=8)
        worker.start()
        threading.Event().wait()

    def orchestrate(self, url: str) -> None:
        """Do nothing: the engine has no other process."""


if __name__ == "__main__":
    main(DramatiqFlows())
