"""Whoever is killed, in whatever state, and started again: the output is the same, and finished work is used again."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from interlock.lifecycle import SortMasterState, SortWorkerState
from interlock.sort.engines.local import run_local
from interlock.sort.settings import Settings
from interlock.sort.workdir import Journal, is_resumable, unfinished
from sort_crew import SMALL, Crew, output_bytes, random_rows, sorted_bytes, write_source, write_source_again

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.chaos

WORKER_STATES = tuple(str(state) for state in SortWorkerState if state is not SortWorkerState.FAILED)
MASTER_STATES = tuple(str(state) for state in SortMasterState if state is not SortMasterState.FAILED)
ROWS = random_rows(17, 4_000, letters=3)


@pytest.mark.parametrize("resident", [0.0, 0.5, 1.0])
def test_a_worker_killed_in_every_state_goes_on_and_uses_what_it_had_finished(tmp_path: Path, resident: float) -> None:
    die_at = ("Sampling", "WaitingForPartitionConfig", "Sorting", "Sorting+", "WaitingForShuffleSignal", "Shuffling",
              "WaitingForMergeSignal", "Merging", "Merging+")  # fmt: skip
    with Crew(tmp_path, write_source(tmp_path / "in", ROWS), resident=resident, partitions=4) as crew:
        crew.start_master()
        crew.start_worker(0)
        crew.start_worker(1, die_at)
        report = crew.wait("master")
        first, second = crew.wait("worker-0"), crew.wait("worker-1")
    assert crew.deaths == ["worker-1"] * len(die_at)
    assert output_bytes(crew.output) == sorted_bytes(ROWS)
    assert [move["to_state"] for move in report["history"]] == list(MASTER_STATES[1:])
    assert first["starts"] == 1
    assert sum(move["event"] == "restart" for move in second["history"]) == len(die_at) == second["starts"] - 1
    blocks, slices = 4, 4 * 2
    least, most = {0.0: (12, 12), 0.5: (2, 11), 1.0: (0, 11)}[resident]  # at most: what came while it sorted again
    assert blocks + slices == 12
    assert least <= second["reused"] <= most, "what was in memory alone is done again"
    assert sorted(path.name for path in crew.output.iterdir()) == [f"partition.{number}" for number in range(4)]


def test_a_killed_worker_that_kept_all_in_memory_is_served_again_by_the_others(tmp_path: Path) -> None:
    die_at = ("Sorting+", "Shuffling", "WaitingForMergeSignal", "Merging+", "Completed")
    with Crew(tmp_path, write_source(tmp_path / "in", ROWS), resident=1.0, workers=3) as crew:
        crew.start_master()
        crew.start_worker(0, ("WaitingForShuffleSignal", "WaitingForMergeSignal"))
        crew.start_worker(1, die_at)
        crew.start_worker(2)
        report = crew.wait("master")
        assert [crew.wait(f"worker-{index}")["index"] for index in range(3)] == [0, 1, 2]
    assert sorted(crew.deaths) == ["worker-0"] * 2 + ["worker-1"] * len(die_at)
    assert output_bytes(crew.output) == sorted_bytes(ROWS)
    assert [worker["index"] for worker in report["workers"]] == [0, 1, 2]
    assert report["records"] == len(ROWS)


def test_a_master_killed_in_every_state_goes_on_with_the_same_workers(tmp_path: Path) -> None:
    die_at = MASTER_STATES[1:]
    with Crew(tmp_path, write_source(tmp_path / "in", ROWS), resident=1.0) as crew:
        crew.start_master(die_at)
        crew.start_worker(0)
        crew.start_worker(1)
        report = crew.wait("master")
        assert [crew.wait(f"worker-{index}")["starts"] for index in range(2)] == [1, 1]
    assert crew.deaths == ["master"] * len(die_at)
    assert output_bytes(crew.output) == sorted_bytes(ROWS)
    assert sum(worker["records"] for worker in report["workers"]) == len(ROWS)
    assert report["history"][-1]["to_state"] == "Completed"


def test_a_worker_that_had_completed_has_nothing_to_do_while_its_files_are_right(tmp_path: Path) -> None:
    with Crew(tmp_path, write_source(tmp_path / "in", ROWS), workers=1, partitions=2) as crew:
        crew.start_master()
        crew.start_worker(0)
        crew.wait("master")
        done = crew.wait("worker-0")
    times = [path.stat().st_mtime_ns for path in sorted(crew.output.iterdir())]
    with Crew(tmp_path, write_source_again(tmp_path / "in"), workers=1, partitions=2) as again:
        again.address = crew.address
        again.start_worker(0)
        assert again.wait("worker-0")["partitions"] == done["partitions"]
    assert [path.stat().st_mtime_ns for path in sorted(crew.output.iterdir())] == times
    (crew.output / "partition.1").write_bytes(b"damaged")
    with Crew(tmp_path, write_source_again(tmp_path / "in"), workers=1, partitions=2) as again:
        again.start_master()
        again.start_worker(0)
        again.wait("master")
    assert output_bytes(crew.output) == sorted_bytes(ROWS)


def test_workers_begin_anew_when_their_master_has_lost_its_memory(tmp_path: Path) -> None:
    with Crew(tmp_path, write_source(tmp_path / "in", ROWS), forgetful=True) as crew:
        crew.start_master(("Sorting",))
        crew.start_worker(0)
        crew.start_worker(1)
        crew.wait("master")
        workers = [crew.wait(f"worker-{index}") for index in range(2)]
    assert output_bytes(crew.output) == sorted_bytes(ROWS)
    for worker in workers:
        moves = [(move["from_state"], move["to_state"]) for move in worker["history"]]
        assert ("Failed", "Initializing") in moves


@pytest.mark.parametrize(
    ("state", "changes", "key_length"),
    [("Shuffling", {"block_records": 520}, 10), ("Merging", {"block_records": 520}, 10),
     ("Merging", {"block_records": 2_000}, 10), ("Merging", {"block_records": 90}, 10),
     ("Merging", {"memory": 1 << 30}, 10), ("Merging", {}, 7)],
)  # fmt: skip
def test_a_whole_sort_that_is_started_again_with_other_arguments_begins_anew(
    tmp_path: Path, state: str, changes: dict[str, int], key_length: int
) -> None:
    settings: dict[str, Any] = {"block_records": 500, "window_records": 400, "resident": 0.0}
    with Crew(tmp_path, write_source(tmp_path / "in", ROWS), **settings) as crew:
        crew.kill_local(state)
    source = write_source_again(tmp_path / "in", key_length=key_length)
    report = run_local(source, crew.output, settings=Settings(**{**settings, **changes}))
    assert output_bytes(crew.output) == sorted_bytes(ROWS, key_length)
    assert sum(worker.reused for worker in report.workers) == 0
    assert sum(one.records for one in report.partitions) == len(ROWS)


def test_a_whole_sort_that_is_started_again_with_the_same_arguments_goes_on(tmp_path: Path) -> None:
    with Crew(tmp_path, write_source(tmp_path / "in", ROWS), resident=0.0) as crew:
        crew.kill_local("Merging")
    settings = Settings(**SMALL, resident=0.0)
    report = run_local(write_source_again(tmp_path / "in"), crew.output, settings=settings)
    assert output_bytes(crew.output) == sorted_bytes(ROWS)
    assert [worker.reused for worker in report.workers] == [8, 8], "four blocks of its own, four of the other"


def test_a_completed_worker_that_is_started_again_serves_those_who_lost_what_it_had_sent(tmp_path: Path) -> None:
    with Crew(tmp_path, write_source(tmp_path / "in", ROWS), resident=1.0) as crew:
        crew.start_master()
        crew.start_worker(0, ("Completed",), forever=True)
        crew.start_worker(1, ("Merging",), forever=True)
        crew.ended("worker-0")
        crew.ended("worker-1")
        crew.start_worker(0)
        crew.start_worker(1)
        crew.wait("master")
        first, second = crew.wait("worker-0"), crew.wait("worker-1")
    assert output_bytes(crew.output) == sorted_bytes(ROWS)
    assert (first["starts"], second["starts"]) == (2, 2)
    assert first["reused"] >= 1, "its partition was finished"


def test_a_completed_worker_whose_input_has_changed_says_so_when_another_needs_its_records(tmp_path: Path) -> None:
    sources = [write_source(tmp_path / f"in-{index}", ROWS[index::2]) for index in range(2)]
    state = tmp_path / "temp" / "worker-0" / "state.json"
    with Crew(tmp_path, sources[0], resident=1.0) as crew:
        crew.start_master()
        crew.start_worker(0, source=sources[0].json())
        crew.start_worker(1, ("Merging",), forever=True, source=sources[1].json())
        crew.ended("worker-1")
        until = time.monotonic() + 60
        while json.loads(state.read_bytes())["state"] != "Completed":
            assert time.monotonic() < until
            time.sleep(0.01)
        os.utime(tmp_path / "in-0", ns=(1, 1))
        crew.start_worker(1, source=sources[1].json())
        told = "the input of this worker changed while it was sorted; sort it anew"
        assert told in crew.failure("worker-0")
        assert told in crew.failure("master")
        assert told in crew.failure("worker-1")


def test_a_completed_worker_that_stays_away_is_named_when_another_needs_its_records(tmp_path: Path) -> None:
    with Crew(tmp_path, write_source(tmp_path / "in", ROWS), resident=1.0, lost=10.0) as crew:
        crew.start_master()
        crew.start_worker(0, ("Completed",), forever=True)
        crew.start_worker(1, ("Merging",), forever=True)
        crew.ended("worker-0")
        crew.ended("worker-1")
        crew.start_worker(1)
        assert "worker 0 (127.0.0.1:" in (message := crew.failure("master"))
        assert "is lost in phase Merging" in message


def test_a_worker_command_killed_when_it_had_completed_goes_on_without_a_word(tmp_path: Path) -> None:
    temp, out = tmp_path / "temp", tmp_path / "out"
    temp.mkdir()
    out.mkdir()
    journal = Journal(temp, "sort worker 0")
    assert not is_resumable(temp)
    for state, resumable in (("Merging", True), ("Completed", True), ("Failed", False)):
        journal.save(state)
        assert is_resumable(temp) is resumable


def test_partitions_that_a_failed_sort_did_not_come_to_replace_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    source = write_source(tmp_path / "in", ROWS)
    for name in ("partition.0", "partition.1", "partition.7"):
        (out / name).write_text(f"old {name}")

    def fail(*written: str) -> None:
        with unfinished(source, out, 2, Settings(), None) as place:
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
