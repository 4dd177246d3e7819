"""Restarts with other arguments are refused with advice, and every restart is in the history."""

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
from sort_cli import first_line, make_input, sort, started
from sort_cluster import SortCluster, output_bytes, random_rows, sorted_bytes, write_source

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.machine import Machine

pytestmark = pytest.mark.chaos

SHORT_TIMEOUT = Settings(register_timeout_s=0.2)
ROWS = random_rows(17, 4_000, letters=3)


def is_lawful(machine: Machine[Any, Any], history: list[dict[str, Any]]) -> bool:
    """Return whether a history is an unbroken chain of transitions that the lifecycle allows."""
    moves = [(move["from_state"], move["event"], move["to_state"]) for move in history]
    allowed = {(str(before), str(event), str(after)) for (before, event), after in machine.transitions.items()}
    return set(moves) <= allowed and all(one[2] == other[0] for one, other in pairwise(moves))


def test_the_histories_show_every_restart_of_a_master_and_of_a_worker(tmp_path: Path) -> None:
    with SortCluster(tmp_path, write_source(tmp_path / "in", ROWS), resident_share=0.0) as cluster:
        cluster.start_master(("Sampling", "Shuffling"))
        cluster.start_worker(0)
        cluster.start_worker(1, ("Sorting", "Merging"))
        report = cluster.wait("master")
        worker = cluster.wait("worker-1")
    assert output_bytes(cluster.output) == sorted_bytes(ROWS)
    assert is_lawful(SORT_MASTER, report["history"]), report["history"]
    assert is_lawful(SORT_WORKER, worker["history"]), worker["history"]
    for history, states in (
        (report["history"], ("Sampling", "Shuffling")),
        (worker["history"], ("Sorting", "Merging")),
    ):
        ended = [move["reason"] for move in history if move["event"] == "fail"]
        assert ended == [f"The process ended in state {state}" for state in states]
        assert [move["reason"] for move in history if move["event"] == "restart"] == ["Started again"] * 2


def test_a_restarted_failed_master_keeps_its_address_and_history(tmp_path: Path) -> None:
    heard: list[str] = []
    for _ in range(2):
        with pytest.raises(Exception, match="0 of 2 workers registered"):
            run_master(2, settings=SHORT_TIMEOUT, work_dir=tmp_path, on_listening=heard.append)
    assert heard[0] == heard[1]
    found = Journal(tmp_path, "sort master").load()
    assert found is not None
    assert [move[1] for move in found["history"]] == ["Failed", "Registering", "Failed"]


def test_a_master_restarted_with_other_numbers_is_refused_with_advice(tmp_path: Path) -> None:
    work_dir, report = tmp_path / "temp", tmp_path / "report"
    with started("master", 2, "--partitions", 6, "--temp", work_dir, "--quiet") as master:
        address = first_line(master)
        os.kill(master.pid, signal.SIGKILL)
    done = sort("master", 3, "--temp", work_dir, "--quiet")
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"{work_dir} holds a sort of 2 workers and 6 partitions that is in phase Registering" in done.stderr
    assert "this is one of 3 and 3: resume it with `sort master 2 --partitions 6`" in done.stderr
    assert "or name another --temp for another sort" in done.stderr
    make_input(tmp_path / "in", 1_000)
    arguments = ("--partitions", 6, "--temp", work_dir, "--report", report, "--history")
    with started("master", 2, *arguments) as master:
        assert first_line(master) == address, "it goes on where it was"
        workers = [("worker", address, "-I", tmp_path / "in", "-O", tmp_path / name, "--quiet") for name in "ab"]
        with started(*workers[0]) as first, started(*workers[1]) as second:
            assert first.communicate(timeout=60)[0].count("partition.") == 3
            assert second.communicate(timeout=60)[0].count("partition.") == 3
        _, shown = master.communicate(timeout=60)
    assert [move["event"] for move in json.loads(report.read_text())["history"]][:2] == ["fail", "restart"]
    assert "The process ended in state Registering" in shown, "the table tells it too"
    assert "Started again" in shown


def test_a_second_master_cannot_use_the_state_of_a_running_one(tmp_path: Path) -> None:
    with started("master", 2, "--temp", tmp_path, "--quiet") as master:
        first_line(master)
        before = (tmp_path / "state.json").read_bytes()
        done = sort("master", 2, "--temp", tmp_path, "--quiet")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"another sort master is running with its state in {tmp_path}: name another --temp" in done.stderr
        assert (tmp_path / "state.json").read_bytes() == before
        master.kill()


@pytest.mark.parametrize("state", [SortMasterState.COMPLETED, SortMasterState.FAILED])
def test_an_ended_sort_does_not_block_another_one(tmp_path: Path, state: SortMasterState) -> None:
    journal = Journal(tmp_path, "sort master")
    journal.checkpoint = {"workers": 3, "partitions": 3}
    journal.save(str(state))
    with pytest.raises(Exception, match="0 of 2 workers registered"):
        run_master(2, settings=SHORT_TIMEOUT, work_dir=tmp_path)
    assert (found := journal.load()) is not None
    assert [move[2] for move in found["history"]] == [SortMasterEvent.FAIL]


def test_the_work_directory_of_a_worker_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path, "sort worker 3").save("Sorting")
    with pytest.raises(SortInputError, match="is the directory of a sort worker 3: name another --temp"):
        run_master(2, work_dir=tmp_path)


def test_a_worker_with_another_input_is_refused_and_damages_nothing(tmp_path: Path) -> None:
    other = write_source(tmp_path / "other", random_rows(3, 70))
    with SortCluster(tmp_path, write_source(tmp_path / "in", ROWS)) as cluster:
        cluster.start_master(("Sorting",), forever=True)
        for index in range(2):
            cluster.start_worker(index, ("WaitingForPartitionConfig",), forever=True)
        for name in ("worker-0", "worker-1", "master"):
            cluster.ended(name)
        cluster.start_master()
        cluster.start_worker(1, source=other.json())
        message = cluster.failure("worker-1")
        assert "and has its 2 workers already, worker 0 (127.0.0.1:" in message
        assert ") with 2,000 records; this one with 70 records is none of them" in message
        assert "restarted needs the input, the output and the --temp that it had" in message
        assert f"Started in {tmp_path}/temp/worker-1 before, it had 2,000 records" in message
        cluster.start_worker(0)
        cluster.start_worker(1)
        cluster.wait("master")
        assert cluster.wait("worker-1")["starts"] == 2
    assert output_bytes(cluster.output) == sorted_bytes(ROWS)
