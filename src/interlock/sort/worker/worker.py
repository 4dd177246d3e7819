"""A sort worker: its state machine from registration to completion, through failures and restarts.

Invariant: the state is saved on every transition, by the thread that holds the lock: signals of the master make
transitions in other threads. A failure in any thread ends this worker in Failed, removes the files of its phase, and is
reported to the master.
"""

from __future__ import annotations

import logging
import resource
import shutil
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from interlock.errors import SortError, SortInputError
from interlock.lifecycle import SORT_WORKER, SortWorkerEvent, SortWorkerState
from interlock.machine import StateMachine
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.checksum import fingerprint
from interlock.sort.data.input_stamps import describe_change, take_stamps
from interlock.sort.io.memory import keep_freed_memory
from interlock.sort.io.merge import verify_output
from interlock.sort.io.runs import read_manifest
from interlock.sort.logging import log
from interlock.sort.rpc import NO_SECURITY, WORKER, Server, Unreachable
from interlock.sort.settings import WORK_DIRECTORY, Partition, Settings, WorkerReport
from interlock.sort.workdir import Journal, new_identity, new_incarnation
from interlock.sort.worker.master_client import MasterClient, UnknownToMaster
from interlock.sort.worker.phases import MANIFESTS, PhaseRunner
from interlock.sort.worker.progress import watch_worker
from interlock.sort.worker.service import WorkerService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from interlock.sort.data.plan import Roster
    from interlock.sort.data.records import Source
    from interlock.sort.security import Security
    from interlock.sort.settings import ProgressCallback, SaveCallback

HEARTBEAT_INTERVAL_S = 1.0
COMPLETED_REGISTER_TIMEOUT_S = 2.0  # for which a worker that had completed tries to reach its master
MAX_ATTEMPTS = 3  # starts of the sort after the master has lost the state of this worker


class UnreportedFailure(SortError):  # noqa: N818 - a named outcome
    """A worker failed before it was registered: no master knows of it, so its starter must report the reason."""


class UnreportedInputFailure(SortInputError, UnreportedFailure):  # noqa: N818 - a named outcome
    """A worker found an error in its input before it was registered."""


