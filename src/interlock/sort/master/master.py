"""The master of a sort: it registers the workers, chooses the boundaries, and is the barrier between the phases.

It compares the state of each worker with its own phase and sends each the signals that it lacks. A worker, or the
master itself, can therefore be restarted at any time: a worker that comes late in a phase gets the signals that the
others had before.

Invariant: a phase begins when every worker has finished the one before it. States are saved in their order, by the
thread that holds the lock. No phase takes longer than its timeout, and
a worker without a heartbeat for too long fails the sort by its name.
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
from interlock.sort.master.broadcast import broadcast_failure, poll_status, send_signal
from interlock.sort.master.roster import RegisteredWorker, check_disk_space, make_roster
from interlock.sort.master.service import MasterService
from interlock.sort.rpc import MASTER, NO_SECURITY, Server
from interlock.sort.settings import Progress, Report, Settings, WorkerReport
from interlock.sort.workdir import Journal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from interlock.sort.security import Security
    from interlock.sort.settings import ProgressCallback, SaveCallback

MASTER_PHASES = tuple(state for state in SORT_MASTER.states if state is not SortMasterState.FAILED)  # in their order
POLL_INTERVAL_S = 0.25
RELEASE_TIMEOUT_S = 5.0  # for completed workers to learn that the sort is complete
SHUTDOWN_GRACE_S = 2.0  # for answers in progress


def run_master(
    workers: int,
    *,
    settings: Settings | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    work_dir: Path | None = None,
    on_listening: Callable[[str], None] | None = None,
    on_progress: ProgressCallback | None = None,
    stop: threading.Event | None = None,
    security: Security = NO_SECURITY,
    on_save: SaveCallback | None = None,
) -> Report:
    """Run the master of a sort with so many workers; return the report, or raise SortError.

    `on_listening` receives the address, `on_progress` the progress. With `work_dir`, the state is saved there, and a
    master that is restarted with the same directory resumes at the same address. Setting `stop` aborts the sort.
    Workers must have the token of `security`, which an address other than loopback needs.
    `on_save` receives the state on every transition.
    """
    if workers < 1:
        raise SortError(f"the number of workers must be at least 1, got {workers}")
    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
    master = Master(workers, settings or Settings(), work_dir, host, port, stop or threading.Event(), security)
    return master.run(on_listening, on_progress, on_save)


class Master:
    """The state machine of the master, and the loop that drives it."""

    def __init__(
        self,
        worker_count: int,
        settings: Settings,
        work_dir: Path | None,
        host: str,
        port: int,
        stop: threading.Event,
        security: Security = NO_SECURITY,
    ) -> None:
        security.check_host(host)
        self.security = security
        self.changed = threading.Condition()
        self.worker_count = worker_count
        self.settings = settings
        self.partitions = settings.partitions or worker_count
        self.epoch = secrets.randbits(62) | 1
        self.workers: dict[int, RegisteredWorker] = {}
        self.plan: Plan | None = None
        self.roster_version = 0
        self.failure = ""
        self.journal = Journal(work_dir, "sort master")
        self.machine: StateMachine[SortMasterState, SortMasterEvent] = StateMachine(SORT_MASTER, observer=self.journal)
        self._stop = stop
        self._furthest = SortMasterState.REGISTERING
        self._began_at = time.monotonic()
        self.server = self._listen(host, self._resume(), port)
        self.journal.checkpoint.update(
            epoch=self.epoch, port=self.server.port, workers=worker_count, partitions=self.partitions
        )
        self.roster_changed()

    def _listen(self, host: str, previous_port: int, port: int) -> Server:
        """Listen on the port of an earlier master of this sort, or else on the one given."""
        threads = max(32, 2 * self.worker_count + 8)
        if previous_port:
            try:
                return Server(MASTER, MasterService(self), host, previous_port, threads, self.security)
            except SortError:
                log.warning(
                    "%s: port %d is in use now; start its workers with the new address",
                    self.journal.name,
                    previous_port,
                )
        return Server(MASTER, MasterService(self), host, port, threads, self.security)

    def run(
        self,
        on_listening: Callable[[str], None] | None,
        on_progress: ProgressCallback | None,
        on_save: SaveCallback | None = None,
    ) -> Report:
        """Run the sort through its phases."""
        with self.changed:
            self.journal.on_save = on_save
            self.journal.save(str(self.machine.state))
        self.server.start()
        try:
            if on_listening is not None:
                on_listening(self.server.address)
            if not self.machine.is_terminal():
                self._run_phases(on_progress)
            with self.changed:
                self.changed.notify_all()
                self.changed.wait_for(
                    lambda: all(worker.released for worker in self.workers.values()), RELEASE_TIMEOUT_S
                )
            self.journal.remove()
            return self._report()
        except BaseException as error:
            self._fail(str(error) or type(error).__name__)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Stop the server; safe to call twice."""
        self.server.stop(grace=SHUTDOWN_GRACE_S)
        for worker in self.workers.values():
            worker.close()

    def has_begun(self, phase: SortMasterState) -> bool:
        """Return whether this sort has begun a phase, in this process or in an earlier one whose workers still run."""
        return MASTER_PHASES.index(self._furthest) >= MASTER_PHASES.index(phase)

    def begin(self, event: SortMasterEvent, reason: str) -> None:
        """Begin the next phase; the furthest one is saved with the state."""
        with self.changed:
            after = SORT_MASTER.next(self.machine.state, event)
            self._furthest = max(self._furthest, after, key=MASTER_PHASES.index)
            self.journal.checkpoint["furthest"] = str(self._furthest)
            self.machine.transition(event, reason)

    def record_failure(self, reason: str) -> None:
        """Record the failure of a worker; the first one is reported."""
        self.failure = self.failure or reason

    def roster_changed(self) -> None:
        """Save the roster under a new version, which is sent to the other workers."""
        with self.changed:
            self.roster_version += 1
            self.journal.checkpoint.update(
                roster=[worker.json() for worker in self.workers.values()], roster_version=self.roster_version
            )
            self.journal.save(str(self.machine.state))
            self.changed.notify_all()

    def roster(self) -> Roster:
        """Return the current roster."""
        return make_roster(self._workers_in_order(), self.roster_version)

    def _workers_in_order(self) -> list[RegisteredWorker]:
        return [self.workers[index] for index in sorted(self.workers)]

    def _run_phases(self, on_progress: ProgressCallback | None) -> None:
        settings = self.settings
        self._drive(self._all_registered, settings.register_timeout_s, on_progress)
        check_disk_space(list(self.workers.values()))
        self.begin(SortMasterEvent.START_SAMPLING, f"{self.worker_count} workers registered")
        self._drive(lambda: self.plan is not None or self._all_sampled(), settings.sample_timeout_s, on_progress)
        if self.plan is None:
            plan = self._make_plan()
            boundaries = [(one.key.hex(), one.position) for one in plan.boundaries]
            with self.changed:
                self.journal.checkpoint["plan"] = {"windows": plan.windows, "boundaries": boundaries}
                self.plan = plan
        self.begin(SortMasterEvent.SET_BOUNDARIES, "All samples received, boundaries chosen")
        self._drive(self._all_reached(SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL), settings.sort_timeout_s, on_progress)
        self.begin(SortMasterEvent.START_SHUFFLE, "All workers have sorted")
        self._drive(
            self._all_reached(SortWorkerState.WAITING_FOR_MERGE_SIGNAL), settings.shuffle_timeout_s, on_progress
        )
        self.begin(SortMasterEvent.START_MERGE, "All workers have shuffled")
        while not self._try_complete():
            self._drive(self._all_reported, settings.merge_timeout_s, on_progress)
        if on_progress is not None:
            on_progress(self._progress())

    def _try_complete(self) -> bool:
        """Complete, unless a worker was restarted; raise if fewer or more records were written than read."""
        with self.changed:
            if not self._all_reported():
                return False
            reports = [worker.report for worker in self.workers.values() if worker.report is not None]
            self._check_counts(reports)
            self.journal.checkpoint["reports"] = [one.json() for one in reports]
            self.begin(SortMasterEvent.COMPLETE, "All workers have completed")
            return True

    def _check_counts(self, reports: list[WorkerReport]) -> None:
        """Raise if fewer or more records, or bytes of lines, were written than read."""
        read, written = sum(worker.records for worker in self.workers.values()), sum(one.records for one in reports)
        order, counted = self.workers[reports[0].index].line_order, "records"
        if order is not None:
            written = sum(partition.size for one in reports for partition in one.partitions)
            counted = "bytes of lines"
        is_unique = order is not None and order.unique
        if written > read or (written < read and not is_unique):
            raise SortError(f"{read:,} {counted} were read, but {written:,} were written")

    def _drive(self, is_done: Callable[[], bool], timeout: float, on_progress: ProgressCallback | None) -> None:
        """Send signals and poll workers until all are done; raise if one failed or is lost, or on timeout."""
        deadline = time.monotonic() + timeout
        polled_at = 0.0
        while True:
            with self.changed:
                self._check(deadline, timeout)
                if is_done():
                    return
                for worker in self.workers.values():
                    send_signal(self, worker)
            if time.monotonic() - polled_at >= POLL_INTERVAL_S:
                polled_at = time.monotonic()
                for worker in list(self.workers.values()):
                    poll_status(self, worker)
                if on_progress is not None:
                    on_progress(self._progress())
            with self.changed:
                if not is_done() and not self.failure:
                    self.changed.wait(POLL_INTERVAL_S)

    def _check(self, deadline: float, timeout: float) -> None:
        state, lost_after_s = self.machine.state, self.settings.lost_after_s
        if self.failure:
            raise SortError(self.failure)
        if self._stop.is_set():
            raise SortError(f"the sort was stopped in phase {state}")
        now = time.monotonic()
        for worker in self.workers.values():
            if now - worker.heartbeat_at > lost_after_s and (not worker.report or self._is_shuffling_again()):
                raise SortError(
                    f"worker {worker.index} ({worker.address}) is lost in phase {state}: no heartbeat for "
                    f"{lost_after_s:g} s"
                )
        if now > deadline:
            raise SortError(f"phase {state} did not end within {timeout:g} s: {self._describe_workers()}")

    def _describe_workers(self) -> str:
        if self.machine.state is SortMasterState.REGISTERING:
            return f"{len(self.workers)} of {self.worker_count} workers registered"
        return ", ".join(
            f"worker {worker.index} ({worker.address}) is {worker.state}" for worker in self.workers.values()
        )

    def _all_registered(self) -> bool:
        return len(self.workers) == self.worker_count and all(worker.state for worker in self.workers.values())

    def _all_sampled(self) -> bool:
        return all(worker.sample is not None for worker in self.workers.values())

    def _all_reached(self, state: SortWorkerState) -> Callable[[], bool]:
        return lambda: all(worker.has_reached(state) for worker in self.workers.values())

    def _all_reported(self) -> bool:
        return all(worker.report is not None for worker in self.workers.values())

    def _is_shuffling_again(self) -> bool:
        """Return whether a worker was restarted during the merge and needs records of completed workers again."""
        return self.machine.state is SortMasterState.MERGING and not all(
            worker.has_reached(SortWorkerState.WAITING_FOR_MERGE_SIGNAL) for worker in self.workers.values()
        )

    def _make_plan(self) -> Plan:
        workers = self._workers_in_order()
        samples = [worker.sample for worker in workers if worker.sample is not None]
        records = sum(worker.records for worker in workers)
        smallest = min(worker.window_records for worker in workers)
        windows = window_count(records, self.partitions, smallest, workers[0].key_length)
        boundaries = choose_boundaries(samples, self.partitions * windows, workers[0].line_order)
        return Plan(self.epoch, self.partitions, windows, tuple(boundaries), self.roster())

    def _resume(self) -> int:
        """Load the state of an earlier master of this sort; return its port, or 0 if there is none."""
        saved = self.journal.load()
        if saved is None:
            return 0
        if saved.get("name") != self.journal.name:
            raise SortInputError(
                f"{self.journal.directory} is the directory of a {saved.get('name')}: name another --temp"
            )
        checkpoint, state = saved["checkpoint"], SortMasterState(saved["state"])
        if (checkpoint["workers"], checkpoint["partitions"]) != (self.worker_count, self.partitions):
            self._refuse_other_sort(state, checkpoint["workers"], checkpoint["partitions"])
            return 0
        self.journal.resume(saved)
        if state is SortMasterState.FAILED:
            self.journal.checkpoint = {}
        else:
            self._restore(checkpoint)
        self._restart_machine(state)
        return int(checkpoint["port"])

    def _refuse_other_sort(self, state: SortMasterState, workers: int, partitions: int) -> None:
        """Refuse to start in the directory of an unfinished sort with other numbers of workers and partitions."""
        if SORT_MASTER.is_terminal(state):
            return
        division = f" --partitions {partitions}" if partitions != workers else ""
        raise SortInputError(
            f"{self.journal.directory} holds a sort of {workers} workers and {partitions} partitions that is in phase "
            f"{state}, and this is one of {self.worker_count} and {self.partitions}: resume it with `sort master "
            f"{workers}{division}`, or name another --temp for another sort"
        )

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        """Restore the roster of an earlier master, and its boundaries and reports if it had any."""
        self.epoch, self.roster_version = checkpoint["epoch"], checkpoint["roster_version"]
        self._furthest = SortMasterState(checkpoint.get("furthest", SortMasterState.REGISTERING))
        self.workers = {row["index"]: RegisteredWorker(**row, security=self.security) for row in checkpoint["roster"]}
        for report in map(WorkerReport.from_json, checkpoint.get("reports", [])):
            self.workers[report.index].report = report
        plan = checkpoint.get("plan")
        if plan is not None:
            boundaries = tuple(Boundary(bytes.fromhex(key), position) for key, position in plan["boundaries"])
            self.plan = Plan(self.epoch, self.partitions, plan["windows"], boundaries, self.roster())

    def _restart_machine(self, state: SortMasterState) -> None:
        """Continue after a master that failed or was killed in a state; a completed one has nothing to do."""
        # Both transitions are saved together: a kill between them would turn a killed sort into a failed one.
        machine = StateMachine(SORT_MASTER, state)
        if state is not SortMasterState.COMPLETED:
            if state is not SortMasterState.FAILED:
                log.warning("%s: its process ended in state %s; it is restarted", self.journal.name, state)
                machine.transition(SortMasterEvent.FAIL, f"The process ended in state {state}")
            machine.transition(SortMasterEvent.RESTART, "Started again")
        for move in machine.history:
            self.journal.record(move)
        self.machine = StateMachine(SORT_MASTER, machine.state, observer=self.journal)

    def _progress(self) -> Progress:
        workers = self._workers_in_order()
        return Progress(
            state=str(self.machine.state),
            workers=tuple(worker.progress() for worker in workers),
            bytes_total=sum(worker.records * worker.record_length for worker in workers),
            elapsed=time.monotonic() - self._began_at,
        )

    def _report(self) -> Report:
        workers = self._workers_in_order()
        return Report(
            records=sum(worker.report.records for worker in workers if worker.report is not None),
            size=sum(worker.records * worker.record_length for worker in workers),
            seconds=time.monotonic() - self._began_at,
            phases=dict(self.journal.phases),
            history=tuple(self.journal.history),
            workers=tuple(worker.report for worker in workers if worker.report is not None),
        )

    def _fail(self, reason: str) -> None:
        """Go to Failed, and tell the workers."""
        with self.changed:
            self.failure = self.failure or reason
            if self.machine.is_terminal():
                return
            self.machine.transition(SortMasterEvent.FAIL, self.failure)
            self.changed.notify_all()
        broadcast_failure(self)
