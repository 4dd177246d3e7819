"""Buffer pool for blocks and windows, stores of rows, and the gathering of sorted rows into a file.

Touching fresh memory costs as much as reading a disk, or more, so the buffers are reused.

Invariant: a buffer has one user at a time; a file has all rows when `write_sorted` returns. Rows are read as they were
written: a spill file with other bytes is an error.
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

from interlock.sort.io.direct_io import IO_BUFFER_BYTES, MAX_IO_BYTES, PAGE_BYTES, DirectReader, io_buffer
from interlock.sort.io.memory import allocate_huge_pages
from interlock.sort.io.page_checksums import PageChecksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from interlock.sort.data.keys import Rows, SortedRows
    from interlock.sort.io.direct_io import DirectWriter

    Borrowed = tuple[NDArray[np.uint8], "IoThread"]

MAX_OPEN_FILES = 1 << 16


class RowStore(Protocol):
    """Rows in memory or in a file that are read by their numbers; `memory.PooledRows` are those in memory."""

    def read(self, low: int, into: Rows) -> None:
        """Fill a contiguous array with rows from number `low` on."""

    def view(self, low: int, count: int, buffer: Callable[[], NDArray[np.uint8]]) -> memoryview:
        """Return the bytes of some rows, at most MAX_IO_BYTES: in place, or else in the I/O buffer given."""

    def close(self) -> None:
        """Release files and memory."""


class SpilledRows:
    """Rows in a spill file, verified whenever some are read; the first one has a number of its own."""

    def __init__(self, path: Path, record_length: int, checksum: str, first: int = 0) -> None:
        self._length = record_length
        self._checksums = PageChecksums.from_hex(checksum)
        self._first = first
        self._path = path
        self._file = DirectReader(path) if _open_file_slots().acquire(blocking=False) else None

    def read(self, low: int, into: Rows) -> None:
        """Fill a contiguous array with rows from number `low` on."""
        target, offset = into.reshape(-1), (low - self._first) * self._length
        with self._opened() as file, io_buffer() as buffer:
            for done in range(0, len(target), MAX_IO_BYTES):
                piece = target[done : done + MAX_IO_BYTES]
                piece[:] = self._read_verified(file, buffer, offset + done, len(piece))

    def view(self, low: int, count: int, buffer: Callable[[], NDArray[np.uint8]]) -> memoryview:
        """Read some rows into an I/O buffer, and return their bytes there."""
        with self._opened() as file:
            return self._read_verified(file, buffer(), (low - self._first) * self._length, count * self._length)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
            _open_file_slots().release()

    def _read_verified(self, file: DirectReader, buffer: NDArray[np.uint8], offset: int, size: int) -> memoryview:
        """Read the pages that hold a range into an I/O buffer, verify them, and return the range."""
        first = offset // PAGE_BYTES * PAGE_BYTES
        end = min(-(-(offset + size) // PAGE_BYTES) * PAGE_BYTES, max(file.size, offset + size))
        pages = file.view(buffer, first, end - first)
        self._checksums.verify(pages, first, self._path)
        return pages[offset - first : offset - first + size]

    @contextmanager
    def _opened(self) -> Iterator[DirectReader]:
        """Yield the open file, or open it for this one read if too many others are open."""
        file = self._file or DirectReader(self._path)
        try:
            yield file
        finally:
            if file is not self._file:
                file.close()


@cache
def _open_file_slots() -> threading.Semaphore:
    """Return the semaphore of files that may stay open: half of the process's limit, at two descriptors each.

    The soft limit is usually only a default, which a process may raise to the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return threading.Semaphore(min(soft if soft > 0 else MAX_OPEN_FILES, MAX_OPEN_FILES) // 4)


class BufferPool:
    """A pool of buffers for so many unsorted rows each, with a spare page for alignment, and an I/O thread each.

    Lines need some more bytes, `spare`.
    """

    def __init__(self, count: int, rows: int, record_length: int, spare: int = 0) -> None:
        self.rows = rows
        self._free: queue.SimpleQueue[Borrowed] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put((allocate_huge_pages(rows * record_length + PAGE_BYTES + spare), IoThread()))

    @contextmanager
    def borrow(self) -> Iterator[Borrowed]:
        """Borrow a buffer and its I/O thread; wait until one is free."""
        borrowed = self._free.get()
        try:
            yield borrowed
        finally:
            self._free.put(borrowed)


class IoThread:
    """A second thread for a reader or writer of rows: it reads half of the parts, and does the writes."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "interlock-sort-io")

    def read_parts(self, parts: Sequence[tuple[RowStore, int, Rows]]) -> None:
        """Fill each array with rows of a store from a number on; half of them in the second thread."""
        other = self._executor.submit(_read_parts, parts[1::2])
        try:
            _read_parts(parts[::2])
        finally:
            other.result()

    def write_sorted(
        self,
        rows: SortedRows,
        low: int,
        high: int,
        file: DirectWriter,
        offset: int,
        checksums: PageChecksums | None = None,
    ) -> str:
        """Write some rows in order at an offset of a file; return their checksum, or those of their pages.

        Rows are gathered in one half of an I/O buffer, which stays in the processor's cache, while the other half is
        written by the second thread.
        """
        length = rows.unit
        digest: PageChecksums | xxhash.xxh3_64 = xxhash.xxh3_64() if checksums is None else checksums
        begun = held = offset % PAGE_BYTES
        writing: Future[None] | None = None
        at = low
        with io_buffer() as buffer:
            half, other = buffer[: IO_BUFFER_BYTES // 2], buffer[IO_BUFFER_BYTES // 2 :]
            try:
                while at < high:
                    taken = min((len(half) - held) // length, high - at)
                    piece = half[held : held + taken * length]
                    rows.gather(at, at + taken, piece)
                    digest.update(piece.data)
                    held, at = held + taken * length, at + taken
                    end = held // PAGE_BYTES * PAGE_BYTES if at < high else held
                    if writing is not None:
                        writing.result()
                    writing = self._executor.submit(file.write, half.data[begun:end], offset)
                    offset += end - begun
                    other[: held - end] = half[end:held]  # a partial page is written with the rows after it
                    begun, held = 0, held - end
                    half, other = other, half
            finally:
                if writing is not None:
                    writing.result()
        return digest.hexdigest()


def _read_parts(parts: Sequence[tuple[RowStore, int, Rows]]) -> None:
    for store, low, into in parts:
        store.read(low, into)
