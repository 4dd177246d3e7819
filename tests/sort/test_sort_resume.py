"""What a master or worker says, and shows, that is started again: with other arguments, and in its history."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from interlock.errors import SortInputError
from interlock.lifecycle import SORT_MASTER, SORT_WORKER, SortMasterEvent, SortMasterState
from interlock.sort.master.master import run_master
from interlock.sort.settings import Settings
from interlock.sort.workdir import Journal
from sort_crew import Crew, output_bytes, random_rows, sorted_bytes, write_source
from sort_support import begun, first_line, make_input, sort

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.machine import Machine

pytestmark = pytest.mark.chaos

SOON = Settings(registering=0.2)
ROWS = random_rows(17, 4_000, letters=3)


def is_lawful(machine: Machine[Any, Any], history: list[dict[str, Any]]) -> bool:
    """Tell whether a history is one unbroken chain of moves that the lifecycle allows."""
    moves = [(move["from_state"], move["event"], move["to_state"]) for move in history]
    allowed = {(str(before), str(event), str(after)) for (before, event), after in machine.transitions.items()}
    return set(moves) <= allowed and all(one[2] == other[0] for one, other in pairwise(moves))


def test_the_histories_show_every_restart_of_a_master_and_of_a_worker(tmp_path: Path) -> None:
    with Crew(tmp_path, write_source(tmp_path / "in", ROWS), resident=0.0) as crew:
        crew.start_master(("Sampling", "Shuffling"))
        crew.start_worker(0)
        crew.start_worker(1, ("Sorting", "Merging"))
        report = crew.wait("master")
        worker = crew.wait("worker-1")
    assert output_bytes(crew.output) == sorted_bytes(ROWS)
    assert is_lawful(SORT_MASTER, report["history"]), report["history"]
    assert is_lawful(SORT_WORKER, worker["history"]), worker["history"]
    for history, states in (
        (report["history"], ("Sampling", "Shuffling")),
        (worker["history"], ("Sorting", "Merging")),
    ):
        ended = [move["reason"] for move in history if move["event"] == "fail"]
        assert ended == [f"The process ended in state {state}" for state in states]
        assert [move["reason"] for move in history if move["event"] == "restart"] == ["Started again"] * 2


def test_a_master_that_failed_and_is_started_again_shows_that_and_keeps_its_address(tmp_path: Path) -> None:
    heard: list[str] = []
    for _ in range(2):
        with pytest.raises(Exception, match="0 of 2 workers came"):
            run_master(2, settings=SOON, temp=tmp_path, listening=heard.append)
    assert heard[0] == heard[1]
    found = Journal(tmp_path, "sort master").load()
    assert found is not None
    assert [move[1] for move in found["history"]] == ["Failed", "Registering", "Failed"]


def test_a_master_started_again_with_other_numbers_says_what_differs_and_what_to_do(tmp_path: Path) -> None:
    temp, report = tmp_path / "temp", tmp_path / "report"
    with begun("master", 2, "--partitions", 6, "--temp", temp, "--quiet") as master:
        address = first_line(master)
        os.kill(master.pid, signal.SIGKILL)
    done = sort("master", 3, "--temp", temp, "--quiet")
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"{temp} holds a sort of 2 workers and 6 partitions that is in phase Registering" in done.stderr
    assert "this is one of 3 and 3: go on with it by `sort master 2 --partitions 6`" in done.stderr
    assert "or name another --temp for another sort" in done.stderr
    make_input(tmp_path / "in", 1_000)
    arguments = ("--partitions", 6, "--temp", temp, "--report", report)
    with begun("master", 2, *arguments) as master:
        assert first_line(master) == address, "it goes on where it was"
        workers = [("worker", address, "-I", tmp_path / "in", "-O", tmp_path / name, "--quiet") for name in "ab"]
        with begun(*workers[0]) as first, begun(*workers[1]) as second:
            assert first.communicate(timeout=60)[0].count("partition.") == 3
            assert second.communicate(timeout=60)[0].count("partition.") == 3
        _, shown = master.communicate(timeout=60)
    assert [move["event"] for move in json.loads(report.read_text())["history"]][:2] == ["fail", "restart"]
    assert "The process ended in state Registering" in shown, "the table tells it too"
    assert "Started again" in shown


def test_a_second_master_does_not_take_the_state_of_one_that_runs(tmp_path: Path) -> None:
    with begun("master", 2, "--temp", tmp_path, "--quiet") as master:
        first_line(master)
        before = (tmp_path / "state.json").read_bytes()
        done = sort("master", 2, "--temp", tmp_path, "--quiet")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"another sort master is running with its state in {tmp_path}: name another --temp" in done.stderr
        assert (tmp_path / "state.json").read_bytes() == before
        master.kill()


@pytest.mark.parametrize("state", [SortMasterState.COMPLETED, SortMasterState.FAILED])
def test_a_sort_that_has_ended_does_not_stand_in_the_way_of_another(tmp_path: Path, state: SortMasterState) -> None:
    journal = Journal(tmp_path, "sort master")
    journal.kept = {"workers": 3, "partitions": 3}
    journal.save(str(state))
    with pytest.raises(Exception, match="0 of 2 workers came"):
        run_master(2, settings=SOON, temp=tmp_path)
    assert (found := journal.load()) is not None
    assert [move[2] for move in found["history"]] == [SortMasterEvent.FAIL]


def test_the_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path, "sort worker 3").save("Sorting")
    with pytest.raises(SortInputError, match="is the directory of a sort worker 3: name another --temp"):
        run_master(2, temp=tmp_path)


def test_a_worker_with_another_input_is_told_what_differs_and_damages_nothing(tmp_path: Path) -> None:
    other = write_source(tmp_path / "other", random_rows(3, 70))
    with Crew(tmp_path, write_source(tmp_path / "in", ROWS)) as crew:
        crew.start_master(("Sorting",), forever=True)
        for index in range(2):
            crew.start_worker(index, ("WaitingForPartitionConfig",), forever=True)
        for name in ("worker-0", "worker-1", "master"):
            crew.ended(name)
        crew.start_master()
        crew.start_worker(1, source=other.json())
        message = crew.failure("worker-1")
        assert "and has its 2 workers already, worker 0 (127.0.0.1:" in message
        assert ") with 2,000 records; this one with 70 records is none of them" in message
        assert "started again needs the input, the output and the --temp that it had" in message
        assert f"Started in {tmp_path}/temp/worker-1 before, it had 2,000 records" in message
        crew.start_worker(0)
        crew.start_worker(1)
        crew.wait("master")
        assert crew.wait("worker-1")["starts"] == 2
    assert output_bytes(crew.output) == sorted_bytes(ROWS)
