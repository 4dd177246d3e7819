"""What goes past the page cache is in the file whichever way it went; a full disk is known of at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.errors import SortError
from interlock.sort.direct import (
    AT_ONCE,
    PAGE,
    DirectReader,
    DirectWriter,
    aligned,
    placed,
    read_cached,
    read_uncached,
)

pytestmark = pytest.mark.unit

PLACES = [Path(tempfile.gettempdir()), Path("/dev/shm")]  # noqa: S108 - a file system that has only memory


@pytest.mark.parametrize("place", [place for place in PLACES if place.is_dir()])
@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 200), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_pieces_of_any_size_in_any_order_make_the_file(
    place: Path, counts: list[int], length: int, random: object
) -> None:
    whole = np.random.default_rng(len(counts)).integers(0, 256, sum(counts) * length, dtype=np.uint8)
    pieces = [(start * length, count) for start, count in zip(np.cumsum([0, *counts]).tolist(), counts, strict=False)]
    random.shuffle(pieces)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(dir=place) as directory:
        path = Path(directory, "file")
        file = DirectWriter(path, len(whole))
        for offset, count in pieces:
            rows = placed(aligned(count * length), count, length, offset)
            rows[:] = whole[offset : offset + count * length].reshape(count, length)
            file.write(rows.reshape(-1).data, offset)
        file.sync()
        file.close()
        file.close()
        assert path.read_bytes() == whole.tobytes()


def test_a_piece_is_read_from_any_place_whatever_its_size(tmp_path: Path) -> None:
    whole = np.random.default_rng(2).integers(0, 256, AT_ONCE + 3 * PAGE + 17, dtype=np.uint8)
    (tmp_path / "file").write_bytes(whole.tobytes())
    file = DirectReader(tmp_path / "file")
    for offset, size in [(0, 1), (PAGE - 1, 2), (5, len(whole) - 5), (len(whole) - 1, 1), (7, 0), (PAGE, PAGE)]:
        room = np.zeros(size, dtype=np.uint8)
        file.read(room.data, offset)
        assert (room == whole[offset : offset + size]).all()
    with pytest.raises(SortError, match="became shorter"):
        file.read(np.zeros(10, dtype=np.uint8).data, len(whole) - 5)
    file.close()


def test_a_file_system_that_wants_other_pages_gets_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.sort.direct.PAGE", 1)
    data = np.random.default_rng(3).integers(0, 256, 10_001, dtype=np.uint8)
    file = DirectWriter(tmp_path / "file", len(data))
    file.write(data.data[:5], 0)
    file.write(data.data[5:], 5)
    file.close()
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    reader = DirectReader(tmp_path / "file")
    room = np.zeros(len(data) - 3, dtype=np.uint8)
    reader.read(room.data, 3)
    reader.close()
    assert (room == data[3:]).all()


def test_what_is_in_memory_already_is_told_from_what_is_not(tmp_path: Path) -> None:
    whole = np.random.default_rng(2).integers(0, 256, 3 << 20, dtype=np.uint8)
    path = tmp_path / "file"
    path.write_bytes(whole.tobytes())
    with path.open("rb") as file:
        room = np.zeros(len(whole), dtype=np.uint8)
        assert read_cached(file.fileno(), room.data, 0) in {0, len(whole)}, "all of it, where the system can tell"
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        room[:] = 0
        done = read_cached(file.fileno(), room.data, 5)
        read_uncached(path, room.data[done : len(whole) - 5], 5 + done)
        assert (room[: len(whole) - 5] == whole[5:]).all()
        assert read_cached(file.fileno(), room.data, len(whole)) == 0


def test_too_little_space_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SortError, match=r"cannot write [0-9,]+ bytes to .*file: (No space left|File too large)"):
        DirectWriter(tmp_path / "file", 1 << 60)
    with pytest.raises(SortError, match=r"cannot write 5 bytes to .*/none/file: No such file"):
        DirectWriter(tmp_path / "none" / "file", 5)
