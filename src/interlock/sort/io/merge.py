"""Merges sorted slices into one output file, window by window: read, sort, write at the window's own place.

Sorting a whole window takes a few calls of numpy, where a heap would take a step of Python for every record. Several
windows are under way at a time, so that the disk works while others are sorted.

Invariant: rows with equal keys keep their input order; a file has its final name only when it is whole and on the disk.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from interlock.sort.data.keys import order
from interlock.sort.io.direct_io import DirectReader, DirectWriter, placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from interlock.sort.io.buffers import Buffers, Rowstore


# SECTION sort/windows
# What is sorted at once in the merge: a stretch of every slice of a partition, between two boundaries.
#
# Invariant: the windows of a partition, in order, hold each of its rows once; a row of a window belongs before every
# row
# of the next. Within a window the stretches are in input order.


class Slice(NamedTuple):
    """What one source block holds for one partition: rows, and where among them its windows begin and end."""

    rows: Rowstore
    edges: Sequence[int]


class Stretch(NamedTuple):
    """Some rows of one slice."""

    rows: Rowstore
    low: int
    high: int

    @property
    def size(self) -> int:
        """Count the rows."""
        return self.high - self.low

    @property
    def middle(self) -> int:
        """The number of the row in the middle."""
        return self.low + self.size // 2


class Window(NamedTuple):
    """Stretches in input order, and the number of the output row at which they begin when they are sorted."""

    first: int
    stretches: tuple[Stretch, ...]

    @property
    def rows(self) -> int:
        """Count the rows."""
        return sum(stretch.size for stretch in self.stretches)


def fitting_windows(slices: Sequence[Slice], most_rows: int, record_length: int, key_length: int) -> list[Window]:
    """List the windows of a partition, none larger than `most_rows`."""
    fitting: list[Window] = []
    left = windows_of(slices)[::-1]
    while left:
        window = left.pop()
        if window.rows <= most_rows:
            fitting.append(window)
        else:
            left.extend(reversed(divide(window, record_length, key_length)))
    return fitting


def windows_of(slices: Sequence[Slice]) -> list[Window]:
    """List the windows that the boundaries make; those without rows are left out."""
    windows: list[Window] = []
    first = 0
    for at in range(len(slices[0].edges) - 1 if slices else 0):
        window = _window(first, (Stretch(one.rows, one.edges[at], one.edges[at + 1]) for one in slices))
        if window.stretches:
            windows.append(window)
            first += window.rows
    return windows


def divide(window: Window, record_length: int, key_length: int) -> tuple[Window, Window]:
    """Divide a window of two rows or more by the middle row of one of its stretches, so that both parts have rows."""
    keys = [_key_reader(stretch.rows, record_length, key_length) for stretch in window.stretches]
    pivot, chosen = _pivot(window, keys)
    cuts: list[int] = []
    for number, stretch in enumerate(window.stretches):
        if number == chosen:
            cuts.append(stretch.middle)
        else:
            bisect = bisect_right if number < chosen else bisect_left
            cuts.append(stretch.low + bisect(range(stretch.low, stretch.high), pivot, key=keys[number]))
    pairs = list(zip(window.stretches, cuts, strict=True))
    lower = _window(window.first, (stretch._replace(high=cut) for stretch, cut in pairs))
    return lower, _window(window.first + lower.rows, (stretch._replace(low=cut) for stretch, cut in pairs))


def _window(first: int, stretches: Iterable[Stretch]) -> Window:
    return Window(first, tuple(stretch for stretch in stretches if stretch.size))


def _pivot(window: Window, keys: list[Callable[[int], bytes]]) -> tuple[bytes, int]:
    """Choose the stretch whose middle row is in the middle of the others', by their sizes; give that row's key too."""
    pairs = zip(keys, window.stretches, strict=True)
    middles = sorted((key(stretch.middle), number) for number, (key, stretch) in enumerate(pairs))
    reached = accumulate(window.stretches[number].size for _, number in middles)
    return next(one for one, size in zip(middles, reached, strict=True) if 2 * size > window.rows)


def _key_reader(rows: Rowstore, record_length: int, key_length: int) -> Callable[[int], bytes]:
    room = np.empty((1, record_length), dtype=np.uint8)

    def key(at: int) -> bytes:
        rows.read(at, room)
        return room[0, :key_length].tobytes()

    return key


class Merger:
    """Writes output files, several windows at a time."""

    def __init__(self, record_length: int, key_length: int, buffers: Buffers, threads: int = 2) -> None:
        self._length = record_length
        self._key_length = key_length
        self._buffers = buffers
        self._threads = threads

    def merge(self, slices: Sequence[Slice], path: Path, done: Callable[[int], None]) -> dict[str, Any]:
        """Write the rows of all slices in order to a file and give a note by which it can be proven later.

        `done` is told of bytes as they are written.
        """
        windows = fitting_windows(slices, self._buffers.rows, self._length, self._key_length)
        rows = sum(window.rows for window in windows)
        part = path.with_name(f".{path.name}.part")
        try:
            sums = self._write_all(part, rows, windows, done)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        part.rename(path)
        _sync_directory(path.parent)
        return {"rows": rows, "sums": sums}

    def _write_all(
        self, path: Path, rows: int, windows: list[Window], done: Callable[[int], None]
    ) -> list[tuple[int, str]]:
        file = DirectWriter(path, rows * self._length)

        def write(window: Window) -> tuple[int, str]:
            checksum = self._write(file, window)
            size = window.rows * self._length
            done(size)
            return size, checksum

        try:
            with ThreadPoolExecutor(self._threads) as pool:
                try:
                    sums = list(pool.map(write, windows))
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            file.sync()
        finally:
            file.close()
        return sums

    def _write(self, file: DirectWriter, window: Window) -> str:
        with self._buffers.lent() as (unsorted, spout):
            gathered = placed(unsorted, window.rows, self._length, 0)
            ends = accumulate(stretch.size for stretch in window.stretches)
            pairs = zip(window.stretches, ends, strict=True)
            spout.fill([(rows, low, gathered[end - (high - low) : end]) for (rows, low, high), end in pairs])
            return spout.pour(gathered, order(gathered, self._key_length), file, window.first * self._length)


def is_proven(path: Path, note: dict[str, Any]) -> bool:
    """Tell whether a file still holds exactly what was once merged into it."""
    if not path.exists() or path.stat().st_size != sum(size for size, _ in note["sums"]):
        return False
    file = DirectReader(path)
    try:
        offset = 0
        for size, checksum in note["sums"]:
            room = np.empty(size, dtype=np.uint8).data
            file.read(room, offset)
            if xxhash.xxh3_64_hexdigest(room) != checksum:
                return False
            offset += size
        return True
    finally:
        file.close()


def _sync_directory(place: Path) -> None:
    directory = os.open(place, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
