"""Tells the C library to keep memory that is freed: what is sent and received comes in pieces of a megabyte.

By default glibc gives every such piece back to the system and asks for it anew; touching it again then costs more than
sending it. Other C libraries are left as they are.
"""

from __future__ import annotations

import ctypes

# The numbers are those of glibc's malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
KEPT = 64 << 20  # bytes at the end of the heap
LARGEST_KEPT = 32 << 20  # the most that glibc allows


def keep_freed_memory() -> None:
    """Have this process use freed memory again instead of giving it back."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(ARENA_MAX, 1)
    mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
    mallopt(TRIM_THRESHOLD, KEPT)
