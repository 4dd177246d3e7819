"""Generator of random records: the same seed gives the same bytes, for any number of files and threads.

Invariant: record i depends only on the seed and the format. It contains its own number after the key if it is long
enough, so that the order of equal keys can be checked.
"""

from __future__ import annotations

from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from interlock.errors import SortError, SortInputError
from interlock.sort.data.checksum import combine_checksums, compute_checksum
from interlock.sort.data.records import LINE_END, RecordFormat
from interlock.sort.io.direct_io import write_fully

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    Rows = NDArray[np.uint8]
    Numbers = NDArray[np.uint64]

CHUNK_RECORDS = 32_768  # generated at once
PRINTABLE_BYTES = np.arange(0x20, 0x7F, dtype=np.uint8)
TO_PRINTABLE = PRINTABLE_BYTES[np.arange(256) % len(PRINTABLE_BYTES)]  # maps any byte to a printable one
HEX_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
DEFAULT_FORMAT = RecordFormat()
NUMBER_BYTES = 8  # of the record's own number; twice as many as hexadecimal digits


@dataclass(frozen=True, slots=True)
class Recipe:
    """The records to generate; their keys are uniformly distributed."""

    records: int
    seed: int = 0
    format: RecordFormat = DEFAULT_FORMAT

    def rows(self, first: int, records: int) -> Rows:
        """Generate some of the records; `first` is a multiple of CHUNK_RECORDS."""
        random = np.random.Generator(np.random.SFC64([self.seed, first // CHUNK_RECORDS]))
        size = records * self.format.record_length
        words = random.integers(0, 1 << 64, -(-size // 8), dtype=np.uint64).astype("<u8", copy=False)
        rows = words.view(np.uint8)[:size].reshape(records, self.format.record_length)
        numbers = np.arange(first, first + records, dtype=np.uint64)
        if self.format.ascii:
            rows = TO_PRINTABLE[rows]
            rows[:, -2:] = np.frombuffer(LINE_END, dtype=np.uint8)
        _put_numbers(rows, numbers, self.format)
        return rows


@dataclass(frozen=True, slots=True)
class GeneratedFiles:
    """The files that were generated; `digest` is the checksum of all records."""

    paths: list[str]
    records: int
    size: int
    digest: int


def generate(
    output: Path,
    recipe: Recipe,
    *,
    files: int = 1,
    threads: int = 2,
    on_written: Callable[[int], object] = lambda _: None,
) -> GeneratedFiles:
    """Write the records to `part-00000` and so on; `on_written` receives the number of bytes of every write."""
    if files < 1:
        raise SortInputError(f"files must be at least 1, got {files}")
    try:
        output.mkdir(parents=True, exist_ok=True)
        return _generate(output, recipe, files, threads, on_written)
    except OSError as error:
        raise SortError(f"records could not be written to {output}: {error.strerror}") from error


def _generate(
    output: Path, recipe: Recipe, files: int, threads: int, on_written: Callable[[int], object]
) -> GeneratedFiles:
    final = [output / f"part-{number:05}" for number in range(files)]
    for path in final:
        if path.exists():
            raise SortInputError(f"{path} exists already: name an empty directory")
    hidden = [path.with_name(f".{path.name}.unfinished") for path in final]
    starts = [recipe.records * number // files for number in range(files + 1)]
    try:
        total = _write_files(hidden, starts, recipe, threads, on_written)
        for source, target in zip(hidden, final, strict=True):
            source.replace(target)
    finally:
        for path in hidden:
            path.unlink(missing_ok=True)
    size = recipe.records * recipe.format.record_length
    return GeneratedFiles([str(path) for path in final], recipe.records, size, total)


def _write_files(
    paths: list[Path], starts: list[int], recipe: Recipe, threads: int, on_written: Callable[[int], object]
) -> int:
    """Write all records; file i begins with record `starts[i]`. Return the checksum."""
    for path in paths:
        path.write_bytes(b"")

    def write_chunk(first: int) -> int:
        rows = recipe.rows(first, min(CHUNK_RECORDS, recipe.records - first))
        _write_rows(rows, first, starts, paths)
        on_written(rows.nbytes)
        return compute_checksum(rows)

    with ThreadPoolExecutor(threads) as pool:
        return combine_checksums(*pool.map(write_chunk, range(0, recipe.records, CHUNK_RECORDS)))


def _write_rows(rows: Rows, first: int, starts: list[int], paths: list[Path]) -> None:
    """Write rows, the first of which is record `first`, to the files that they belong to."""
    number = bisect_right(starts, first) - 1
    end = first
    while end < first + len(rows):
        begin, end = end, min(first + len(rows), starts[number + 1])
        if begin < end:
            offset = (begin - starts[number]) * rows.shape[1]
            with paths[number].open("r+b", buffering=0) as file:
                write_fully(file.fileno(), rows[begin - first : end - first].reshape(-1).data, offset)
        number += 1


def _put_numbers(rows: Rows, numbers: Numbers, record_format: RecordFormat) -> None:
    """Write each record's number after its key, if the record is long enough."""
    pieces = numbers.astype(">u8").view(np.uint8).reshape(-1, NUMBER_BYTES)
    if record_format.ascii:
        pieces = HEX_DIGITS[np.stack([pieces >> 4, pieces & 15], axis=2).reshape(-1, 2 * NUMBER_BYTES)]
    end = record_format.key_length + pieces.shape[1]
    if end <= record_format.record_length - (len(LINE_END) if record_format.ascii else 0):
        rows[:, record_format.key_length : end] = pieces
