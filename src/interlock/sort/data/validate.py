"""Validation of an output: its partitions, one after the other, are the input's records in order.

Invariant: it reads every byte once, uses no report of the sort, and shares no code with the sort but the reading of
records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from interlock.errors import SortInputError
from interlock.sort.data.checksum import combine_checksums, compute_checksum, format_checksum
from interlock.sort.data.records import KEY_LENGTH, RECORD_LENGTH, Extent, RecordFormat, Source, open_source
from interlock.sort.data.validate_lines import LineSummary, compare_lines, summarize_lines
from interlock.sort.workdir import PARTITION_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from interlock.sort.data.line_order import LineOrder

BLOCK_BYTES = 4 << 20  # that a thread reads at once
MAX_SHOWN_BYTES = 60  # of a line in a message
MAX_MISSING = 20  # missing partitions that are listed

ReadCallback = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of consecutive records; keys are None without records, and empty if the order is not checked."""

    records: int
    digest: int
    duplicates: int
    first: bytes | None = None
    last: bytes | None = None
    disorder: int | None = None  # the first record whose key is smaller than the one before it


@dataclass(slots=True)
class ValidatedPartition:
    """The content of one partition file."""

    number: int
    path: str
    records: int
    size: int
    digest: str
    first_key: str | None
    last_key: str | None


