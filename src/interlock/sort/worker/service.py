"""What a worker answers: each call checks the state, and a wrong one is refused with its name.

Invariant: a handler never does the work of a phase; it makes one move, or takes in a slice, and answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from interlock.errors import InterlockError, InvalidTransitionError
from interlock.lifecycle import SortWorkerEvent, SortWorkerState
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.plan import Plan, Roster
from interlock.sort.io.shuffle_receiver import Damaged, Intake, Stranger
from interlock.sort.logging import log
from interlock.sort.worker.progress import status_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.sort.rpc import Piece
    from interlock.sort.worker.worker import Worker

    Context = grpc.ServicerContext
    Pieces = Iterator[Piece]

TAKING_DATA = (SortWorkerState.SHUFFLING, SortWorkerState.WAITING_FOR_MERGE_SIGNAL)
STARTED = (*TAKING_DATA, SortWorkerState.MERGING, SortWorkerState.COMPLETED)


class WorkerHandlers:
    """The calls of WorkerService, by their names on the wire."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def SetPartitionBoundaries(self, request: wire.PartitionConfig, context: Context) -> wire.Ack:  # noqa: N802 - RPC
        """Take the plan and begin to sort."""
        del context
        worker = self._worker
        with worker.changed:
            if request.epoch != worker.epoch:
                return self._another(request.epoch)
            if not worker.machine.is_in_state(SortWorkerState.WAITING_FOR_PARTITION_CONFIG):
                log.error("%s: cannot set partition config in state %s", worker.journal.who, worker.machine.state)
                return self._refused("set partition config")
            plan = Plan.of(request)
            if len(plan.boundaries) != plan.partitions * plan.windows - 1:
                return wire.Ack(message=f"{len(plan.boundaries)} boundaries do not make {plan.partitions} partitions")
            try:
                worker.workshop.accept(plan, worker.index)
            except (OSError, InterlockError) as error:
                worker.failed(error)
                return wire.Ack(message=str(error), state=str(worker.machine.state))
            return self._move(SortWorkerEvent.RECEIVE_CONFIG, "Config received, starting sort", "set partition config")

    def StartShuffle(self, request: wire.ShuffleStart, context: Context) -> wire.Ack:  # noqa: N802 - RPC
        """Begin to send; in later states, learn of a worker that was started again, and send to it once more."""
        del context
        worker = self._worker
        with worker.changed:
            if request.epoch != worker.epoch:
                return self._another(request.epoch)
            roster = Roster.of(request.roster)
            sender = worker.workshop.sender
            if worker.machine.is_in_state(*STARTED) and roster.version > worker.roster_version:
                worker.roster = roster
                if sender is not None:
                    sender.update(roster)
                return wire.Ack(success=True, state=str(worker.machine.state))
            if worker.machine.is_in_state(SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL):
                worker.roster = roster
            return self._move(SortWorkerEvent.START_SHUFFLE, "Signal received, starting shuffle", "start shuffle")

    def StartMerge(self, request: wire.MergeStart, context: Context) -> wire.Ack:  # noqa: N802 - RPC
        """Begin to merge."""
        del context
        with self._worker.changed:
            if request.epoch != self._worker.epoch:
                return self._another(request.epoch)
            return self._move(SortWorkerEvent.START_MERGE, "Signal received, starting merge", "start merge")

    def GetStatus(self, request: wire.StatusRequest, context: Context) -> wire.WorkerStatus:  # noqa: N802 - RPC
        """Say how far this worker is, in any state; hear that the whole sort has failed."""
        del context
        worker = self._worker
        if request.abort and request.epoch == worker.epoch:
            worker.abandon(request.abort)
        state = worker.machine.state
        status = status_of(state, worker.workshop.progress(state))
        status.bytes_done = worker.workshop.bytes_done(state)
        status.roster_version = worker.roster_version
        status.incarnation = worker.incarnation
        status.epoch = worker.epoch
        return status

    def ShuffleData(self, pieces: Pieces, context: Context) -> wire.ShuffleAck:  # noqa: N802 - RPC
        """Take in slices; data that comes in another state than it should is taken all the same, and logged."""
        worker = self._worker
        inbox = worker.workshop.inbox
        state = worker.machine.state
        if inbox is None or state is SortWorkerState.FAILED:
            return wire.ShuffleAck(message=f"Cannot take shuffle data in state {state}", state=str(state))
        if state not in TAKING_DATA:
            log.warning("%s: received shuffle data in state %s", worker.journal.who, state)
        intake = Intake(inbox, worker.epoch)
        try:
            intake.take_all(pieces)
            return wire.ShuffleAck(success=True, state=str(worker.machine.state))
        except Stranger as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Damaged as error:
            context.abort(grpc.StatusCode.ABORTED, str(error))
        except (OSError, InterlockError) as error:
            worker.failed(error)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return wire.ShuffleAck()

    def _move(self, event: SortWorkerEvent, reason: str, what: str) -> wire.Ack:
        try:
            state = self._worker.machine.transition(event, reason)
        except InvalidTransitionError:
            return self._refused(what)
        self._worker.changed.notify_all()
        return wire.Ack(success=True, state=str(state))

    def _refused(self, what: str) -> wire.Ack:
        state = self._worker.machine.state
        return wire.Ack(message=f"Cannot {what} in state {state}", state=str(state))

    def _another(self, epoch: int) -> wire.Ack:
        state = self._worker.machine.state
        return wire.Ack(
            message=f"this worker takes part in sort {self._worker.epoch}, not in {epoch}", state=str(state)
        )
