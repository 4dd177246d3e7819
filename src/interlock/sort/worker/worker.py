"""One sort worker: its life through the phases, from registration to completion, and through failures and restarts.

Invariant: the state is saved on every move. Whatever fails, in whatever thread, ends this worker in Failed, cleans up
what that state leaves behind and reaches the master.
"""

from __future__ import annotations

import resource
import shutil
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from interlock.errors import SortError, SortInputError
from interlock.lifecycle import SORT_WORKER, SortWorkerEvent, SortWorkerState
from interlock.machine import StateMachine
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.checksum import fingerprint
from interlock.sort.io.memory import keep_freed_memory
from interlock.sort.io.merge import is_proven
from interlock.sort.io.runs import read_note
from interlock.sort.logging import log
from interlock.sort.rpc import WORKER, Server, Unreachable
from interlock.sort.settings import HIDDEN, Partition, Settings, WorkerReport
from interlock.sort.workdir import Journal, new_identity, new_incarnation
from interlock.sort.worker.master_client import Forgotten, MasterPeer
from interlock.sort.worker.phases import NOTES, Workshop
from interlock.sort.worker.progress import watching
from interlock.sort.worker.service import WorkerHandlers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from interlock.sort.data.plan import Roster
    from interlock.sort.data.records import Source
    from interlock.sort.settings import Told

    Saved = Callable[[dict[str, Any]], object]


# SECTION sort/untold
# Failures of a worker that no master knows of, since the worker had no place in a sort yet.
#
# Invariant: whoever started the worker gets the reason, because nobody else can tell it.


class Untold(SortError):  # noqa: N818 - a named outcome
    """A worker failed before it had a master to tell."""


class UntoldInput(SortInputError, Untold):  # noqa: N818 - a named outcome
    """A worker was given something wrong, and found it before it had a master to tell."""


