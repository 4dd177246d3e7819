"""Where rows are brought in order: memory for a block or a window, and how its rows go to a file in the right order.

Touching fresh memory costs as much as reading a disk, or more; so all of it is used again and again.

Invariant: what is lent is lent to one at a time; a file has all rows when `pour` returns.
"""

from __future__ import annotations

import queue
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Protocol

import xxhash

from interlock.sort.data.keys import gather
from interlock.sort.io.direct_io import PAGE, ROOM, DirectReader, room
from interlock.sort.io.memory import large_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from interlock.sort.data.keys import Index, Rows
    from interlock.sort.io.direct_io import DirectWriter

    Lent = tuple[NDArray[np.uint8], "Spout"]


class Buffers:
    """Arrays that hold so many rows as they are read, with a page to spare, each with a spout."""

    def __init__(self, count: int, rows: int, record_length: int) -> None:
        self.rows = rows
        self._free: queue.SimpleQueue[Lent] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put((large_pages(rows * record_length + PAGE), Spout()))

    @contextmanager
    def lent(self) -> Iterator[Lent]:
        """Lend one."""
        lent = self._free.get()
        try:
            yield lent
        finally:
            self._free.put(lent)


class Spout:
    """A second thread for who reads rows, which it does as well, or writes them, which it does instead."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "interlock-sort-beside")

    def fill(self, parts: Sequence[tuple[Rowstore, int, Rows]]) -> None:
        """Fill arrays with the rows of a store from some number on; half of them in the other thread."""
        other = self._thread.submit(_fill, parts[1::2])
        try:
            _fill(parts[::2])
        finally:
            other.result()

    def pour(self, rows: Rows, index: Index, file: DirectWriter, offset: int) -> str:
        """Write rows in the order of their numbers to a place in a file, and give their checksum.

        They are gathered in one half of a room, which stays in the processor's cache, while the other half is written.
        """
        length = rows.shape[1]
        digest = xxhash.xxh3_64()
        begun = held = offset % PAGE
        writing: Future[None] | None = None
        at = 0
        with room() as lent:
            half, other = lent[: ROOM // 2], lent[ROOM // 2 :]
            try:
                while at < len(index):
                    taken = min((len(half) - held) // length, len(index) - at)
                    piece = half[held : held + taken * length]
                    gather(rows, index[at : at + taken], piece.reshape(taken, length))
                    digest.update(piece.data)
                    held, at = held + taken * length, at + taken
                    end = held // PAGE * PAGE if at < len(index) else held
                    if writing is not None:
                        writing.result()
                    writing = self._thread.submit(file.write, half.data[begun:end], offset)
                    offset += end - begun
                    other[: held - end] = half[end:held]  # what does not fill a page waits for the rows behind it
                    begun, held = 0, held - end
                    half, other = other, half
            finally:
                if writing is not None:
                    writing.result()
        return digest.hexdigest()


def _fill(parts: Sequence[tuple[Rowstore, int, Rows]]) -> None:
    for store, low, into in parts:
        store.read(low, into)


# SECTION sort/rowstores
# Rows that can be had by their numbers, and those of them that are in a file; `cells` has those in memory.
#
# Invariant: rows are read as they were written; nobody changes them between.

MOST_OPEN = 1 << 16


class Rowstore(Protocol):
    """Rows that can be had by their numbers."""

    def read(self, low: int, into: Rows) -> None:
        """Fill a contiguous array with rows from number `low` on."""

    def view(self, low: int, count: int, lent: Callable[[], NDArray[np.uint8]]) -> memoryview:
        """Give the bytes of some rows, AT_ONCE at most: where they are, or else in a room that is lent."""

    def close(self) -> None:
        """Let go of files and memory."""


class Spilled:
    """Rows in a file, the first of which has a number of its own."""

    def __init__(self, path: Path, record_length: int, first: int = 0) -> None:
        self._length = record_length
        self._first = first
        self._path = path
        self._file = DirectReader(path) if _kept_open().acquire(blocking=False) else None

    def read(self, low: int, into: Rows) -> None:
        """Fill a contiguous array with rows from number `low` on."""
        with self._opened() as file:
            file.read(into.reshape(-1).data, (low - self._first) * self._length)

    def view(self, low: int, count: int, lent: Callable[[], NDArray[np.uint8]]) -> memoryview:
        """Give the bytes of some rows, in a room."""
        with self._opened() as file:
            return file.view(lent(), (low - self._first) * self._length, count * self._length)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
            _kept_open().release()

    @contextmanager
    def _opened(self) -> Iterator[DirectReader]:
        """Give the file, opened for this once if too many others are open."""
        file = self._file or DirectReader(self._path)
        try:
            yield file
        finally:
            if file is not self._file:
                file.close()


@cache
def _kept_open() -> threading.Semaphore:
    """Give what counts the files that may stay open: half of those that this process may open, at two descriptors each.

    The system's limit is mostly a default, which a process may raise itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return threading.Semaphore(min(soft if soft > 0 else MOST_OPEN, MOST_OPEN) // 4)
