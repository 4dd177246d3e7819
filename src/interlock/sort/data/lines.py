"""Sort and gather of lines of any length with numpy: line ends and key extents, order by keys, copies in order.

A line consists of its bytes and a line feed. Rows are compared by words of up to 64 bits: eight bytes of a key, or the
digits of a number. As many bits as fit are packed with the number of the row and sorted as integers; only the rows that
are still tied are compared by the next word. So most rows are compared by one word, and the rest in few calls.

Lines are copied as pieces of one width, each in one call for thousands of lines: a piece that is longer than its line
writes beyond it, and the next line overwrites that.

Invariant: lines that compare as equal keep their order.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from interlock.errors import SortInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from interlock.sort.data.keys import Boundary
    from interlock.sort.data.line_order import LineKey, LineOrder

    Bytes = NDArray[np.uint8]
    Words = NDArray[np.uint64]
    Index = NDArray[np.int64]
    Flags = NDArray[np.bool_]

LINE_FEED, SPACE, TAB = 10, 32, 9
PADDING_BYTES = 4096  # behind the last line in a buffer, which may be read
SCAN_BYTES = 1 << 18  # scanned for line ends and fields at once; what is found stays in the processor's cache
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 32, PADDING_BYTES
MAX_SINGLE_PIECE_BYTES = 512  # lines up to this length are copied in one piece each
PIECES_AT_ONCE = 2048
WORD_BYTES = 8
MAX_WORD_ROUNDS = 256  # of one key, by words; longer keys that are still equal are compared as bytes objects
ROWS_PER_WORD_ROUND = 32  # a round takes as long as the objects of so many rows: as few rows are compared as objects
DIGITS_PER_WORD, DIGITS_IN_FIRST_WORD = 16, 14
MAX_SHORT_DIGITS = 127  # numbers with fewer digits before the point have digits in their first word
SIGN_BIT = np.uint64(1 << 63)
MASKS = np.array([0, *(((1 << 64) - 1) ^ ((1 << (64 - 8 * count)) - 1) for count in range(1, 9))], dtype=np.uint64)
UPPER_CASE = np.frombuffer(bytes(range(256)).upper(), dtype=np.uint8)
ONES = 0x0101010101010101


class Lines(NamedTuple):
    """Lines in a buffer: where each begins, where its line feed is, and where its first key begins and ends.

    Behind the last line, the buffer has PADDING_BYTES more.
    """

    data: Bytes
    begins: Index
    ends: Index
    key_begins: Index
    key_ends: Index

    @property
    def sizes(self) -> Index:
        """The bytes of each line with its line feed."""
        return self.ends - self.begins + 1


class SortedLines:
    """Lines in order, whose bytes are read by their offset in that order."""

    def __init__(self, data: Bytes, begins: Index, sizes: Index) -> None:
        self._data = data
        self.begins = begins  # of the lines in the buffer, in order
        self._sizes = sizes
        self._ends = np.cumsum(sizes)

    @property
    def unit(self) -> int:
        """Rows are numbered by their bytes."""
        return 1

    @property
    def lines(self) -> int:
        """The number of lines."""
        return len(self._sizes)

    @property
    def count(self) -> int:
        """The number of bytes."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def offset_of(self, line: int) -> int:
        """Return the offset at which a line begins; the number of lines is that of their end."""
        return int(self._ends[line - 1]) if line else 0

    def gather(self, low: int, high: int, into: Bytes) -> None:
        """Copy the bytes from one offset in the order to another."""
        if low == high:
            return
        first = int(np.searchsorted(self._ends, low, "right"))
        last = int(np.searchsorted(self._ends, high, "left"))
        begins, sizes = self.begins[first : last + 1].copy(), self._sizes[first : last + 1].copy()
        sizes[-1] -= int(self._ends[last]) - high
        skipped = low - (int(self._ends[first]) - int(self._sizes[first]))
        begins[0] += skipped
        sizes[0] -= skipped
        gather_lines(self._data, begins, sizes, into)


def scan_lines(data: Bytes, low: int, high: int, order: LineOrder) -> Lines:
    """Find the lines between two offsets of a buffer, which hold whole lines, and the first key of each."""
    key, separator = order.comparisons[0], order.separator
    found: list[tuple[Index, ...]] = []
    while low < high:
        wanted = SCAN_BYTES
        while (piece := _scan_piece(data, low, min(low + wanted, high), key, separator)) is None:
            if low + wanted >= high:
                raise SortInputError("a line does not end")
            wanted *= 2
        found.append(piece)
        low = int(found[-1][1][-1]) + 1
    if not found:
        nothing = np.empty(0, dtype=np.int64)
        return Lines(data, nothing, nothing, nothing, nothing)
    begins, ends, key_begins, key_ends = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return Lines(data, begins, ends, key_begins, key_ends)


