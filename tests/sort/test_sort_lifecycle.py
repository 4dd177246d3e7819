"""Journal and progress of master and workers: history, durations, state file, percentages, clean-up by state."""

from __future__ import annotations

from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING

import orjson
import pytest

from interlock.errors import InvalidTransitionError
from interlock.lifecycle import SORT_WORKER, SortMasterState, SortWorkerEvent, SortWorkerState
from interlock.machine import StateMachine
from interlock.sort.data.keys import Boundary
from interlock.sort.data.plan import Member, Plan, Roster
from interlock.sort.master.roster import STATE_RANK
from interlock.sort.settings import Settings
from interlock.sort.wire_pb2 import WorkerStatus
from interlock.sort.workdir import Journal, is_resumable
from interlock.sort.worker.progress import STATE_PROGRESS, make_status
from interlock.sort.worker.worker import Worker
from sort_cluster import random_rows, write_source

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.sort.worker.phases import PhaseRunner

pytestmark = pytest.mark.unit

S = SortWorkerState


def runner_at_path(place: Path) -> PhaseRunner:
    source = write_source(place / "in", random_rows(1, 10))
    (place / "out").mkdir()
    (place / "temp").mkdir()
    return Worker("127.0.0.1:1", source, place / "out", Settings(), place / "temp", 0, "127.0.0.1").runner


def test_every_transition_is_recorded_timed_and_saved(tmp_path: Path) -> None:
    now = [100.0]
    journal = Journal(tmp_path, "sort worker 0", lambda: now[0])
    machine = StateMachine(SORT_WORKER, observer=journal, clock=lambda: now[0])
    for event, at in ((SortWorkerEvent.REGISTER, 101.0), (SortWorkerEvent.SEND_SAMPLE, 103.5)):
        now[0] = at
        machine.transition(event, f"at {at}")
        assert orjson.loads((tmp_path / "state.json").read_bytes())["state"] == str(machine.state)
    assert journal.phases == {"Sampling": 2.5}
    assert [(move.from_state, move.to_state, move.reason, move.timestamp) for move in journal.history] == [
        ("Initializing", "Sampling", "at 101.0", 101.0),
        ("Sampling", "WaitingForPartitionConfig", "at 103.5", 103.5),
    ]
    with pytest.raises(InvalidTransitionError, match="start_merge"):
        machine.transition(SortWorkerEvent.START_MERGE)
    again = Journal(tmp_path, "sort worker 0")
    found = again.load()
    assert found is not None
    again.resume(found)
    assert again.history == journal.history
    assert again.phases == journal.phases


def test_durations_ignore_a_wall_clock_that_is_set_back(tmp_path: Path) -> None:
    now, wall = [50.0], [1_000.0]
    journal = Journal(tmp_path, "sort worker 0", lambda: now[0])
    machine = StateMachine(SORT_WORKER, observer=journal, clock=lambda: wall[0])
    for event, at in ((SortWorkerEvent.REGISTER, 51.0), (SortWorkerEvent.SEND_SAMPLE, 53.0)):
        now[0], wall[0] = at, wall[0] - 3_600.0
        machine.transition(event)
    assert journal.phases == {"Sampling": 2.0}
    assert [move.elapsed for move in journal.history] == [1.0, 3.0]
    assert [move.timestamp for move in journal.history] == [-2_600.0, -6_200.0]
    later = Journal(tmp_path, "sort worker 0", lambda: now[0])
    found = later.load()
    assert found is not None
    later.resume(found)
    now[0] += 4.0
    StateMachine(SORT_WORKER, machine.state, observer=later).transition(SortWorkerEvent.RECEIVE_CONFIG)
    assert [move.elapsed for move in later.history] == [1.0, 3.0, 7.0], "after the seconds of the process before it"


def test_history_and_durations_are_printed_as_text() -> None:
    now = [0.0]
    journal = Journal(None, "sort worker 0", lambda: now[0])
    machine = StateMachine(SORT_WORKER, observer=journal)
    events = (SortWorkerEvent.REGISTER, SortWorkerEvent.SEND_SAMPLE, SortWorkerEvent.RECEIVE_CONFIG)
    for event, at in zip(events, (1.0, 3.25, 4.0), strict=True):
        now[0] = at
        machine.transition(event, f"because of {event}")
    printed = StringIO()
    journal.print_history(printed)
    assert printed.getvalue().splitlines() == [
        "=== State Transition History ===",
        "[+0.0s] Initializing -> Sampling: because of register",
        "[+2.2s] Sampling -> WaitingForPartitionConfig: because of send_sample",
        "[+3.0s] WaitingForPartitionConfig -> Sorting: because of receive_config",
    ]
    printed = StringIO()
    journal.print_phase_durations(printed)
    assert printed.getvalue().splitlines() == ["=== Phase Durations ===", "Sampling: 2.25s", "Sorting: In progress"]


