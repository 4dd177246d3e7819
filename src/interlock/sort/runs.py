"""Sorted rows, in memory or in a file, and the sorting of source blocks into them.

Invariant: a file has its final name only when all of it is written, and beside it a note with its checksum; a file that
is found again is used only when note and checksum are right.
"""

from __future__ import annotations

import os
import queue
import resource
import threading
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import orjson
import xxhash

from interlock.sort.allocation import small_pages
from interlock.sort.direct import PAGE, DirectReader, DirectWriter, aligned, placed
from interlock.sort.keys import boundary_cuts, gather, order
from interlock.sort.plan import first_position, stays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from interlock.sort.keys import Index, Rows
    from interlock.sort.plan import Plan
    from interlock.sort.records import Source

POURED = 2 << 20  # bytes that are brought in order and written at once
MOST_OPEN = 1 << 16


class Rowstore(Protocol):
    """Rows that can be read by their numbers."""

    def read(self, low: int, into: Rows) -> None:
        """Fill a contiguous array with rows from number `low` on."""

    def view(self, low: int, count: int, room: Callable[[], NDArray[np.uint8]]) -> memoryview:
        """Give the bytes of some rows: where they are, or else in an aligned array that has room for them."""

    def close(self) -> None:
        """Let go of files and memory."""


class Resident:
    """Rows in memory."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def read(self, low: int, into: Rows) -> None:
        """Fill a contiguous array with rows from number `low` on."""
        into[:] = self._rows[low : low + len(into)]

    def view(self, low: int, count: int, room: Callable[[], NDArray[np.uint8]]) -> memoryview:
        """Give the bytes of some rows where they are."""
        del room
        return self._rows[low : low + count].reshape(-1).data

    def close(self) -> None:
        """Let go of the memory."""
        self._rows = self._rows[:0].copy()


class Spilled:
    """Rows in a file."""

    def __init__(self, path: Path, record_length: int) -> None:
        self._length = record_length
        self._path = path
        self._file = DirectReader(path) if _kept_open().acquire(blocking=False) else None

    def read(self, low: int, into: Rows) -> None:
        """Fill a contiguous array with rows from number `low` on."""
        with self._opened() as file:
            file.read(into.reshape(-1).data, low * self._length)

    def view(self, low: int, count: int, room: Callable[[], NDArray[np.uint8]]) -> memoryview:
        """Give the bytes of some rows, in an aligned array that has room for them."""
        with self._opened() as file:
            return file.view(room(), low * self._length, count * self._length)

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


class Run:
    """The sorted rows of one source block; `cuts` are the row numbers at which windows begin and end."""

    def __init__(self, block: int, cuts: list[int], rows: Rowstore) -> None:
        self.block = block
        self.cuts = cuts
        self.rows = rows


class Buffers:
    """Pairs of arrays that are used again and again: touching fresh memory costs as much as reading a disk, or more.

    The first of a pair holds so many rows as they are read, the second a part of them, in order, that is written next.
    Both begin at a page.
    """

    def __init__(self, pairs: int, rows: int, record_length: int) -> None:
        self.rows = rows
        self._free: queue.SimpleQueue[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = queue.SimpleQueue()
        for _ in range(pairs):
            self._free.put((aligned(rows * record_length), aligned(max(POURED, 2 * record_length))))

    @contextmanager
    def pair(self) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Lend a pair."""
        lent = self._free.get()
        try:
            yield lent
        finally:
            self._free.put(lent)


