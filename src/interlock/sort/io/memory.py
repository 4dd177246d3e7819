"""Memory that costs as little as it can: touching it for the first time may take longer than to fill it from a disk.

What is sent and received comes in pieces of some megabytes. By default glibc gives each back to the system and asks
for it anew, so it is told to keep them; other C libraries are left as they are.

Rows that stay are had in small pages, and all at once: a machine that has others beside it may have to be given
large pages first, and one fault for each small one costs a quarter more. Where rows pass through is had in large
ones: a disk takes such a page as a whole, where it would be given hundreds of small ones that lie anywhere, and rows
that are gathered from all over it are found faster.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from interlock.errors import SortError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from interlock.sort.data.keys import Rows


# The numbers are those of glibc's malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
KEPT = 64 << 20  # bytes at the end of the heap
LARGEST_KEPT = 32 << 20  # the most that glibc allows
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
LARGE_PAGE = 2 << 20
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; others refuse it, and have their pages one by one


def keep_freed_memory() -> None:
    """Have this process use freed memory again instead of giving it back."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(ARENA_MAX, 1)
    mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
    mallopt(TRIM_THRESHOLD, KEPT)


def small_pages(size: int) -> NDArray[np.uint8]:
    """Give an array of bytes in small pages, none of which is there before it is used."""
    if not size:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(mmap.mmap(-1, size, flags=PRIVATE), dtype=np.uint8)


def large_pages(size: int) -> NDArray[np.uint8]:
    """Give an array of bytes that begins at a large page and consists of such, if the system gives any."""
    raw = mmap.mmap(-1, size + LARGE_PAGE, flags=PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system may be without them
            raw.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(raw, dtype=np.uint8)
    start = -found.ctypes.data % LARGE_PAGE
    return found[start : start + size]


def populate(array: NDArray[np.uint8], begin: int, end: int) -> None:
    """Have a part of such an array, all of which will be used, at once."""
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
    if begin >= end:
        return
    try:
        advise = ctypes.CDLL(None).madvise  # the module mmap has it too, but holds up all other threads meanwhile
    except (OSError, AttributeError, TypeError):
        return
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise(array.ctypes.data + begin, end - begin, POPULATE_WRITE)


# SECTION sort/cells
# Memory for rows that stay: cells of one size, lent for some rows and given back when these are needed no more.
#
# Touching memory for the first time may take longer than writing as much to a disk. So a cell that was used is lent
# again
# before a fresh one, and fresh ones are had many at once.
#
# Invariant: a cell is lent to one at a time, and no more is in use than there was said to be.


class GivenBack(SortError):  # noqa: N818 - a named outcome: somebody else may have the memory by now
    """Rows were asked for after their memory was given back."""


class Cells:
    """All cells of one worker."""

    def __init__(self, size: int, rows_each: int, record_length: int) -> None:
        self.rows_each = rows_each
        self.record_length = record_length
        self._size = rows_each * record_length
        self._count = size // self._size
        self._memory = small_pages(self._count * self._size)
        self._fresh = 0  # the number of the first cell that was never lent
        self._used: list[int] = []
        self._changing = threading.Lock()

    def lend(self, rows: int, first: int = 0) -> Celled | None:
        """Lend room for some rows, the first of which has a number; None when there is too little."""
        wanted = -(-rows // self.rows_each)
        with self._changing:
            again = min(wanted, len(self._used))
            fresh = range(self._fresh, self._fresh + wanted - again)
            if fresh.stop > self._count:
                return None
            self._fresh = fresh.stop
            numbers = [*(self._used.pop() for _ in range(again)), *fresh]
        populate(self._memory, fresh.start * self._size, fresh.stop * self._size)
        return Celled(self, numbers, rows, first)

    def take_back(self, celled: Celled) -> None:
        """Take the cells of some rows back, once."""
        with self._changing:
            self._used += reversed(celled.numbers)
            celled.numbers = []

    def cell(self, number: int) -> NDArray[np.uint8]:
        """Give the memory of one cell."""
        return self._memory[number * self._size : (number + 1) * self._size]

    def in_a_row(self, number: int, offset: int, size: int) -> memoryview:
        """Give memory that begins in one cell and may end in one behind it."""
        begin = number * self._size + offset
        return self._memory[begin : begin + size].data


class Celled:
    """Rows in cells; the first has a number of its own."""

    def __init__(self, cells: Cells, numbers: list[int], rows: int, first: int) -> None:
        self.numbers = numbers
        self._cells = cells
        self._first = first
        self._rows = rows
        self._is_in_a_row = all(behind == before + 1 for before, behind in pairwise(numbers))

    def parts(self) -> Iterator[Rows]:
        """Give the memory of all rows, cell by cell."""
        each, length = self._cells.rows_each, self._cells.record_length
        for at, number in enumerate(self.numbers):
            rows = min(each, self._rows - at * each)
            yield self._cells.cell(number)[: rows * length].reshape(rows, length)

    def fill(self, data: memoryview, offset: int) -> None:
        """Put bytes to a place."""
        given = np.frombuffer(data, dtype=np.uint8)
        done = 0
        for there in self._bytes(offset, len(given)):
            there[:] = given[done : done + len(there)]
            done += len(there)

    def read(self, low: int, into: Rows) -> None:
        """Fill a contiguous array with rows from number `low` on."""
        flat = into.reshape(-1)
        done = 0
        for there in self._bytes((low - self._first) * self._cells.record_length, len(flat)):
            flat[done : done + len(there)] = there
            done += len(there)

    def view(self, low: int, count: int, lent: Callable[[], NDArray[np.uint8]]) -> memoryview:
        """Give the bytes of some rows where they are, or in a room if they are scattered."""
        length = self._cells.record_length
        offset, size = (low - self._first) * length, count * length
        if self._is_in_a_row and size:
            return self._cells.in_a_row(self._cell(0), offset, size)
        found = lent()[:size]
        self.read(low, found.reshape(count, length))
        return found.data

    def close(self) -> None:
        """Give the memory back; safe to call twice."""
        self._cells.take_back(self)

    def _bytes(self, offset: int, size: int) -> Iterator[NDArray[np.uint8]]:
        """Give the memory of some bytes, cell by cell."""
        each = self._cells.rows_each * self._cells.record_length
        while size:
            at, within = divmod(offset, each)
            piece = min(size, each - within)
            yield self._cells.cell(self._cell(at))[within : within + piece]
            offset, size = offset + piece, size - piece

    def _cell(self, at: int) -> int:
        try:
            return self.numbers[at]
        except IndexError:
            raise GivenBack(f"{self._rows:,} rows are no longer in memory") from None
