"""The order of one buffer of a sort, whatever its format: records of one length, or lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.sort.data.keys import SortedRecords, find_boundaries, sort_rows
from interlock.sort.data.lines import PADDING_BYTES, sorted_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.sort.data.keys import Boundary, Rows, SortedRows
    from interlock.sort.data.records import RecordFormat


def sort_buffer(
    buffer: Rows, rows: int, record_format: RecordFormat, boundaries: Sequence[Boundary] = (), position: int = 0
) -> tuple[SortedRows, list[int]]:
    """Sort the rows at the begin of a buffer; return them and how many come before each boundary.

    `position` is the input position of the first row. Behind the rows, the buffer has `spare_bytes` more.
    """
    if record_format.lines is not None:
        return sorted_lines(buffer, 0, rows, record_format.lines, boundaries, position)
    length, key_length = record_format.record_length, record_format.key_length
    records = buffer[: rows * length].reshape(rows, length)
    index = sort_rows(records, key_length)
    return SortedRecords(records, index), find_boundaries(records, index, position, key_length, boundaries)


def spare_bytes(record_format: RecordFormat, boundaries: Sequence[Boundary] = ()) -> int:
    """Return how many bytes `sort_buffer` needs behind the rows."""
    if record_format.lines is None:
        return 0
    return PADDING_BYTES + sum(len(one.key) + 1 for one in boundaries)
