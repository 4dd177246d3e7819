"""Common parts of the drivers of task queues: commands, the start barrier of workers, and the board of handlers.

Invariant: every queue gets the same commands, its workers are separate processes, and its handlers do the same: they
count themselves and store the time in shared memory that the benchmark reads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import mmap
import random
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SLOT = struct.Struct("=qqq")  # handlers started, nanoseconds of the first start and of the latest
PICKUP_TIMEOUT_S = 30.0


class Driver(Protocol):
    """One queue, with the settings that its documentation recommends for many small tasks."""

    setting: str
    # a query for the number of unsettled tasks; it must be cheap when there are none
    remaining: str

    async def prepare(self, url: str) -> None:
        """Create the schema."""

    async def enqueue_in_bulk(self, url: str, tasks: int) -> float:
        """Enqueue as fast as the queue can; return the seconds without connecting."""

    async def enqueue_singly(self, url: str, tasks: int) -> float:
        """Enqueue one by one, each committed before the next; return the seconds without connecting."""

    async def enqueue_when_asked(
        self, url: str, ask: Callable[[Callable[[], Awaitable[object]]], Awaitable[None]]
    ) -> None:
        """Connect, and pass a function that enqueues one task to `ask`."""

    def work(self, url: str, concurrency: int, handled: Callable[[], None]) -> None:
        """Run a worker until the process is stopped; the handler calls `handled` and nothing else."""


class Board:
    """Memory shared by the benchmark and the worker processes; each worker has one slot."""

    def __init__(self, path: Path, slot: int = 0) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._offset = slot * SLOT.size
        self._count = 0
        self._first = 0

    @staticmethod
    def create(path: Path, slots: int) -> Board:
        """Create an empty board."""
        path.write_bytes(bytes(SLOT.size * slots))
        return Board(path)

    def move_to(self, slot: int) -> None:
        """Take another slot, as a forked process must: it shares the memory and not the count."""
        self._offset = slot * SLOT.size
        self._count = self._first = 0

    def handled(self) -> None:
        """Record the start of a handler."""
        now = time.monotonic_ns()
        self._count += 1
        self._first = self._first or now
        SLOT.pack_into(self._memory, self._offset, self._count, self._first, now)

    def read(self) -> tuple[int, int, int]:
        """Return the number of starts over all slots, and the times of the first and the latest."""
        slots = [slot for slot in SLOT.iter_unpack(self._memory) if slot[0]]
        if not slots:
            return 0, 0, 0
        return sum(slot[0] for slot in slots), min(slot[1] for slot in slots), max(slot[2] for slot in slots)


async def pick_up(driver: Driver, url: str, tasks: int, board: Board) -> list[tuple[float, float]]:
    """Enqueue a task when the previous one has started; return the milliseconds from the call and from the commit."""
    took: list[tuple[float, float]] = []

    async def ask(enqueue: Callable[[], Awaitable[object]]) -> None:
        for _ in range(tasks):
            # Random, to avoid synchronization, and long enough for the worker to be idle again.
            await asyncio.sleep(random.uniform(0.01, 0.03))  # noqa: S311 - not for security
            before, _first, _latest = board.read()
            called = time.monotonic_ns()
            await enqueue()
            committed = time.monotonic_ns()
            while board.read()[0] == before:
                if time.monotonic_ns() - committed > PICKUP_TIMEOUT_S * 1e9:
                    raise TimeoutError("a task was not picked up")
                await asyncio.sleep(0.0005)
            started = board.read()[2]
            took.append(((started - called) / 1e6, (started - committed) / 1e6))

    await driver.enqueue_when_asked(url, ask)
    return took


def work(driver: Driver, url: str, concurrency: int, board: Board) -> None:
    """Wait until all workers are ready, then work."""
    print("ready", flush=True)
    sys.stdin.readline()
    driver.work(url, concurrency, board.handled)


def main(driver: Driver) -> None:
    """Run the command of the benchmark, and print the answer as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["describe", "prepare", "bulk", "singly", "pickup", "work"])
    parser.add_argument("--url", default="")
    parser.add_argument("--tasks", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--board", type=Path)
    parser.add_argument("--slot", type=int, default=0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if given.command == "describe":
        print(json.dumps({"setting": driver.setting, "remaining": driver.remaining}))
    elif given.command == "prepare":
        asyncio.run(driver.prepare(given.url))
    elif given.command == "bulk":
        print(json.dumps(asyncio.run(driver.enqueue_in_bulk(given.url, given.tasks))))
    elif given.command == "singly":
        print(json.dumps(asyncio.run(driver.enqueue_singly(given.url, given.tasks))))
    elif given.command == "pickup":
        print(json.dumps(asyncio.run(pick_up(driver, given.url, given.tasks, Board(given.board)))))
    else:
        work(driver, given.url, given.concurrency, Board(given.board, given.slot))
