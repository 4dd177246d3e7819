"""Makes rows whose keys are skewed, duplicate, constant, presorted or reversed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

DISTRIBUTIONS = (
    "uniform",
    "skewed",
    "skewed with small keys",
    "duplicates",
    "constant",
    "presorted",
    "reversed",
)
DUPLICATE_KEYS = 50  # distinct keys of `duplicates`
ZIPF_EXPONENT = 1.2  # of `skewed`: the most frequent key has about a fifth of all rows
GREATEST_RANK = 1 << 40  # keeps the first bytes of small keys equal
SCATTER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that every rank keeps a key of its own


def distributed_rows(
    distribution: str, count: int, *, seed: int = 3, length: int = 100, key_length: int = 10
) -> NDArray[np.uint8]:
    """Make rows of random bytes whose keys have one of the DISTRIBUTIONS."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (count, length), dtype=np.uint8)
    keys = rows[:, :key_length]
    match distribution:
        case "uniform":
            pass
        case "skewed":
            keys[:] = _pack(_zipf_ranks(rng, count) * SCATTER, key_length)
        case "skewed with small keys":
            keys[:] = _pack(_zipf_ranks(rng, count), key_length)
        case "duplicates":
            few = rng.integers(0, 256, (DUPLICATE_KEYS, key_length), dtype=np.uint8)
            keys[:] = few[rng.integers(0, DUPLICATE_KEYS, count)]
        case "constant":
            keys[:] = 7
        case "presorted":
            rows = rows[np.lexsort(keys[:, ::-1].T)]
        case "reversed":
            rows = rows[np.lexsort(keys[:, ::-1].T)[::-1]]
        case _:
            raise ValueError(f"{distribution} is none of {DISTRIBUTIONS}")
    return rows


def _zipf_ranks(rng: np.random.Generator, count: int) -> NDArray[np.uint64]:
    return np.minimum(rng.zipf(ZIPF_EXPONENT, count), GREATEST_RANK).astype(np.uint64)


def _pack(numbers: NDArray[np.uint64], key_length: int) -> NDArray[np.uint8]:
    """Write numbers as big-endian keys; a key longer than eight bytes repeats the last one."""
    pieces = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
    return pieces[:, np.minimum(np.arange(key_length), 7)]
