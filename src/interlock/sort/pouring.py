"""Where rows are brought in order: memory for a block or a window, and how its rows go to a file in the right order.

Touching fresh memory costs as much as reading a disk, or more; so all of it is used again and again.

Invariant: what is lent is lent to one at a time; a file has all rows when `pour` returns.
"""

from __future__ import annotations

import queue
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import xxhash

from interlock.sort.allocation import small_pages
from interlock.sort.direct import PAGE, aligned
from interlock.sort.keys import gather

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from interlock.sort.direct import DirectWriter
    from interlock.sort.keys import Index, Rows

    Lent = tuple[NDArray[np.uint8], "Spout"]

POURED = 2 << 20  # bytes that are brought in order and written at once


class Buffers:
    """Arrays that hold so many rows as they are read, each with a spout; they begin at a page."""

    def __init__(self, count: int, rows: int, record_length: int) -> None:
        self.rows = rows
        self._free: queue.SimpleQueue[Lent] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put((small_pages(rows * record_length + 2 * PAGE), Spout(record_length)))

    @contextmanager
    def lent(self) -> Iterator[Lent]:
        """Lend one."""
        lent = self._free.get()
        try:
            yield lent
        finally:
            self._free.put(lent)


class Spout:
    """Two small arrays, which stay in the processor's cache: rows are gathered in one while the other is written."""

    def __init__(self, record_length: int) -> None:
        size = max(POURED, 2 * record_length)
        self._rooms = aligned(size), aligned(size)
        self._writer = ThreadPoolExecutor(1, "interlock-sort-write")

    def pour(self, rows: Rows, index: Index, file: DirectWriter, offset: int) -> str:
        """Write rows in the order of their numbers to a place in a file, and give their checksum."""
        length = rows.shape[1]
        digest = xxhash.xxh3_64()
        room, other = self._rooms
        begun = held = offset % PAGE
        writing: Future[None] | None = None
        at = 0
        try:
            while at < len(index):
                taken = min((len(room) - held) // length, len(index) - at)
                piece = room[held : held + taken * length]
                gather(rows, index[at : at + taken], piece.reshape(taken, length))
                digest.update(piece.data)
                held, at = held + taken * length, at + taken
                end = held // PAGE * PAGE if at < len(index) else held
                if writing is not None:
                    writing.result()
                writing = self._writer.submit(file.write, room.data[begun:end], offset)
                offset += end - begun
                other[: held - end] = room[end:held]  # what does not fill a page waits for the rows behind it
                begun, held = 0, held - end
                room, other = other, room
        finally:
            if writing is not None:
                writing.result()
        return digest.hexdigest()
