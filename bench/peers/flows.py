"""What the drivers of all workflow engines share: the commands, and the shapes of the flows that they run.

Invariant: every engine is asked for the same flows by the same commands. The first and the last step of a flow count
themselves on the board; all steps do nothing else.
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
FAN = "fan"  # one step, a hundred at once, one step
WIDTH = 100
PATIENCE = 120.0

Finish = "Callable[[], Awaitable[None]]"  # ends when the flow has


class FlowDriver(Protocol):
    """One engine, in the setting that its documentation recommends for many small flows."""

    setting: str
    # a query that is 0 when every flow has ended; empty where the board must do
    remaining: str

    async def prepare(self, url: str) -> None:
        """Make the schema, if there is one."""

    async def submit(self, url: str, shape: str, flows: int) -> None:
        """Submit flows as fast as the engine can."""

    async def start_when_asked(
        self,
        url: str,
        shape: str,
        ask: Callable[[Callable[[], Awaitable[Callable[[], Awaitable[None]]]]], Awaitable[None]],
    ) -> None:
        """Connect, and hand over what starts one flow, commits, and gives what waits for its end."""

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run a worker until the process is stopped."""

    def orchestrate(self, url: str) -> None:
        """Run what else the engine needs, if anything, until the process is stopped."""


async def time_flows(driver: FlowDriver, url: str, shape: str, flows: int) -> list[float]:
    """Run flows one after the other in an idle system; give the milliseconds from each commit to its end."""
    took: list[float] = []

    async def ask(start: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]) -> None:
        for number in range(flows + 5):
            await asyncio.sleep(random.uniform(0.02, 0.05))  # noqa: S311 - not in step with anything
            finish = await start()
            began = time.perf_counter()
            async with asyncio.timeout(PATIENCE):
                await finish()
            if number >= 5:  # noqa: PLR2004 - the first ones find caches and connections cold
                took.append((time.perf_counter() - began) * 1e3)

    await driver.start_when_asked(url, shape, ask)
    return took


def main(driver: FlowDriver) -> None:
    """Do what the benchmark asks for, and answer in JSON."""
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
