"""Sorts rows by their keys, as fast as numpy can, and finds the places of boundaries among them.

The bytes that all keys share are skipped; the next bits of the key and the number of the row go into one 64-bit word,
and the words are sorted. Rows whose words hold the same key bits are compared by their whole keys afterwards.

Invariant: rows with equal keys keep their order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Rows = NDArray[np.uint8]
    Words = NDArray[np.uint64]
    Index = NDArray[np.int64]

WORD = 8


class Boundary(NamedTuple):
    """A place in the order of all records: a key, and a position in the whole input among records of that key."""

    key: bytes
    position: int


def word_offsets(key_length: int) -> list[int]:
    """List where the words of a key begin; the last may overlap the one before it, which changes no comparison."""
    if key_length <= WORD:
        return [0]
    return [*range(0, key_length - WORD, WORD), key_length - WORD]


def words(rows: Rows, offset: int, key_length: int) -> Words:
    """Give the eight key bytes from an offset on of every row, as numbers that compare like the bytes."""
    count, record_length = rows.shape
    if record_length < WORD:
        padded = np.zeros((count, WORD), dtype=np.uint8)
        padded[:, :key_length] = rows[:, :key_length]
        return padded.view(">u8").reshape(count).astype(np.uint64)
    found = np.ndarray((count,), ">u8", rows.data, offset, (record_length,)).astype(np.uint64)
    if key_length < WORD:
        found &= np.uint64((1 << 64) - (1 << (64 - 8 * key_length)))
    return found


def order(rows: Rows, key_length: int) -> Index:
    """Give the numbers of the rows in the order of their keys."""
    count = len(rows)
    if count < 2:  # noqa: PLR2004 - one row is in order
        return np.arange(count, dtype=np.int64)
    head, offset = _telling_words(rows, key_length)
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
    if cut or offset + WORD < key_length:
        head >>= np.uint64(bits)
        _repair(rows, key_length, index, np.flatnonzero(head[1:] == head[:-1]))
    return index


def gather(rows: Rows, index: Index, into: Rows) -> None:
    """Copy rows in the order of their numbers."""
    whole = np.dtype((np.void, rows.shape[1]))
    np.take(rows.view(whole).reshape(-1), index, out=into.view(whole).reshape(-1), mode="clip")


def boundary_cuts(rows: Rows, index: Index, first: int, key_length: int, boundaries: Sequence[Boundary]) -> list[int]:
    """Count, for every boundary, the rows before it.

    `index` is the order of the rows, and `first` the input position of the first of them.
    """
    if not boundaries:
        return []
    sought = np.array([int.from_bytes(one.key[:WORD].ljust(WORD, b"\0"), "big") for one in boundaries], dtype=np.uint64)
    column = _column(rows, 0, key_length)
    lows, highs = (_bisected(column, index, sought, before) for before in (np.less, np.less_equal))
    return [
        _cut_within(rows, index, first, key_length, boundary, int(low), int(high)) if low < high else int(low)
        for boundary, low, high in zip(boundaries, lows, highs, strict=True)
    ]


def _bisected(
    column: NDArray[np.uint64], index: Index, sought: NDArray[np.uint64], before: Callable[..., NDArray[np.bool_]]
) -> Index:
    """Count the words before each one sought, in the order that the index gives; looks at few of the words."""
    low = np.zeros(len(sought), dtype=np.int64)
    high = np.full(len(sought), len(index), dtype=np.int64)
    while (open_ := low < high).any():
        middle = (low + high) // 2
        goes_up = open_ & before(column[index[np.minimum(middle, len(index) - 1)]], sought)
        low = np.where(goes_up, middle + 1, low)
        high = np.where(open_ & ~goes_up, middle, high)
    return low


def _cut_within(rows: Rows, index: Index, first: int, key_length: int, boundary: Boundary, low: int, high: int) -> int:
    """Find the place of a boundary among rows whose keys begin alike; `low` and `high` are places in the order."""

    def key(at: int) -> bytes:
        return rows[index[at], :key_length].tobytes()

    if key_length > WORD:
        span = range(low, high)
        low, high = (
            low + bisect_left(span, boundary.key, key=key),
            low + bisect_right(span, boundary.key, key=key),
        )
    return low + int(np.searchsorted(index[low:high], boundary.position - first, "left"))


def _telling_words(rows: Rows, key_length: int) -> tuple[Words, int]:
    """Give the words of the keys from the first byte on in which they differ, and where that is."""
    offset = 0
    while True:
        head = words(rows, offset, key_length)
        last = key_length - WORD
        if offset >= last:
            return head, offset
        differing = (int(head.min()) ^ int(head.max())).bit_length()
        shared = WORD - (differing + 7) // 8
        if not shared:
            return head, offset
        offset = min(offset + shared, last)


def _repair(rows: Rows, key_length: int, index: Index, pairs: Index) -> None:
    """Put rows right whose words held the same key bits: `pairs` are the places of those like the next one."""
    if not len(pairs):
        return
    columns = [_column(rows, offset, key_length) for offset in word_offsets(key_length)]
    if not _any_misplaced(columns, index[pairs], index[pairs + 1]):
        return
    among = np.zeros(len(index), dtype=bool)
    among[pairs] = True
    among[pairs + 1] = True
    members = index[among]
    index[among] = members[np.lexsort([column[members] for column in reversed(columns)])]


def _any_misplaced(columns: list[NDArray[np.uint64]], left: Index, right: Index) -> bool:
    """Tell whether any left row belongs after its right one."""
    undecided = np.ones(len(left), dtype=bool)
    for column in columns:
        mine, other = column[left], column[right]
        if bool((undecided & (mine > other)).any()):
            return True
        undecided &= mine == other
    return False


def _column(rows: Rows, offset: int, key_length: int) -> NDArray[np.uint64]:
    """View one word of all keys where it lies, or copy it where the rows or keys are too short for that."""
    count, record_length = rows.shape
    if min(record_length, key_length) < WORD:
        return words(rows, offset, key_length)
    return np.ndarray((count,), ">u8", rows.data, offset, (record_length,))
