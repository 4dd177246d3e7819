"""Where rows are brought in order: memory for a block or a window, and how its rows go to a file in the right order.

Touching fresh memory costs as much as reading a disk, or more; so all of it is used again and again.

Invariant: what is lent is lent to one at a time; a file has all rows when `pour` returns.
"""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import xxhash

from interlock.sort.allocation import large_pages
from interlock.sort.direct import PAGE, ROOM, room
from interlock.sort.keys import gather

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from interlock.sort.direct import DirectWriter
    from interlock.sort.keys import Index, Rows
    from interlock.sort.rowstores import Rowstore

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
