"""The input of a sort: records of one length, or lines, in files that are only read, in a fixed order.

Invariant: a source numbers its records by (input as given, path, offset), and every part of it is read from the same
bytes, however it is divided into shares and blocks. Lines are numbered by their bytes: shares and blocks begin at the
first line that begins at or behind their even share of the bytes.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, auto
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from interlock.errors import SortInputError
from interlock.sort.data.line_order import LineOrder
from interlock.sort.io.direct_io import FileShrank, disable_readahead, read_cached, read_fully, read_uncached
from interlock.sort.workdir import check_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

STANDARD_INPUT = Path("-")
LINE_END = b"\r\n"
RECORD_LENGTH = 100
KEY_LENGTH = 10
MAX_RECORD_LENGTH = 1 << 20
DIRECT_READ_BYTES = 1 << 20  # from this size on, a read bypasses the page cache
DETECTION_RECORDS = 64  # at the head of a file, by which its format is detected
TEXT = np.zeros(256, dtype=bool)  # bytes of text in lines, in ASCII, UTF-8 or an encoding of one byte
TEXT[0x20:0x7F] = TEXT[0x80:] = True
TEXT[[0x07, 0x08, 0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x1B]] = True  # controls that `file` accepts in text, as of colours
LINE_FEED = b"\n"
LINE_FEED_SCAN_BYTES = 256 << 10  # compared at once; the result stays in the processor's cache
LINE_SEARCH_BYTES = 64 << 10  # read at once to find the end of a line
LINE_PROBES, LINE_PROBE_BYTES = 32, 32 << 10  # by which the length of lines is estimated


class Content(Enum):
    """The content of an input, as its heads show it: text of one of four kinds, or other bytes."""

    BINARY = auto()
    UNBROKEN = auto()  # text without line feeds
    LF = auto()  # lines as long as records
    CR_LF = auto()
    LINES = auto()  # lines of other lengths

    def describe(self, record_length: int) -> str:
        """Describe the content in a message."""
        return {
            Content.BINARY: "other bytes than text",
            Content.UNBROKEN: "text without line feeds",
            Content.LF: f"lines of {record_length} bytes that end in a line feed",
            Content.CR_LF: f"lines of {record_length} bytes that end in CR LF",
            Content.LINES: "lines of other lengths or ends",
        }[self]


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Length of a record and of the key at its head, and whether a record is a line that ends in CR LF.

    With `lines`, the order of lines of any length, the lengths are 1: rows are numbered by their bytes. Records that
    were detected as text have a `text_end`: a line feed at the end of each, or nothing; none has another line feed.
    """

    record_length: int = RECORD_LENGTH
    key_length: int = KEY_LENGTH
    ascii: bool = False
    lines: LineOrder | None = None
    text_end: str | None = None

    def __post_init__(self) -> None:
        ending = len(LINE_END) if self.ascii else 0
        if not 1 <= self.record_length <= MAX_RECORD_LENGTH:
            raise SortInputError(
                f"record length must be between 1 and {MAX_RECORD_LENGTH:,} bytes, got {self.record_length}"
            )
        if not 1 <= self.key_length <= self.record_length - ending:
            where = "a line without its CR LF" if self.ascii else "the record"
            raise SortInputError(
                f"a key of {self.key_length} bytes in a record of {self.record_length}: "
                f"it must have 1 to {self.record_length - ending} bytes, all in {where}"
            )

    def json(self) -> dict[str, Any]:
        """Return the format as a JSON document."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RecordFormat:
        """Read the format from its JSON document."""
        lines = document.get("lines")
        return cls(**{**document, "lines": None if lines is None else LineOrder.from_json(lines)})

    @classmethod
    def of_lines(cls, order: LineOrder) -> RecordFormat:
        """Return the format of lines of any length."""
        return cls(1, 1, lines=order)

    def __str__(self) -> str:
        if self.lines is not None:
            return str(self.lines)
        kind = "lines" if self.line_end else "binary records" if self.line_end is None else "records of text"
        return f"{kind} of {self.record_length} bytes with keys of {self.key_length}"

    @property
    def line_end(self) -> bytes | None:
        """The line end of every record, which has no other line feed; None if records may have any bytes."""
        if self.ascii:
            return LINE_END
        return None if self.text_end is None else self.text_end.encode()


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive whole records in one file; `offset` is in bytes.

    An extent without a path is a line feed, which the last line of a file lacks.
    """

    path: str
    offset: int
    records: int


