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
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
