"""What goes past the page cache is in the file whichever way it went; a full disk is known of at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.errors import SortError
from interlock.sort.io.buffers import Spout
from interlock.sort.io.direct_io import (
    AT_ONCE,
    PAGE,
    ROOM,
    DirectReader,
    DirectWriter,
    placed,
    read_cached,
    read_uncached,
    room,
)
from interlock.sort.io.memory import large_pages

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
            with room() as lent:
                data = lent[offset % PAGE :][: count * length]
                data[:] = whole[offset : offset + count * length]
                file.write(data.data, offset)
        file.sync()
        file.close()
        file.close()
        assert path.read_bytes() == whole.tobytes()


def test_a_piece_is_read_from_any_place_whatever_its_size(tmp_path: Path) -> None:
    whole = np.random.default_rng(2).integers(0, 256, AT_ONCE + 3 * PAGE + 17, dtype=np.uint8)
    (tmp_path / "file").write_bytes(whole.tobytes())
    file = DirectReader(tmp_path / "file")
    for offset, size in [(0, 1), (PAGE - 1, 2), (5, len(whole) - 5), (len(whole) - 1, 1), (7, 0), (PAGE, PAGE)]:
        into = np.zeros(size, dtype=np.uint8)
        file.read(into.data, offset)
        assert (into == whole[offset : offset + size]).all()
    with pytest.raises(SortError, match="became shorter"):
        file.read(np.zeros(10, dtype=np.uint8).data, len(whole) - 5)
    file.close()


@pytest.mark.parametrize("way", ["past the page cache", "without such a way", "that is refused"])
def test_rows_are_read_to_their_place_and_seen_in_a_room_whatever_the_file_system_can_do(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = np.random.default_rng(2).integers(0, 256, AT_ONCE + 3 * PAGE + 17, dtype=np.uint8)
    (tmp_path / "file").write_bytes(whole.tobytes())
    if way == "without such a way":
        monkeypatch.setattr("interlock.sort.io.direct_io._open_direct", lambda *_: -1)
    file = DirectReader(tmp_path / "file")
    if way == "that is refused":
        monkeypatch.setattr("interlock.sort.io.direct_io.PAGE", 1)
    array = large_pages(whole.nbytes + PAGE)
    for offset, count in [(0, 41_000), (100, 41_000), (4_000, 2), (PAGE, 50), (8_100, 30_000)]:
        rows = placed(array, count, 100, offset)
        file.read(rows.reshape(-1).data, offset)
        assert rows.tobytes() == whole[offset : offset + count * 100].tobytes()
    with room() as lent:
        for offset in (0, 1, PAGE - 1, PAGE):
            assert bytes(file.view(lent, offset, AT_ONCE)) == whole[offset : offset + AT_ONCE].tobytes()
    file.close()


@pytest.mark.parametrize(("length", "offset"), [(1 << 20, PAGE - 1), ((1 << 20) - 1, 1), (PAGE, 7), (1, 0)])
def test_rows_of_any_length_are_poured_in_order_to_any_place(length: int, offset: int, tmp_path: Path) -> None:
    rows = np.random.default_rng(3).integers(0, 256, (5, length), dtype=np.uint8)
    index = np.array([3, 0, 4, 1, 2])
    file = DirectWriter(tmp_path / "file", offset + rows.nbytes)
    checksum = Spout().pour(rows, index, file, offset)
    file.close()
    assert (tmp_path / "file").read_bytes()[offset:] == rows[index].tobytes()
    assert checksum == xxhash.xxh3_64_hexdigest(rows[index].tobytes())


def test_a_file_system_that_wants_other_pages_gets_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.sort.io.direct_io.PAGE", 1)
    data = np.random.default_rng(3).integers(0, 256, 10_001, dtype=np.uint8)
    file = DirectWriter(tmp_path / "file", len(data))
    file.write(data.data[:5], 0)
    file.write(data.data[5:], 5)
    file.close()
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    reader = DirectReader(tmp_path / "file")
    into = np.zeros(len(data) - 3, dtype=np.uint8)
    reader.read(into.data, 3)
    reader.close()
    assert (into == data[3:]).all()


def test_what_is_in_memory_already_is_told_from_what_is_not(tmp_path: Path) -> None:
    whole = np.random.default_rng(2).integers(0, 256, 3 << 20, dtype=np.uint8)
    path = tmp_path / "file"
    path.write_bytes(whole.tobytes())
    with path.open("rb") as file:
        into = np.zeros(len(whole), dtype=np.uint8)
        assert read_cached(file.fileno(), into.data, 0) in {0, len(whole)}, "all of it, where the system can tell"
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        into[:] = 0
        done = read_cached(file.fileno(), into.data, 5)
        read_uncached(path, into.data[done : len(whole) - 5], 5 + done)
        assert (into[: len(whole) - 5] == whole[5:]).all()
        assert read_cached(file.fileno(), into.data, len(whole)) == 0


def test_a_room_is_lent_to_one_at_a_time_and_then_again() -> None:
    with room() as first, room() as second:
        assert first.nbytes == second.nbytes == ROOM
        assert not np.shares_memory(first, second)
        assert first.ctypes.data % PAGE == second.ctypes.data % PAGE == 0
    with pytest.raises(ZeroDivisionError), room() as third:
        _ = 1 // 0
    with room() as fourth:
        assert fourth is third, "who fails gives it back too"


def test_too_little_space_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SortError, match=r"cannot write [0-9,]+ bytes to .*file: (No space left|File too large)"):
        DirectWriter(tmp_path / "file", 1 << 60)
    with pytest.raises(SortError, match=r"cannot write 5 bytes to .*/none/file: No such file"):
        DirectWriter(tmp_path / "none" / "file", 5)
