"""Order-independent checksum of records, to compare input and output, and a fingerprint of input files.

Invariant: equal multisets of records of one length have equal checksums, however they are divided. A record that is
lost, duplicated or changed in any bit, or two that exchange bytes, change the checksum except with a probability of
about 2**-64.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from interlock.sort.data.input_stamps import take_stamps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from interlock.sort.data.records import Source

WORD_BYTES = 4
ROWS_AT_ONCE = 8192  # their words fit the processor's cache
MASK_64 = (1 << 64) - 1


def compute_checksum(rows: NDArray[np.uint8]) -> int:
    """Return the sum, modulo 2**64, of a hash of every row."""
    total = 0
    for first in range(0, len(rows), ROWS_AT_ONCE):
        hashes = _hash_rows(rows[first : first + ROWS_AT_ONCE])
        total += int(np.add.reduce(hashes, dtype=np.uint64))
    return total & MASK_64


def combine_checksums(*checksums: int) -> int:
    """Return the checksum of all records together from those of the parts."""
    return sum(checksums) & MASK_64


def format_checksum(value: int) -> str:
    """Format a checksum as 16 hexadecimal digits."""
    return f"{value:016x}"


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter numbers over 64 bits, one to one (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def fingerprint(source: Source) -> str:
    """Return a hash of the format, the extents, and the stamps of the files of a source."""
    digest = xxhash.xxh3_64(str(source.format).encode())
    stamps = take_stamps(source)
    for extent in source.extents:
        if extent.path:
            digest.update(os.fsencode(f"{extent}{stamps[extent.path]}"))
    return digest.hexdigest()


def _hash_rows(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Hash each row: the sum of its words times odd random factors, mixed so that sums of rows do not cancel out."""
    length = rows.shape[1]
    words = -(-length // WORD_BYTES)
    if length % WORD_BYTES or not rows.flags.c_contiguous:
        padded = np.zeros((len(rows), words * WORD_BYTES), dtype=np.uint8)
        padded[:, :length] = rows
        rows = padded
    wide = rows.view(np.dtype("<u4")).astype(np.uint64)
    return mix_bits(np.matmul(wide, _factors(words)) + np.uint64(length))


@lru_cache(maxsize=8)
def _factors(words: int) -> NDArray[np.uint64]:
    numbers = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mix_bits(numbers) | np.uint64(1)
