"""The roster: the workers as the master sees them, with their last state and the signals they still need.

Invariant: a worker keeps its index when it is restarted; within one incarnation its state only advances.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interlock.errors import SortError
from interlock.lifecycle import SORT_WORKER, SortWorkerState
from interlock.sort.data.line_order import LineOrder
from interlock.sort.data.plan import Member, Roster
from interlock.sort.rpc import NO_SECURITY, WORKER, Peer
from interlock.sort.settings import Partition, TransitionRecord, WorkerProgress, WorkerReport
from interlock.sort.wire_pb2 import WorkerStatus
from interlock.sort.worker.progress import make_status

if TYPE_CHECKING:
    from interlock.sort import wire_pb2 as wire
    from interlock.sort.data.plan import Sample
    from interlock.sort.security import Security

SAVED_FIELDS = (
    "index", "identity", "incarnation", "address", "records", "record_length", "key_length", "block_records",
    "window_records", "starts", "free_output", "free_temp", "room", "output_disk", "temp_disk", "lines",
)  # fmt: skip
STATE_RANK = {str(state): rank for rank, state in enumerate(SORT_WORKER.states)}  # a failed state has the highest rank


@dataclass(slots=True)
class RegisteredWorker:
    """One worker in the roster.

    `incarnation` is the number of its current start, `state` its last known state, `roster_version` the roster that it
    has. `signaled` is the state and roster version for which the last signal was sent, `released` whether it knows that
    the sort is complete.
    """

    index: int
    identity: str
    incarnation: int
    address: str
    records: int
    record_length: int
    key_length: int
    block_records: int
    window_records: int
    free_output: int = 0
    free_temp: int = 0
    room: int = 0
    output_disk: str = ""
    temp_disk: str = ""
    lines: str = ""
    starts: int = 1
    state: str = ""
    state_at: float = 0.0
    roster_version: int = 0
    security: Security = NO_SECURITY
    status: WorkerStatus = field(default_factory=WorkerStatus)
    sample: Sample | None = None
    report: WorkerReport | None = None
    released: bool = False
    heartbeat_at: float = field(default_factory=time.monotonic)
    signaled: tuple[str, int] = ("", 0)
    signaled_at: float = 0.0
    status_call: Any = None
    signal_call: Any = None
    _peer: Peer | None = None

    @classmethod
    def from_registration(
        cls, index: int, request: wire.Registration, security: Security = NO_SECURITY
    ) -> RegisteredWorker:
        """Create the entry of a worker that registers for the first time."""
        return cls(
            index,
            request.identity,
            request.incarnation,
            request.address,
            request.records,
            request.record_length,
            request.key_length,
            request.block_records,
            request.window_records,
            request.free_output,
            request.free_temp,
            request.room,
            request.output_disk,
            request.temp_disk,
            request.lines,
            state=request.state,
            security=security,
        )

    def describe_changes(self, request: wire.Registration) -> str:
        """Describe the arguments of a restarted worker that differ from before; empty if none does."""
        named = {"records": "records", "record_length": "bytes a record", "key_length": "bytes a key",
                 "block_records": "records a block, which follow from --memory"}  # fmt: skip
        changes = [
            f"{getattr(request, name):,} instead of {getattr(self, name):,} {words}"
            for name, words in named.items()
            if getattr(request, name) != getattr(self, name)
        ]
        if request.lines != self.lines:
            changes.append(f"{describe_lines(request.lines)} instead of {describe_lines(self.lines)}")
        return "; ".join(changes)

    @property
    def line_order(self) -> LineOrder | None:
        """The order of lines; None for records of one length."""
        return LineOrder.from_text(self.lines) if self.lines else None

    def rejoin(self, request: wire.Registration, *, is_over: bool = False) -> None:
        """Register a worker that was restarted; a repeated call changes nothing.

        Its report counts no more, unless the sort is over: then the worker has nothing to do.
        """
        if request.incarnation == self.incarnation:
            return
        self.incarnation, self.address = request.incarnation, request.address
        self.roster_version, self.signaled = 0, ("", 0)
        if not is_over:
            self.state, self.report = request.state, None
        self.starts += 1
        self.heartbeat_at = self.state_at = time.monotonic()
        self.close()

    def record_heartbeat(self, state: str) -> None:
        """Record a sign of life, and the worker's state if it is further than the last known one."""
        self.heartbeat_at = time.monotonic()
        if not self.state or STATE_RANK[state] > STATE_RANK[self.state]:
            self.state, self.state_at = state, self.heartbeat_at

    def record_status(self, status: WorkerStatus, asked_at: float) -> None:
        """Record the worker's answer to a request that was sent at this time.

        An answer to a later request than the last known state came from is the truth, even if it is an earlier state.
        """
        if self.state and asked_at > self.state_at:
            self.state = status.state
        self.status, self.roster_version = status, status.roster_version
        self.record_heartbeat(status.state)

    def has_reached(self, state: SortWorkerState) -> bool:
        """Return whether the worker is in this state or a later one, and has not failed."""
        return self.state not in {"", SortWorkerState.FAILED} and STATE_RANK[self.state] >= STATE_RANK[state]

    @property
    def peer(self) -> Peer:
        """The client for calls to the worker."""
        if self._peer is None:
            self._peer = Peer(WORKER, self.address, f"worker {self.index}", self.security)
        return self._peer

    def close(self) -> None:
        """Close the connection."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def json(self) -> dict[str, Any]:
        """Return the fields that a restarted master needs."""
        return {name: getattr(self, name) for name in SAVED_FIELDS}

    def progress(self) -> WorkerProgress:
        """Return the progress from the last status, or from the last state if that is newer."""
        status = self.status
        if self.state and status.state != self.state:
            status = make_status(SortWorkerState(self.state), 0.0)
        return WorkerProgress(
            index=self.index,
            address=self.address,
            state=self.state,
            phase=WorkerStatus.Phase.Name(status.current_phase),
            percent=status.progress_percentage,
            message=status.message,
            bytes_done=status.bytes_done,
        )

    def complete(self, request: wire.Completion) -> None:
        """Record the report of a worker that has completed."""
        self.record_heartbeat(str(SortWorkerState.COMPLETED))
        self.report = WorkerReport(
            index=self.index,
            address=self.address,
            records=request.records,
            partitions=tuple(Partition(one.number, one.path, one.records, one.size) for one in request.partitions),
            phases=dict(request.phases),
            history=tuple(
                TransitionRecord(one.from_state, one.to_state, one.event, one.reason, one.timestamp, one.elapsed)
                for one in request.history
            ),
            peak_memory=request.peak_memory,
            reused=request.reused,
            starts=self.starts,
        )


def describe_lines(order: str) -> str:
    """Describe the order of lines of a registration, or that it has none."""
    return str(LineOrder.from_text(order)) if order else "records of one length"


def make_roster(workers: list[RegisteredWorker], version: int) -> Roster:
    """Create the roster that is sent to the workers."""
    return Roster(
        version,
        tuple(
            Member(
                worker.index,
                worker.address,
                worker.incarnation,
                worker.records,
                worker.block_records,
                worker.state == SortWorkerState.COMPLETED,
            )
            for worker in workers
        ),
    )


def check_disk_space(workers: list[RegisteredWorker]) -> None:
    """Raise if the disks have too little space for output and spill files; workers on one disk share it."""
    total = sum(worker.records * worker.record_length for worker in workers)
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    users: dict[str, list[str]] = defaultdict(list)
    for worker in workers:
        share = total // len(workers)
        own = worker.records * worker.record_length
        incoming = share - share * own // total if total else 0
        spilled = max(0, own + incoming - worker.room)
        for disk, need, left in (
            (worker.output_disk, share, worker.free_output),
            (worker.temp_disk, spilled, worker.free_temp),
        ):
            needed[disk] += need
            free[disk] = min(left, free.get(disk, left))
            users[disk].append(f"worker {worker.index} ({worker.address})")
    for disk, need in needed.items():
        if need > free[disk]:
            raise SortError(
                f"too little disk space: {' and '.join(dict.fromkeys(users[disk]))} need {need:,} bytes for output and "
                f"unfinished work, and there are {free[disk]:,}"
            )
