"""The master of a sort: it seats the workers, chooses the boundaries, and holds all together at each phase's end.

It looks at where the workers are and tells each what it lacks, so that a worker, or the master itself, can be started
again at any time: a worker that comes late in a phase is told what the others were told before.

Invariant: a phase begins when every worker has finished the one before it. No phase takes longer than its time, and a
worker that is silent too long ends the sort with its name.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from interlock.errors import SortError, SortInputError
from interlock.lifecycle import SORT_MASTER, SortMasterEvent, SortMasterState, SortWorkerState
from interlock.machine import StateMachine
from interlock.sort.data.keys import Boundary
from interlock.sort.data.plan import Plan, Roster, choose_boundaries, window_count
from interlock.sort.logging import log
from interlock.sort.master.broadcast import ask_status, signal, withdraw
from interlock.sort.master.roster import Seat, check_space, roster_of
from interlock.sort.master.service import MasterHandlers
from interlock.sort.rpc import MASTER, Server
from interlock.sort.settings import Progress, Report, Settings, WorkerReport
from interlock.sort.workdir import Journal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from interlock.sort.settings import Told

TICK = 0.25
FAREWELL = 5.0  # seconds for which the master stays for workers that have not heard that all is done
ANSWERED = 2.0  # seconds that answers under way may take to leave


def run_master(
    workers: int,
    *,
    settings: Settings | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    temp: Path | None = None,
    listening: Callable[[str], None] | None = None,
    told: Told | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """Lead a sort of so many workers; give what was done, or raise SortError.

    `listening` is told the address, `told` how it goes. With `temp`, the state is kept there, and a master that is
    started again with the same one goes on at the same address. Setting `stop` makes the master give up.
    """
    if workers < 1:
        raise SortError(f"a sort needs at least one worker, not {workers}")
    if temp is not None:
        temp.mkdir(parents=True, exist_ok=True)
    master = Master(workers, settings or Settings(), temp, host, port, stop or threading.Event())
    return master.run(listening, told)


class Master:
    """The master's machine, and what drives it."""

    def __init__(
        self, workers: int, settings: Settings, temp: Path | None, host: str, port: int, stop: threading.Event
    ) -> None:
        self.changed = threading.Condition()
        self.workers = workers
        self.settings = settings
        self.partitions = settings.partitions or workers
        self.epoch = secrets.randbits(62) | 1
        self.seats: dict[int, Seat] = {}
        self.plan: Plan | None = None
        self.roster_version = 0
        self.failure = ""
        self.journal = Journal(temp, "sort master")
        self.machine: StateMachine[SortMasterState, SortMasterEvent] = StateMachine(SORT_MASTER, observer=self.journal)
        self._stop = stop
        self._begun = time.monotonic()
        self._server = self._listen(host, self._resume(), port)
        self.journal.kept.update(epoch=self.epoch, port=self._server.port, workers=workers, partitions=self.partitions)
        self.seats_changed()

    def _listen(self, host: str, before: int, port: int) -> Server:
        """Listen where an earlier master of this sort did, or else where it is wanted."""
        threads = max(32, 2 * self.workers + 8)
        if before:
            try:
                return Server(MASTER, MasterHandlers(self), host, before, threads)
            except SortError:
                log.warning(
                    "%s: port %d is taken now; its workers have to be told the new one", self.journal.who, before
                )
        return Server(MASTER, MasterHandlers(self), host, port, threads)

    def run(self, listening: Callable[[str], None] | None, told: Told | None) -> Report:
        """Lead the sort through its phases."""
        self._server.start()
        try:
            if listening is not None:
                listening(self._server.address)
            if not self.machine.is_terminal():
                self._phases(told)
            with self.changed:
                self.changed.notify_all()
                self.changed.wait_for(lambda: all(seat.dismissed for seat in self.seats.values()), FAREWELL)
            self.journal.remove()
            return self._report()
        except BaseException as error:
            self._fall(str(error) or type(error).__name__)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Answer no more; safe to call twice."""
        self._server.stop(grace=ANSWERED)
        for seat in self.seats.values():
            seat.close()

    def failed(self, reason: str) -> None:
        """Hear that a worker failed; the first failure is the one that is told."""
        self.failure = self.failure or reason

    def seats_changed(self) -> None:
        """Make the others learn where a worker is now."""
        with self.changed:
            self.roster_version += 1
            self.journal.kept.update(
                seats=[seat.json() for seat in self.seats.values()], roster_version=self.roster_version
            )
            self.journal.save(str(self.machine.state))
            self.changed.notify_all()

    def roster(self) -> Roster:
        """List the workers as they are now."""
        return roster_of([self.seats[index] for index in sorted(self.seats)], self.roster_version)

    def _phases(self, told: Told | None) -> None:
        settings, machine = self.settings, self.machine
        self._drive(self._is_seated, settings.registering, told)
        check_space(list(self.seats.values()))
        machine.transition(SortMasterEvent.START_SAMPLING, f"{self.workers} workers registered")
        self._drive(lambda: self.plan is not None or self._is_sampled(), settings.sampling, told)
        if self.plan is None:
            self.plan = self._make_plan()
            self._keep_plan(self.plan)
        machine.transition(SortMasterEvent.SET_BOUNDARIES, "All samples received, boundaries chosen")
        self._drive(self._all(SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL), settings.sorting, told)
        machine.transition(SortMasterEvent.START_SHUFFLE, "All workers have sorted")
        self._drive(self._all(SortWorkerState.WAITING_FOR_MERGE_SIGNAL), settings.shuffling, told)
        machine.transition(SortMasterEvent.START_MERGE, "All workers have shuffled")
        while not self._completed():
            self._drive(self._is_reported, settings.merging, told)
        if told is not None:
            told(self._progress())

    def _completed(self) -> bool:
        """Complete, unless a worker has been started again; fail unless as many records were written as were read."""
        with self.changed:
            if not self._is_reported():
                return False
            reports = [seat.report for seat in self.seats.values() if seat.report is not None]
            read, written = sum(seat.records for seat in self.seats.values()), sum(one.records for one in reports)
            if written != read:
                raise SortError(f"{read:,} records were to be sorted, and {written:,} were written")
            self.journal.kept["reports"] = [one.json() for one in reports]
            self.machine.transition(SortMasterEvent.COMPLETE, "All workers have completed")
            return True

    def _drive(self, ready: Callable[[], bool], patience: float, told: Told | None) -> None:
        """Keep the workers going until all are ready; raise when one failed, is lost, or takes too long."""
        until = time.monotonic() + patience
        shown = 0.0
        while True:
            with self.changed:
                self._check(until, patience)
                if ready():
                    return
                for seat in self.seats.values():
                    signal(self, seat)
            if time.monotonic() - shown >= TICK:
                shown = time.monotonic()
                for seat in list(self.seats.values()):
                    ask_status(self, seat)
                if told is not None:
                    told(self._progress())
            with self.changed:
                if not ready() and not self.failure:
                    self.changed.wait(TICK)

    def _check(self, until: float, patience: float) -> None:
        state = self.machine.state
        if self.failure:
            raise SortError(self.failure)
        if self._stop.is_set():
            raise SortError(f"the sort was given up in phase {state}")
        now = time.monotonic()
        for seat in self.seats.values():
            if now - seat.heard_at > self.settings.lost and (not seat.report or self._is_wanting()):
                raise SortError(
                    f"worker {seat.index} ({seat.address}) is lost in phase {state}: no word from it for "
                    f"{self.settings.lost:g} s"
                )
        if now > until:
            raise SortError(f"phase {state} did not end within {patience:g} s: {self._laggards()}")

    def _laggards(self) -> str:
        if self.machine.state is SortMasterState.REGISTERING:
            return f"{len(self.seats)} of {self.workers} workers came"
        return ", ".join(f"worker {seat.index} ({seat.address}) is {seat.state}" for seat in self.seats.values())

    def _is_seated(self) -> bool:
        return len(self.seats) == self.workers and all(seat.state for seat in self.seats.values())

    def _is_sampled(self) -> bool:
        return all(seat.sample is not None for seat in self.seats.values())

    def _is_wanting(self) -> bool:
        """Tell whether a worker was started again in the merge and lacks records that others have to send once more."""
        wanting = (not seat.reached(SortWorkerState.WAITING_FOR_MERGE_SIGNAL) for seat in self.seats.values())
        return self.machine.state is SortMasterState.MERGING and any(wanting)

    def _is_reported(self) -> bool:
        return all(seat.report is not None for seat in self.seats.values())

    def _all(self, state: SortWorkerState) -> Callable[[], bool]:
        return lambda: all(seat.reached(state) for seat in self.seats.values())

    def _make_plan(self) -> Plan:
        seats = [self.seats[index] for index in sorted(self.seats)]
        samples = [seat.sample for seat in seats if seat.sample is not None]
        records = sum(seat.records for seat in seats)
        smallest = min(seat.window_records for seat in seats)
        windows = window_count(records, self.partitions, smallest, seats[0].key_length)
        boundaries = choose_boundaries(samples, self.partitions * windows)
        return Plan(self.epoch, self.partitions, windows, tuple(boundaries), self.roster())

    def _keep_plan(self, plan: Plan) -> None:
        self.journal.kept["plan"] = {
            "windows": plan.windows,
            "boundaries": [(one.key.hex(), one.position) for one in plan.boundaries],
        }

    def _resume(self) -> int:
        """Take up what an earlier master of this sort left; give the port that it had."""
        found = self.journal.load()
        if found is None:
            return 0
        if found.get("who") != self.journal.who:
            raise SortInputError(f"{self.journal.place} is the directory of a {found.get('who')}: name another --temp")
        kept, state = found["kept"], SortMasterState(found["state"])
        if (kept["workers"], kept["partitions"]) != (self.workers, self.partitions):
            self._refuse_to_replace(state, kept["workers"], kept["partitions"])
            return 0
        self.journal.resume(found)
        if state is SortMasterState.FAILED:
            self.journal.kept = {}
        else:
            self._take_up(kept)
        self._revive(state)
        return int(kept["port"])

    def _refuse_to_replace(self, state: SortMasterState, workers: int, partitions: int) -> None:
        """Refuse to begin a sort where one of other numbers has not ended."""
        if SORT_MASTER.is_terminal(state):
            return
        division = f" --partitions {partitions}" if partitions != workers else ""
        raise SortInputError(
            f"{self.journal.place} holds a sort of {workers} workers and {partitions} partitions that is in phase "
            f"{state}, and this is one of {self.workers} and {self.partitions}: go on with it by `sort master "
            f"{workers}{division}`, or name another --temp for another sort"
        )

    def _take_up(self, kept: dict[str, Any]) -> None:
        """Take up the workers of an earlier master, and the boundaries and reports, if it had come so far."""
        self.epoch, self.roster_version = kept["epoch"], kept["roster_version"]
        self.seats = {row["index"]: Seat(**row) for row in kept["seats"]}
        for report in map(WorkerReport.of, kept.get("reports", [])):
            self.seats[report.index].report = report
        plan = kept.get("plan")
        if plan is not None:
            boundaries = tuple(Boundary(bytes.fromhex(key), position) for key, position in plan["boundaries"])
            self.plan = Plan(self.epoch, self.partitions, plan["windows"], boundaries, self.roster())

    def _revive(self, state: SortMasterState) -> None:
        """Go on after a master that failed or was killed in some state; one that had completed has nothing to do."""
        # Both moves are saved together: a kill between them would make a failed sort of one that only was killed.
        machine = StateMachine(SORT_MASTER, state)
        if state is not SortMasterState.COMPLETED:
            if state is not SortMasterState.FAILED:
                log.warning("%s: its process ended in state %s; it is started again", self.journal.who, state)
                machine.transition(SortMasterEvent.FAIL, f"The process ended in state {state}")
            machine.transition(SortMasterEvent.RESTART, "Started again")
        for move in machine.history:
            self.journal.record(move)
        self.machine = StateMachine(SORT_MASTER, machine.state, observer=self.journal)

    def _progress(self) -> Progress:
        seats = [self.seats[index] for index in sorted(self.seats)]
        return Progress(
            state=str(self.machine.state),
            workers=tuple(seat.progress() for seat in seats),
            bytes_total=sum(seat.records * seat.record_length for seat in seats),
            elapsed=time.monotonic() - self._begun,
        )

    def _report(self) -> Report:
        seats = [self.seats[index] for index in sorted(self.seats)]
        return Report(
            records=sum(seat.records for seat in seats),
            size=sum(seat.records * seat.record_length for seat in seats),
            seconds=time.monotonic() - self._begun,
            phases=dict(self.journal.phases),
            history=tuple(self.journal.history),
            workers=tuple(seat.report for seat in seats if seat.report is not None),
        )

    def _fall(self, reason: str) -> None:
        """Go to Failed, and make the workers give up too."""
        with self.changed:
            self.failure = self.failure or reason
            if self.machine.is_terminal():
                return
            self.machine.transition(SortMasterEvent.FAIL, self.failure)
            self.changed.notify_all()
        withdraw(self)
