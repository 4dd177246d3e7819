"""Records to sort: the same bytes for the same seed, in however many files and by however many threads.

Invariant: record i of n depends on the seed, the distribution, the format and n alone; it carries its own number where
there is room, so that the order of equal keys can be checked.
"""

from __future__ import annotations

from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from interlock.errors import SortError, SortInputError
from interlock.sort.data.checksum import digest, mixed, together
from interlock.sort.data.records import LINE_END, RecordFormat
from interlock.sort.io.direct_io import write_fully

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    Rows = NDArray[np.uint8]
    Numbers = NDArray[np.uint64]

CHUNK = 32_768  # records made at once
DISTINCT = 1_000  # keys of the duplicate-heavy distribution
RANKS = 1 << 20  # keys of the skewed distribution
EXPONENT = 1.1  # of its Zipf law: the first key has about a tenth of all records
SYMBOLS = np.arange(0x20, 0x7F, dtype=np.uint8)
SYMBOL_OF = SYMBOLS[np.arange(256) % len(SYMBOLS)]
HEX_OF = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
PLAIN = RecordFormat()
NUMBER = 8  # bytes of the record's own number; twice as many as hexadecimal digits


class Distribution(StrEnum):
    """How the keys are spread."""

    UNIFORM = "uniform"
    SKEWED = "skewed"
    DUPLICATES = "duplicates"
    PRESORTED = "presorted"
    REVERSED = "reversed"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make."""

    records: int
    seed: int = 0
    distribution: Distribution = Distribution.UNIFORM
    format: RecordFormat = PLAIN

    def rows(self, first: int, records: int) -> Rows:
        """Make some of the records; `first` is a multiple of the chunk."""
        random = np.random.Generator(np.random.SFC64([self.seed, first // CHUNK]))
        size = records * self.format.record_length
        words = random.integers(0, 1 << 64, -(-size // 8), dtype=np.uint64).astype("<u8", copy=False)
        rows = words.view(np.uint8)[:size].reshape(records, self.format.record_length)
        numbers = np.arange(first, first + records, dtype=np.uint64)
        draws = random.random(records)
        if self.format.ascii:
            rows = SYMBOL_OF[rows]
            rows[:, -2:] = np.frombuffer(LINE_END, dtype=np.uint8)
        _put_number(rows, numbers, self.format)
        keys = self._keys(numbers, draws)
        if keys is not None:
            rows[:, : self.format.key_length] = keys
        return rows

    def _keys(self, numbers: Numbers, draws: NDArray[np.float64]) -> Rows | None:
        """Make the keys of some records; None leaves the random bytes that are there."""
        match self.distribution:
            case Distribution.UNIFORM:
                return None
            case Distribution.SKEWED:
                top = RANKS ** (1 - EXPONENT)
                ranks = ((top - 1) * draws + 1) ** (1 / (1 - EXPONENT))
                return self._names(ranks.astype(np.uint64))
            case Distribution.DUPLICATES:
                return self._names((draws * DISTINCT).astype(np.uint64))
            case Distribution.CONSTANT:
                return self._names(np.zeros(len(numbers), dtype=np.uint64))
            case Distribution.PRESORTED:
                return self._ladder(numbers)
            case Distribution.REVERSED:
                return self._ladder(np.uint64(self.records - 1) - numbers)

    def _names(self, numbers: Numbers) -> Rows:
        """Give every number a key of its own that looks random."""
        start = mixed(numbers + np.uint64(self.seed % (1 << 32)) * np.uint64(RANKS))
        words = [mixed(start + np.uint64(place)) for place in range(-(-self.format.key_length // 8))]
        keys = np.stack(words, axis=1).view(np.uint8)[:, : self.format.key_length]
        return SYMBOL_OF[keys] if self.format.ascii else keys

    def _ladder(self, numbers: Numbers) -> Rows:
        """Give keys that grow with the numbers, evenly over all keys."""
        width = self.format.key_length
        base, digits = (len(SYMBOLS), 9) if self.format.ascii else (256, 8)
        highest = min(base**digits, (1 << 64) - 1)
        left = numbers * np.uint64(highest // max(self.records, 1))
        keys = np.zeros((len(numbers), max(width, digits)), dtype=np.uint8)
        for place in reversed(range(digits)):
            keys[:, place] = left % np.uint64(base)
            left = left // np.uint64(base)
        return SYMBOLS[keys[:, :width]] if self.format.ascii else keys[:, :width]


@dataclass(frozen=True, slots=True)
class Made:
    """What was made."""

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
    told: Callable[[int], object] = lambda _: None,
) -> Made:
    """Write the records to `part-00000` and so on; `told` gets the number of bytes of every piece that is written."""
    if files < 1:
        raise SortInputError(f"{files} files: at least one is needed")
    try:
        output.mkdir(parents=True, exist_ok=True)
        return _generate(output, recipe, files, threads, told)
    except OSError as error:
        raise SortError(f"records could not be written to {output}: {error.strerror}") from error


def _generate(output: Path, recipe: Recipe, files: int, threads: int, told: Callable[[int], object]) -> Made:
    final = [output / f"part-{number:05}" for number in range(files)]
    for path in final:
        if path.exists():
            raise SortInputError(f"{path} exists already: name an empty directory")
    hidden = [path.with_name(f".{path.name}.unfinished") for path in final]
    starts = [recipe.records * number // files for number in range(files + 1)]
    try:
        total = _fill(hidden, starts, recipe, threads, told)
        for source, target in zip(hidden, final, strict=True):
            source.replace(target)
    finally:
        for path in hidden:
            path.unlink(missing_ok=True)
    return Made([str(path) for path in final], recipe.records, recipe.records * recipe.format.record_length, total)


def _fill(paths: list[Path], starts: list[int], recipe: Recipe, threads: int, told: Callable[[int], object]) -> int:
    """Write all records to these files, which start with the records of these numbers; give the digest."""
    for path in paths:
        path.write_bytes(b"")

    def make(first: int) -> int:
        rows = recipe.rows(first, min(CHUNK, recipe.records - first))
        _write(rows, first, starts, paths)
        told(rows.nbytes)
        return digest(rows)

    with ThreadPoolExecutor(threads) as pool:
        return together(*pool.map(make, range(0, recipe.records, CHUNK)))


def _write(rows: Rows, first: int, starts: list[int], paths: list[Path]) -> None:
    """Write rows, the first of which has this number, to the files that they belong to, of which one is open."""
    number = bisect_right(starts, first) - 1
    end = first
    while end < first + len(rows):
        begin, end = end, min(first + len(rows), starts[number + 1])
        if begin < end:
            _put(paths[number], rows[begin - first : end - first], (begin - starts[number]) * rows.shape[1])
        number += 1


def _put(path: Path, rows: Rows, at: int) -> None:
    with path.open("r+b", buffering=0) as file:
        write_fully(file.fileno(), rows.reshape(-1).data, at)


def _put_number(rows: Rows, numbers: Numbers, used: RecordFormat) -> None:
    """Write each record's number after its key, where there is room."""
    pieces = numbers.astype(">u8").view(np.uint8).reshape(-1, NUMBER)
    if used.ascii:
        pieces = HEX_OF[np.stack([pieces >> 4, pieces & 15], axis=2).reshape(-1, 2 * NUMBER)]
    end = used.key_length + pieces.shape[1]
    if end <= used.record_length - (len(LINE_END) if used.ascii else 0):
        rows[:, used.key_length : end] = pieces
