"""Proof that a sort did its work: its partitions, one after the other, are the input's records in order.

Invariant: it reads every byte once, trusts nothing that the sort says of itself, and shares no code with it but the
reading of records.
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
from interlock.sort.data.checksum import digest, together, written
from interlock.sort.data.records import Extent, RecordFormat, Source, open_source
from interlock.sort.workdir import PARTITION

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


# SECTION sort/digest
# A checksum of records that does not ask for their order, so that input and output can be compared.
#
# Invariant: equal multisets of records of one length have equal digests, however they are cut; a record lost,
# doubled or
# changed in any bit, or two that exchange bytes, change the digest but for a chance of about 2 to the minus 64.


BLOCK = 4 << 20  # bytes that a thread looks at, at once
MOST_PROBLEMS = 20

Told = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Summary:
    """What is known of some records in a row; no keys where there are no records, empty ones where nobody asked."""

    records: int
    digest: int
    duplicates: int
    first: bytes | None = None
    last: bytes | None = None
    disorder: int | None = None  # the first record whose key is smaller than the one before it


@dataclass(slots=True)
class Partition:
    """What was found in one partition file."""

    number: int
    path: str
    records: int
    size: int
    digest: str
    first_key: str | None
    last_key: str | None


@dataclass(slots=True)
class Validation:
    """The findings; without problems, the output is the sorted input."""

    partitions: list[Partition] = field(default_factory=list)
    records: int = 0
    size: int = 0
    duplicates: int = 0
    digest: str = ""
    input_records: int | None = None
    input_digest: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def is_valid(self) -> bool:
        """Tell whether nothing was wrong."""
        return not self.problems

    @property
    def largest(self) -> float | None:
        """Give the size of the largest partition, as a multiple of an even share."""
        sizes = [partition.records for partition in self.partitions]
        return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else None


def validate(
    outputs: Sequence[Path],
    inputs: Sequence[Path] = (),
    *,
    record_length: int = 100,
    key_length: int = 10,
    threads: int | None = None,
    told: Told = lambda _: None,
) -> Validation:
    """Check the partitions in these directories, and against the input where one is given.

    Without partitions there is nothing to check, which is an error of the caller.
    """
    found = Validation()
    paths = _partitions(outputs, found)
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        whole = Summary(0, 0, 0)
        for number, path in paths:
            source = _records_of(path, record_length, key_length, found)
            summary = _summarized(pool, source, told)
            _check_order(found, whole.last, path, source, summary)
            found.partitions.append(_described(number, path, source, summary))
            whole = _joined(whole, summary)
        found.records, found.size = whole.records, whole.records * record_length
        found.duplicates, found.digest = whole.duplicates, written(whole.digest)
        if inputs:
            source = open_source(inputs, record_length=record_length, key_length=key_length, ascii=False)
            _compare(found, _summarized(pool, source, told, ordered=False))
    return found


def _check_order(found: Validation, last: bytes | None, path: Path, source: Source, summary: Summary) -> None:
    """Note disorder in a partition, and between it and the key with which those before it end."""
    if summary.disorder is not None:
        found.problems.append(f"{source.place(summary.disorder)}: smaller key than the record before it")
    if last is not None and summary.first is not None and summary.first < last:
        found.problems.append(
            f"{path}: begins with key {_shown(summary.first)}, less than {_shown(last)}, "
            "with which the partition before it ends"
        )


def _partitions(outputs: Sequence[Path], found: Validation) -> list[tuple[int, Path]]:
    """Find the partition files by number; a number that is missing or there twice is a problem."""
    numbered: dict[int, Path] = {}
    for directory in outputs:
        if not directory.is_dir():
            raise SortInputError(f"output {directory} is not a directory")
        for path in sorted(directory.iterdir()):
            match = PARTITION.fullmatch(path.name)
            if match is None:
                found.problems.append(f"{path} is not a partition, and should not be there")
            elif int(match[1]) in numbered:
                found.problems.append(f"{path}: there is partition {match[1]} in {numbered[int(match[1])]} already")
            else:
                numbered[int(match[1])] = path
    if not numbered:
        where = ", ".join(map(str, outputs))
        raise SortInputError(f"there is no partition.0 or other partition in {where}: nothing was sorted to there")
    found.problems += [f"partition.{number} is missing" for number in _missing(numbered)]
    return sorted(numbered.items())


def _missing(numbered: dict[int, Path]) -> list[int]:
    """List the first numbers that are not there, however large the largest is."""
    return list(islice((number for number in range(max(numbered)) if number not in numbered), MOST_PROBLEMS))


def _records_of(path: Path, record_length: int, key_length: int, found: Validation) -> Source:
    """Open a partition; of one that is cut off, the whole records."""
    if not path.is_file():
        found.problems.append(f"{path} is not a file, or a link to nowhere")
        return Source(RecordFormat(record_length, key_length), ())
    size = path.stat().st_size
    if size % record_length:
        found.problems.append(f"{path}: {size:,} bytes are not a whole number of records of {record_length} bytes")
        whole = (Extent(str(path), 0, size // record_length),) if size >= record_length else ()
        return Source(RecordFormat(record_length, key_length), whole)
    return open_source([path], record_length=record_length, key_length=key_length, ascii=False)


def _summarized(pool: ThreadPoolExecutor, source: Source, told: Told, *, ordered: bool = True) -> Summary:
    """Look at all records, block by block, in threads."""

    def look(block: Source) -> Summary:
        rows = np.empty((block.records, block.format.record_length), dtype=np.uint8)
        block.read(rows)
        told(rows.nbytes)
        return _looked_at(rows, block.format.key_length) if ordered else Summary(len(rows), digest(rows), 0, b"", b"")

    whole = Summary(0, 0, 0)
    for part in pool.map(look, source.blocks(max(1, BLOCK // source.format.record_length))):
        whole = _joined(whole, part)
    return whole


def _looked_at(rows: NDArray[np.uint8], key_length: int) -> Summary:
    """Summarize rows that should be in order."""
    keys = rows[:, :key_length]
    smaller = np.zeros(len(rows) - 1, dtype=bool)
    equal = np.ones(len(rows) - 1, dtype=bool)
    for start in range(0, key_length, 8):
        words = _words(keys[:, start : start + 8])
        smaller |= equal & (words[1:] < words[:-1])
        equal &= words[1:] == words[:-1]
        if not equal.any():
            break
    disorder = int(smaller.argmax()) + 1 if smaller.any() else None
    first, last = keys[0].tobytes(), keys[-1].tobytes()
    return Summary(len(rows), digest(rows), int(equal.sum()), first, last, disorder)


def _words(columns: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Give up to eight bytes of each key as a number that compares alike."""
    padded = np.zeros((len(columns), 8), dtype=np.uint8)
    padded[:, : columns.shape[1]] = columns
    return padded.view(">u8").reshape(-1).astype(np.uint64)


