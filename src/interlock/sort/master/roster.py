"""The workers as the master sees them: who they are, what they last said, and what they still have to be told.

Invariant: a worker keeps its place in the order when it is started again; within one start its state only goes forward.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interlock.errors import SortError
from interlock.lifecycle import SortWorkerState
from interlock.sort.data.plan import Member, Roster
from interlock.sort.rpc import WORKER, Peer
from interlock.sort.settings import Moved, Partition, WorkerProgress, WorkerReport
from interlock.sort.wire_pb2 import WorkerStatus
from interlock.sort.workdir import rank
from interlock.sort.worker.progress import status_of

if TYPE_CHECKING:
    from interlock.sort import wire_pb2 as wire
    from interlock.sort.data.plan import Sample

SAVED = (
    "index", "identity", "incarnation", "address", "records", "record_length", "key_length", "block_records",
    "window_records", "starts", "free_output", "free_temp", "room", "output_disk", "temp_disk",
)  # fmt: skip


@dataclass(slots=True)
class Seat:
    """One worker's place."""

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
    starts: int = 1
    state: str = ""
    roster_version: int = 0
    status: WorkerStatus = field(default_factory=WorkerStatus)
    sample: Sample | None = None
    report: WorkerReport | None = None
    dismissed: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    signalled: tuple[str, int] = ("", 0)
    signalled_at: float = 0.0
    asked: Any = None
    signal: Any = None
    _peer: Peer | None = None

    @classmethod
    def of(cls, index: int, request: wire.Registration) -> Seat:
        """Seat a worker that registers."""
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
            state=request.state,
        )

    def changed(self, request: wire.Registration) -> str:
        """Say what a worker that was started again has, that it had not before; nothing when all is the same."""
        named = {"records": "records", "record_length": "bytes a record", "key_length": "bytes a key",
                 "block_records": "records a block, which follow from --memory"}  # fmt: skip
        before = {words: getattr(self, name) for name, words in named.items()}
        now = {words: getattr(request, name) for name, words in named.items()}
        return "; ".join(
            f"{now[words]:,} instead of {before[words]:,} {words}" for words in now if now[words] != before[words]
        )

    def rejoin(self, request: wire.Registration) -> None:
        """Take in a worker that was started again."""
        if request.incarnation == self.incarnation:
            return
        self.incarnation, self.address = request.incarnation, request.address
        self.state, self.roster_version, self.signalled = request.state, 0, ("", 0)
        if request.state != SortWorkerState.COMPLETED:
            self.report = None
        self.starts += 1
        self.heard_at = time.monotonic()
        self.close()

    def hear(self, state: str) -> None:
        """Learn of the worker's state."""
        self.heard_at = time.monotonic()
        if not self.state or rank(state) >= rank(self.state):
            self.state = state

    def reached(self, state: SortWorkerState) -> bool:
        """Tell whether the worker is at least so far."""
        return self.state not in {"", SortWorkerState.FAILED} and rank(self.state) >= rank(state)

    @property
    def peer(self) -> Peer:
        """The connection to it."""
        if self._peer is None:
            self._peer = Peer(WORKER, self.address, f"worker {self.index}")
        return self._peer

    def close(self) -> None:
        """Close the connection."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def json(self) -> dict[str, Any]:
        """Give what a master that is started again must know."""
        return {name: getattr(self, name) for name in SAVED}

    def progress(self) -> WorkerProgress:
        """Say how far it is: what it last told, or what its state tells if that came later."""
        status = self.status
        if self.state and status.state != self.state:
            status = status_of(SortWorkerState(self.state), 0.0)
        return WorkerProgress(
            index=self.index,
            address=self.address,
            state=self.state,
            phase=WorkerStatus.Phase.Name(status.current_phase),
            percent=status.progress_percentage,
            message=status.message,
            bytes_done=status.bytes_done,
        )

    def completed(self, request: wire.Completion) -> None:
        """Take in the report of a worker that has completed."""
        self.hear(str(SortWorkerState.COMPLETED))
        self.report = WorkerReport(
            index=self.index,
            address=self.address,
            records=request.records,
            partitions=tuple(Partition(one.number, one.path, one.records, one.size) for one in request.partitions),
            phases=dict(request.phases),
            history=tuple(
                Moved(one.from_state, one.to_state, one.event, one.reason, one.timestamp) for one in request.history
            ),
            peak_memory=request.peak_memory,
            reused=request.reused,
            starts=self.starts,
        )


def roster_of(seats: list[Seat], version: int) -> Roster:
    """List the workers as they are told of each other."""
    return Roster(
        version,
        tuple(
            Member(
                seat.index,
                seat.address,
                seat.incarnation,
                seat.records,
                seat.block_records,
                seat.state == SortWorkerState.COMPLETED,
            )
            for seat in seats
        ),
    )


def check_space(seats: list[Seat]) -> None:
    """Refuse to begin what the disks cannot hold; workers on one disk share it."""
    total = sum(seat.records * seat.record_length for seat in seats)
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    users: dict[str, list[str]] = defaultdict(list)
    for seat in seats:
        share = total // len(seats)
        own = seat.records * seat.record_length
        incoming = share - share * own // total if total else 0
        spilled = max(0, own + incoming - seat.room)
        for disk, need, left in (
            (seat.output_disk, share, seat.free_output),
            (seat.temp_disk, spilled, seat.free_temp),
        ):
            needed[disk] += need
            free[disk] = min(left, free.get(disk, left))
        users[seat.output_disk].append(f"worker {seat.index} ({seat.address})")
        users[seat.temp_disk].append(f"worker {seat.index} ({seat.address})")
    for disk, need in needed.items():
        if need > free[disk]:
            raise SortError(
                f"too little disk space: {' and '.join(dict.fromkeys(users[disk]))} need {need:,} bytes for output and "
                f"unfinished work, and there are {free[disk]:,}"
            )