@dataclass(slots=True)
class Validation:
    """The result of a validation; without problems, the output is the sorted input."""

    partitions: list[ValidatedPartition] = field(default_factory=list)
    records: int = 0
    size: int = 0
    duplicates: int = 0
    digest: str = ""
    input_records: int | None = None
    input_digest: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def is_valid(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def largest(self) -> float | None:
        """The size of the largest partition, as a multiple of an even share."""
        sizes = [partition.records for partition in self.partitions]
        return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else None


def validate(
    outputs: Sequence[Path],
    inputs: Sequence[Path] = (),
    *,
    record_length: int | None = None,
    key_length: int | None = None,
    lines: LineOrder | None = None,
    threads: int | None = None,
    on_read: ReadCallback = lambda _: None,
) -> Validation:
    """Check the partitions in these directories, and compare them with the input if one is given.

    The format is detected unless lengths or the order of lines are given. A directory without partitions is an input
    error. `on_read` receives the number of bytes of every read.
    """
    result = Validation()
    paths = _find_partitions(outputs, result)
    if lines is None and (record_length, key_length) == (None, None):
        lines = _detect_lines(inputs, [path for _, path in paths])
    if lines is not None:
        _validate_lines(result, paths, inputs, lines, on_read)
        return result
    record_length, key_length = record_length or RECORD_LENGTH, key_length or KEY_LENGTH
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        whole = Summary(0, 0, 0)
        for number, path in paths:
            source = _open_partition(path, record_length, key_length, result)
            summary = _summarize(pool, source, on_read)
            _check_order(result, whole.last, path, source, summary)
            result.partitions.append(_describe(number, path, source, summary))
            whole = _join(whole, summary)
        result.records, result.size = whole.records, whole.records * record_length
        result.duplicates, result.digest = whole.duplicates, format_checksum(whole.digest)
        if inputs:
            source = open_source(inputs, record_length=record_length, key_length=key_length, ascii=False)
            _compare(result, _summarize(pool, source, on_read, check_order=False))
    return result


def _detect_lines(inputs: Sequence[Path], partitions: Sequence[Path]) -> LineOrder | None:
    """Return the order of lines if the input has lines, as the sort detects it, or else the first partition."""
    filled = [path for path in partitions if path.is_file() and path.stat().st_size]
    return open_source(inputs or filled[:1], check_sizes=False).format.lines if inputs or filled else None


def _validate_lines(
    result: Validation,
    paths: Sequence[tuple[int, Path]],
    inputs: Sequence[Path],
    order: LineOrder,
    on_read: ReadCallback,
) -> None:
    """Check partitions of lines."""
    last: bytes | None = None
    digest = 0
    for number, path in paths:
        if not path.is_file():
            result.problems.append(f"{path} is not a file, or a link to nowhere")
            continue
        source = open_source([path], lines=order)
        found = summarize_lines(source, order, on_read)
        result.duplicates += found.equal
        if last is not None and found.first is not None:
            result.duplicates += not compare_lines(last, found.first, order)
        result.problems += _problems_of_lines(path, source, found, last, order)
        ends = (None if line is None else _format_line(line) for line in (found.first, found.last))
        digest = combine_checksums(digest, found.digest)
        result.partitions.append(
            ValidatedPartition(number, str(path), found.lines, found.size, format_checksum(found.digest), *ends)
        )
        last = found.last if found.last is not None else last
        result.records, result.size = result.records + found.lines, result.size + found.size
    result.digest = format_checksum(digest)
    if inputs:
        whole = summarize_lines(open_source(inputs, lines=order), None, on_read)
        if not order.unique:
            _compare(result, Summary(whole.lines, whole.digest, 0))
        elif result.records > whole.lines or (result.records == 0) is not (whole.lines == 0):
            # the checksum of the lines that were kept cannot be known without sorting
            result.problems.append(f"{result.records:,} lines, but the input has {whole.lines:,}")


def _problems_of_lines(
    path: Path, source: Source, found: LineSummary, last: bytes | None, order: LineOrder
) -> list[str]:
    """List what is wrong with a partition of lines behind one that ends with the line `last`."""
    problems: list[str] = []
    if source.extents and not source.extents[-1].path:
        problems.append(f"{path}: the last line does not end")
    if found.disorder is not None:
        offset, line = found.disorder
        problems.append(f"{path}, byte {offset:,}: {_format_line(line)} is out of order")
    if last is not None and found.first is not None:
        direction = compare_lines(last, found.first, order)
        if direction > 0 or (order.unique and not direction):
            problems.append(
                f"{path}: begins with {_format_line(found.first)}, which does not belong behind "
                f"{_format_line(last)}, with which the partition before it ends"
            )
    return problems


def _format_line(line: bytes) -> str:
    """Format the begin of a line."""
    return repr(line[:MAX_SHOWN_BYTES].decode(errors="backslashreplace")) + "…" * (len(line) > MAX_SHOWN_BYTES)


def _check_order(result: Validation, last: bytes | None, path: Path, source: Source, summary: Summary) -> None:
    """Report disorder within a partition, and between it and the last key of the partitions before it."""
    if summary.disorder is not None:
        result.problems.append(f"{source.describe_position(summary.disorder)}: smaller key than the record before it")
    if last is not None and summary.first is not None and summary.first < last:
        result.problems.append(
            f"{path}: begins with key {_format_key(summary.first)}, less than {_format_key(last)}, "
            "with which the partition before it ends"
        )


def _find_partitions(outputs: Sequence[Path], result: Validation) -> list[tuple[int, Path]]:
    """Find the partition files by number; a missing or duplicate number is a problem."""
    numbered: dict[int, Path] = {}
    for directory in outputs:
        if not directory.is_dir():
            raise SortInputError(f"output {directory} is not a directory")
        for path in sorted(directory.iterdir()):
            match = PARTITION_NAME.fullmatch(path.name)
            if match is None:
                result.problems.append(f"{path} is not a partition, and should not be there")
            elif int(match[1]) in numbered:
                result.problems.append(f"{path}: there is partition {match[1]} in {numbered[int(match[1])]} already")
            else:
                numbered[int(match[1])] = path
    if not numbered:
        where = ", ".join(map(str, outputs))
        raise SortInputError(f"there is no partition.0 or other partition in {where}: nothing was sorted to there")
    missing = (number for number in range(max(numbered)) if number not in numbered)
    result.problems += [f"partition.{number} is missing" for number in islice(missing, MAX_MISSING)]
    return sorted(numbered.items())


def _open_partition(path: Path, record_length: int, key_length: int, result: Validation) -> Source:
    """Open a partition; of a truncated one, only the whole records."""
    if not path.is_file():
        result.problems.append(f"{path} is not a file, or a link to nowhere")
        return Source(RecordFormat(record_length, key_length), ())
    size = path.stat().st_size
    if size % record_length:
        result.problems.append(f"{path}: {size:,} bytes are not a whole number of records of {record_length} bytes")
        whole = (Extent(str(path), 0, size // record_length),) if size >= record_length else ()
        return Source(RecordFormat(record_length, key_length), whole)
    return open_source([path], record_length=record_length, key_length=key_length, ascii=False)


def _summarize(pool: ThreadPoolExecutor, source: Source, on_read: ReadCallback, *, check_order: bool = True) -> Summary:
    """Read all records in blocks, in the threads of the pool, and summarize them."""

    def summarize(block: Source) -> Summary:
        rows = np.empty((block.records, block.format.record_length), dtype=np.uint8)
        block.read(rows)
        on_read(rows.nbytes)
        if check_order:
            return _summarize_rows(rows, block.format.key_length)
        return Summary(len(rows), compute_checksum(rows), 0, b"", b"")

    whole = Summary(0, 0, 0)
    for part in pool.map(summarize, source.blocks(max(1, BLOCK_BYTES // source.format.record_length))):
        whole = _join(whole, part)
    return whole


def _summarize_rows(rows: NDArray[np.uint8], key_length: int) -> Summary:
    """Summarize rows, and check their order."""
    keys = rows[:, :key_length]
    smaller = np.zeros(len(rows) - 1, dtype=bool)
    equal = np.ones(len(rows) - 1, dtype=bool)
    for start in range(0, key_length, 8):
        words = _key_words(keys[:, start : start + 8])
        smaller |= equal & (words[1:] < words[:-1])
        equal &= words[1:] == words[:-1]
        if not equal.any():
            break
    disorder = int(smaller.argmax()) + 1 if smaller.any() else None
    first, last = keys[0].tobytes(), keys[-1].tobytes()
    return Summary(len(rows), compute_checksum(rows), int(equal.sum()), first, last, disorder)


def _key_words(columns: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return up to eight bytes of each key as a number that compares like the bytes."""
    padded = np.zeros((len(columns), 8), dtype=np.uint8)
    padded[:, : columns.shape[1]] = columns
    return padded.view(">u8").reshape(-1).astype(np.uint64)


def _join(one: Summary, other: Summary) -> Summary:
    """Combine the summaries of consecutive records."""
    if one.first is None or one.last is None:
        return other
    if other.first is None:
        return one
    disorder = one.disorder
    if disorder is None:
        within = None if other.disorder is None else one.records + other.disorder
        disorder = one.records if other.first < one.last else within
    duplicates = one.duplicates + other.duplicates + (one.last == other.first)
    total = combine_checksums(one.digest, other.digest)
    return Summary(one.records + other.records, total, duplicates, one.first, other.last, disorder)


def _compare(result: Validation, source: Summary) -> None:
    result.input_records, result.input_digest = source.records, format_checksum(source.digest)
    if source.records != result.records:
        result.problems.append(f"{result.records:,} records, but the input has {source.records:,}")
    elif result.input_digest != result.digest:
        result.problems.append(
            f"checksum {result.digest}, but that of the input is {result.input_digest}: some records differ"
        )


def _describe(number: int, path: Path, source: Source, summary: Summary) -> ValidatedPartition:
    first, last = (None if key is None else _format_key(key) for key in (summary.first, summary.last))
    return ValidatedPartition(
        number, str(path), summary.records, source.size, format_checksum(summary.digest), first, last
    )


def _format_key(key: bytes) -> str:
    """Format a key as text if it is printable, else as hexadecimal digits."""
    return key.decode("ascii") if key.isascii() and key.decode("ascii").isprintable() else key.hex()
