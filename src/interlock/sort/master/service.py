"""The gRPC service of the master: each call is checked against the roster and the state of the sort.

Invariant: a repeated call changes nothing, so that workers may retry calls whose answer was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from interlock.lifecycle import SORT_MASTER, SortMasterState, SortWorkerState
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.line_order import LineOrder
from interlock.sort.data.plan import POSITION_BYTES, Sample, max_boundaries
from interlock.sort.master.roster import RegisteredWorker, describe_lines
from interlock.sort.rpc import PROTOCOL_VERSION

if TYPE_CHECKING:
    import grpc

    from interlock.sort.master.master import Master

    Context = grpc.ServicerContext

WORKER_STATES = frozenset(map(str, SortWorkerState))
RUNNING_STATES = frozenset(SORT_MASTER.unfinished)
# The states that a worker reports at the end of a phase, or as a heartbeat, and the first phase in which it can.
REPORTED_STATES = {
    SortWorkerState.WAITING_FOR_PARTITION_CONFIG: SortMasterState.REGISTERING,
    SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL: SortMasterState.SORTING,
    SortWorkerState.SHUFFLING: SortMasterState.SHUFFLING,
    SortWorkerState.WAITING_FOR_MERGE_SIGNAL: SortMasterState.SHUFFLING,
}
MAX_LISTED_WORKERS = 3  # in the message of a refusal
COMPLETION_WAIT_S = 5.0  # for the other workers, before a completed worker gets its answer


def is_consistent(request: wire.Registration) -> bool:
    """Return whether the numbers and the order of a registration are such as a worker has."""
    if not 0 < request.key_length <= request.record_length or not (request.block_records and request.window_records):
        return False
    if not request.lines:
        return True
    try:
        LineOrder.from_text(request.lines)
    except ValueError:
        return False
    return bool(request.key_length == request.record_length == 1)


class MasterService:
    """The methods of MasterService, by their names on the wire."""

    def __init__(self, master: Master) -> None:
        self._master = master

    def RegisterWorker(self, request: wire.Registration, context: Context) -> wire.Registered:  # noqa: N802 - RPC
        """Assign an index to a worker, or the one it had before it was restarted."""
        del context
        master = self._master
        with master.changed:
            refusal = self._refuse_registration(request)
            if refusal:
                return wire.Registered(message=refusal, protocol=PROTOCOL_VERSION)
            worker = next((one for one in master.workers.values() if one.identity == request.identity), None)
            if worker is not None:
                changes = worker.describe_changes(request)
                if changes:
                    return wire.Registered(
                        message=f"it was restarted with other arguments: {changes}; start it with the arguments it had",
                        protocol=PROTOCOL_VERSION,
                    )
                worker.rejoin(request, is_over=master.machine.state is SortMasterState.COMPLETED)
            else:
                problem = self._find_problem(request)
                if problem:
                    return wire.Registered(message=problem, protocol=PROTOCOL_VERSION)
                index = self._choose_index(request.index)
                worker = RegisteredWorker.from_registration(index, request, master.security)
                master.workers[worker.index] = worker
            master.roster_changed()
            return wire.Registered(
                success=True,
                epoch=master.epoch,
                index=worker.index,
                workers=master.worker_count,
                partitions=master.partitions,
                starts=worker.starts,
                protocol=PROTOCOL_VERSION,
                finished=master.machine.state is SortMasterState.COMPLETED,
            )

    def SendSample(self, request: wire.Sample, context: Context) -> wire.Ack:  # noqa: N802 - RPC
        """Store a worker's sample."""
        del context
        with self._master.changed:
            worker, refusal = self._find_worker(request.epoch, request.worker, request.incarnation)
            if worker is None:
                return refusal
            if self._master.machine.state not in RUNNING_STATES:
                return self._refuse("take a sample")
            count, rest = divmod(len(request.keys), worker.key_length)
            if worker.lines:
                count, rest = request.keys.count(b"\n"), not request.keys.endswith(b"\n") and len(request.keys)
            if rest or len(request.positions) != count * POSITION_BYTES:
                return wire.Ack(message="the sample has different numbers of positions and keys", invalid=True)
            keys = np.frombuffer(request.keys, dtype=np.uint8)
            if not worker.lines:
                keys = keys.reshape(-1, worker.key_length)
            positions = np.frombuffer(request.positions, dtype="<u8").astype(np.uint64)
            worker.sample = Sample(keys, positions, request.records)
            self._master.changed.notify_all()
            return wire.Ack(success=True, state=str(self._master.machine.state))

    def NotifyPhaseComplete(self, request: wire.PhaseComplete, context: Context) -> wire.Ack:  # noqa: N802 - RPC
        """Record that a worker has finished a phase, or that it failed; also a heartbeat."""
        del context
        with self._master.changed:
            worker, refusal = self._find_worker(request.epoch, request.worker, request.incarnation)
            if worker is None:
                return refusal
            if request.state not in WORKER_STATES:
                return wire.Ack(message=f"{request.state!r} is not a state of a worker", invalid=True)
            if self._master.machine.state not in RUNNING_STATES:
                return self._refuse("take the end of a phase")
            if not request.success:
                self._master.record_failure(f"worker {worker.index} ({worker.address}) failed: {request.message}")
            else:
                first_phase = REPORTED_STATES.get(SortWorkerState(request.state))
                if first_phase is None or not self._master.has_begun(first_phase):
                    return self._refuse(f"take the end of a phase by a worker in {request.state}")
                worker.record_heartbeat(request.state)
            self._master.changed.notify_all()
            return wire.Ack(success=True, state=str(self._master.machine.state))

    def ReportCompletion(self, request: wire.Completion, context: Context) -> wire.CompletionAck:  # noqa: N802 - RPC
        """Store a worker's report; answer when all workers have completed, or after COMPLETION_WAIT_S."""
        del context
        master = self._master
        with master.changed:
            worker, refusal = self._find_worker(request.epoch, request.worker, request.incarnation)
            if worker is None:
                return wire.CompletionAck(message=refusal.message, failed=refusal.failed)
            problem = self._find_completion_problem(worker)
            if problem:
                return wire.CompletionAck(message=problem)
            worker.complete(request)
            master.changed.notify_all()
            master.changed.wait_for(master.machine.is_terminal, COMPLETION_WAIT_S)
            finished = master.machine.state is SortMasterState.COMPLETED
            failed = master.machine.state is SortMasterState.FAILED
            worker.released = finished
            master.changed.notify_all()
            return wire.CompletionAck(success=not failed, message=master.failure, finished=finished, failed=failed)

    def _find_worker(self, epoch: int, index: int, incarnation: int) -> tuple[RegisteredWorker | None, wire.Ack]:
        """Find the caller in the roster; if it is not there or the sort has failed, return the refusal."""
        master = self._master
        state = str(master.machine.state)
        worker = master.workers.get(index)
        if epoch != master.epoch or worker is None or worker.incarnation != incarnation:
            return None, wire.Ack(message=f"there is no such worker in sort {master.epoch}", state=state, unknown=True)
        if master.machine.state is SortMasterState.FAILED:
            return None, wire.Ack(message=master.failure, state=state, failed=True)
        return worker, wire.Ack()

    def _refuse(self, action: str) -> wire.Ack:
        state = self._master.machine.state
        return wire.Ack(message=f"Cannot {action} in state {state}", state=str(state))

    def _refuse_registration(self, request: wire.Registration) -> str:
        """Return why no registration like this one is accepted, from a known worker or a new one."""
        master = self._master
        if request.protocol != PROTOCOL_VERSION:
            return (
                f"it speaks version {request.protocol} of the protocol and this master version {PROTOCOL_VERSION}: "
                "install the same version of Interlock for the master and all workers"
            )
        if master.machine.state is SortMasterState.FAILED:
            return f"Cannot register a worker in state {master.machine.state}: {master.failure}"
        if request.state not in WORKER_STATES:
            return f"{request.state!r} is not a state of a worker"
        if request.state != SortWorkerState.INITIALIZING:
            return f"Cannot register a worker that is in state {request.state}"
        return "" if is_consistent(request) else "its registration is inconsistent"

    def _find_completion_problem(self, worker: RegisteredWorker) -> str:
        """Return why a worker cannot have completed; empty if it can."""
        master = self._master
        if not master.has_begun(SortMasterState.MERGING):
            return f"Cannot take the completion of a worker in state {master.machine.state}"
        is_known = bool(worker.state) and master.machine.state is not SortMasterState.COMPLETED
        if is_known and not worker.has_reached(SortWorkerState.WAITING_FOR_MERGE_SIGNAL):
            return f"Cannot take the completion of a worker that is in state {worker.state}"
        return ""

    def _find_problem(self, request: wire.Registration) -> str:
        """Return why a new worker is refused; empty if it is accepted."""
        master = self._master
        other = next(iter(master.workers.values()), None)
        lengths = (request.record_length, request.key_length)
        limit = max_boundaries(request.key_length)
        problems = {
            self._describe_full_roster(request): master.machine.state is not SortMasterState.REGISTERING
            or len(master.workers) >= master.worker_count,
            f"index {request.index} is too large for a sort of {master.worker_count} workers": request.index
            >= master.worker_count,
            f"another worker has the index {request.index}": request.index in master.workers,
            f"keys of {request.key_length:,} bytes allow for {limit:,} partitions at most": master.partitions > limit,
            f"its records have {lengths[0]} bytes and keys of {lengths[1]}, unlike those of the worker before it": other
            is not None
            and lengths != (other.record_length, other.key_length),
            f"it sorts {describe_lines(request.lines)}, and the worker before it {describe_lines(other.lines)}"
            if other is not None
            else "": other is not None and request.lines != other.lines,
        }
        return next((problem for problem, applies in problems.items() if applies), "")

    def _describe_full_roster(self, request: wire.Registration) -> str:
        """Describe the roster to a worker that comes too late, and what to do."""
        master = self._master
        unit = "bytes of lines" if request.lines else "records"
        workers = sorted(master.workers.values(), key=lambda worker: worker.index)
        named = [
            f"worker {worker.index} ({worker.address}) with {worker.records:,} {unit}"
            for worker in workers[:MAX_LISTED_WORKERS]
        ]
        more = [f"{len(workers) - MAX_LISTED_WORKERS} more"] if len(workers) > MAX_LISTED_WORKERS else []
        return (
            f"the sort is in state {master.machine.state} and has its {master.worker_count} workers already, "
            f"{', '.join([*named, *more])}; this one with {request.records:,} {unit} is none of them. A worker that "
            "is restarted needs the input, the output and the --temp that it had; another sort needs a master of "
            "its own, with another --temp"
        )

    def _choose_index(self, wanted: int) -> int:
        if wanted >= 0:
            return wanted
        return next(index for index in range(self._master.worker_count) if index not in self._master.workers)
