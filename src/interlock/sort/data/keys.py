"""Stable sort of rows by their keys with numpy, and binary search of partition boundaries in the sorted order.

The bytes that all keys share are skipped. The next bits of the key and the number of the row are packed into one 64-bit
word, and the words are sorted (numpy does that with SIMD). Rows whose words hold the same key bits are compared by
their whole keys afterwards.

Invariant: rows with equal keys keep their order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Rows = NDArray[np.uint8]
    Words = NDArray[np.uint64]
    Index = NDArray[np.int64]

WORD_BYTES = 8


class Boundary(NamedTuple):
    """A position in the order of all records: a key and, among the records with that key, an input position."""

    key: bytes
    position: int


class SortedRows(Protocol):
    """Rows in order, in memory; they are numbered from 0, and lines by their bytes."""

    @property
    def unit(self) -> int:
        """The bytes for which a row number stands."""

    @property
    def count(self) -> int:
        """The number of rows."""

    @property
    def lines(self) -> int:
        """The number of records or lines."""

    def gather(self, low: int, high: int, into: Rows) -> None:
        """Copy the bytes of some rows into an array of exactly their size."""


class SortedRecords:
    """Records of one length in the order of an index."""

    def __init__(self, rows: Rows, index: Index) -> None:
        self._rows = rows
        self._index = index

    @property
    def unit(self) -> int:
        """The length of a record."""
        return int(self._rows.shape[1])

    @property
    def count(self) -> int:
        """The number of records."""
        return len(self._index)

    lines = count

    def gather(self, low: int, high: int, into: Rows) -> None:
        """Copy some records into an array of exactly their size."""
        gather_rows(self._rows, self._index[low:high], into.reshape(high - low, self.unit))


def word_offsets(key_length: int) -> list[int]:
    """List the offsets of the words of a key; the last may overlap the one before it, which changes no comparison."""
    if key_length <= WORD_BYTES:
        return [0]
    return [*range(0, key_length - WORD_BYTES, WORD_BYTES), key_length - WORD_BYTES]


def key_words(rows: Rows, offset: int, key_length: int) -> Words:
    """Return eight key bytes of every row, from an offset on, as numbers that compare like the bytes."""
    count, record_length = rows.shape
    if record_length < WORD_BYTES:
        padded = np.zeros((count, WORD_BYTES), dtype=np.uint8)
        padded[:, :key_length] = rows[:, :key_length]
        return padded.view(">u8").reshape(count).astype(np.uint64)
    found = np.ndarray((count,), ">u8", rows.data, offset, (record_length,)).astype(np.uint64)
    if key_length < WORD_BYTES:
        found &= np.uint64((1 << 64) - (1 << (64 - 8 * key_length)))
    return found


def sort_rows(rows: Rows, key_length: int) -> Index:
    """Return the numbers of the rows in the order of their keys."""
    count = len(rows)
    if count < 2:  # noqa: PLR2004 - one row is sorted
        return np.arange(count, dtype=np.int64)
    head, offset = _distinguishing_words(rows, key_length)
    bits = (count - 1).bit_length()
    low, high = int(head.min()), int(head.max())
    cut = max(0, (high - low).bit_length() + bits - 64)
    head -= np.uint64(low)
    if cut:
        head >>= np.uint64(cut)
    head <<= np.uint64(bits)
    head |= np.arange(count, dtype=np.uint64)
    head.sort()
    index = (head & np.uint64((1 << bits) - 1)).view(np.int64)
    if cut or offset + WORD_BYTES < key_length:
        head >>= np.uint64(bits)
        _sort_ties(rows, key_length, index, np.flatnonzero(head[1:] == head[:-1]))
    return index


def gather_rows(rows: Rows, index: Index, into: Rows) -> None:
    """Copy rows in the order of an index."""
    whole = np.dtype((np.void, rows.shape[1]))
    np.take(rows.view(whole).reshape(-1), index, out=into.view(whole).reshape(-1), mode="clip")


def find_boundaries(rows: Rows, index: Index, first: int, key_length: int, boundaries: Sequence[Boundary]) -> list[int]:
    """Return, for every boundary, the number of rows before it.

    `index` is the order of the rows, and `first` the input position of the first row.
    """
    if not boundaries:
        return []
    sought = np.array(
        [int.from_bytes(one.key[:WORD_BYTES].ljust(WORD_BYTES, b"\0"), "big") for one in boundaries], dtype=np.uint64
    )
    column = _word_column(rows, 0, key_length)
    lows, highs = (_bisect_words(column, index, sought, before) for before in (np.less, np.less_equal))
    return [
        _find_among_equals(rows, index, first, key_length, boundary, int(low), int(high)) if low < high else int(low)
        for boundary, low, high in zip(boundaries, lows, highs, strict=True)
    ]


def _bisect_words(
    column: NDArray[np.uint64], index: Index, sought: NDArray[np.uint64], before: Callable[..., NDArray[np.bool_]]
) -> Index:
    """Binary search for all sought words at once: return how many words are before each, in the order of the index."""
    low = np.zeros(len(sought), dtype=np.int64)
    high = np.full(len(sought), len(index), dtype=np.int64)
    while (open_ := low < high).any():
        middle = (low + high) // 2
        goes_up = open_ & before(column[index[np.minimum(middle, len(index) - 1)]], sought)
        low = np.where(goes_up, middle + 1, low)
        high = np.where(open_ & ~goes_up, middle, high)
    return low


def _find_among_equals(
    rows: Rows, index: Index, first: int, key_length: int, boundary: Boundary, low: int, high: int
) -> int:
    """Find a boundary among the rows `low` to `high` of the order, whose keys have the same first word."""

    def key(at: int) -> bytes:
        return rows[index[at], :key_length].tobytes()

    if key_length > WORD_BYTES:
        span = range(low, high)
        low, high = (
            low + bisect_left(span, boundary.key, key=key),
            low + bisect_right(span, boundary.key, key=key),
        )
    return low + int(np.searchsorted(index[low:high], boundary.position - first, "left"))


def _distinguishing_words(rows: Rows, key_length: int) -> tuple[Words, int]:
    """Return the words of the keys from the first byte on that differs between them, and the offset of that byte."""
    offset = 0
    while True:
        head = key_words(rows, offset, key_length)
        last = key_length - WORD_BYTES
        if offset >= last:
            return head, offset
        differing = (int(head.min()) ^ int(head.max())).bit_length()
        shared = WORD_BYTES - (differing + 7) // 8
        if not shared:
            return head, offset
        offset = min(offset + shared, last)


def _sort_ties(rows: Rows, key_length: int, index: Index, pairs: Index) -> None:
    """Sort rows whose words held the same key bits; `pairs` are the positions whose word equals the next one."""
    if not len(pairs):
        return
    columns = [_word_column(rows, offset, key_length) for offset in word_offsets(key_length)]
    if not _any_out_of_order(columns, index[pairs], index[pairs + 1]):
        return
    among = np.zeros(len(index), dtype=bool)
    among[pairs] = True
    among[pairs + 1] = True
    members = index[among]
    index[among] = members[np.lexsort([column[members] for column in reversed(columns)])]


def _any_out_of_order(columns: list[NDArray[np.uint64]], left: Index, right: Index) -> bool:
    """Return whether any left row belongs after its right one."""
    undecided = np.ones(len(left), dtype=bool)
    for column in columns:
        mine, other = column[left], column[right]
        if bool((undecided & (mine > other)).any()):
            return True
        undecided &= mine == other
    return False


def _word_column(rows: Rows, offset: int, key_length: int) -> NDArray[np.uint64]:
    """Return one word of all keys as a view, or as a copy if rows or keys are too short for a view."""
    count, record_length = rows.shape
    if min(record_length, key_length) < WORD_BYTES:
        return key_words(rows, offset, key_length)
    return np.ndarray((count,), ">u8", rows.data, offset, (record_length,))
