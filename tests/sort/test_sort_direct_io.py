"""Direct I/O writes and reads the same bytes as ordinary I/O; a full disk is an error at once."""

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
from interlock.sort.data.keys import SortedRecords
from interlock.sort.io.buffers import IoThread
from interlock.sort.io.direct_io import (
    IO_BUFFER_BYTES,
    MAX_IO_BYTES,
    PAGE_BYTES,
    DirectReader,
    DirectWriter,
    align_rows,
    io_buffer,
    read_cached,
    read_uncached,
)
from interlock.sort.io.memory import allocate_huge_pages

pytestmark = pytest.mark.unit

PLACES = [Path(tempfile.gettempdir()), Path("/dev/shm")]  # noqa: S108 - a file system that has only memory


@pytest.mark.parametrize("place", [place for place in PLACES if place.is_dir()])
@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 200), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_ranges_are_written_in_any_size_and_order(place: Path, counts: list[int], length: int, random: object) -> None:
    whole = np.random.default_rng(len(counts)).integers(0, 256, sum(counts) * length, dtype=np.uint8)
    pieces = [(start * length, count) for start, count in zip(np.cumsum([0, *counts]).tolist(), counts, strict=False)]
    random.shuffle(pieces)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(dir=place) as directory:
        path = Path(directory, "file")
        file = DirectWriter(path, len(whole))
        for offset, count in pieces:
            with io_buffer() as buffer:
                data = buffer[offset % PAGE_BYTES :][: count * length]
                data[:] = whole[offset : offset + count * length]
                file.write(data.data, offset)
        file.sync()
        file.close()
        file.close()
        assert path.read_bytes() == whole.tobytes()


def test_ranges_can_be_read_at_any_offset_and_size(tmp_path: Path) -> None:
    whole = np.random.default_rng(2).integers(0, 256, MAX_IO_BYTES + 3 * PAGE_BYTES + 17, dtype=np.uint8)
    (tmp_path / "file").write_bytes(whole.tobytes())
    file = DirectReader(tmp_path / "file")
    for offset, size in [
        (0, 1),
        (PAGE_BYTES - 1, 2),
        (5, len(whole) - 5),
        (len(whole) - 1, 1),
        (7, 0),
        (PAGE_BYTES, PAGE_BYTES),
    ]:
        into = np.zeros(size, dtype=np.uint8)
        file.read(into.data, offset)
        assert (into == whole[offset : offset + size]).all()
    with pytest.raises(SortError, match="became shorter"):
        file.read(np.zeros(10, dtype=np.uint8).data, len(whole) - 5)
    file.close()


@pytest.mark.parametrize("way", ["direct", "unsupported", "refused"])
def test_rows_are_read_with_and_without_direct_io(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.random.default_rng(2).integers(0, 256, MAX_IO_BYTES + 3 * PAGE_BYTES + 17, dtype=np.uint8)
    (tmp_path / "file").write_bytes(whole.tobytes())
    if way == "unsupported":
        monkeypatch.setattr("interlock.sort.io.direct_io._open_direct", lambda *_: -1)
    file = DirectReader(tmp_path / "file")
    if way == "refused":
        monkeypatch.setattr("interlock.sort.io.direct_io.PAGE_BYTES", 1)
    array = allocate_huge_pages(whole.nbytes + PAGE_BYTES)
    for offset, count in [(0, 41_000), (100, 41_000), (4_000, 2), (PAGE_BYTES, 50), (8_100, 30_000)]:
        rows = align_rows(array, count, 100, offset)
        file.read(rows.reshape(-1).data, offset)
        assert rows.tobytes() == whole[offset : offset + count * 100].tobytes()
    with io_buffer() as buffer:
        for offset in (0, 1, PAGE_BYTES - 1, PAGE_BYTES):
            assert bytes(file.view(buffer, offset, MAX_IO_BYTES)) == whole[offset : offset + MAX_IO_BYTES].tobytes()
    file.close()


@pytest.mark.parametrize(("length", "offset"), [(1 << 20, PAGE_BYTES - 1), ((1 << 20) - 1, 1), (PAGE_BYTES, 7), (1, 0)])
def test_rows_of_any_length_are_written_in_order_at_any_offset(length: int, offset: int, tmp_path: Path) -> None:
    rows = np.random.default_rng(3).integers(0, 256, (5, length), dtype=np.uint8)
    index = np.array([3, 0, 4, 1, 2])
    file = DirectWriter(tmp_path / "file", offset + rows.nbytes)
    checksum = IoThread().write_sorted(SortedRecords(rows, index), 0, len(index), file, offset)
    file.close()
    assert (tmp_path / "file").read_bytes()[offset:] == rows[index].tobytes()
    assert checksum == xxhash.xxh3_64_hexdigest(rows[index].tobytes())


def test_a_file_system_with_other_alignment_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.sort.io.direct_io.PAGE_BYTES", 1)
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


def test_cached_pages_are_read_and_others_are_not(tmp_path: Path) -> None:
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


def test_an_io_buffer_has_one_user_and_is_reused() -> None:
    with io_buffer() as first, io_buffer() as second:
        assert first.nbytes == second.nbytes == IO_BUFFER_BYTES
        assert not np.shares_memory(first, second)
        assert first.ctypes.data % PAGE_BYTES == second.ctypes.data % PAGE_BYTES == 0
    with pytest.raises(ZeroDivisionError), io_buffer() as third:
        _ = 1 // 0
    with io_buffer() as fourth:
        assert fourth is third, "an error returns it too"


def test_too_little_space_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SortError, match=r"cannot write [0-9,]+ bytes to .*file: (No space left|File too large)"):
        DirectWriter(tmp_path / "file", 1 << 60)
    with pytest.raises(SortError, match=r"cannot write 5 bytes to .*/none/file: No such file"):
        DirectWriter(tmp_path / "none" / "file", 5)
