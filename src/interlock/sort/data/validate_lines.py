"""Check of the order of lines, line by line in plain Python: slow, but independent of the sort.

Invariant: it shares no code with the sort but the description of the order and the reading of lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from interlock.sort.data.checksum import MASK_64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from interlock.sort.data.line_order import LineKey, LineOrder
    from interlock.sort.data.records import Source

BLOCK_BYTES = 4 << 20
BLANKS = b" \t"
FIELD = re.compile(rb"[ \t]*[^ \t]+|[ \t]+")
NUMBER = re.compile(rb"[ \t]*(-?\d*\.?\d*)")
NO_NUMBER = {b"", b"-", b".", b"-."}

Value = Any  # bytes or a Decimal, the same for all values of a key


@dataclass(slots=True)
class LineSummary:
    """Summary of consecutive lines: their number and bytes, the sum of their hashes, the first and the last one."""

    lines: int = 0
    size: int = 0
    digest: int = 0
    equal: int = 0  # lines that compare as equal to the one before
    first: bytes | None = None
    last: bytes | None = None
    disorder: tuple[int, bytes] | None = None  # offset and content of the first line that is out of order


def summarize_lines(source: Source, order: LineOrder | None, on_read: Callable[[int], object]) -> LineSummary:
    """Read all lines of a source; check their order if one is given."""
    found = LineSummary()
    before: list[Value] | None = None
    digest = 0
    for line in _read_lines(source, on_read):
        digest += xxhash.xxh3_64_intdigest(line)
        if order is not None:
            values = _values(line, order)
            if before is not None and found.disorder is None:
                direction = compare_values(before, values, order)
                found.equal += not direction
                if direction > 0 or (order.unique and not direction):
                    found.disorder = (found.size, line)
            before = values
        if found.first is None:
            found.first = line
        found.last = line
        found.lines += 1
        found.size += len(line) + 1
    found.digest = digest & MASK_64
    return found


def compare_lines(one: bytes, other: bytes, order: LineOrder) -> int:
    """Return -1 if a line belongs before another one, 0 if they compare as equal, else 1."""
    return compare_values(_values(one, order), _values(other, order), order)


def compare_values(one: list[Value], other: list[Value], order: LineOrder) -> int:
    """Compare two lines by the values of their keys."""
    for mine, its, key in zip(one, other, order.comparisons, strict=True):
        if mine != its:
            return 1 if (mine > its) is not key.reverse else -1
    return 0


def _read_lines(source: Source, on_read: Callable[[int], object]) -> Iterator[bytes]:
    for number in range(-(-source.records // BLOCK_BYTES)):
        block = source.block(number, BLOCK_BYTES)
        text = np.empty(block.size, dtype=np.uint8)
        block.read(text)
        on_read(block.size)
        if block.size:
            yield from text.tobytes()[:-1].split(b"\n")


def _values(line: bytes, order: LineOrder) -> list[Value]:
    return [_value(line, key, order.separator) for key in order.comparisons]


def _value(line: bytes, key: LineKey, separator: int | None) -> Value:
    """Return the number or the bytes by which a key compares a line."""
    begin, end = 0, len(line)
    ends = _field_ends(line, separator) if key.needs_fields else []
    if key.first_field:
        begin = _begin_of(line, ends, key.first_field, separator)
    begin = _advance(line, begin, key.skips_blanks, key.first_character)
    if key.last_field is not None:
        if key.last_characters:
            end = _begin_of(line, ends, key.last_field, separator)
            end = _advance(line, end, key.skips_blanks_at_end, key.last_characters)
        elif key.last_field < len(ends):
            end = ends[key.last_field]
    text = line[begin : max(begin, end)]
    if key.numeric:
        match = NUMBER.match(text)
        digits = match[1] if match is not None else b""
        return Decimal(0 if digits in NO_NUMBER else digits.decode())
    return text.upper() if key.folded else text


def _field_ends(line: bytes, separator: int | None) -> list[int]:
    if separator is None:
        return [match.end() for match in FIELD.finditer(line)]
    ends = [at for at, byte in enumerate(line) if byte == separator]
    return [*ends, len(line)]


def _begin_of(line: bytes, ends: list[int], field: int, separator: int | None) -> int:
    if not field:
        return 0
    if field > len(ends):
        return len(line)
    return min(ends[field - 1] + (separator is not None), len(line))


def _advance(line: bytes, begin: int, skips_blanks: bool, characters: int) -> int:  # noqa: FBT001 - of the key
    if skips_blanks:
        begin = len(line) - len(line[begin:].lstrip(BLANKS))
    return min(begin + characters, len(line))
