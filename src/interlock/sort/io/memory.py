"""Memory of a worker: huge pages for I/O, a pool of row slabs between the phases, and malloc settings.

Touching memory for the first time may take longer than filling it from a disk, or writing as much to one, so all memory
is reused. Messages of the shuffle have some megabytes; by default glibc returns each to the system and requests it
anew, so it is configured to keep them. Other C libraries are left as they are.

Rows that stay between the phases are in small pages, prefaulted many at once: a virtual machine may have to get huge
pages from its host first, and one fault for each small page costs a quarter more. Memory through which rows pass is in
huge pages: direct I/O transfers such a page as a whole, instead of hundreds of scattered small ones, and gathering rows
from all over it is faster.
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

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
KEPT_HEAP_BYTES = 64 << 20  # at the end of the heap
MAX_MMAP_THRESHOLD_BYTES = 32 << 20  # the largest value that glibc allows
MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
HUGE_PAGE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; other kernels refuse it, and fault their pages in one by one


def keep_freed_memory() -> None:
    """Configure malloc to reuse freed memory instead of returning it to the system."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(M_ARENA_MAX, 1)
    mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_BYTES)
    mallopt(M_TRIM_THRESHOLD, KEPT_HEAP_BYTES)


def allocate_pages(size: int) -> NDArray[np.uint8]:
    """Allocate an array of bytes in small pages, which are faulted in when they are first used."""
    if not size:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(mmap.mmap(-1, size, flags=MAP_FLAGS), dtype=np.uint8)


def allocate_huge_pages(size: int) -> NDArray[np.uint8]:
    """Allocate an array of bytes that is aligned to huge pages, and consists of them if the system provides any."""
    raw = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=MAP_FLAGS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may be built without transparent huge pages
            raw.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(raw, dtype=np.uint8)
    start = -array.ctypes.data % HUGE_PAGE_BYTES
    return array[start : start + size]


def prefault(array: NDArray[np.uint8], begin: int, end: int) -> None:
    """Fault in a range of an array at once, all of which will be used."""
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
    if begin >= end:
        return
    try:
        madvise = ctypes.CDLL(None).madvise  # the mmap module has madvise too, but holds the GIL meanwhile
    except (OSError, AttributeError, TypeError):
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(array.ctypes.data + begin, end - begin, MADV_POPULATE_WRITE)


class MemoryReleased(SortError):  # noqa: N818 - a named outcome: the memory may belong to other rows by now
    """Rows were read after their memory was freed."""


class RowPool:
    """The memory of one worker for rows that stay: a pool of slabs of equal size.

    A slab that was used before is allocated again before a new one, and new ones are prefaulted many at once.

    Invariant: a slab has one user at a time, and no more memory is in use than `size`.
    """

    def __init__(self, size: int, rows_per_slab: int, record_length: int) -> None:
        self.rows_per_slab = rows_per_slab
        self.record_length = record_length
        self._slab_bytes = rows_per_slab * record_length
        self._count = size // self._slab_bytes
        self._memory = allocate_pages(self._count * self._slab_bytes)
        self._next_new = 0  # number of the first slab that was never allocated
        self._free: list[int] = []
        self._lock = threading.Lock()

    def allocate(self, rows: int, first: int = 0) -> PooledRows | None:
        """Allocate memory for rows, the first of which has the number `first`; None if there is too little."""
        wanted = -(-rows // self.rows_per_slab)
        with self._lock:
            reused = min(wanted, len(self._free))
            new = range(self._next_new, self._next_new + wanted - reused)
            if new.stop > self._count:
                return None
            self._next_new = new.stop
            slabs = [*(self._free.pop() for _ in range(reused)), *new]
        prefault(self._memory, new.start * self._slab_bytes, new.stop * self._slab_bytes)
        return PooledRows(self, slabs, rows, first)

    def free(self, rows: PooledRows) -> None:
        """Take the slabs of some rows back; safe to call twice."""
        with self._lock:
            self._free += reversed(rows.slabs)
            rows.slabs = []

    def slab(self, number: int) -> NDArray[np.uint8]:
        """Return the memory of one slab."""
        return self._memory[number * self._slab_bytes : (number + 1) * self._slab_bytes]

    def rows(self, number: int, count: int) -> NDArray[np.uint8]:
        """Return the memory of rows that begin in one slab and may extend into the slabs after it."""
        begin = number * self._slab_bytes
        return self._memory[begin : begin + count * self.record_length]

    def consecutive(self, number: int, offset: int, size: int) -> memoryview:
        """Return memory that begins in one slab and may extend into the slabs after it."""
        begin = number * self._slab_bytes + offset
        return self._memory[begin : begin + size].data


class PooledRows:
    """Rows in slabs of a pool; a `RowStore` whose first row has a number of its own."""

    def __init__(self, pool: RowPool, slabs: list[int], rows: int, first: int) -> None:
        self.slabs = slabs
        self._pool = pool
        self._first = first
        self._rows = rows
        self._is_consecutive = all(after == before + 1 for before, after in pairwise(slabs))

    def parts(self) -> Iterator[Rows]:
        """Yield the memory of all rows in order, as far as it is consecutive."""
        per_slab, length = self._pool.rows_per_slab, self._pool.record_length
        breaks = [at for at in range(1, len(self.slabs)) if self.slabs[at] != self.slabs[at - 1] + 1]
        for begin, end in pairwise([0, *breaks, len(self.slabs)] if self.slabs else []):
            rows = min(end * per_slab, self._rows) - begin * per_slab
            yield self._pool.rows(self.slabs[begin], rows).reshape(rows, length)

    def write(self, data: memoryview, offset: int) -> None:
        """Copy bytes to an offset."""
        given = np.frombuffer(data, dtype=np.uint8)
        done = 0
        for target in self._bytes(offset, len(given)):
            target[:] = given[done : done + len(target)]
            done += len(target)

    def read(self, low: int, into: Rows) -> None:
        """Fill a contiguous array with rows from number `low` on."""
        flat = into.reshape(-1)
        done = 0
        for source in self._bytes((low - self._first) * self._pool.record_length, len(flat)):
            flat[done : done + len(source)] = source
            done += len(source)

    def view(self, low: int, count: int, buffer: Callable[[], NDArray[np.uint8]]) -> memoryview:
        """Return the bytes of some rows in place, or copied to an I/O buffer if the slabs are not consecutive."""
        length = self._pool.record_length
        offset, size = (low - self._first) * length, count * length
        if self._is_consecutive and size:
            return self._pool.consecutive(self._slab(0), offset, size)
        copy = buffer()[:size]
        self.read(low, copy.reshape(count, length))
        return copy.data

    def close(self) -> None:
        """Free the memory; safe to call twice."""
        self._pool.free(self)

    def _bytes(self, offset: int, size: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the memory of a range of bytes, slab by slab."""
        slab_bytes = self._pool.rows_per_slab * self._pool.record_length
        while size:
            at, within = divmod(offset, slab_bytes)
            piece = min(size, slab_bytes - within)
            yield self._pool.slab(self._slab(at))[within : within + piece]
            offset, size = offset + piece, size - piece

    def _slab(self, at: int) -> int:
        try:
            return self.slabs[at]
        except IndexError:
            raise MemoryReleased(f"{self._rows:,} rows are no longer in memory") from None
