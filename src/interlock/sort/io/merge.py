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
import threading
from bisect import bisect_left, bisect_right
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from interlock.sort.data.blocks import sort_buffer, spare_bytes
from interlock.sort.data.lines import PADDING_BYTES, scan_lines, sort_lines
from interlock.sort.io.compression import make_compressor
from interlock.sort.io.direct_io import DirectReader, DirectWriter, align, io_buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from interlock.sort.data.keys import SortedRows
    from interlock.sort.data.line_order import LineOrder
    from interlock.sort.data.records import RecordFormat
    from interlock.sort.io.buffers import BufferPool, RowStore
    from interlock.sort.settings import Compression


PACKED_PIECE_BYTES = 256 << 10  # of rows, compressed at once
LINE_READ_BYTES = 4096  # read at once on each side of an offset to find a line


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


class WrittenWindow(NamedTuple):
    """A window in the file: its rows and lines, and the size and the checksum of its bytes there."""

    rows: int
    lines: int
    size: int
    checksum: str


class Merger:
    """Merges slices into output files, several windows at a time."""

    def __init__(
        self,
        record_format: RecordFormat,
        buffers: BufferPool,
        threads: int = 2,
        compression: Compression | None = None,
    ) -> None:
        self._format = record_format
        self._length = record_format.record_length
        self._buffers = buffers
        self._threads = threads
        self._compression = compression

    def merge(self, slices: Sequence[Slice], path: Path, on_written: Callable[[int], None]) -> dict[str, Any]:
        """Write the rows of all slices in order to a file; return its manifest, by which it can be verified later.

        `on_written` receives the number of bytes of every window.
        """
        windows = plan_windows(slices, self._buffers.rows, self._format)
        part = path.with_name(f".{path.name}.part")
        try:
            written = self._write_windows(part, windows, on_written)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        part.rename(path)
        _sync_directory(path.parent)
        return {
            "rows": sum(window.rows for window in written),
            "lines": sum(window.lines for window in written),
            "sums": [(window.size, window.checksum) for window in written],
        }

    def _write_windows(
        self, path: Path, windows: list[Window], on_written: Callable[[int], None]
    ) -> list[WrittenWindow]:
        is_unique = self._format.lines is not None and self._format.lines.unique
        has_other_size = is_unique or self._compression is not None
        file = DirectWriter(path, 0 if has_other_size else sum(window.rows for window in windows) * self._length)
        offsets = _Offsets([None if has_other_size else window.rows * self._length for window in windows])

        def write(number: int) -> WrittenWindow:
            try:
                written = self._write_window(file, windows[number], offsets, number)
            except BaseException as error:
                offsets.abandon(error)
                raise
            on_written(windows[number].rows * self._length)
            return written

        try:
            with ThreadPoolExecutor(self._threads) as pool:
                try:
                    written = list(pool.map(write, range(len(windows))))
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            if self._compression is not None and not written:  # a file of no bytes is no compressed file
                written = [_write_bytes(file, make_compressor(self._compression).flush(), 0)]
            file.sync()
        finally:
            file.close()
        return written

    def _write_window(self, file: DirectWriter, window: Window, offsets: _Offsets, number: int) -> WrittenWindow:
        size = window.rows * self._length
        needed = size + spare_bytes(self._format)
        with self._buffers.borrow() as (buffer, io_thread):
            room = align(buffer, 0)
            if needed > len(room):  # lines that are longer than others
                room = np.empty(needed, dtype=np.uint8)
            rows = room[:size].reshape(window.rows, self._length)
            ends = accumulate(segment.size for segment in window.segments)
            pairs = zip(window.segments, ends, strict=True)
            io_thread.read_parts([(store, low, rows[end - (high - low) : end]) for (store, low, high), end in pairs])
            ordered, _ = sort_buffer(room, window.rows, self._format)
            size = ordered.count * self._length
            if self._compression is not None:
                packed = _compress(ordered, self._compression)
                found = _write_bytes(file, packed, offsets.take(number, len(packed)))
                return found._replace(rows=ordered.count, lines=ordered.lines)
            checksum = io_thread.write_sorted(ordered, 0, ordered.count, file, offsets.take(number, size))
            return WrittenWindow(ordered.count, ordered.lines, size, checksum)


