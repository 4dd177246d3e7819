"""Celery: chains and chords on Redis, https://pypi.org/project/celery/."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

from flows import CHAIN, WIDTH, main

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from driver import Board

PROCESSES = 2


def defined(url: str, handled: Callable[[], None] | None = None) -> tuple[Any, Callable[[str], Any]]:
    """Create an app and a factory of flows; imported lazily, since Celery may not be installed."""
    celery = importlib.import_module("celery")
    app = celery.Celery("flows", broker=url, backend=url)
    app.conf.update(worker_prefetch_multiplier=4, task_acks_late=False, broker_connection_retry_on_startup=True)

    @app.task(name="ends")  # type: ignore[untyped-decorator]  # may not be installed
    def ends(*_: Any) -> int:
        if handled is not None:
            handled()
        return 1

    @app.task(name="noop")  # type: ignore[untyped-decorator]  # may not be installed
    def noop(*_: Any) -> int:
        return 1

    def flow(shape: str) -> Any:
        if shape == CHAIN:
            return celery.chain(ends.s(), noop.s(), ends.s())
        return celery.chain(ends.s(), celery.chord([noop.s() for _ in range(WIDTH)], ends.s()))

    return app, flow


class CeleryFlows:
    """Celery."""

    setting = f"one worker of {PROCESSES} processes (pool prefork), prefetch 4, Redis without persistence"
    remaining = ""

    async def prepare(self, url: str) -> None:
        """Do nothing: there is no schema."""

    async def submit(self, url: str, shape: str, flows: int) -> None:
        """Send one by one."""
        _, flow = defined(url)
        for _ in range(flows):
            flow(shape).apply_async()

    async def start_when_asked(
        self,
        url: str,
        shape: str,
        ask: Callable[[Callable[[], Awaitable[Callable[[], Awaitable[None]]]]], Awaitable[None]],
    ) -> None:
        """Wait on the result backend in a thread."""
        _, flow = defined(url)

        async def start() -> Callable[[], Awaitable[None]]:
            result = flow(shape).apply_async()

            async def finish() -> None:
                await asyncio.to_thread(result.get, interval=0.001)

            return finish

        await ask(start)

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run its worker, whose processes are forked from this one and count in slots of their own."""
        del concurrency
        app, _ = defined(url, handled)
        board: Board = handled.__self__  # type: ignore[attr-defined]  # the method of a board
        signals = importlib.import_module("celery.signals")
        current_process = importlib.import_module("billiard").current_process

        def take_slot(**_: Any) -> None:
            board.move_to(current_process().index)

        signals.worker_process_init.connect(take_slot, weak=False)
        options = ("--pool=prefork", f"--concurrency={PROCESSES}", "--loglevel=WARNING", "--without-gossip")
        app.worker_main(["worker", *options])

    def orchestrate(self, url: str) -> None:
        """Do nothing: the engine has no other process."""


if __name__ == "__main__":
    main(CeleryFlows())