@contextmanager
def unreported_failures() -> Iterator[None]:
    """Turn errors of the block into UnreportedFailure."""
    try:
        yield
    except UnreportedFailure:
        raise
    except SortInputError as error:
        raise UnreportedInputFailure(str(error)) from error
    except SortError as error:
        raise UnreportedFailure(str(error)) from error
    except OSError as error:
        raise UnreportedFailure(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error


def run_worker(
    master: str,
    source: Source,
    output: Path,
    *,
    settings: Settings | None = None,
    work_dir: Path | None = None,
    index: int | None = None,
    host: str = "127.0.0.1",
    on_progress: ProgressCallback | None = None,
    stop: threading.Event | None = None,
    on_save: SaveCallback | None = None,
    security: Security = NO_SECURITY,
) -> WorkerReport:
    """Run a worker of the sort whose master is at an address: sort a source, write partitions to the output directory.

    Unfinished work goes to `work_dir`; a worker that is restarted with the same one resumes there. `index` is the
    position in the order of workers, which the master chooses if it is None. `host` is the address of this machine
    that the other workers can reach. Setting `stop` aborts the worker. `on_save` receives the state on every
    transition. `security` has the token of the sort.
    """
    keep_freed_memory()
    directory = work_dir or output / WORK_DIRECTORY
    with unreported_failures():
        output.mkdir(parents=True, exist_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        worker = Worker(master, source, output, settings or Settings(), directory, index, host, security)
    worker.journal.on_save = on_save
    with watch_worker(worker, on_progress, stop):
        report = worker.run()
    if work_dir is None:
        shutil.rmtree(directory, ignore_errors=True)
    return report


class Worker:
    """The state machine of a worker, and the sequence of phases that drives it."""

    def __init__(
        self,
        master: str,
        source: Source,
        output: Path,
        settings: Settings,
        work_dir: Path,
        index: int | None,
        host: str,
        security: Security = NO_SECURITY,
    ) -> None:
        self.security = security
        self.changed = threading.Condition()
        self.settings = settings
        self.index = -1
        self.epoch = 0
        self.starts = 1
        self.incarnation = new_incarnation()
        self.roster: Roster | None = None
        self.journal = Journal(work_dir, "sort worker")
        self.machine: StateMachine[SortWorkerState, SortWorkerEvent] = StateMachine(SORT_WORKER, observer=self.journal)
        self.runner = PhaseRunner(source, output, work_dir, settings, self.changed, self.fail, self.check)
        self.wanted_index = index
        self.stopping = threading.Event()
        self._failure: BaseException | None = None
        self._abort_reason: str | None = None
        self._other_sort: dict[str, Any] | None = None  # state of another sort, kept until this worker is registered
        self._master = MasterClient(master, self)
        self.server = Server(WORKER, WorkerService(self), host, security=security)
        self.worker_count, self._partitions = 0, 0
        self._stamps = take_stamps(source)
        self._input_change = ""  # since an earlier process of this worker took part in the sort

    @property
    def address(self) -> str:
        """The address that the other workers and the master can reach."""
        return self.server.address

    @property
    def roster_version(self) -> int:
        """The version of the roster that this worker has."""
        return self.roster.version if self.roster is not None else 0

    def run(self) -> WorkerReport:
        """Run all phases; return the report, or raise the failure."""
        self.server.start()
        try:
            with unreported_failures():
                done = self._load_state()
            return done if done is not None else self._run_attempts()
        finally:
            self.runner.close()
            self.server.stop()
            self._master.close()

    @property
    def can_restart(self) -> bool:
        """Whether this worker may start again from the beginning: only after a failure."""
        return self.machine.state.can_transition_to(SortWorkerState.INITIALIZING)

    def fail(self, error: BaseException) -> None:
        """Record a failure from any thread; the current phase ends with it."""
        with self.changed:
            if self._failure is None:
                self._failure = error
            self.stopping.set()
            self.changed.notify_all()

    def abort(self, reason: str) -> None:
        """End, because the whole sort has failed."""
        self._abort_reason = reason
        self.fail(SortError(reason))

    def check(self) -> None:
        """Raise the failure of another thread, if there is one."""
        if self._failure is not None:
            raise self._failure

    def _run_attempts(self) -> WorkerReport:
        """Run the phases, and again from the start if the master has lost the state of this worker."""
        left = MAX_ATTEMPTS
        while True:
            try:
                return self._run_phases()
            except UnknownToMaster as error:
                left -= 1
                self._enter_failed(error)
                if not left or not self.can_restart:
                    raise
                self._restart(str(error))
            except BaseException as error:
                self._enter_failed(error)
                if not self.epoch:  # not registered yet
                    with unreported_failures():
                        raise
                if self._abort_reason is None:
                    self._master.report_failure(error)
                raise

    def _run_phases(self) -> WorkerReport:
        machine, runner = self.machine, self.runner
        self._register()
        self._move(SortWorkerEvent.REGISTER, "Starting sampling phase")
        sample = self._take_sample()
        self._master.send_sample(sample)
        self._move(SortWorkerEvent.SEND_SAMPLE, "Sampling complete, waiting for config")
        self._master.notify_state(SortWorkerState.WAITING_FOR_PARTITION_CONFIG)
        self._wait_for_signal(SortWorkerState.WAITING_FOR_PARTITION_CONFIG, lambda: self._master.send_sample(sample))
        machine.require_state(SortWorkerState.SORTING)
        runner.sort()
        self._move(SortWorkerEvent.FINISH_SORTING, "Sorting complete, waiting for signal")
        self._notify_and_wait(SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL)
        machine.require_state(SortWorkerState.SHUFFLING)
        self._shuffle()
        self._move(SortWorkerEvent.FINISH_SHUFFLE, "Shuffle complete, waiting for signal")
        self._notify_and_wait(SortWorkerState.WAITING_FOR_MERGE_SIGNAL)
        machine.require_state(SortWorkerState.MERGING)
        partitions = runner.merge()
        self._check_input()
        self.journal.checkpoint["partitions"] = [(one.number, one.path, one.records, one.size) for one in partitions]
        self._move(SortWorkerEvent.COMPLETE, "All phases completed successfully")
        self._complete(partitions)
        return self._report(partitions)

    def _move(self, event: SortWorkerEvent, reason: str) -> None:
        """Make a transition and save it."""
        with self.changed:
            self.machine.transition(event, reason)

    def _load_state(self) -> WorkerReport | None:
        """Load the state of an earlier process: return its report if it had completed, else prepare to resume."""
        stamp = f"{fingerprint(self.runner.source)} {self.runner.output.resolve()}"
        saved = self.journal.load()
        if saved is None or saved.get("checkpoint", {}).get("stamp") != stamp:
            if saved is not None:
                self._input_change = describe_change(saved.get("checkpoint", {}).get("files", {}), self._stamps)
            self.journal.checkpoint = {"identity": new_identity(), "stamp": stamp, "epoch": 0, "index": -1}
            self.journal.checkpoint["files"] = self._stamps
            self.journal.checkpoint["input"] = self.runner.source.records
            self.journal.checkpoint["format"] = str(self.runner.source.format)
            if saved is None:
                self._claim_work_dir()
            else:
                self._other_sort = saved
            return None
        self.journal.resume(saved)
        state = SortWorkerState(saved["state"])
        if state is SortWorkerState.COMPLETED:
            return self._report_completed_before()
        self._restart_machine(state)
        return None

    def _claim_work_dir(self) -> None:
        """Remove the files of another sort, and save the state of this one."""
        self._other_sort = None
        self.runner.clean_all()
        with self.changed:
            self.journal.save(str(self.machine.state))

    def _restart_machine(self, state: SortWorkerState) -> None:
        """Continue after a process that failed or was killed in a state."""
        self.machine = StateMachine(SORT_WORKER, state, observer=self.journal)
        if state is not SortWorkerState.FAILED:
            log.warning("%s: its process ended in state %s; it is restarted", self.journal.name, state)
            self._move(SortWorkerEvent.FAIL, f"The process ended in state {state}")
            self.runner.clean_after_kill()
        self._move(SortWorkerEvent.RESTART, "Started again")

    def _report_completed_before(self) -> WorkerReport | None:
        """Return the report of a worker that had completed, if its files are intact and the master needs no more."""
        checkpoint = self.journal.checkpoint
        partitions = [Partition(*one) for one in checkpoint.get("partitions", [])]
        if not all(map(self._is_intact, partitions)):
            return None
        try:
            answer = self._master.register(COMPLETED_REGISTER_TIMEOUT_S)
        except Unreachable:
            answer = None
        if answer is not None and not (answer.finished and answer.epoch == checkpoint["epoch"]):
            return None  # a new sort, or one in which another worker may need this one's records again
        self.runner.reused += len(partitions)
        self.machine = StateMachine(SORT_WORKER, SortWorkerState.COMPLETED, observer=self.journal)
        self.index = checkpoint["index"]
        if answer is not None:
            self._apply_registration(answer)
            self._complete(partitions)
        return self._report(partitions)

    def _is_intact(self, partition: Partition) -> bool:
        name = self.settings.partition_name(partition.number)
        manifest = read_manifest(self.runner.work_dir / MANIFESTS / name)
        return manifest is not None and verify_output(self.runner.output / name, manifest)

    def _register(self) -> None:
        answer = self._master.register(self.settings.register_timeout_s)
        if not answer.success:
            refusal = f"the master at {self._master.address} refused this worker: {answer.message}"
            if self._input_change:
                raise SortInputError(
                    f"{self._input_change} since this worker took part in the sort: start a new sort. So {refusal}"
                )
            raise SortError(f"{refusal}{self._describe_other_sort()}")
        self._apply_registration(answer)
        if self._other_sort is not None:
            self._claim_work_dir()

    def _check_input(self) -> None:
        """Refuse to complete if a file changed after this worker was started: part of it may be from before."""
        change = describe_change(self._stamps, take_stamps(self.runner.source))
        if change:
            raise SortInputError(f"{change} while it was sorted; start a new sort")

    def _describe_other_sort(self) -> str:
        """Describe the sort whose state is in the work directory, if it is another one."""
        before = (self._other_sort or {}).get("checkpoint", {})
        if "input" not in before:
            return ""
        now = self.runner.source.format
        started = f". Started in {self.runner.work_dir} before, it"
        if before.get("format", str(now)) != str(now):
            return f"{started} sorted {before['format']}, and now {now}"
        return f"{started} had {before['input']:,} {'records' if now.lines is None else 'bytes of lines'}"

    def _apply_registration(self, answer: wire.Registered) -> None:
        self.epoch, self.index, self.starts = answer.epoch, answer.index, answer.starts
        self.worker_count, self._partitions = answer.workers, answer.partitions
        self.journal.name = f"sort worker {self.index}"
        self.journal.checkpoint.update(epoch=self.epoch, index=self.index)

    def _take_sample(self) -> wire.Sample:
        sample = self.runner.sample(self.index, self.worker_count, self._partitions)
        return wire.Sample(
            epoch=self.epoch,
            worker=self.index,
            incarnation=self.incarnation,
            records=sample.records,
            keys=sample.keys.tobytes(),
            positions=sample.positions.astype("<u8").tobytes(),
        )

    def _shuffle(self) -> None:
        roster = self.roster
        if roster is None:
            raise SortError("the shuffle was started without a roster")
        sender = self.runner.begin_shuffle(self.settings.shuffle_timeout_s, self.security)
        sender.start(roster)
        with self.changed:
            sender.update(self.roster or roster)
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: self._failure is not None or self.runner.is_shuffled(), HEARTBEAT_INTERVAL_S
                )
                self.check()
                if self.runner.is_shuffled():
                    return
            self._master.notify_state(SortWorkerState.SHUFFLING)

    def _notify_and_wait(self, state: SortWorkerState) -> None:
        """Tell the master of the end of a phase, and again as a heartbeat until its signal for the next one."""
        self._master.notify_state(state)
        self._wait_for_signal(state, lambda: self._master.notify_state(state))

    def _wait_for_signal(self, state: SortWorkerState, remind: Callable[[], None]) -> None:
        """Wait until a signal of the master ends this state; call `remind` as a heartbeat meanwhile."""
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: self.machine.state is not state or self._failure is not None, HEARTBEAT_INTERVAL_S
                )
                self.check()
                if self.machine.state is not state:
                    return
            remind()

    def _complete(self, partitions: list[Partition]) -> None:
        """Report completion, and stay until all workers have completed: a restarted one may need records again."""
        while not self._master.report_completion(self._report(partitions)):
            self.check()
        self.runner.close()
        self.runner.clean_after_completion()

    def _enter_failed(self, error: BaseException) -> None:
        """Go to Failed and remove the files of the phase that failed."""
        with self.changed:
            state = self.machine.state
            if state in {SortWorkerState.COMPLETED, SortWorkerState.FAILED} or self._other_sort is not None:
                return
            self._move(SortWorkerEvent.FAIL, f"{type(error).__name__}: {error}")
        if log.isEnabledFor(logging.DEBUG):
            self.journal.print_history(sys.stderr)
            self.journal.print_phase_durations(sys.stderr)
        self.runner.close()
        self.runner.clean_after_failure(state)

    def _restart(self, reason: str) -> None:
        self._move(SortWorkerEvent.RESTART, reason)
        with self.changed:
            self._failure = None
            self.stopping.clear()
            self.incarnation = new_incarnation()
            self.roster = None
            self.runner.reset()

    def _report(self, partitions: list[Partition]) -> WorkerReport:
        return WorkerReport(
            index=self.index,
            address=self.address,
            records=sum(one.records for one in partitions),
            partitions=tuple(partitions),
            phases=dict(self.journal.phases),
            history=tuple(self.journal.history),
            peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            reused=self.runner.reused,
            starts=self.starts,
        )