def sort_lines(lines: Lines, order: LineOrder) -> tuple[Index, Flags]:
    """Return the numbers of the lines in order, and for each place whether its line is equal to the one before."""
    ranking = _Ranking(len(lines.begins))
    for number, key in enumerate(order.comparisons):
        if len(ranking.rows) < 2:  # noqa: PLR2004 - nothing is tied
            break
        begins, ends = (lines.key_begins, lines.key_ends) if not number else _find_key(lines, ranking.rows, key, order)
        if key.numeric:
            _rank_by_number(ranking, lines.data, begins, ends, key)
        else:
            _rank_by_bytes(ranking, lines.data, begins, ends, key)
    return ranking.order, ranking.tied()


def gather_lines(data: Bytes, begins: Index, sizes: Index, into: Bytes) -> None:
    """Copy lines one behind the other into an array of exactly their size."""
    width = _piece_width(sizes)
    counts = -(-sizes // width)
    offsets = np.cumsum(sizes) - sizes
    if len(sizes) and int(counts.max()) > 1:
        repeated = np.repeat(np.arange(len(sizes)), counts)
        within = (np.arange(len(repeated)) - (np.cumsum(counts) - counts)[repeated]) * width
        begins, offsets = begins[repeated] + within, offsets[repeated] + within
    inside = int(np.searchsorted(offsets, len(into) - width, "right"))
    _copy_pieces(data, begins[:inside], offsets[:inside], width, into)
    if inside < len(offsets):  # the last pieces would write beyond the array
        first = int(offsets[inside])
        rest = np.empty(len(into) - first + width, dtype=np.uint8)
        _copy_pieces(data, begins[inside:], offsets[inside:] - first, width, rest)
        into[first:] = rest[: len(into) - first]


def _piece_width(sizes: Index) -> int:
    longest = int(sizes.max(initial=1))
    if longest > MAX_SINGLE_PIECE_BYTES:
        longest = min(max(2 * int(sizes.mean()), MIN_PIECE_BYTES), longest)
    return min(-(-longest // 16) * 16, MAX_PIECE_BYTES)


def _copy_pieces(data: Bytes, begins: Index, offsets: Index, width: int, into: Bytes) -> None:
    """Copy pieces of one width in ascending order of their offsets; each may overwrite the end of the one before."""
    if not len(begins):
        return
    if not assigns_in_order():
        for begin, offset in zip(begins.tolist(), offsets.tolist(), strict=True):
            into[offset : offset + width] = data[begin : begin + width]
        return
    source, target = _overlapping(data, width), _overlapping(into, width)
    for at in range(0, len(begins), PIECES_AT_ONCE):
        target[offsets[at : at + PIECES_AT_ONCE]] = source[begins[at : at + PIECES_AT_ONCE]]


def _overlapping(data: Bytes, width: int) -> NDArray[np.void]:
    """Return a view of an array as pieces of one width that begin at every byte."""
    return np.ndarray((len(data) - width + 1,), f"V{width}", data.data, 0, (1,))


@cache
def assigns_in_order() -> bool:
    """Return whether numpy assigns to an index array element by element in order, which it does not guarantee."""
    width, count = 48, 4 * PIECES_AT_ONCE
    source = ((np.arange(13 * count + width) * 2_654_435_761) >> 13).astype(np.uint8)
    into = np.empty(3 * count + width, dtype=np.uint8)
    offsets = np.arange(count, dtype=np.int64) * 3
    _overlapping(into, width)[offsets] = _overlapping(source, width)[offsets * 4]
    expected = np.concatenate([source[12 * at : 12 * at + 3] for at in range(count)])
    return bool((into[: 3 * count] == expected).all())


def _scan_piece(data: Bytes, low: int, high: int, key: LineKey, separator: int | None) -> tuple[Index, ...] | None:
    """Find begin, end, key begin and key end of all whole lines from a line's begin on; None if there are none."""
    piece = data[low:high]
    is_end = piece == LINE_FEED
    if not key.needs_fields:
        hits = np.flatnonzero(is_end)
        last_hits = np.arange(len(hits))
    else:
        hits = np.flatnonzero(is_end | _field_ends(piece, is_end, separator))
        last_hits = np.flatnonzero(is_end[hits])
    if not len(last_hits):
        return None
    hits += low
    ends = hits[last_hits]
    begins = np.empty_like(ends)
    begins[0], begins[1:] = low, ends[:-1] + 1
    fields = _Fields(data, begins, ends, hits, last_hits, separator)
    key_begins = fields.begin_of(key.first_field, key.skips_blanks, key.first_character)
    if key.last_field is None:
        key_ends = ends
    elif key.last_characters:
        key_ends = fields.begin_of(key.last_field, key.skips_blanks_at_end, key.last_characters)
    else:
        key_ends = fields.end_of(key.last_field)
    return begins, ends, key_begins, np.maximum(key_begins, key_ends)


def _field_ends(piece: Bytes, is_end: Flags, separator: int | None) -> Flags:
    """Return where a field ends: at the separator, or else where blanks follow other characters."""
    if separator is not None:
        return np.equal(piece, separator)
    blank = (piece == SPACE) | (piece == TAB)
    found = np.zeros(len(piece), dtype=bool)
    found[1:] = blank[1:] & ~(blank[:-1] | is_end[:-1])
    return found


class _Fields(NamedTuple):
    """The fields of some lines: `hits` are the ends of all fields, `last_hits` which of them are the ends of lines."""

    data: Bytes
    begins: Index
    ends: Index
    hits: Index
    last_hits: Index
    separator: int | None

    def end_of(self, field: int) -> Index:
        """Return where a field ends in each line: at the end of the line if it has no such field."""
        first_hits = np.empty_like(self.last_hits)
        first_hits[0], first_hits[1:] = 0, self.last_hits[:-1] + 1
        return self.hits[np.minimum(first_hits + field, self.last_hits)]

    def begin_of(self, field: int, skips_blanks: bool, characters: int) -> Index:  # noqa: FBT001 - of the key
        """Return where a field begins in each line, and so many characters further, but within the line."""
        if not field:
            found = self.begins
        else:
            found = self.end_of(field - 1)
            if self.separator is not None:
                found = np.minimum(found + 1, self.ends)
        if skips_blanks:
            found = found + run_lengths(self.data, found, self.ends, _blank_flags, b" \t")
        return np.minimum(found + characters, self.ends) if characters else found


def _find_key(lines: Lines, rows: Index, key: LineKey, order: LineOrder) -> tuple[Index, Index]:
    """Find a key of some lines; return arrays for all lines, of which only those of the rows are set."""
    if not key.needs_fields and not key.skips_blanks and key.last_field is None:
        return np.minimum(lines.begins + key.first_character, lines.ends), lines.ends
    key_begins, key_ends = np.empty_like(lines.begins), np.empty_like(lines.ends)
    sizes = lines.ends[rows] - lines.begins[rows] + 1
    cumulated = np.cumsum(sizes)
    low = 0
    while low < len(rows):
        before = int(cumulated[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(cumulated, before + SCAN_BYTES, "right")))
        some = rows[low:high]
        size = int(cumulated[high - 1]) - before
        text = np.zeros(size + PADDING_BYTES, dtype=np.uint8)
        gather_lines(lines.data, lines.begins[some], sizes[low:high], text[:size])
        piece = _scan_piece(text, 0, size, key, order.separator)
        if piece is None:
            raise SortInputError("a line does not end")
        begins, _, found_begins, found_ends = piece
        key_begins[some] = lines.begins[some] + (found_begins - begins)
        key_ends[some] = lines.begins[some] + (found_ends - begins)
        low = high
    return key_begins, key_ends


class _Ranking:
    """The order of rows as far as it is decided; `rows` are those that are tied with a neighbour, in that order."""

    def __init__(self, count: int) -> None:
        self.order = np.arange(count, dtype=np.int64)
        self.rows = self.order.copy()
        self._places = self.rows  # of the tied rows in the order
        self._groups = np.zeros(count, dtype=np.uint64)  # of the tied rows; those of one group are tied
        self._group_count = min(count, 1)

    def refine(self, words: Words, width: int) -> None:
        """Sort the tied rows of each group by words of so many bits, one for each of `rows`."""
        while len(self.rows) > 1 and width > 0:
            words, width = _narrow(words, width)
            if not width or self._is_even(words):
                return
            count_bits = (len(words) - 1).bit_length()
            taken = min(width, 64 - count_bits - (self._group_count - 1).bit_length())
            left = width - taken
            packed = words >> np.uint64(left)
            if left or self._group_count > 1:
                packed |= self._groups << np.uint64(taken)
            packed <<= np.uint64(count_bits)
            packed |= np.arange(len(words), dtype=np.uint64)
            packed.sort()
            moved = (packed & np.uint64((1 << count_bits) - 1)).view(np.int64)
            packed >>= np.uint64(count_bits)
            self.order[self._places] = sorted_rows = self.rows[moved]
            tied = packed[1:] == packed[:-1]
            kept = np.zeros(len(words), dtype=bool)
            kept[1:] = tied
            kept[:-1] |= tied
            heads = packed[kept]
            self.rows, self._places = sorted_rows[kept], self._places[kept]
            self._number_groups(heads[1:] != heads[:-1])
            width = left
            if left:
                words = words[moved[kept]] & np.uint64((1 << left) - 1)

    def sort_by(self, key: Callable[[int], bytes], *, reverse: bool) -> None:
        """Sort the tied rows of each group by bytes objects, and end all ties but those of equal ones."""
        keyed = [(int(group), key(int(row)), int(row)) for group, row in zip(self._groups, self.rows, strict=True)]
        keyed.sort(key=lambda one: one[1], reverse=reverse)
        keyed.sort(key=lambda one: one[0])
        self.rows = np.array([row for _, _, row in keyed], dtype=np.int64)
        self.order[self._places] = self.rows
        changes = [one[:2] != other[:2] for one, other in zip(keyed[1:], keyed[:-1], strict=True)]
        kept = np.ones(len(keyed), dtype=bool)
        differs = np.array([True, *changes, True])
        kept &= ~(differs[1:] & differs[:-1])
        numbers = np.cumsum(differs[:-1])[kept]
        self.rows, self._places = self.rows[kept], self._places[kept]
        self._number_groups(numbers[1:] != numbers[:-1])

    def tied(self) -> Flags:
        """Return for each place of the order whether its row is tied with the one before."""
        found = np.zeros(len(self.order), dtype=bool)
        found[self._places[1:]] = self._groups[1:] == self._groups[:-1]
        return found

    def _number_groups(self, changes: Flags) -> None:
        self._groups = np.zeros(len(self.rows), dtype=np.uint64)
        np.cumsum(changes, out=self._groups[1:])
        self._group_count = int(self._groups[-1]) + 1 if len(self._groups) else 0

    def _is_even(self, words: Words) -> bool:
        """Return whether the words of each group are equal, so that nothing is to be sorted."""
        return bool(((words[1:] == words[:-1]) | (self._groups[1:] != self._groups[:-1])).all())


def _narrow(words: Words, width: int) -> tuple[Words, int]:
    """Subtract the smallest word, and drop low bits that none has: fewer bits have to be sorted."""
    low, high = int(words.min()), int(words.max())
    if low == high:
        return words, 0
    words = words - np.uint64(low)
    used = int(np.bitwise_or.reduce(words))
    shift = (used & -used).bit_length() - 1
    return words >> np.uint64(shift), min(width, (high - low).bit_length()) - shift


def _rank_by_bytes(ranking: _Ranking, data: Bytes, begins: Index, ends: Index, key: LineKey) -> None:
    """Refine an order by a key that is compared byte by byte; a key that is the beginning of another comes first."""
    done = 0  # rounds

    def rest(row: int) -> bytes:
        text = data[int(begins[row]) + done * WORD_BYTES : int(ends[row])]
        return (UPPER_CASE[text] if key.folded else text).tobytes()

    while len(ranking.rows) > 1:
        begin, end = begins[ranking.rows] + done * WORD_BYTES, ends[ranking.rows]
        left = end - begin
        if int(left.max()) <= 0:
            break
        if done == MAX_WORD_ROUNDS or len(ranking.rows) <= ROWS_PER_WORD_ROUND * done:
            ranking.sort_by(rest, reverse=key.reverse)
            break
        words = _load_words(data, np.minimum(begin, end), left)
        if key.folded:
            words = _fold(words)
        ranking.refine(~words if key.reverse else words, 64)
        done += 1
    lengths = (ends[ranking.rows] - begins[ranking.rows]).astype(np.uint64)  # of keys that differ in NULs at their ends
    ranking.refine(~lengths if key.reverse else lengths, 64)


def _load_words(data: Bytes, begins: Index, sizes: Index) -> Words:
    """Return up to eight bytes from each offset as numbers that compare like the bytes; bytes beyond the size are 0."""
    view = np.ndarray((len(data) - WORD_BYTES + 1,), ">u8", data.data, 0, (1,))
    words = view[begins].astype(np.uint64)
    words &= MASKS[np.clip(sizes, 0, WORD_BYTES)]
    return words


def _fold(words: Words) -> Words:
    return UPPER_CASE[words.view(np.uint8)].view(np.uint64)


def _rank_by_number(ranking: _Ranking, data: Bytes, begins: Index, ends: Index, key: LineKey) -> None:
    """Refine an order by the number with which a key begins: its sign, its digits before the point, all its digits."""
    numbers = _parse_numbers(data, begins, ends, ranking.rows)
    ranking.refine(~numbers.first_words(ranking.rows) if key.reverse else numbers.first_words(ranking.rows), 64)
    at = 0
    while len(ranking.rows) > 1:
        rows = ranking.rows
        skipped = np.where(numbers.integers[rows] < MAX_SHORT_DIGITS, DIGITS_IN_FIRST_WORD, 0) + at * DIGITS_PER_WORD
        if int((numbers.integers[rows] + numbers.fractions[rows] - skipped).max()) <= 0:
            return
        words = numbers.digits(rows, skipped, DIGITS_PER_WORD)
        words = np.where(numbers.negative[rows] != key.reverse, ~words, words)
        ranking.refine(words, 64)
        at += 1


class _Numbers(NamedTuple):
    """Numbers: where their digits begin, without leading zeros, how many are before and behind the point, the sign."""

    data: Bytes
    begins: Index
    integers: Index
    fractions: Index
    negative: Flags

    def first_words(self, rows: Index) -> Words:
        """Return words that compare like the numbers as far as they go: sign, digits before the point, first digits."""
        integers = self.integers[rows]
        words = self.digits(rows, np.zeros_like(rows), DIGITS_IN_FIRST_WORD) >> np.uint64(8)
        many = integers >= MAX_SHORT_DIGITS
        if many.any():
            words[many] = integers[many].astype(np.uint64)
        words |= np.minimum(integers, MAX_SHORT_DIGITS).astype(np.uint64) << np.uint64(56)
        return np.where(self.negative[rows], SIGN_BIT - np.uint64(1) - words, SIGN_BIT | words)

    def digits(self, rows: Index, skipped: Index, count: int) -> Words:
        """Return the digits from a number of digits on as four bits each, from the highest bits on."""
        high = self._eight_digits(rows, skipped) << np.uint64(32)
        low = self._eight_digits(rows, skipped + WORD_BYTES)
        return high | (low & np.uint64(0xFFFFFFFF ^ ((1 << (4 * (DIGITS_PER_WORD - count))) - 1)))

    def _eight_digits(self, rows: Index, skipped: Index) -> Words:
        begins, integers, fractions = self.begins[rows], self.integers[rows], self.fractions[rows]
        before = np.clip(integers - skipped, 0, WORD_BYTES)
        found = _pack_digits(_load_words(self.data, begins + np.minimum(skipped, integers), before))
        behind = np.clip(integers + fractions - skipped - before, 0, WORD_BYTES - before)
        if behind.any():
            start = begins + integers + 1 + np.clip(skipped - integers, 0, fractions)
            start = np.minimum(start, len(self.data) - WORD_BYTES)
            found |= _pack_digits(_load_words(self.data, start, behind)) >> (4 * before).astype(np.uint64)
        return found


def _parse_numbers(data: Bytes, begins: Index, ends: Index, rows: Index) -> _Numbers:
    """Parse the numbers of some rows: blanks, a minus sign, digits, a point, digits; anything else is 0."""
    end = ends[rows]
    begin = begins[rows]
    begin = begin + run_lengths(data, begin, end, _blank_flags, b" \t")
    negative = (data[begin] == ord("-")) & (begin < end)
    begin = begin + negative
    begin = begin + run_lengths(data, begin, end, _zero_flags, b"0")
    integers = run_lengths(data, begin, end, _digit_flags, b"0123456789")
    point = begin + integers
    has_point = (point < end) & (data[point] == ord("."))
    fractions = np.zeros_like(begin)
    if has_point.any():
        fractions[has_point] = run_lengths(data, point[has_point] + 1, end[has_point], _digit_flags, b"0123456789")
        zeros = np.zeros_like(begin)
        zeros[has_point] = run_lengths(data, point[has_point] + 1, end[has_point], _zero_flags, b"0")
        fractions[(integers == 0) & (zeros == fractions)] = 0
    negative &= (integers > 0) | (fractions > 0)
    columns = [np.zeros(len(begins), dtype=column.dtype) for column in (begin, integers, fractions, negative)]
    for column, values in zip(columns, (begin, integers, fractions, negative), strict=True):
        column[rows] = values
    return _Numbers(data, *columns)


def run_lengths(data: Bytes, begins: Index, ends: Index, flags: Callable[[Words], Words], characters: bytes) -> Index:
    """Return how many bytes from each offset on are of a kind; `flags` sets the highest bit of all other bytes."""
    view = np.ndarray((len(data) - WORD_BYTES + 1,), ">u8", data.data, 0, (1,))
    lengths = np.zeros_like(begins)
    active = np.flatnonzero(begins < ends)
    for _ in range(MAX_WORD_ROUNDS):
        if not len(active):
            break
        found = flags(view[begins[active] + lengths[active]].astype(np.uint64))
        # the exponent of the number is that of its highest bit
        highest = (found.astype(np.float64).view(np.int64) >> 52) - 1023
        lengths[active] += np.where(found == 0, WORD_BYTES, (63 - highest) >> 3)
        active = active[(found == 0) & (begins[active] + lengths[active] < ends[active])]
    for at in active.tolist():  # runs longer than MAX_WORD_ROUNDS words
        begin = int(begins[at] + lengths[at])
        text = data[begin : int(ends[at])].tobytes()
        lengths[at] += len(text) - len(text.lstrip(characters))
    np.minimum(lengths, np.maximum(ends - begins, 0), out=lengths)
    return lengths


def _nonzero_flags(words: Words) -> Words:
    """Set the highest bit of every byte that is not 0, and no other bit."""
    low = np.uint64(0x7F * ONES)
    return (((words & low) + low) | words) & np.uint64(0x80 * ONES)


def _zero_flags(words: Words) -> Words:
    return _nonzero_flags(words ^ np.uint64(ord("0") * ONES))


def _blank_flags(words: Words) -> Words:
    return _nonzero_flags(words ^ np.uint64(SPACE * ONES)) & _nonzero_flags(words ^ np.uint64(TAB * ONES))


def _digit_flags(words: Words) -> Words:
    words = words ^ np.uint64(ord("0") * ONES)
    return (((words & np.uint64(0x7F * ONES)) + np.uint64(0x76 * ONES)) | words) & np.uint64(0x80 * ONES)


def _pack_digits(words: Words) -> Words:
    """Pack eight digits of one byte each into the lower 32 bits, four bits each."""
    words &= np.uint64(0x0F * ONES)
    words = (words | (words >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
    words = (words | (words >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
    return (words | (words >> np.uint64(16))) & np.uint64(0xFFFFFFFF)


def sorted_lines(
    data: Bytes, low: int, high: int, order: LineOrder, dividers: Sequence[Boundary] = (), position: int = 0
) -> tuple[SortedLines, list[int]]:
    """Sort the lines between two offsets of a buffer; also return how many bytes come before each divider.

    A divider is a line, and a position in the whole input that decides among equal lines; `position` is that of the
    first line. The buffer needs space for the dividers behind the lines. A unique order keeps the first of equal lines.
    """
    lines = scan_lines(data, low, high, order)
    is_divider = np.zeros(len(lines.begins) + len(dividers), dtype=bool)
    if dividers:
        text = b"".join(one.key + b"\n" for one in dividers)
        data[high : high + len(text)] = np.frombuffer(text, dtype=np.uint8)
        positions = np.array([one.position for one in dividers], dtype=np.uint64).astype(np.int64)
        at = np.searchsorted(lines.begins + (position - low), positions, "left")
        if order.unique:  # equal lines must stay together
            at[:] = 0
        is_divider[np.sort(at) + np.arange(len(at))] = True
        columns = zip(lines[1:], scan_lines(data, high, high + len(text), order)[1:], strict=True)
        lines = Lines(data, *(np.insert(column, at, added) for column, added in columns))
    index, tied = sort_lines(lines, order)
    is_line = ~is_divider[index]
    places = np.flatnonzero(~is_line) - np.arange(len(dividers))
    if dividers:
        index = index[is_line]
    if order.unique:
        groups = np.cumsum(~tied)[is_line]
        kept = np.ones(len(index), dtype=bool)
        kept[1:] = groups[1:] != groups[:-1]
        places = np.concatenate([[0], np.cumsum(kept)])[places]
        index = index[kept]
    begins = lines.begins[index]
    found = SortedLines(data, begins, lines.ends[index] - begins + 1)
    return found, [found.offset_of(place) for place in places.tolist()]
