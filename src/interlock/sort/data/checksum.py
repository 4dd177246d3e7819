"""TODO docstring."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from interlock.sort.data.records import Source

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


WORD = 4


AT_ONCE = 8192  # rows: their words fit the processor's cache


MASK = (1 << 64) - 1


def digest(rows: NDArray[np.uint8]) -> int:
    """Give the sum, modulo 2**64, of a hash of every row; digests of parts add up to that of the whole."""
    total = 0
    for first in range(0, len(rows), AT_ONCE):
        hashes = _hashes(rows[first : first + AT_ONCE])
        total += int(np.add.reduce(hashes, dtype=np.uint64))
    return total & MASK


def together(*digests: int) -> int:
    """Give the digest of all records whose digests these are."""
    return sum(digests) & MASK


def written(value: int) -> str:
    """Write a digest as 16 hexadecimal digits."""
    return f"{value:016x}"


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter numbers over 64 bits, one to one (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hashes(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Hash each row: its words times odd random factors, summed, then mixed so that sums of rows tell nothing."""
    length = rows.shape[1]
    words = -(-length // WORD)
    if length % WORD or not rows.flags.c_contiguous:
        padded = np.zeros((len(rows), words * WORD), dtype=np.uint8)
        padded[:, :length] = rows
        rows = padded
    wide = rows.view(np.dtype("<u4")).astype(np.uint64)
    return mixed(np.matmul(wide, _factors(words)) + np.uint64(length))


@lru_cache(maxsize=8)
def _factors(words: int) -> NDArray[np.uint64]:
    numbers = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mixed(numbers) | np.uint64(1)


def fingerprint(source: Source) -> str:
    """Give what tells two sources apart: their format and extents, and the sizes and times of their files."""
    digest = xxhash.xxh3_64(str(source.format).encode())
    for extent in source.extents:
        status = Path(extent.path).stat()
        digest.update(os.fsencode(f"{extent}{status.st_size}{status.st_mtime_ns}"))
    return digest.hexdigest()
