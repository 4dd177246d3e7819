"""The gRPC service of a worker: each call is checked against the state, and refused with the state's name.

Invariant: a handler never does the work of a phase; it makes one transition, or receives a slice, and answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from interlock.errors import InterlockError, InvalidTransitionError
from interlock.lifecycle import SortWorkerEvent, SortWorkerState
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.keys import Boundary
from interlock.sort.data.plan import POSITION_BITS, Plan, Roster, are_ordered
from interlock.sort.io.shuffle_receiver import DamagedData, StreamReceiver, UnexpectedSlice
from interlock.sort.logging import log
from interlock.sort.rpc import MalformedMessage, decode_chunk
from interlock.sort.worker.progress import make_status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.sort.worker.worker import Worker

    Context = grpc.ServicerContext

RECEIVING_STATES = (SortWorkerState.SHUFFLING, SortWorkerState.WAITING_FOR_MERGE_SIGNAL)
# Another worker may have got its signal earlier, which is no reason for a warning.
ORDINARY_STATES = (SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL, *RECEIVING_STATES)
# In the others there is no plan yet, or no more.
ACCEPTING_STATES = (SortWorkerState.SORTING, *ORDINARY_STATES, SortWorkerState.MERGING, SortWorkerState.COMPLETED)
SHUFFLE_STARTED_STATES = (*RECEIVING_STATES, SortWorkerState.MERGING, SortWorkerState.COMPLETED)


class WorkerService:
    """The methods of WorkerService, by their names on the wire."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def SetPartitionBoundaries(self, request: wire.PartitionConfig, context: Context) -> wire.Ack:  # noqa: N802 - RPC
        """Accept the plan and start to sort."""
        del context
        worker = self._worker
        with worker.changed:
            if request.epoch != worker.epoch:
                return self._refuse_epoch(request.epoch)
            if not worker.machine.is_in_state(SortWorkerState.WAITING_FOR_PARTITION_CONFIG):
                log.error("%s: cannot set partition config in state %s", worker.journal.name, worker.machine.state)
                return self._refuse("set partition config")
            problem = self._find_plan_problem(request)
            if problem:
                return wire.Ack(message=problem, state=str(worker.machine.state), invalid=True)
            plan = Plan.from_message(request)
            try:
                worker.runner.accept(plan, worker.index)
            except (OSError, InterlockError) as error:
                worker.fail(error)
                return wire.Ack(message=str(error), state=str(worker.machine.state))
            return self._transition(
                SortWorkerEvent.RECEIVE_CONFIG, "Config received, starting sort", "set partition config"
            )

    def StartShuffle(self, request: wire.ShuffleStart, context: Context) -> wire.Ack:  # noqa: N802 - RPC
        """Start to send; in later states, take the new roster and send again to a worker that was restarted."""
        del context
        worker = self._worker
        with worker.changed:
            if request.epoch != worker.epoch:
                return self._refuse_epoch(request.epoch)
            problem = self._find_roster_problem(request.roster)
            if problem and worker.machine.is_in_state(
                SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL, *SHUFFLE_STARTED_STATES
            ):
                return wire.Ack(message=problem, state=str(worker.machine.state), invalid=True)
            roster = Roster.from_message(request.roster)
            sender = worker.runner.sender
            if worker.machine.is_in_state(*SHUFFLE_STARTED_STATES) and roster.version > worker.roster_version:
                worker.roster = roster
                if sender is not None:
                    sender.update(roster)
                return wire.Ack(success=True, state=str(worker.machine.state))
            if worker.machine.is_in_state(SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL):
                worker.roster = roster
            return self._transition(SortWorkerEvent.START_SHUFFLE, "Signal received, starting shuffle", "start shuffle")

    def StartMerge(self, request: wire.MergeStart, context: Context) -> wire.Ack:  # noqa: N802 - RPC
        """Start to merge."""
        del context
        with self._worker.changed:
            if request.epoch != self._worker.epoch:
                return self._refuse_epoch(request.epoch)
            return self._transition(SortWorkerEvent.START_MERGE, "Signal received, starting merge", "start merge")

    def GetStatus(self, request: wire.StatusRequest, context: Context) -> wire.WorkerStatus:  # noqa: N802 - RPC
        """Return the progress, in any state; abort if the request says that the whole sort has failed."""
        del context
        worker = self._worker
        if request.abort and request.epoch == worker.epoch:
            worker.abort(request.abort)
        state = worker.machine.state
        status = make_status(state, worker.runner.progress(state))
        status.bytes_done = worker.runner.bytes_done(state)
        status.roster_version = worker.roster_version
        status.incarnation = worker.incarnation
        status.epoch = worker.epoch
        return status

    def ShuffleData(self, messages: Iterator[bytes], context: Context) -> wire.ShuffleAck:  # noqa: N802 - RPC
        """Receive slices; data that arrives in an unusual state is accepted all the same, and logged.

        Data that is refused fails the sort only if its sender takes part in it and has no other.
        """
        worker = self._worker
        receiver = worker.runner.receiver
        state = worker.machine.state
        if receiver is None or state not in ACCEPTING_STATES:
            return wire.ShuffleAck(message=f"Cannot take shuffle data in state {state}", state=str(state))
        if state not in ORDINARY_STATES:
            log.warning("%s: received shuffle data in state %s", worker.journal.name, state)
        try:
            StreamReceiver(receiver, worker.epoch).receive(map(decode_chunk, messages))
            return wire.ShuffleAck(success=True, state=str(worker.machine.state))
        except UnexpectedSlice as error:
            log.warning("%s: refused shuffle data from %s: %s", worker.journal.name, context.peer(), error)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (DamagedData, MalformedMessage) as error:
            log.warning("%s: refused shuffle data from %s: %s", worker.journal.name, context.peer(), error)
            context.abort(grpc.StatusCode.ABORTED, str(error))
        except (OSError, InterlockError) as error:
            worker.fail(error)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return wire.ShuffleAck()

    def _find_plan_problem(self, request: wire.PartitionConfig) -> str:
        """Return why a plan cannot be that of this worker's sort; empty if it can."""
        windows = request.partitions * request.windows
        boundaries = list(map(Boundary, request.keys, request.positions))
        if len(request.keys) != len(request.positions) or len(boundaries) != windows - 1:
            return f"{len(request.keys)} keys and {len(request.positions)} positions do not divide {windows} windows"
        if not are_ordered(boundaries, self._worker.runner.source.format.lines):
            return "the boundaries of the plan are not in order"
        return self._find_roster_problem(request.roster)

    def _find_roster_problem(self, roster: wire.Roster) -> str:
        """Return why a roster cannot be that of this worker's sort; empty if it can."""
        worker, members = self._worker, roster.members
        if (
            not members
            or [one.index for one in members] != list(range(worker.worker_count))
            or not all(one.block_records and one.records < 1 << POSITION_BITS for one in members)
        ):
            return f"the roster is not one of {worker.worker_count} workers"
        own = members[worker.index]
        if (own.records, own.block_records) != (worker.runner.source.records, worker.runner.block_records):
            return f"the roster has another worker with the index {worker.index}"
        return ""

    def _transition(self, event: SortWorkerEvent, reason: str, action: str) -> wire.Ack:
        try:
            state = self._worker.machine.transition(event, reason)
        except InvalidTransitionError:
            return self._refuse(action)
        self._worker.changed.notify_all()
        return wire.Ack(success=True, state=str(state))

    def _refuse(self, action: str) -> wire.Ack:
        state = self._worker.machine.state
        return wire.Ack(message=f"Cannot {action} in state {state}", state=str(state))

    def _refuse_epoch(self, epoch: int) -> wire.Ack:
        state = self._worker.machine.state
        return wire.Ack(
            message=f"this worker takes part in sort {self._worker.epoch}, not in {epoch}", state=str(state)
        )
