"""An input that changes while it is sorted: the sort fails by its name, and a restart names the cause."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from interlock.errors import SortError, SortInputError
from interlock.sort.data.input_stamps import describe_change, take_stamps
from interlock.sort.settings import Settings
from interlock.sort.workdir import Journal, open_work_directory
from sort_cluster import SortCluster, random_rows, write_source
from sort_threads import sort_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from interlock.machine import Move

pytestmark = pytest.mark.flow

ROWS = random_rows(41, 3_000)


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def rewrite_in_the_same_moment(path: Path) -> None:
    """Replace a file by another one of its size and time, as `cp -p` and a rename do."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rewrite, "changed: its modification time is another one while it was sorted; start a new sort"),
        (rewrite_in_the_same_moment, "changed: its inode is another one while it was sorted; start a new sort"),
        (remove, "cannot be read: No such file or directory; it must stay until the sort ends"),
    ],
)
def test_a_change_after_the_blocks_were_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], words: str
) -> None:
    moved = Journal.moved
    changed: list[str] = []

    def move(self: Journal, move: Move[Any, Any], /) -> None:
        if str(move.to_state) == "Merging" and self.name == "sort worker 1":
            changed.append(self.name)
            change(tmp_path / "in")
        moved(self, move)

    monkeypatch.setattr(Journal, "moved", move)
    with pytest.raises(SortError, match=f"input {tmp_path / 'in'} {words}"):
        sort_in_threads(write_source(tmp_path / "in", ROWS), tmp_path, resident_share=1.0)
    assert changed == ["sort worker 1"]


def test_a_worker_that_is_restarted_after_a_change_names_it(tmp_path: Path) -> None:
    with SortCluster(tmp_path, write_source(tmp_path / "in", ROWS), resident_share=1.0) as cluster:
        cluster.start_master()
        cluster.start_worker(0)
        cluster.start_worker(1, ("Sorting",), forever=True)
        cluster.ended("worker-1")
        rewrite(tmp_path / "in")
        cluster.start_worker(1)
        message = cluster.failure("worker-1")
        assert (
            f"input {tmp_path / 'in'} changed: its modification time is another one since this worker took" in message
        )
        assert "start a new sort" in message


def test_a_sort_that_starts_over_because_of_a_change_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_source(tmp_path / "in", ROWS)
    work_dir = tmp_path / "out" / ".interlock-sort"
    with open_work_directory(source, tmp_path / "out", 2, Settings(), None):
        saved = (work_dir / "sort").read_bytes()
    work_dir.mkdir(exist_ok=True)
    (work_dir / "sort").write_bytes(saved)
    with open_work_directory(source, tmp_path / "out", 2, Settings(), None):
        assert caplog.messages == []
    work_dir.mkdir(exist_ok=True)
    (work_dir / "sort").write_bytes(saved)
    (tmp_path / "in").write_bytes(ROWS[:2_000].tobytes())
    shorter = write_source(tmp_path / "in", ROWS[:2_000])
    with open_work_directory(shorter, tmp_path / "out", 2, Settings(), None):
        assert [line for line in caplog.messages if "its size was 300,000 and is 200,000" in line]


def test_stamps_tell_what_changed(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", ROWS)
    before = take_stamps(source)
    assert describe_change(before, take_stamps(source)) == ""
    assert describe_change({"elsewhere": [1, 2, 3]}, before) == ""
    copy = str(tmp_path / ".interlock-sort-input" / "00000000")
    assert describe_change({copy: [1, 2, 3]}, {copy: [1, 5, 6]}) == "", "a restarted sort unpacks its input again"
    with (tmp_path / "in").open("ab") as file:
        file.write(bytes(100))
    assert "its size was 300,000 and is 300,100, its modification time" in describe_change(before, take_stamps(source))
    (tmp_path / "in").unlink()
    with pytest.raises(SortInputError, match="cannot be read: No such file"):
        take_stamps(source)