def _joined(one: Summary, other: Summary) -> Summary:
    """Summarize the records of both, one after the other."""
    if one.first is None or one.last is None:
        return other
    if other.first is None:
        return one
    disorder = one.disorder
    if disorder is None:
        within = None if other.disorder is None else one.records + other.disorder
        disorder = one.records if other.first < one.last else within
    duplicates = one.duplicates + other.duplicates + (one.last == other.first)
    total = together(one.digest, other.digest)
    return Summary(one.records + other.records, total, duplicates, one.first, other.last, disorder)


def _compare(found: Validation, source: Summary) -> None:
    found.input_records, found.input_digest = source.records, written(source.digest)
    if source.records != found.records:
        found.problems.append(f"{found.records:,} records, but the input has {source.records:,}")
    elif found.input_digest != found.digest:
        found.problems.append(
            f"checksum {found.digest}, but that of the input is {found.input_digest}: some records are not the same"
        )


def _described(number: int, path: Path, source: Source, summary: Summary) -> Partition:
    first, last = (None if key is None else _shown(key) for key in (summary.first, summary.last))
    return Partition(number, str(path), summary.records, source.size, written(summary.digest), first, last)


def _shown(key: bytes) -> str:
    """Write a key as text where it is printable, as hexadecimal digits elsewhere."""
    return key.decode("ascii") if key.isascii() and key.decode("ascii").isprintable() else key.hex()
