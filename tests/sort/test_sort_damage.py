"""Bytes of temporary files that change on the disk: the sort fails with the name of the file, and writes no output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

from interlock.errors import SortError
from interlock.sort.io.buffers import SpilledRows
from interlock.sort.io.direct_io import IO_BUFFER_BYTES, PAGE_BYTES
from interlock.sort.io.page_checksums import DamagedFile, PageChecksums, compute_checksums
from interlock.sort.io.runs import read_manifest, write_manifest
from interlock.sort.workdir import Journal
from sort_cluster import random_rows, write_source
from sort_threads import sort_in_threads

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.machine import Move

pytestmark = pytest.mark.flow

ROWS = random_rows(23, 4_000)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    ("state", "pattern"),
    [("Merging", "runs/run-*"), ("Merging", "slices/slice-*"), ("Shuffling", "runs/run-*")],
    ids=["rows of its own", "rows that were received", "rows for another worker"],
)
def test_a_flipped_bit_of_a_temporary_file_fails_the_sort_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, pattern: str
) -> None:
    moved = Journal.moved
    flipped: list[Path] = []

    def flip_then_move(self: Journal, move: Move[Any, Any], /) -> None:
        if str(move.to_state) == state and self.name == "sort worker 1" and self.directory is not None:
            path = next(path for path in sorted(self.directory.glob(pattern)) if path.suffix == "")
            flip(path, 9_999 if state == "Shuffling" else path.stat().st_size - 1)
            flipped.append(path)
        moved(self, move)

    monkeypatch.setattr(Journal, "moved", flip_then_move)
    source = write_source(tmp_path / "in", ROWS)
    with pytest.raises(SortError) as raised:
        sort_in_threads(source, tmp_path, resident_share=0.0)
    assert len(flipped) == 1
    assert f"temporary file {flipped[0]} is damaged: wrong checksum of the page at byte " in str(raised.value)
    assert list((tmp_path / "out-1").glob("partition.*")) == []


def test_a_flipped_bit_of_a_manifest_or_a_state_makes_it_invalid(tmp_path: Path) -> None:
    """Cuts or boundaries with another digit would put rows into the wrong window, without an error."""
    journal = Journal(tmp_path, "sort master")
    journal.checkpoint["plan"] = {"windows": 2, "boundaries": [("80" * 10, 7)]}
    journal.save("Sorting")
    run = tmp_path / "run-000000"
    manifest = {"identity": "3 of a sort", "cuts": [0, 500, 1000], "first": 0, "rows": 1000, "checksum": "00"}
    write_manifest(run, manifest)
    assert read_manifest(run) == manifest
    assert (found := journal.load()) is not None
    assert found["checkpoint"] == {"plan": {"windows": 2, "boundaries": [["80" * 10, 7]]}}
    for path in (tmp_path / "state.json", tmp_path / "run-000000.json"):
        content = path.read_bytes()
        for at in range(len(content)):
            flip(path, at)
            assert (journal.load() if path.name == "state.json" else read_manifest(run)) is None, (path.name, at)
            path.write_bytes(content)
        path.write_bytes(content[: len(content) // 2])
    assert (journal.load(), read_manifest(run)) == (None, None)


@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES + 700])
@pytest.mark.parametrize("piece", [1_000, PAGE_BYTES, 2 * PAGE_BYTES + 1])
def test_checksums_are_those_of_the_pages_however_the_bytes_come(size: int, piece: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8).data
    sums = PageChecksums()
    for begin in range(0, size, piece):
        sums.update(data[begin : begin + piece])
    pages = [data[begin : begin + PAGE_BYTES] for begin in range(0, size, PAGE_BYTES)]
    expected = b"".join(xxhash.xxh3_64_intdigest(page).to_bytes(8, "little") for page in pages)
    assert sums.hexdigest() == compute_checksums(data) == expected.hex()


def test_every_range_is_verified_and_only_the_pages_that_hold_it(tmp_path: Path) -> None:
    rows = random_rows(3, 90_000)
    path = tmp_path / "rows"
    path.write_bytes(rows.tobytes())
    store = SpilledRows(path, 100, compute_checksums(rows.reshape(-1).data), 1_000)
    damaged = 50_000
    flip(path, damaged * 100 + 37)
    buffer = np.empty(IO_BUFFER_BYTES, dtype=np.uint8)
    clean = (range(damaged - 100), range(damaged + 100, len(rows)))
    for numbers in clean:
        found = np.empty((len(numbers), 100), dtype=np.uint8)
        store.read(1_000 + numbers.start, found)
        assert np.array_equal(found, rows[numbers.start : numbers.stop])
        view = store.view(1_000 + numbers.start, 300, lambda: buffer)
        assert bytes(view) == rows[numbers.start : numbers.start + 300].tobytes()
    for low, count in ((damaged, 1), (0, len(rows)), (damaged - 1, 2)):
        with pytest.raises(DamagedFile, match=r"rows is damaged: wrong checksum of the page at byte 4,997,120"):
            store.read(1_000 + low, np.empty((count, 100), dtype=np.uint8))
    with pytest.raises(DamagedFile, match="rows is damaged"):
        store.view(1_000 + damaged, 10, lambda: buffer)
    store.close()


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    rows = random_rows(3, 100)
    path = tmp_path / "rows"
    path.write_bytes(rows[:60].tobytes())
    store = SpilledRows(path, 100, compute_checksums(rows.reshape(-1).data))
    with pytest.raises(SortError, match="became shorter"):
        store.read(0, np.empty((100, 100), dtype=np.uint8))
    store.close()
