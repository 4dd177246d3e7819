"""Rows that can be had by their numbers, and those of them that are in a file; `cells` has those in memory.

Invariant: rows are read as they were written; nobody changes them between.
"""

from __future__ import annotations

import resource
import threading
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Protocol

from interlock.sort.direct import DirectReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from interlock.sort.keys import Rows

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