def pour(rows: Rows, index: Index, file: DirectWriter, offset: int, room: NDArray[np.uint8]) -> str:
    """Write rows in the order of their numbers to a place in a file, and give their checksum.

    They go through a small aligned array, which stays in the processor's cache; what does not fill a page waits in it
    for the rows behind it.
    """
    length = rows.shape[1]
    digest = xxhash.xxh3_64()
    begun = held = offset % PAGE
    at = 0
    while at < len(index):
        taken = min((len(room) - held) // length, len(index) - at)
        piece = room[held : held + taken * length]
        gather(rows, index[at : at + taken], piece.reshape(taken, length))
        digest.update(piece.data)
        held, at = held + taken * length, at + taken
        end = held // PAGE * PAGE if at < len(index) else held
        file.write(room.data[begun:end], offset)
        offset += end - begun
        room[: held - end] = room[end:held]
        begun, held = 0, held - end
    return digest.hexdigest()


def lasting(rows: int, record_length: int) -> Rows:
    """Give memory for rows that stay."""
    if not rows:
        return np.empty((0, record_length), dtype=np.uint8)
    return small_pages(rows * record_length).reshape(rows, record_length)


class BlockSorter:
    """Sorts the blocks of one worker's source, each into a run."""

    def __init__(
        self,
        source: Source,
        block_records: int,
        plan: Plan,
        worker: int,
        buffers: Buffers,
        place: Path,
        resident: float = 0.0,
    ) -> None:
        self.source = source
        self._block_records = block_records
        self._plan = plan
        self._first = first_position(worker)
        self._buffers = buffers
        self._place = place
        self._resident = resident
        self._stamp = f"{plan.digest()} {worker} {block_records} {fingerprint(source)}"

    def sort(self, block: int) -> tuple[Run, bool]:
        """Sort one block, or find it sorted already; tell which."""
        start = block * self._block_records
        count = min(self._block_records, self.source.records - start)
        is_resident = stays(block, self._resident)
        found = None if is_resident else self._found(block, count)
        if found is not None:
            return found, True
        part, key_length = self.source.part(start, count), self.source.format.key_length
        with self._buffers.pair() as (unsorted, room):
            rows = placed(unsorted, count, self.source.format.record_length, part.extents[0].offset)
            part.read(rows)
            index = order(rows, key_length)
            inner = boundary_cuts(rows, index, self._first + start, key_length, self._plan.boundaries)
            cuts = [0, *inner, count]
            if not is_resident:
                return self._spill(block, cuts, rows, index, room), False
            into = lasting(count, rows.shape[1])
            gather(rows, index, into)
            return Run(block, cuts, Resident(into)), False

    def _spill(self, block: int, cuts: list[int], rows: Rows, index: Index, room: NDArray[np.uint8]) -> Run:
        """Write a run and the note beside it; neither has its name before it is whole."""
        path = self._path(block)
        part = path.with_name(f"{path.name}.part")
        file = DirectWriter(part, rows.nbytes)
        try:
            checksum = pour(rows, index, file, 0, room)
        finally:
            file.close()
        part.rename(path)
        write_note(path, {"stamp": self._stamp, "cuts": cuts, "checksum": checksum})
        return Run(block, cuts, Spilled(path, rows.shape[1]))

    def _path(self, block: int) -> Path:
        return self._place / f"run-{block:06}"

    def _found(self, block: int, count: int) -> Run | None:
        path = self._path(block)
        note = read_note(path)
        if note is None or note.get("stamp") != self._stamp:
            return None
        with self._buffers.pair() as (room, _):
            rows = placed(room, count, self.source.format.record_length, 0)
            if not holds(path, rows, note["checksum"]):
                return None
        return Run(block, note["cuts"], Spilled(path, rows.shape[1]))


def fingerprint(source: Source) -> str:
    """Give what tells two sources apart: their format and extents, and the sizes and times of their files."""
    digest = xxhash.xxh3_64(str(source.format).encode())
    for extent in source.extents:
        status = Path(extent.path).stat()
        digest.update(os.fsencode(f"{extent}{status.st_size}{status.st_mtime_ns}"))
    return digest.hexdigest()


def holds(path: Path, room: Rows, checksum: str) -> bool:
    """Read a file into an array of exactly its size and tell whether its checksum is right."""
    if not path.exists() or path.stat().st_size != room.nbytes:
        return False
    file = DirectReader(path)
    try:
        data = room.reshape(-1).data
        file.read(data, 0)
        return bool(xxhash.xxh3_64_hexdigest(data) == checksum)
    finally:
        file.close()


def write_note(path: Path, note: dict[str, Any]) -> None:
    """Write the note beside a file."""
    final = path.with_name(f"{path.name}.json")
    part = path.with_name(f"{path.name}.json.part")
    part.write_bytes(orjson.dumps(note))
    part.rename(final)


def read_note(path: Path) -> dict[str, Any] | None:
    """Read the note beside a file; None when there is none, or none that can be read."""
    try:
        found = orjson.loads(path.with_name(f"{path.name}.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return found if isinstance(found, dict) else None