def test_states_know_what_they_can_become() -> None:
    order = [S.INITIALIZING, S.SAMPLING, S.WAITING_FOR_PARTITION_CONFIG, S.SORTING, S.WAITING_FOR_SHUFFLE_SIGNAL,
             S.SHUFFLING, S.WAITING_FOR_MERGE_SIGNAL, S.MERGING, S.COMPLETED]  # fmt: skip
    expected = {*pairwise(order), *((state, S.FAILED) for state in order[:-1]), (S.FAILED, S.INITIALIZING)}
    assert {(one, other) for one in S for other in S if one.can_transition_to(other)} == expected
    assert SortMasterState.REGISTERING.can_transition_to(SortMasterState.SAMPLING)
    assert not SortMasterState.REGISTERING.can_transition_to(SortMasterState.MERGING)


def test_only_a_failed_worker_can_restart(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", random_rows(1, 10))
    for name in ("out", "temp"):
        (tmp_path / name).mkdir()
    worker = Worker("127.0.0.1:1", source, tmp_path / "out", Settings(), tmp_path / "temp", 0, "127.0.0.1")
    can = {}
    for state in S:
        worker.machine = StateMachine(SORT_WORKER, state)
        can[state] = worker.can_restart
    assert can == {state: state is S.FAILED for state in S}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"state'])
def test_a_damaged_state_file_loads_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    assert Journal(tmp_path, "").load() is None
    assert not is_resumable(tmp_path)


def test_only_a_sort_that_has_not_failed_can_be_resumed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "sort master")
    assert not is_resumable(tmp_path)
    for state in SortMasterState:
        journal.save(str(state))
        assert is_resumable(tmp_path) == (state is not SortMasterState.FAILED), "one that ends removes its state"
    journal.remove()
    assert not is_resumable(tmp_path)


def test_the_percentages_are_those_of_the_phases() -> None:
    assert set(STATE_PROGRESS) == set(SortWorkerState)
    at = {state: make_status(state, 0.5).progress_percentage for state in SortWorkerState}
    assert at == {
        S.INITIALIZING: 0.0, S.SAMPLING: 10.0, S.WAITING_FOR_PARTITION_CONFIG: 15.0, S.SORTING: 35.0,
        S.WAITING_FOR_SHUFFLE_SIGNAL: 55.0, S.SHUFFLING: 67.5, S.WAITING_FOR_MERGE_SIGNAL: 80.0, S.MERGING: 90.0,
        S.COMPLETED: 100.0, S.FAILED: 0.0,
    }  # fmt: skip
    assert make_status(S.SORTING, 0.5).message == "Sorting: 50%"
    assert make_status(S.MERGING, 7.0).progress_percentage == 100.0
    assert make_status(S.WAITING_FOR_MERGE_SIGNAL, 0.0).current_phase == WorkerStatus.SHUFFLING


def test_states_are_ranked_in_the_order_of_the_phases() -> None:
    assert [STATE_RANK[state] for state in SortWorkerState] == list(range(len(SortWorkerState)))


@pytest.mark.parametrize("state", [state for state in SortWorkerState if not SORT_WORKER.is_terminal(state)])
def test_a_failure_removes_the_files_of_its_phase(tmp_path: Path, state: SortWorkerState) -> None:
    runner = runner_at_path(tmp_path)
    runner.plan = Plan(1, 2, 1, (Boundary(b"m", 0),), Roster(1, (Member(0, "", 1, 10, 10), Member(1, "", 1, 0, 1))))
    runner.worker = 0
    places = {name: tmp_path / "temp" / name for name in ("runs", "slices", "outputs")}
    for place in places.values():
        place.mkdir()
    files = {
        "runs": places["runs"] / "run-000000",
        "slices": places["slices"] / "slice-0001-000000-00000",
        "output": tmp_path / "out" / "partition.0",
        "note": places["outputs"] / "partition.0.json",
        "of another": tmp_path / "out" / "partition.1",
    }
    for file in files.values():
        file.touch()
    runner.clean_after_failure(state)
    gone = {name for name, file in files.items() if not file.exists()}
    assert gone == {
        S.SORTING: {"runs"},
        S.WAITING_FOR_SHUFFLE_SIGNAL: {"runs"},
        S.SHUFFLING: {"slices"},
        S.WAITING_FOR_MERGE_SIGNAL: {"slices"},
        S.MERGING: {"output", "note"},
    }.get(state, {"runs", "slices", "note"})
    assert (tmp_path / "in").exists()


def test_incomplete_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    runner = runner_at_path(tmp_path)
    runs = tmp_path / "temp" / "runs"
    runs.mkdir()
    (runs / "run-000000").touch()
    (runs / "run-000001.part").touch()
    (tmp_path / "temp" / "state.json.part").touch()
    runner.clean_after_kill()
    assert [path.name for path in (tmp_path / "temp").rglob("*") if path.is_file()] == ["run-000000"]