@contextmanager
def untold() -> Iterator[None]:
    """Have what fails in the block say that no master knows of it."""
    try:
        yield
    except Untold:
        raise
    except SortInputError as error:
        raise UntoldInput(str(error)) from error
    except SortError as error:
        raise Untold(str(error)) from error
    except OSError as error:
        raise Untold(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error


HEARTBEAT = 1.0
NOTHING_TO_DO = 2.0  # seconds for which a completed worker looks for its master
RESTARTS = 3


def run_worker(
    master: str,
    source: Source,
    output: Path,
    *,
    settings: Settings | None = None,
    temp: Path | None = None,
    index: int | None = None,
    host: str = "127.0.0.1",
    told: Told | None = None,
    stop: threading.Event | None = None,
    saved: Saved | None = None,
) -> WorkerReport:
    """Take part in the sort of the master at an address: sort a source, write partitions to the output directory.

    Unfinished work goes to `temp`; a worker that is started again with the same one goes on from there. `index` is the
    place in the order of workers, which the master chooses when it is not given. `host` is the address of this machine
    at which the other workers reach it. Setting `stop` makes the worker give up. `saved` gets what every move saves.
    """
    keep_freed_memory()
    place = temp or output / HIDDEN
    with untold():
        output.mkdir(parents=True, exist_ok=True)
        place.mkdir(parents=True, exist_ok=True)
        worker = Worker(master, source, output, settings or Settings(), place, index, host)
    worker.journal.also = saved
    with watching(worker, told, stop):
        report = worker.run()
    if temp is None:
        shutil.rmtree(place, ignore_errors=True)
    return report


class Worker:
    """A worker's machine, and what drives it."""

    def __init__(
        self, master: str, source: Source, output: Path, settings: Settings, temp: Path, index: int | None, host: str
    ) -> None:
        self.changed = threading.Condition()
        self.settings = settings
        self.index = -1
        self.epoch = 0
        self.starts = 1
        self.incarnation = new_incarnation()
        self.roster: Roster | None = None
        self.journal = Journal(temp, "sort worker")
        self.machine: StateMachine[SortWorkerState, SortWorkerEvent] = StateMachine(SORT_WORKER, observer=self.journal)
        self.workshop = Workshop(source, output, temp, settings, self.changed, self.failed, self.check)
        self.wanted = index
        self.stopping = threading.Event()
        self._failure: BaseException | None = None
        self._abandoned: str | None = None
        self._foreign: dict[str, Any] | None = None  # the state of another sort that is here until this one has a place
        self._master = MasterPeer(master, self)
        self._server = Server(WORKER, WorkerHandlers(self), host)
        self._workers, self._partitions = 0, 0

    @property
    def address(self) -> str:
        """Where the other workers and the master reach this one."""
        return self._server.address

    @property
    def roster_version(self) -> int:
        """Which roster this worker knows."""
        return self.roster.version if self.roster is not None else 0

    def run(self) -> WorkerReport:
        """Go through all phases; give what was done, or raise what failed."""
        self._server.start()
        try:
            with untold():
                done = self._finished_before()
            return done if done is not None else self._attempts()
        finally:
            self.workshop.close()
            self._server.stop()
            self._master.close()

    def failed(self, error: BaseException) -> None:
        """Hear of a failure in some thread; the phase under way ends with it."""
        with self.changed:
            if self._failure is None:
                self._failure = error
            self.stopping.set()
            self.changed.notify_all()

    def abandon(self, reason: str) -> None:
        """Hear that the whole sort has failed."""
        self._abandoned = reason
        self.failed(SortError(reason))

    def check(self) -> None:
        """Raise what failed in another thread."""
        if self._failure is not None:
            raise self._failure

    def _attempts(self) -> WorkerReport:
        """Go through the phases, from the beginning again when the master has forgotten this worker."""
        left = RESTARTS
        while True:
            try:
                return self._phases()
            except Forgotten as error:
                left -= 1
                self._fall(error)
                if not left:
                    raise
                self._restart(str(error))
            except BaseException as error:
                self._fall(error)
                self._tell(error)
                raise

    def _tell(self, error: BaseException) -> None:
        """Tell the master of a failure, unless it told of it; raise what says that there is no master yet."""
        if not self.epoch:
            with untold():
                raise error
        if self._abandoned is None:
            self._master.report_failure(error)

    def _phases(self) -> WorkerReport:
        machine, workshop = self.machine, self.workshop
        self._register()
        machine.transition(SortWorkerEvent.REGISTER, "Starting sampling phase")
        sample = self._sample()
        self._master.send_sample(sample)
        machine.transition(SortWorkerEvent.SEND_SAMPLE, "Sampling complete, waiting for config")
        self._master.notify()
        self._await(SortWorkerState.WAITING_FOR_PARTITION_CONFIG, lambda: self._master.send_sample(sample))
        workshop.sort()
        machine.transition(SortWorkerEvent.FINISH_SORTING, "Sorting complete, waiting for signal")
        self._master.notify()
        self._await(SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL, self._master.notify)
        self._shuffle()
        machine.transition(SortWorkerEvent.FINISH_SHUFFLE, "Shuffle complete, waiting for signal")
        self._master.notify()
        self._await(SortWorkerState.WAITING_FOR_MERGE_SIGNAL, self._master.notify)
        partitions = workshop.merge()
        self.journal.kept["partitions"] = [(one.number, one.path, one.records, one.size) for one in partitions]
        machine.transition(SortWorkerEvent.COMPLETE, "All phases completed successfully")
        self._complete(partitions)
        return self._report(partitions)

    def _finished_before(self) -> WorkerReport | None:
        """Look at what an earlier process left: give its report if there is nothing to do, else make ready to go on."""
        stamp = f"{fingerprint(self.workshop.source)} {self.workshop.output.resolve()}"
        found = self.journal.load()
        if found is None or found.get("kept", {}).get("stamp") != stamp:
            self.journal.kept = {"identity": new_identity(), "stamp": stamp, "epoch": 0, "index": -1}
            self.journal.kept["input"] = self.workshop.source.records
            if found is None:
                self._begin()
            else:
                self._foreign = found
            return None
        self.journal.resume(found)
        state = SortWorkerState(found["state"])
        if state is SortWorkerState.COMPLETED:
            done = self._proven()
            if done is not None:
                return done
        else:
            self._revive(state)
        return None

    def _begin(self) -> None:
        """Remove what another sort left, if there is something: this one has the place now."""
        self._foreign = None
        self.workshop.clean_all()
        self.journal.save(str(self.machine.state))

    def _revive(self, state: SortWorkerState) -> None:
        """Go on after a process that failed or was killed in some state."""
        self.machine = StateMachine(SORT_WORKER, state, observer=self.journal)
        if state is not SortWorkerState.FAILED:
            log.warning("%s: its process ended in state %s; it is started again", self.journal.who, state)
            self.machine.transition(SortWorkerEvent.FAIL, f"The process ended in state {state}")
            self.workshop.clean_after_kill()
        self.machine.transition(SortWorkerEvent.RESTART, "Started again")

    def _proven(self) -> WorkerReport | None:
        """Give the report of a worker that had completed, if its files are right and its master needs nothing more."""
        kept = self.journal.kept
        partitions = [Partition(*one) for one in kept.get("partitions", [])]
        if not all(map(self._is_proven, partitions)):
            return None
        try:
            answer = self._master.register(NOTHING_TO_DO)
        except Unreachable:
            answer = None
        if answer is not None and not (answer.finished and answer.epoch == kept["epoch"]):
            return None  # a new sort, or one in which another worker may need the records of this one again
        self.workshop.reused += len(partitions)
        self.machine = StateMachine(SORT_WORKER, SortWorkerState.COMPLETED, observer=self.journal)
        self.index = kept["index"]
        if answer is not None:
            self._registered(answer)
            self._complete(partitions)
        return self._report(partitions)

    def _is_proven(self, partition: Partition) -> bool:
        name = f"partition.{partition.number}"
        note = read_note(self.workshop.temp / NOTES / name)
        return note is not None and is_proven(self.workshop.output / name, note)

    def _register(self) -> None:
        answer = self._master.register(self.settings.registering)
        if not answer.success:
            raise SortError(
                f"the master at {self._master.address} refused this worker: {answer.message}{self._had_before()}"
            )
        self._registered(answer)
        if self._foreign is not None:
            self._begin()

    def _had_before(self) -> str:
        """Say what was sorted here before, if it was something else."""
        had = (self._foreign or {}).get("kept", {}).get("input")
        return f". Started in {self.workshop.temp} before, it had {had:,} records" if had is not None else ""

    def _registered(self, answer: wire.Registered) -> None:
        self.epoch, self.index, self.starts = answer.epoch, answer.index, answer.starts
        self._workers, self._partitions = answer.workers, answer.partitions
        self.journal.who = f"sort worker {self.index}"
        self.journal.kept.update(epoch=self.epoch, index=self.index)

    def _sample(self) -> wire.Sample:
        sample = self.workshop.sample(self.index, self._workers, self._partitions)
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
        sender = self.workshop.begin_shuffle(self.settings.shuffling)
        sender.start(roster)
        with self.changed:
            sender.update(self.roster or roster)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._failure is not None or self.workshop.is_shuffled(), HEARTBEAT)
                self.check()
                if self.workshop.is_shuffled():
                    return
            self._master.notify()

    def _await(self, state: SortWorkerState, remind: Callable[[], None]) -> None:
        """Wait until the master's signal moves this worker on; remind the master of it from time to time."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.machine.state is not state or self._failure is not None, HEARTBEAT)
                self.check()
                if self.machine.state is not state:
                    return
            remind()

    def _complete(self, partitions: list[Partition]) -> None:
        """Report completion, and stay for the others until all have completed: one may have to be served again."""
        while not self._master.report(self._report(partitions)):
            self.check()
        self.workshop.close()
        self.workshop.clean_after_completion()

    def _fall(self, error: BaseException) -> None:
        """Go to Failed and clean up by the state before."""
        state = self.machine.state
        if state in {SortWorkerState.COMPLETED, SortWorkerState.FAILED} or self._foreign is not None:
            return
        self.machine.transition(SortWorkerEvent.FAIL, f"{type(error).__name__}: {error}")
        self.workshop.close()
        self.workshop.clean_after_failure(state)

    def _restart(self, reason: str) -> None:
        self.machine.transition(SortWorkerEvent.RESTART, reason)
        with self.changed:
            self._failure = None
            self.stopping.clear()
            self.incarnation = new_incarnation()
            self.roster = None
            self.workshop.forget()

    def _report(self, partitions: list[Partition]) -> WorkerReport:
        return WorkerReport(
            index=self.index,
            address=self.address,
            records=sum(one.records for one in partitions),
            partitions=tuple(partitions),
            phases=dict(self.journal.phases),
            history=tuple(self.journal.history),
            peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            reused=self.workshop.reused,
            starts=self.starts,
        )
