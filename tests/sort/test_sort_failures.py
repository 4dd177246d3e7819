"""Failures of a sort: which one is reported, where its reason goes, log levels, and files that stay."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from interlock.errors import SortError, SortInputError
from interlock.lifecycle import SORT_WORKER, SortMasterEvent, SortMasterState, SortWorkerState
from interlock.machine import StateMachine
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.plan import Member, Plan, Roster
from interlock.sort.data.validate import validate
from interlock.sort.master.master import Master
from interlock.sort.master.roster import RegisteredWorker
from interlock.sort.master.service import MasterService
from interlock.sort.rpc import PROTOCOL_VERSION
from interlock.sort.settings import Settings
from interlock.sort.workdir import Journal
from interlock.sort.worker.service import WorkerService
from interlock.sort.worker.worker import (
    UnreportedFailure,
    UnreportedInputFailure,
    Worker,
    run_worker,
    unreported_failures,
)
from sort_cli import make_input, names, sort, started
from sort_cluster import random_rows, write_source
from sort_threads import sort_in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.flow

ROWS = random_rows(5, 300)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture the log of the sort from level info on."""
    with caplog.at_level(logging.INFO, logger="interlock.sort"):
        yield caplog


def levels(logged: pytest.LogCaptureFixture) -> dict[str, str]:
    return {record.getMessage(): record.levelname for record in logged.records}


def test_the_first_of_several_failures_is_reported() -> None:
    master = Master(3, Settings(), None, "127.0.0.1", 0, threading.Event())
    handlers: Any = MasterService(master)
    for index in range(3):
        handlers.RegisterWorker(
            wire.Registration(identity=f"{index}", index=index, record_length=100, key_length=10, block_records=1,
                              window_records=1, incarnation=1, address=f"w{index}:1", state="Initializing",
                              protocol=PROTOCOL_VERSION), None
        )  # fmt: skip

    def fail(index: int, message: str) -> wire.Ack:
        own: dict[str, Any] = {"epoch": master.epoch, "worker": index, "incarnation": 1, "state": "Failed"}
        answer: wire.Ack = handlers.NotifyPhaseComplete(wire.PhaseComplete(**own, message=message), None)
        return answer

    assert fail(2, "its disk is full").success
    assert fail(0, "worker 2 does not answer").success, "accepted, but not reported"
    with pytest.raises(SortError) as raised:
        master.run(None, None)
    assert str(raised.value) == "worker 2 (w2:1) failed: its disk is full"
    assert master.journal.history[-1].reason == str(raised.value)
    late = fail(1, "given up")
    assert (late.success, late.failed, late.message) == (False, True, str(raised.value))


