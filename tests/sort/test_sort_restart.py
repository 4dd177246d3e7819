"""Masters and workers killed in any state and restarted: the output is the same, and finished work is reused."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from interlock.lifecycle import SortMasterState, SortWorkerState
from interlock.sort.settings import Settings
from interlock.sort.workdir import Journal, is_resumable, open_work_directory
from sort_cluster import SortCluster, output_bytes, random_rows, sorted_bytes, write_source, write_source_again

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.chaos

WORKER_STATES = tuple(str(state) for state in SortWorkerState if state is not SortWorkerState.FAILED)
MASTER_STATES = tuple(str(state) for state in SortMasterState if state is not SortMasterState.FAILED)
ROWS = random_rows(17, 4_000, letters=3)


@pytest.mark.parametrize("resident_share", [0.0, 0.5, 1.0])
def test_a_worker_killed_in_every_state_resumes_and_reuses_its_files(tmp_path: Path, resident_share: float) -> None:
    die_at = ("Sampling", "WaitingForPartitionConfig", "Sorting", "Sorting+", "WaitingForShuffleSignal", "Shuffling",
              "WaitingForMergeSignal", "Merging", "Merging+")  # fmt: skip
    with SortCluster(
        tmp_path, write_source(tmp_path / "in", ROWS), resident_share=resident_share, partitions=4
    ) as cluster:
        cluster.start_master()
        cluster.start_worker(0)
        cluster.start_worker(1, die_at)
        report = cluster.wait("master")
        first, second = cluster.wait("worker-0"), cluster.wait("worker-1")
    assert cluster.deaths == ["worker-1"] * len(die_at)
    assert output_bytes(cluster.output) == sorted_bytes(ROWS)
    assert [move["to_state"] for move in report["history"]] == list(MASTER_STATES[1:])
    assert first["starts"] == 1
    assert sum(move["event"] == "restart" for move in second["history"]) == len(die_at) == second["starts"] - 1
    blocks, slices = 4, 4 * 2
    least, most = {0.0: (12, 12), 0.5: (2, 11), 1.0: (0, 11)}[
        resident_share
    ]  # at most: what came while it sorted again
    assert blocks + slices == 12
    assert least <= second["reused"] <= most, "what was in memory alone is done again"
    assert sorted(path.name for path in cluster.output.iterdir()) == [f"partition.{number}" for number in range(4)]


def test_a_killed_worker_with_all_rows_in_memory_is_served_again(tmp_path: Path) -> None:
    die_at = ("Sorting+", "Shuffling", "WaitingForMergeSignal", "Merging+", "Completed")
    with SortCluster(tmp_path, write_source(tmp_path / "in", ROWS), resident_share=1.0, workers=3) as cluster:
        cluster.start_master()
        cluster.start_worker(0, ("WaitingForShuffleSignal", "WaitingForMergeSignal"))
        cluster.start_worker(1, die_at)
        cluster.start_worker(2)
        report = cluster.wait("master")
        assert [cluster.wait(f"worker-{index}")["index"] for index in range(3)] == [0, 1, 2]
    assert sorted(cluster.deaths) == ["worker-0"] * 2 + ["worker-1"] * len(die_at)
    assert output_bytes(cluster.output) == sorted_bytes(ROWS)
    assert [worker["index"] for worker in report["workers"]] == [0, 1, 2]
    assert report["records"] == len(ROWS)


def test_a_master_killed_in_every_state_resumes_with_the_same_workers(tmp_path: Path) -> None:
    die_at = MASTER_STATES[1:]
    with SortCluster(tmp_path, write_source(tmp_path / "in", ROWS), resident_share=1.0) as cluster:
        cluster.start_master(die_at)
        cluster.start_worker(0)
        cluster.start_worker(1)
        report = cluster.wait("master")
        assert [cluster.wait(f"worker-{index}")["starts"] for index in range(2)] == [1, 1]
    assert cluster.deaths == ["master"] * len(die_at)
    assert output_bytes(cluster.output) == sorted_bytes(ROWS)
    assert sum(worker["records"] for worker in report["workers"]) == len(ROWS)
    assert report["history"][-1]["to_state"] == "Completed"


def test_a_completed_worker_has_nothing_to_do_while_its_files_are_intact(tmp_path: Path) -> None:
    with SortCluster(tmp_path, write_source(tmp_path / "in", ROWS), workers=1, partitions=2) as cluster:
        cluster.start_master()
        cluster.start_worker(0)
        cluster.wait("master")
        done = cluster.wait("worker-0")
    times = [path.stat().st_mtime_ns for path in sorted(cluster.output.iterdir())]
    with SortCluster(tmp_path, write_source_again(tmp_path / "in"), workers=1, partitions=2) as again:
        again.address = cluster.address
        again.start_worker(0)
        assert again.wait("worker-0")["partitions"] == done["partitions"]
    assert [path.stat().st_mtime_ns for path in sorted(cluster.output.iterdir())] == times
    (cluster.output / "partition.1").write_bytes(b"damaged")
    with SortCluster(tmp_path, write_source_again(tmp_path / "in"), workers=1, partitions=2) as again:
        again.start_master()
        again.start_worker(0)
        again.wait("master")
    assert output_bytes(cluster.output) == sorted_bytes(ROWS)


def test_workers_restart_when_the_master_has_lost_its_state(tmp_path: Path) -> None:
    with SortCluster(tmp_path, write_source(tmp_path / "in", ROWS), forgetful=True) as cluster:
        cluster.start_master(("Sorting",))
        cluster.start_worker(0)
        cluster.start_worker(1)
        cluster.wait("master")
        workers = [cluster.wait(f"worker-{index}") for index in range(2)]
    assert output_bytes(cluster.output) == sorted_bytes(ROWS)
    for worker in workers:
        moves = [(move["from_state"], move["to_state"]) for move in worker["history"]]
        assert ("Failed", "Initializing") in moves


@pytest.mark.parametrize(
    ("state", "changes", "key_length"),
    [("Shuffling", {"block_records": 520}, 10), ("Merging", {"block_records": 520}, 10),
     ("Merging", {"block_records": 2_000}, 10), ("Merging", {"block_records": 90}, 10),
     ("Merging", {"memory": 1 << 30}, 10), ("Merging", {}, 7)],
)  # fmt: skip
def test_a_local_sort_restarted_with_other_arguments_starts_over(
    tmp_path: Path, state: str, changes: dict[str, int], key_length: int
) -> None:
    settings: dict[str, Any] = {"block_records": 500, "window_records": 400, "resident_share": 0.0}
    with SortCluster(tmp_path, write_source(tmp_path / "in", ROWS), **settings) as cluster:
        cluster.kill_local(state)
        report = cluster.restart_local(write_source_again(tmp_path / "in", key_length=key_length), **changes)
    assert output_bytes(cluster.output) == sorted_bytes(ROWS, key_length)
    assert sum(worker["reused"] for worker in report["workers"]) == 0
    assert sum(one["records"] for worker in report["workers"] for one in worker["partitions"]) == len(ROWS)


def test_a_local_sort_restarted_with_the_same_arguments_resumes(tmp_path: Path) -> None:
    with SortCluster(tmp_path, write_source(tmp_path / "in", ROWS), resident_share=0.0) as cluster:
        cluster.kill_local("Merging")
        report = cluster.restart_local(write_source_again(tmp_path / "in"))
    assert output_bytes(cluster.output) == sorted_bytes(ROWS)
    assert [worker["reused"] for worker in report["workers"]] == [8, 8], "four blocks of its own, four of the other"


def test_a_restarted_completed_worker_sends_its_records_again(tmp_path: Path) -> None:
    with SortCluster(tmp_path, write_source(tmp_path / "in", ROWS), resident_share=1.0) as cluster:
        cluster.start_master()
        cluster.start_worker(0, ("Completed",), forever=True)
        cluster.start_worker(1, ("Merging",), forever=True)
        cluster.ended("worker-0")
        cluster.ended("worker-1")
        cluster.start_worker(0)
        cluster.start_worker(1)
        cluster.wait("master")
        first, second = cluster.wait("worker-0"), cluster.wait("worker-1")
    assert output_bytes(cluster.output) == sorted_bytes(ROWS)
    assert (first["starts"], second["starts"]) == (2, 2)
    assert first["reused"] >= 1, "its partition was finished"


def test_a_changed_input_is_an_error_when_records_are_needed_again(tmp_path: Path) -> None:
    sources = [write_source(tmp_path / f"in-{index}", ROWS[index::2]) for index in range(2)]
    state = tmp_path / "temp" / "worker-0" / "state.json"
    with SortCluster(tmp_path, sources[0], resident_share=1.0) as cluster:
        cluster.start_master()
        cluster.start_worker(0, source=sources[0].json())
        cluster.start_worker(1, ("Merging",), forever=True, source=sources[1].json())
        cluster.ended("worker-1")
        until = time.monotonic() + 60
        while json.loads(state.read_bytes())["state"] != "Completed":
            assert time.monotonic() < until
            time.sleep(0.01)
        os.utime(tmp_path / "in-0", ns=(1, 1))
        cluster.start_worker(1, source=sources[1].json())
        message = "the input of this worker changed while it was sorted; start a new sort"
        assert message in cluster.failure("worker-0")
        assert message in cluster.failure("master")
        assert message in cluster.failure("worker-1")


def test_a_missing_completed_worker_is_lost_when_its_records_are_needed(tmp_path: Path) -> None:
    with SortCluster(tmp_path, write_source(tmp_path / "in", ROWS), resident_share=1.0, lost_after_s=6.0) as cluster:
        cluster.start_master()
        cluster.start_worker(0, ("Completed",), forever=True)
        cluster.start_worker(1, ("Merging",), forever=True)
        cluster.ended("worker-0")
        cluster.ended("worker-1")
        cluster.start_worker(1)
        assert "worker 0 (127.0.0.1:" in (message := cluster.failure("master"))
        assert "is lost in phase Merging" in message


def test_a_killed_worker_command_is_resumable_unless_it_failed(tmp_path: Path) -> None:
    work_dir, out = tmp_path / "temp", tmp_path / "out"
    work_dir.mkdir()
    out.mkdir()
    journal = Journal(work_dir, "sort worker 0")
    assert not is_resumable(work_dir)
    for state, resumable in (("Merging", True), ("Completed", True), ("Failed", False)):
        journal.save(state)
        assert is_resumable(work_dir) is resumable


def test_a_failed_sort_keeps_partitions_until_it_replaces_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    source = write_source(tmp_path / "in", ROWS)
    for name in ("partition.0", "partition.1", "partition.7"):
        (out / name).write_text(f"old {name}")

    def fail(*written: str) -> None:
        with open_work_directory(source, out, 2, Settings(), None) as place:
            (place / "worker-0").mkdir()
            for name in written:
                (out / "new").write_text("new")
                (out / "new").rename(out / name)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail("partition.8")
    assert sorted(path.name for path in out.iterdir()) == ["partition.0", "partition.1", "partition.7"]
    assert (out / "partition.0").read_text() == "old partition.0"
    with pytest.raises(ZeroDivisionError):
        fail("partition.0")
    assert list(out.iterdir()) == [], "of a sequence that was half replaced nothing is left"
