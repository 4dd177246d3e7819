"""Common parts of the drivers of workflow engines: commands and shapes of the flows.

Invariant: every engine runs the same flows by the same commands. The first and the last step of a flow count themselves
on the board; the steps do nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from driver import Board

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CHAIN = "chain"  # three steps, one after the other
FAN = "fan"  # fan-out: one step, a hundred in parallel, one step
WIDTH = 100
FLOW_TIMEOUT_S = 120.0

Finish = "Callable[[], Awaitable[None]]"  # waits for the end of the flow


class FlowDriver(Protocol):
    """One engine, with the settings that its documentation recommends for many small flows."""

    setting: str
    # a query that returns 0 when every flow has ended; empty if only the board can tell
    remaining: str

    async def prepare(self, url: str) -> None:
        """Create the schema, if there is one."""

    async def submit(self, url: str, shape: str, flows: int) -> None:
        """Submit flows as fast as the engine can."""

    async def start_when_asked(
        self,
        url: str,
        shape: str,
        ask: Callable[[Callable[[], Awaitable[Callable[[], Awaitable[None]]]]], Awaitable[None]],
    ) -> None:
        """Connect, and pass a function to `ask` that starts and commits one flow and returns its waiter."""

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run a worker until the process is stopped."""

    def orchestrate(self, url: str) -> None:
        """Run the engine's other process, if it has one, until the process is stopped."""


async def time_flows(driver: FlowDriver, url: str, shape: str, flows: int) -> list[float]:
    """Run flows one by one in an idle system; return the milliseconds from each commit to its end."""
    took: list[float] = []

    async def ask(start: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]) -> None:
        for number in range(flows + 5):
            await asyncio.sleep(random.uniform(0.02, 0.05))  # noqa: S311 - random, to avoid synchronization
            finish = await start()
            began = time.perf_counter()
            async with asyncio.timeout(FLOW_TIMEOUT_S):
                await finish()
            if number >= 5:  # noqa: PLR2004 - warm-up of caches and connections
                took.append((time.perf_counter() - began) * 1e3)

    await driver.start_when_asked(url, shape, ask)
    return took


def main(driver: FlowDriver) -> None:
    """Run the command of the benchmark, and print the answer as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["describe", "prepare", "submit", "time", "work", "orchestrate"])
    parser.add_argument("--url", default="")
    parser.add_argument("--shape", default=CHAIN)
    parser.add_argument("--flows", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--board", type=Path)
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if given.command == "describe":
        print(json.dumps({"setting": driver.setting, "remaining": driver.remaining}))
    elif given.command == "prepare":
        asyncio.run(driver.prepare(given.url))
    elif given.command == "submit":
        asyncio.run(driver.submit(given.url, given.shape, given.flows))
    elif given.command == "time":
        print(json.dumps(asyncio.run(time_flows(driver, given.url, given.shape, given.flows))))
    else:
        print("ready", flush=True)
        sys.stdin.readline()
        if given.command == "work":
            driver.work(given.url, given.concurrency, Board(given.board).handled)
        else:
            driver.orchestrate(given.url)