def _compress(rows: SortedRows, compression: Compression) -> bytearray:
    """Compress rows in order, as one member of a gzip file or frame of a zstd file."""
    compressor = make_compressor(compression)
    packed = bytearray()
    with io_buffer() as buffer:
        step = max(1, PACKED_PIECE_BYTES // rows.unit)
        for low in range(0, rows.count, step):
            high = min(low + step, rows.count)
            piece = buffer[: (high - low) * rows.unit]
            rows.gather(low, high, piece)
            packed += compressor.compress(piece.data)
    packed += compressor.flush()
    return packed


def _write_bytes(file: DirectWriter, data: bytes | bytearray, offset: int) -> WrittenWindow:
    file.write(memoryview(data), offset)
    return WrittenWindow(0, 0, len(data), xxhash.xxh3_64_hexdigest(data))


class _Offsets:
    """The offsets of windows in a file; where a size is not known before the window is sorted, the next one waits.

    Windows are begun in order, so that each waits only for windows that were begun before it.
    """

    def __init__(self, sizes: list[int | None]) -> None:
        self._sizes = sizes
        self._offsets = [0]
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        with self._changed:
            self._advance()

    def take(self, number: int, size: int) -> int:
        """Set the size of a window; return its offset as soon as the sizes of all windows before it are set."""
        with self._changed:
            self._sizes[number] = size
            self._advance()
            self._changed.wait_for(lambda: number < len(self._offsets) or self._error is not None)
            if self._error is not None and number >= len(self._offsets):
                raise self._error
            return self._offsets[number]

    def abandon(self, error: BaseException) -> None:
        """End all waits with the error of a window that could not be written."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _advance(self) -> None:
        while len(self._offsets) <= len(self._sizes) and (size := self._sizes[len(self._offsets) - 1]) is not None:
            self._offsets.append(self._offsets[-1] + size)
        self._changed.notify_all()


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


def plan_windows(slices: Sequence[Slice], max_rows: int, record_format: RecordFormat) -> list[Window]:
    """List the windows of a partition; those larger than `max_rows` are split, unless they are one long line."""
    fitting: list[Window] = []
    left = list_windows(slices)[::-1]
    while left:
        window = left.pop()
        if window.rows <= max_rows:
            fitting.append(window)
        elif record_format.lines is None:
            left.extend(reversed(split_window(window, record_format.record_length, record_format.key_length)))
        else:
            parts = split_lines(window, record_format.lines)
            if parts is None:
                fitting.append(window)
            else:
                left.extend(reversed(parts))
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


def split_lines(window: Window, order: LineOrder) -> tuple[Window, Window] | None:
    """Split a window of lines at a line in the middle of one of its segments; None if it cannot be split."""
    readers = [_LineReader(segment) for segment in window.segments]
    middles = [reader.line_at(segment.middle) for reader, segment in zip(readers, window.segments, strict=True)]
    ranked = _rank([line for _, line in middles], order)
    cumulated = accumulate(window.segments[number].size for number in ranked)
    chosen = next(number for number, size in zip(ranked, cumulated, strict=True) if 2 * size > window.rows)
    start, pivot = middles[chosen]
    cuts = [
        start if number == chosen else reader.cut(pivot, order, keeps_equal=number < chosen and not order.unique)
        for number, reader in enumerate(readers)
    ]
    if order.unique:  # equal lines must stay together
        cuts[chosen] = readers[chosen].cut(pivot, order, keeps_equal=False)
    pairs = list(zip(window.segments, cuts, strict=True))
    lower = _make_window(window.first, (segment._replace(high=cut) for segment, cut in pairs))
    upper = _make_window(window.first + lower.rows, (segment._replace(low=cut) for segment, cut in pairs))
    return (lower, upper) if lower.segments and upper.segments else None


class _LineReader:
    """Reads single lines of a segment by an offset within them."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def line_at(self, offset: int) -> tuple[int, bytes]:
        """Return begin and bytes of the line that contains an offset."""
        size = LINE_READ_BYTES
        while True:
            low, high = max(self._segment.low, offset - size), min(self._segment.high, offset + size)
            text = np.empty((high - low, 1), dtype=np.uint8)
            self._segment.rows.read(low, text)
            data, at = text.tobytes(), offset - low
            begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
            if end >= 0 and (begin or low == self._segment.low):
                return low + begin, data[begin : end + 1]
            size *= 4

    def cut(self, pivot: bytes, order: LineOrder, *, keeps_equal: bool) -> int:
        """Return where the lines begin that belong behind the pivot; lines equal to it are before if `keeps_equal`."""
        low, high = self._segment.low, self._segment.high
        while low < high:
            begin, line = self.line_at((low + high) // 2)
            pair = [line, pivot] if keeps_equal else [pivot, line]
            is_before = (_rank(pair, order) == [0, 1]) is keeps_equal
            low, high = (begin + len(line), high) if is_before else (low, begin)
        return low


def _rank(lines: Sequence[bytes], order: LineOrder) -> list[int]:
    """Return the numbers of lines in order; equal ones keep their order."""
    text = np.frombuffer(b"".join(lines) + bytes(PADDING_BYTES), dtype=np.uint8)
    index, _ = sort_lines(scan_lines(text, 0, len(text) - PADDING_BYTES, order), order)
    return [int(number) for number in index]


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