@dataclass(frozen=True, slots=True)
class Source:
    """Records in input order; `position` is the number of the first one in the whole input.

    `line_length` is an estimate of the length of short lines; it is 0 for records.
    """

    format: RecordFormat
    extents: tuple[Extent, ...]
    position: int = 0
    line_length: int = 0
    ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", tuple(accumulate(extent.records for extent in self.extents)))

    @property
    def records(self) -> int:
        """The number of records."""
        return self.ends[-1] if self.ends else 0

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.records * self.format.record_length

    def part(self, first: int, records: int) -> Source:
        """Return `records` records of this source, from number `first` on."""
        if not 0 <= first <= first + records <= self.records:
            raise ValueError(f"records {first} to {first + records} of a source of {self.records}")
        return Source(self.format, tuple(self._cut(first, records)), self.position + first, self.line_length)

    def share(self, index: int, count: int) -> Source:
        """Return share `index` (from 0) of `count` even shares, which together are the whole source."""
        first, end = (self.line_start(self.records * number // count) for number in (index, index + 1))
        return self.part(first, end - first)

    def block(self, number: int, records: int) -> Source:
        """Return block `number` (from 0) of so many records; the last one may be smaller, and lines are kept whole."""
        first, end = self.line_start(number * records), self.line_start((number + 1) * records)
        return self.part(first, end - first)

    def blocks(self, records: int) -> list[Source]:
        """Divide the source into blocks of so many records."""
        return [self.block(number, records) for number in range(-(-self.records // records))]

    def line_start(self, number: int) -> int:
        """Return the number of the first record at or behind a number; lines are numbered by their bytes."""
        if self.format.lines is None or number <= 0 or number >= self.records:
            return min(number, self.records)
        before = number - 1  # may be the end of the line before
        data = np.empty(LINE_SEARCH_BYTES, dtype=np.uint8)
        while before < self.records:
            piece = data[: min(len(data), self.records - before)]
            self._fill(piece, self._cut(before, len(piece)))
            ends = np.flatnonzero(piece == ord(LINE_FEED))
            if len(ends):
                return before + int(ends[0]) + 1
            before += len(piece)
        return self.records

    def read(self, into: NDArray[np.uint8]) -> None:
        """Read exactly the bytes of this source into a contiguous array; check the line ends of records."""
        if into.nbytes != self.size:
            raise ValueError(f"the buffer has {into.nbytes} bytes, but the source has {self.size}")
        self._fill(into, self.extents)
        end = self.format.line_end
        if end is not None:
            self._check_line_ends(into.reshape(self.records, self.format.record_length), end)

    def read_many(self, starts: Sequence[int], records: int) -> NDArray[np.uint8]:
        """Read `records` records from each start into a new array of rows; line ends are not checked."""
        rows = np.empty((len(starts) * records, self.format.record_length), dtype=np.uint8)
        self._fill(rows, (extent for first in starts for extent in self._cut(first, records)))
        return rows

    def describe_position(self, number: int) -> str:
        """Return file and offset of the record with this number, for an error message."""
        at = bisect_right(self.ends, number)
        extent = self.extents[at] if self.extents[at].path else self.extents[at - 1]
        within = number - (self.ends[at] - self.extents[at].records)
        return f"{extent.path}, byte {extent.offset + within * self.format.record_length:,}"

    def json(self) -> dict[str, Any]:
        """Return the source as a JSON document."""
        rows = [[extent.path, extent.offset, extent.records] for extent in self.extents]
        return {
            "format": self.format.json(),
            "extents": rows,
            "position": self.position,
            "line_length": self.line_length,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Source:
        """Read the source from its JSON document."""
        extents = tuple(Extent(path, offset, records) for path, offset, records in document["extents"])
        record_format = RecordFormat.from_json(document["format"])
        return cls(record_format, extents, document["position"], document["line_length"])

    def _fill(self, into: NDArray[np.uint8], extents: Iterable[Extent]) -> None:
        buffer = into.reshape(-1).data
        done = 0
        with _ExtentReader() as reader:
            for extent in extents:
                length = extent.records * self.format.record_length
                reader.read(extent, buffer[done : done + length])
                done += length

    def _cut(self, first: int, records: int) -> Iterator[Extent]:
        at = bisect_right(self.ends, first)
        while records:
            extent = self.extents[at]
            skipped = first - (self.ends[at] - extent.records)
            taken = min(records, extent.records - skipped)
            yield Extent(extent.path, extent.offset + skipped * self.format.record_length, taken)
            first, records, at = first + taken, records - taken, at + 1

    def _check_line_ends(self, rows: NDArray[np.uint8], end: bytes) -> None:
        """Refuse a record without its line end, or with a line feed elsewhere: it is not one line."""
        count, length = rows.shape
        ends_wrong = np.zeros(count, dtype=bool)
        for column, byte in enumerate(end, length - len(end)):
            ends_wrong |= rows[:, column] != byte
        expected = 1 if end else 0
        if not ends_wrong.any() and _count_line_feeds(rows.reshape(-1)) == count * expected:
            return
        wrong = int((ends_wrong | ((rows == ord(LINE_FEED)).sum(axis=1) != expected)).argmax())
        name = {b"": "", b"\n": "a line feed"}.get(end, "CR LF")
        reason = f"does not end in {name}" if ends_wrong[wrong] else "has a line feed before its end"
        raise SortInputError(
            f"{self.describe_position(wrong)}: this {'line' if end else 'record'} of {length} bytes {reason}, unlike "
            "those at the head of the input; --lines sorts lines of any length, and --binary records of any bytes"
        )


def open_source(
    inputs: Sequence[Path],
    *,
    record_length: int | None = None,
    key_length: int | None = None,
    ascii: bool | None = None,  # noqa: A002 - the term of the sort benchmark
    lines: LineOrder | None = None,
    check_sizes: bool = True,
) -> Source:
    """Find and check the input files; detect the format unless lengths, `ascii` or `lines` determine it.

    A directory stands for all files beneath it, in the order of their paths, without hidden ones.
    """
    if lines is not None and (record_length, key_length, ascii) != (None, None, None):
        raise SortInputError("lines have no record length: give either the keys of lines, or the lengths of records")
    has_lengths = (record_length, key_length) != (None, None)
    record_length = RECORD_LENGTH if record_length is None else record_length
    key_length = KEY_LENGTH if key_length is None else key_length
    RecordFormat(record_length, key_length)
    sizes = {path: check_readable(path) for path in list_files(inputs)}
    content = Content.BINARY
    if lines is None and ascii is None:
        content = _detect_content(sizes, record_length, has_lengths=has_lengths)
        lines = LineOrder() if content is Content.LINES else None
    if lines is not None:
        return _open_lines(sizes, lines)
    text_end = {Content.UNBROKEN: "", Content.LF: "\n"}.get(content)
    record_format = RecordFormat(record_length, key_length, ascii or content is Content.CR_LF, text_end=text_end)
    return _open_records(sizes, record_format, check_sizes=check_sizes)


def _open_records(sizes: dict[Path, int], record_format: RecordFormat, *, check_sizes: bool) -> Source:
    record_length = record_format.record_length
    for path, size in sizes.items():
        if size % record_length and check_sizes:
            whole = size - size % record_length
            advice = "" if record_format.text_end is None else "; --lines sorts lines of any length"
            raise SortInputError(
                f"{path}: {size:,} bytes are not a whole number of records of {record_length} bytes; the last "
                f"{size % record_length}, from byte {whole:,} on, are a truncated record, or --record-length is wrong"
                f"{advice}"
            )
    extents = tuple(Extent(str(path), 0, size // record_length) for path, size in sizes.items() if size)
    return Source(record_format, extents)


def _open_lines(sizes: dict[Path, int], order: LineOrder) -> Source:
    """Return a source of lines; a file whose last line does not end gets a line feed."""
    extents: list[Extent] = []
    for path, size in sizes.items():
        if size:
            extents.append(Extent(str(path), 0, size))
            with path.open("rb", buffering=0) as file:
                if os.pread(file.fileno(), 1, size - 1) != LINE_FEED:
                    extents.append(Extent("", 0, 1))
    source = Source(RecordFormat.of_lines(order), tuple(extents))
    return replace(source, line_length=_estimate_line_length(source))


def _estimate_line_length(source: Source) -> int:
    """Return the mean length of lines in the part of a source, of some, in which they are the shortest."""
    size = min(LINE_PROBE_BYTES, source.records)
    if not size:
        return 1
    probes = min(LINE_PROBES, -(-source.records // size))
    starts = [(source.records - size) * number // max(probes - 1, 1) for number in range(probes)]
    counts = (source.read_many(starts, size).reshape(probes, size) == ord(LINE_FEED)).sum(axis=1)
    return max(1, size // max(1, int(counts.max())))


def list_files(inputs: Sequence[Path]) -> list[Path]:
    """List the files of all inputs, each once; standard input is listed as it is."""
    if not inputs:
        raise SortInputError("no input: name at least one directory or file with records")
    found: dict[Path, Path] = {}
    for given in inputs:
        if given == STANDARD_INPUT:
            found[given] = given
            continue
        for path in _files_of_input(given):
            check_name("input", path)
            real = path.resolve()
            if real in found:
                raise SortInputError(f"{path} is given twice, also as {found[real]}: name every input once")
            found[real] = path.absolute()
    return list(found.values())


def _files_of_input(given: Path) -> list[Path]:
    try:
        is_directory = stat.S_ISDIR(given.stat().st_mode)
    except FileNotFoundError as error:
        raise SortInputError(f"input {given} does not exist") from error
    except OSError as error:
        raise SortInputError(f"input {given} cannot be read: {error.strerror}") from error
    if not is_directory:
        return [given]
    paths: list[Path] = []
    for directory, names, files in os.walk(given, onerror=_raise_unreadable, followlinks=True):
        names[:] = [name for name in names if not name.startswith(".")]
        paths += [Path(directory, name) for name in files if not name.startswith(".")]
    return sorted(paths)


def _raise_unreadable(error: OSError) -> None:
    raise SortInputError(f"input {error.filename} cannot be read: {error.strerror}") from error


def check_readable(path: Path) -> int:
    """Open a file to check that it can be read; return its size."""
    if path.exists() and not path.is_file():
        raise SortInputError(f"input {path} is neither a file nor a directory; a stream can be read with -")
    try:
        with path.open("rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise SortInputError(f"input {path} cannot be read: {error.strerror}") from error


def _detect_content(sizes: dict[Path, int], record_length: int, *, has_lengths: bool) -> Content:
    """Return the content of the input; refuse files that do not go together, or do not fit the lengths given."""
    found: dict[Content, Path] = {}  # the first file of each kind
    for path, head in _read_heads(sizes, record_length):
        content = _content_of(head, record_length)
        if content is Content.UNBROKEN and len(head) < record_length and not (has_lengths or found):
            content = Content.LINES  # one line without its end, and less than a record
        if has_lengths and content is Content.LINES:
            _refuse_other_lines(path, head, record_length)
        if content is Content.LF and not has_lengths:  # the sort benchmark, whose lengths are the default, has CR LF
            content = Content.LINES
        first = next(iter(found), content)
        if first is Content.LINES:
            return first
        if content not in {first, Content.BINARY, Content.UNBROKEN} and not has_lengths:
            raise SortInputError(
                f"{path} holds {content.describe(record_length)}, and {found[first]} before it holds "
                f"{first.describe(record_length)}: sort lines of any length with --lines, or records with --binary"
            )
        found.setdefault(content, path)
    kinds = list(found)
    has_one_kind = len(kinds) == 1 or kinds[:1] == [Content.CR_LF]  # whose line ends are checked in all files
    return kinds[0] if has_one_kind else Content.BINARY


def _read_heads(sizes: dict[Path, int], record_length: int) -> Iterator[tuple[Path, bytes]]:
    """Read the heads of all files that are not empty, by which the format is detected."""
    for path, size in sizes.items():
        if size:
            with path.open("rb", buffering=0) as file:
                yield path, file.read(record_length * DETECTION_RECORDS)


def _rows_of_head(head: bytes, record_length: int) -> NDArray[np.uint8]:
    whole = len(head) // record_length * record_length
    return np.frombuffer(head, dtype=np.uint8, count=whole).reshape(-1, record_length)


def _content_of(head: bytes, record_length: int) -> Content:
    """Return the content of the head of a file."""
    if not TEXT[np.frombuffer(head, dtype=np.uint8)].all():
        return Content.BINARY
    if LINE_FEED not in head:
        return Content.UNBROKEN
    rows = _rows_of_head(head, record_length)
    is_end = rows == ord(LINE_FEED)
    if not len(rows) or not is_end[:, -1].all() or is_end[:, :-1].any():
        return Content.LINES
    has_returns = record_length > 1 and bool((rows[:, -2] == ord("\r")).all())
    return Content.CR_LF if has_returns else Content.LF


def _count_line_feeds(data: NDArray[np.uint8]) -> int:
    starts = range(0, len(data), LINE_FEED_SCAN_BYTES)
    return sum(int(np.count_nonzero(data[at : at + LINE_FEED_SCAN_BYTES] == ord(LINE_FEED))) for at in starts)


def _refuse_other_lines(path: Path, head: bytes, record_length: int) -> None:
    """Refuse text whose lines have another length: records would begin in the middle of lines."""
    lines = head.split(LINE_FEED)[:-1]
    lengths = sorted({len(line) + len(LINE_FEED) for line in lines})
    if len(lengths) == 1:
        advice = f"lines of {lengths[0]} bytes: give --record-length {lengths[0]}, or sort lines without lengths"
    else:
        advice = f"lines of {lengths[0]} to {lengths[-1]} bytes: sort lines without --record-length and --key-length"
    raise SortInputError(f"{path} does not hold records of {record_length} bytes but {advice} (or --binary)")


class _ExtentReader:
    """Reads extents; the current file stays open for the next one."""

    def __init__(self) -> None:
        self._path = ""
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._path, self._file = "", -1

    def read(self, extent: Extent, buffer: memoryview) -> None:
        """Read the records of an extent into a buffer."""
        if not extent.path:
            buffer[:] = LINE_FEED
            return
        try:
            if extent.path != self._path:
                self.__exit__()
                self._file = os.open(extent.path, os.O_RDONLY)
                self._path = extent.path
                disable_readahead(self._file)
            if len(buffer) < DIRECT_READ_BYTES:
                read_fully(self._file, buffer, extent.offset, Path(extent.path))
                return
            # Pages that are not cached yet are read with direct I/O: filling the page cache costs more than the disk.
            done = read_cached(self._file, buffer, extent.offset)
            if done < len(buffer):
                read_uncached(Path(extent.path), buffer[done:], extent.offset + done)
        except FileShrank as error:
            raise SortInputError(f"input {extent.path} became shorter while it was sorted") from error
        except OSError as error:
            raise SortInputError(f"input {extent.path} cannot be read: {error.strerror}") from error
