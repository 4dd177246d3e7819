"""Merges sorted slices into one output file, window by window: read, sort, write at the window's own place.

Sorting a whole window takes a few calls of numpy, where a heap would take a step of Python for every record. Several
windows are under way at a time, so that the disk works while others are sorted.

Invariant: rows with equal keys keep their input order; a file has its final name only when it is whole and on the disk.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from interlock.sort.direct import DirectReader, DirectWriter, placed
from interlock.sort.keys import order
from interlock.sort.windows import fitting_windows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from interlock.sort.pouring import Buffers
    from interlock.sort.windows import Slice, Window


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
