"""Interlock's workflows, with guards, audit and the orchestrator, as a user runs them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from flows import CHAIN, FAN, WIDTH, main

from interlock import Interlock
from interlock.config import Config
from interlock.orchestrator.process import Orchestrator
from interlock.postgres.connection import connect
from interlock.postgres.migrate import migrate
from interlock.telemetry import configure_logging
from interlock.worker.process import WorkerStateMachine
from interlock.worker.settings import WorkerSettings, get_instance_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CONCURRENT_SUBMITS = 8
LAYER = 100  # parallel steps in a large DAG


def nothing() -> None:
    """Replace the board in processes that run no handler."""


def defined(url: str, shape: str | None, handled: Callable[[], None] = nothing) -> Interlock:
    """Create an app with a workflow of this shape: chain, fan, dag:10000 or map:100000; None: chain and fan."""
    configure_logging("warning")
    app = Interlock(config=Config(database_url=url))

    @app.task(name="noop")
    async def noop() -> None:
        pass

    @app.task(name="ends")
    async def ends() -> None:
        handled()

    @app.task(name="part")
    async def part(item: int) -> int:
        return item

    for wanted in (CHAIN, FAN) if shape is None else (shape,):
        _shaped(app, wanted)
    return app


def _shaped(app: Interlock, shape: str) -> None:
    kind, _, size = shape.partition(":")
    workflow: Any = app.workflow(shape.replace(":", "_"))
    if kind == CHAIN:
        workflow.task("ends", name="first")
        workflow.task("noop", name="second", after=["first"])
        workflow.task("ends", name="third", after=["second"])
    elif kind == "dag":
        _layers(workflow, int(size))
    else:
        workflow.task("ends", name="first")
        workflow.add("map", "part", name="parts", over_input="items", after=["first"])
        workflow.task("ends", name="last", after=["parts"])


def _layers(workflow: Any, steps: int) -> None:
    """Declare layers in which each step depends on two steps of the previous layer."""
    for number in range(steps):
        layer, place = divmod(number, LAYER)
        before = (layer - 1) * LAYER
        after = [f"s{before + place}", f"s{before + (place + 1) % LAYER}"] if layer else []
        workflow.task("ends" if number in {0, steps - 1} else "noop", name=f"s{number}", after=after)


def input_of(shape: str) -> dict[str, Any]:
    """Return the input of a flow."""
    kind, _, size = shape.partition(":")
    return {"items": list(range(int(size or WIDTH)))} if kind in {FAN, "map"} else {}


class InterlockFlows:
    """Interlock."""

    setting = "one worker of 100 slots, one orchestrator"
    remaining = "select (exists (select from interlock.jobs where status in ('SUBMITTED', 'PENDING', 'RUNNING')))::int"

    async def prepare(self, url: str) -> None:
        """Create the schema."""
        async with connect(url) as connection:
            await migrate(connection)

    async def submit(self, url: str, shape: str, flows: int) -> None:
        """Submit a few concurrently."""
        given = input_of(shape)
        left = iter(range(flows))
        async with defined(url, shape) as app:

            async def some() -> None:
                for _ in left:
                    await app.submit(shape.replace(":", "_"), given)

            await asyncio.gather(*(some() for _ in range(CONCURRENT_SUBMITS)))

    async def start_when_asked(
        self,
        url: str,
        shape: str,
        ask: Callable[[Callable[[], Awaitable[Callable[[], Awaitable[None]]]]], Awaitable[None]],
    ) -> None:
        """Open the app."""
        given = input_of(shape)
        async with defined(url, shape) as app:

            async def start() -> Callable[[], Awaitable[None]]:
                job = await app.submit(shape, given)

                async def finish() -> None:
                    await job.wait()

                return finish

            await ask(start)

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run the worker that `interlock worker` runs."""
        app = defined(url, None, handled)
        WorkerStateMachine(get_instance_name(), app, WorkerSettings(concurrency=concurrency)).run()

    def orchestrate(self, url: str) -> None:
        """Run the orchestrator that `interlock orchestrator` runs."""
        configure_logging("warning")
        asyncio.run(self._orchestrate(url))

    async def _orchestrate(self, url: str) -> None:
        await Orchestrator(Interlock(config=Config(database_url=url))).serve()


if __name__ == "__main__":
    main(InterlockFlows())
