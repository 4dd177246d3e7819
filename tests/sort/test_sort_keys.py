"""Keys are sorted as bytes, of any length and distribution, and rows with equal keys keep their order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.sort.data.keys import Boundary, find_boundaries, gather_rows, sort_rows, word_offsets
from sort_distributions import DISTRIBUTIONS, DUPLICATE_KEYS, distributed_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.unit


def expected(rows: NDArray[np.uint8], key_length: int) -> list[int]:
    return sorted(range(len(rows)), key=lambda at: rows[at, :key_length].tobytes())


@st.composite
def tables(draw: st.DrawFn) -> tuple[NDArray[np.uint8], int]:
    record_length = draw(st.integers(1, 40))
    key_length = draw(st.integers(1, record_length))
    count = draw(st.integers(0, 60))
    letters = draw(st.sampled_from([1, 2, 3, 256]))
    shared = draw(st.integers(0, key_length))
    seed = draw(st.integers(0, 2**32 - 1))
    rows = np.random.default_rng(seed).integers(0, letters, (count, record_length), dtype=np.uint8)
    rows[:, :shared] = 7
    return rows, key_length


@given(tables())
@settings(max_examples=300, deadline=None)
def test_rows_are_sorted_by_key_and_ties_by_position(table: tuple[NDArray[np.uint8], int]) -> None:
    rows, key_length = table
    assert sort_rows(rows, key_length).tolist() == expected(rows, key_length)


@given(tables(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_boundary_is_found_by_key_and_position(table: tuple[NDArray[np.uint8], int], data: st.DataObject) -> None:
    rows, key_length = table
    first = 1000
    index = sort_rows(rows, key_length)
    keys = [rows[at, :key_length].tobytes() for at in range(len(rows))]
    sought = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(keys) if keys else st.binary(min_size=key_length, max_size=key_length),
                st.integers(900, 1100),
            ),
            max_size=5,
        )
    )
    boundaries = [Boundary(key, position) for key, position in sought]
    counts = [sum((key, first + at) < boundary for at, key in enumerate(keys)) for boundary in boundaries]
    assert find_boundaries(rows, index, first, key_length, boundaries) == counts


@pytest.mark.parametrize("likeness", [*DISTRIBUTIONS, "same head", "long shared head"])
def test_large_blocks_of_any_distribution_are_sorted(likeness: str) -> None:
    rows = distributed_rows(likeness if likeness in DISTRIBUTIONS else "uniform", 70_000)
    if likeness == "same head":
        rows[:, :6] &= 1
    elif likeness == "long shared head":
        rows[:, :8] = 65
    index = sort_rows(rows, 10)
    assert index.tolist() == expected(rows, 10)
    into = np.empty_like(rows)
    gather_rows(rows, index, into)
    assert (into == rows[index]).all()


def test_the_distributions_are_what_their_names_say() -> None:
    count = 20_000
    found = {name: [bytes(key) for key in distributed_rows(name, count)[:, :10]] for name in DISTRIBUTIONS}
    distinct = {name: len(set(keys)) for name, keys in found.items()}
    assert distinct["uniform"] == distinct["presorted"] == distinct["reversed"] == count
    assert (distinct["duplicates"], distinct["constant"]) == (DUPLICATE_KEYS, 1)
    assert found["uniform"] != found["presorted"] == sorted(found["uniform"])
    assert found["reversed"] == found["presorted"][::-1]
    for name in ("skewed", "skewed with small keys"):
        ((_, hottest),) = Counter(found[name]).most_common(1)
        assert 0.1 < hottest / count < 0.3
        assert distinct[name] > count / 20
    assert max(found["skewed with small keys"]) < bytes([1]) < max(found["skewed"])


def test_the_words_of_a_key_cover_all_of_it_in_order() -> None:
    for length in range(1, 40):
        covered = sorted({at for offset in word_offsets(length) for at in range(offset, offset + 8)})
        assert covered[:length] == list(range(length))
        assert length < 8 or covered == list(range(length))
