"""K-way merge of sorted slices into one output file, window by window: read, sort, write at the window's own offset.

A window is a segment of every slice of a partition between two boundaries. Sorting a whole window takes a few calls of
numpy, while a heap would take a step of Python for every record. Several windows are in progress at a time, so that the
disk works while others are sorted.

Invariant: the windows of a partition, in order, hold each of its rows once, and a row of a window belongs before every
row of the next. Rows with equal keys keep their input order. A file has its final name only when it is complete and on
the disk.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from interlock.sort.data.keys import sort_rows
from interlock.sort.io.direct_io import DirectReader, DirectWriter, align_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from interlock.sort.io.buffers import BufferPool, RowStore


class Slice(NamedTuple):
    """The rows of one source block for one partition, and the row numbers at which its windows begin and end."""

    rows: RowStore
    edges: Sequence[int]


class Segment(NamedTuple):
    """Consecutive rows of one slice."""

    rows: RowStore
    low: int
    high: int

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.high - self.low

    @property
    def middle(self) -> int:
        """The number of the row in the middle."""
        return self.low + self.size // 2


class Window(NamedTuple):
    """Segments in input order; `first` is the number of the output row at which the sorted window begins."""

    first: int
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(segment.size for segment in self.segments)


class Merger:
    """Merges slices into output files, several windows at a time."""

    def __init__(self, record_length: int, key_length: int, buffers: BufferPool, threads: int = 2) -> None:
        self._length = record_length
        self._key_length = key_length
        self._buffers = buffers
        self._threads = threads

    def merge(self, slices: Sequence[Slice], path: Path, on_written: Callable[[int], None]) -> dict[str, Any]:
        """Write the rows of all slices in order to a file; return its manifest, by which it can be verified later.

        `on_written` receives the number of bytes of every window.
        """
        windows = plan_windows(slices, self._buffers.rows, self._length, self._key_length)
        rows = sum(window.rows for window in windows)
        part = path.with_name(f".{path.name}.part")
        try:
            sums = self._write_windows(part, rows, windows, on_written)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        part.rename(path)
        _sync_directory(path.parent)
        return {"rows": rows, "sums": sums}

    def _write_windows(
        self, path: Path, rows: int, windows: list[Window], on_written: Callable[[int], None]
    ) -> list[tuple[int, str]]:
        file = DirectWriter(path, rows * self._length)

        def write(window: Window) -> tuple[int, str]:
            checksum = self._write_window(file, window)
            size = window.rows * self._length
            on_written(size)
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

    def _write_window(self, file: DirectWriter, window: Window) -> str:
        with self._buffers.borrow() as (buffer, io_thread):
            rows = align_rows(buffer, window.rows, self._length, 0)
            ends = accumulate(segment.size for segment in window.segments)
            pairs = zip(window.segments, ends, strict=True)
            io_thread.read_parts([(store, low, rows[end - (high - low) : end]) for (store, low, high), end in pairs])
            return io_thread.write_sorted(rows, sort_rows(rows, self._key_length), file, window.first * self._length)


def verify_output(path: Path, manifest: dict[str, Any]) -> bool:
    """Return whether a file still holds exactly what was merged into it."""
    if not path.exists() or path.stat().st_size != sum(size for size, _ in manifest["sums"]):
        return False
    file = DirectReader(path)
    try:
        offset = 0
        for size, checksum in manifest["sums"]:
            data = np.empty(size, dtype=np.uint8).data
            file.read(data, offset)
            if xxhash.xxh3_64_hexdigest(data) != checksum:
                return False
            offset += size
        return True
    finally:
        file.close()


def plan_windows(slices: Sequence[Slice], max_rows: int, record_length: int, key_length: int) -> list[Window]:
    """List the windows of a partition; those larger than `max_rows` are split."""
    fitting: list[Window] = []
    left = list_windows(slices)[::-1]
    while left:
        window = left.pop()
        if window.rows <= max_rows:
            fitting.append(window)
        else:
            left.extend(reversed(split_window(window, record_length, key_length)))
    return fitting


def list_windows(slices: Sequence[Slice]) -> list[Window]:
    """List the non-empty windows between the boundaries."""
    windows: list[Window] = []
    first = 0
    for at in range(len(slices[0].edges) - 1 if slices else 0):
        window = _make_window(first, (Segment(one.rows, one.edges[at], one.edges[at + 1]) for one in slices))
        if window.segments:
            windows.append(window)
            first += window.rows
    return windows


def split_window(window: Window, record_length: int, key_length: int) -> tuple[Window, Window]:
    """Split a window of two or more rows at the middle row of one of its segments, so that both parts have rows."""
    keys = [_key_reader(segment.rows, record_length, key_length) for segment in window.segments]
    pivot, chosen = _choose_pivot(window, keys)
    cuts: list[int] = []
    for number, segment in enumerate(window.segments):
        if number == chosen:
            cuts.append(segment.middle)
        else:
            bisect = bisect_right if number < chosen else bisect_left
            cuts.append(segment.low + bisect(range(segment.low, segment.high), pivot, key=keys[number]))
    pairs = list(zip(window.segments, cuts, strict=True))
    lower = _make_window(window.first, (segment._replace(high=cut) for segment, cut in pairs))
    return lower, _make_window(window.first + lower.rows, (segment._replace(low=cut) for segment, cut in pairs))


def _make_window(first: int, segments: Iterable[Segment]) -> Window:
    return Window(first, tuple(segment for segment in segments if segment.size))


def _choose_pivot(window: Window, keys: list[Callable[[int], bytes]]) -> tuple[bytes, int]:
    """Choose the segment whose middle row is the median of all, weighted by size; return its key and its number."""
    pairs = zip(keys, window.segments, strict=True)
    middles = sorted((key(segment.middle), number) for number, (key, segment) in enumerate(pairs))
    cumulated = accumulate(window.segments[number].size for _, number in middles)
    return next(one for one, size in zip(middles, cumulated, strict=True) if 2 * size > window.rows)


def _key_reader(rows: RowStore, record_length: int, key_length: int) -> Callable[[int], bytes]:
    row = np.empty((1, record_length), dtype=np.uint8)

    def read_key(at: int) -> bytes:
        rows.read(at, row)
        return row[0, :key_length].tobytes()

    return read_key


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