def test_states_are_saved_in_the_order_of_the_transitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that saves holds the lock of its process, so that no other thread saves an older or a newer state."""
    locks: dict[Journal, threading.Condition] = {}
    unlocked: list[tuple[str, str]] = []
    saved: set[str] = set()
    init_worker, init_master, save = Worker.__init__, Master.__init__, Journal.save

    def is_free(lock: threading.Condition) -> bool:
        if lock.acquire(blocking=False):
            lock.release()
            return True
        return False

    with ThreadPoolExecutor(1) as other:

        def make_worker(self: Worker, *arguments: Any) -> None:
            init_worker(self, *arguments)
            locks[self.journal] = self.changed

        def make_master(self: Master, *arguments: Any) -> None:
            init_master(self, *arguments)
            locks[self.journal] = self.changed

        def check_and_save(self: Journal, state: str) -> None:
            lock = locks.get(self)  # none while a process is made, with a single thread
            if lock is not None and other.submit(is_free, lock).result():
                unlocked.append((self.name, state))
            saved.add(state)
            save(self, state)

        monkeypatch.setattr(Worker, "__init__", make_worker)
        monkeypatch.setattr(Master, "__init__", make_master)
        monkeypatch.setattr(Journal, "save", check_and_save)
        sort_in_threads(write_source(tmp_path / "in", random_rows(1, 2_000)), tmp_path)
    assert saved == {*SortMasterState, *SortWorkerState} - {"Failed"}
    assert unlocked == []


def test_a_failed_worker_counts_for_no_phase_until_its_restart() -> None:
    worker = RegisteredWorker(0, "a", 1, "w:1", 10, 100, 10, 5, 5, state="Merging")
    assert worker.has_reached(SortWorkerState.SHUFFLING)
    worker.record_heartbeat("Failed")
    worker.record_heartbeat("Merging")  # a late answer
    assert worker.state == "Failed"
    assert not any(worker.has_reached(state) for state in SortWorkerState)
    assert (worker.progress().phase, worker.progress().percent) == ("FAILED", 0.0)
    worker.rejoin(wire.Registration(incarnation=2, address="w:2", state="Initializing"))
    worker.record_heartbeat("Sampling")
    assert worker.has_reached(SortWorkerState.SAMPLING)
    assert not worker.has_reached(SortWorkerState.SORTING)


def test_log_levels_of_moves_early_data_and_refused_plans(tmp_path: Path, logged: pytest.LogCaptureFixture) -> None:
    for place in ("out", "temp"):
        (tmp_path / place).mkdir()
    source = write_source(tmp_path / "in", ROWS)
    worker = Worker("127.0.0.1:1", source, tmp_path / "out", Settings(), tmp_path / "temp", 0, "127.0.0.1")
    handlers: Any = WorkerService(worker)
    worker.runner.accept(Plan(0, 1, 1, (), Roster(1, (Member(0, "w:1", 1, len(ROWS), len(ROWS)),))), 0)
    answer = handlers.SetPartitionBoundaries(wire.PartitionConfig(), None)
    assert (answer.success, answer.message) == (False, "Cannot set partition config in state Initializing")
    refused = handlers.ShuffleData(iter(()), None)
    assert (refused.success, refused.message) == (False, "Cannot take shuffle data in state Initializing")
    worker.machine = StateMachine(SORT_WORKER, SortWorkerState.SORTING, observer=worker.journal)
    assert handlers.ShuffleData(iter(()), None).success, "a restarted worker may get data again before its time"
    worker.machine = StateMachine(SORT_WORKER, observer=worker.journal)
    worker.fail(SortError("its disk is full"))
    with pytest.raises(UnreportedFailure, match="its disk is full"):
        worker.run()
    assert levels(logged) == {
        "sort worker: cannot set partition config in state Initializing": "ERROR",
        "sort worker: received shuffle data in state Sorting": "WARNING",
        "sort worker: Initializing -> Failed (SortError: its disk is full)": "INFO",
    }


def test_the_restart_of_a_process_is_logged_as_a_warning(tmp_path: Path, logged: pytest.LogCaptureFixture) -> None:
    first = Master(2, Settings(), tmp_path, "127.0.0.1", 0, threading.Event())
    first.machine.transition(SortMasterEvent.START_SAMPLING)
    first.close()
    Master(2, Settings(), tmp_path, "127.0.0.1", 0, threading.Event()).close()
    assert levels(logged)["sort master: its process ended in state Sampling; it is restarted"] == "WARNING"


def test_log_level_and_format_apply_to_all_processes(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 1_000)

    def run(*options: str, **environment: str) -> list[str]:
        out = tmp_path / "-".join(["out", *options, *environment])
        with started(
            "run", tmp_path / "in", "-O", out, "-w", 2, "-q", before=options, environment=environment
        ) as process:
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return [line for line in errors.splitlines() if " -> " in line]

    assert run() == run("--log-level", "warning") == []
    lines = run("--log-level", "info")
    assert len(lines) == 5 + 2 * 8
    assert all("[info] sort " in line for line in lines)
    machine = [json.loads(line) for line in run("--log-format", "json", INTERLOCK_LOG_LEVEL="debug")]
    assert {line["level"] for line in machine} == {"info"}
    for who in ("sort master", "sort worker 0", "sort worker 1"):
        assert sum(line["message"].startswith(f"{who}: ") for line in machine) in {5, 8}


def test_a_failure_before_registration_is_reported_to_the_user(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 1_000)
    taken = tmp_path / "out" / ".interlock-sort" / "worker-1"
    taken.parent.mkdir(parents=True)
    taken.touch()
    done = sort("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "-q")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"interlock: worker 1 failed before it was registered: {taken}: File exists"]
    assert done.stdout == ""


def test_unreported_failures_name_the_input_as_cause_or_not(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", ROWS)
    (tmp_path / "in").unlink()
    with pytest.raises(UnreportedInputFailure, match=r"input .*in cannot be read: No such file or directory; it must"):
        run_worker("127.0.0.1:1", source, tmp_path / "out")
    with pytest.raises(UnreportedFailure, match="disk: No space") as raised, unreported_failures():
        raise OSError(28, "No space", "disk")
    assert not isinstance(raised.value, UnreportedInputFailure)
    with pytest.raises(UnreportedInputFailure, match="no record"), unreported_failures():
        raise SortInputError("no record")


def test_a_failed_merge_keeps_the_partitions_it_was_to_replace(tmp_path: Path) -> None:
    make_input(tmp_path / "old", 3_000, seed=4)
    make_input(tmp_path / "in", 50_000)
    out = tmp_path / "out"
    assert sort("run", tmp_path / "old", "-O", out, "-w", 3, "-q").returncode == 0
    arguments = ("run", tmp_path / "in", "-O", out, "-w", 2, "--overwrite")
    done = sort(*arguments, largest_file=1_000_000)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "Merging" in done.stderr, "what was sorted and received had room in memory"
    assert names(out) == ["partition.0", "partition.1", "partition.2"]
    assert validate([out], [tmp_path / "old"]).problems == []
    assert sort(*arguments).returncode == 0
    assert names(out) == ["partition.0", "partition.1"]
    assert validate([out], [tmp_path / "in"]).problems == []


def test_two_sorts_share_one_engine(tmp_path: Path, url: str) -> None:
    sizes = {"a": 60_000, "b": 5_000}
    for name, records in sizes.items():
        make_input(tmp_path / f"in-{name}", records, seed=len(name))
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                started(
                    "run", tmp_path / f"in-{name}", "-O", tmp_path / name, "-w", 2, "--engine", "interlock", url=url
                )
            )
            for name in sizes
        ]
        for process in running:
            _, errors = process.communicate(timeout=100)
            assert process.returncode == 0, errors
            assert "Traceback" not in errors
    for name in sizes:
        assert names(tmp_path / name) == ["partition.0", "partition.1"]
        assert validate([tmp_path / name], [tmp_path / f"in-{name}"]).problems == []
