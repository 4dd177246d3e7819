"""Keys are sorted as bytes, of any length and distribution, and rows with equal keys keep their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.sort.data.keys import Boundary, find_boundaries, gather_rows, sort_rows, word_offsets

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


@pytest.mark.parametrize("likeness", ["uniform", "same head", "few keys", "one key", "long shared head", "presorted"])
def test_large_blocks_of_any_distribution_are_sorted(likeness: str) -> None:
    rng = np.random.default_rng(5)
    rows = rng.integers(0, 256, (70_000, 100), dtype=np.uint8)
    if likeness == "same head":
        rows[:, :6] = rng.integers(0, 2, (len(rows), 6), dtype=np.uint8)
    elif likeness == "few keys":
        rows[:, :10] = rng.integers(0, 256, (50, 10), dtype=np.uint8)[rng.integers(0, 50, len(rows))]
    elif likeness == "one key":
        rows[:, :10] = 65
    elif likeness == "long shared head":
        rows[:, :8] = 65
    elif likeness == "presorted":
        rows[:] = rows[np.lexsort(rows[:, 9::-1].T)]
    index = sort_rows(rows, 10)
    assert index.tolist() == expected(rows, 10)
    into = np.empty_like(rows)
    gather_rows(rows, index, into)
    assert (into == rows[index]).all()


def test_the_words_of_a_key_cover_all_of_it_in_order() -> None:
    for length in range(1, 40):
        covered = sorted({at for offset in word_offsets(length) for at in range(offset, offset + 8)})
        assert covered[:length] == list(range(length))
        assert length < 8 or covered == list(range(length))
