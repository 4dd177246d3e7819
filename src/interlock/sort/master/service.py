"""What the master answers: each call checks whether it comes from a worker of this sort, and at the right time.

Invariant: a call that is made again changes nothing, so that workers may repeat what they are not sure was heard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from interlock.lifecycle import SortMasterState, SortWorkerState
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.plan import POSITION, Sample, most_boundaries
from interlock.sort.master.roster import Seat

if TYPE_CHECKING:
    import grpc

    from interlock.sort.master.master import Master

    Context = grpc.ServicerContext

STATES = frozenset(map(str, SortWorkerState))
NAMED = 3  # workers that a refusal lists
LINGER = 5.0  # seconds for which the answer to a completed worker may wait for the others


class MasterHandlers:
    """The calls of MasterService, by their names on the wire."""

    def __init__(self, master: Master) -> None:
        self._master = master

    def RegisterWorker(self, request: wire.Registration, context: Context) -> wire.Registered:  # noqa: N802 - RPC
        """Give a worker its place, or the one it had before it was started again."""
        del context
        master = self._master
        with master.changed:
            if request.state not in STATES:
                return wire.Registered(message=f"{request.state!r} is no state of a worker")
            seat = next((one for one in master.seats.values() if one.identity == request.identity), None)
            if seat is not None:
                changed = seat.changed(request)
                if changed:
                    return wire.Registered(
                        message=f"it was started again with other arguments: {changed}; start it with those that it had"
                    )
                seat.rejoin(request)
            else:
                problem = self._problem(request)
                if problem:
                    return wire.Registered(message=problem)
                seat = Seat.of(self._place(request.index), request)
                master.seats[seat.index] = seat
            master.seats_changed()
            return wire.Registered(
                success=True,
                epoch=master.epoch,
                index=seat.index,
                workers=master.workers,
                partitions=master.partitions,
                starts=seat.starts,
                finished=master.machine.state is SortMasterState.COMPLETED,
            )

    def SendSample(self, request: wire.Sample, context: Context) -> wire.Ack:  # noqa: N802 - RPC
        """Take a worker's sample."""
        del context
        with self._master.changed:
            seat, refusal = self._seat(request.epoch, request.worker, request.incarnation)
            if seat is None:
                return refusal
            count, rest = divmod(len(request.keys), seat.key_length)
            if rest or len(request.positions) != count * POSITION:
                return wire.Ack(message="the sample has not as many positions as keys", failed=True)
            keys = np.frombuffer(request.keys, dtype=np.uint8).reshape(-1, seat.key_length)
            positions = np.frombuffer(request.positions, dtype="<u8").astype(np.uint64)
            seat.sample = Sample(keys, positions, request.records)
            self._master.changed.notify_all()
            return wire.Ack(success=True, state=str(self._master.machine.state))

    def NotifyPhaseComplete(self, request: wire.PhaseComplete, context: Context) -> wire.Ack:  # noqa: N802 - RPC
        """Hear that a worker has finished a phase, or that it failed."""
        del context
        with self._master.changed:
            seat, refusal = self._seat(request.epoch, request.worker, request.incarnation)
            if seat is None:
                return refusal
            if request.state not in STATES:
                return wire.Ack(message=f"{request.state!r} is no state of a worker")
            if not request.success:
                self._master.failed(f"worker {seat.index} ({seat.address}) failed: {request.message}")
            else:
                seat.hear(request.state)
            self._master.changed.notify_all()
            return wire.Ack(success=True, state=str(self._master.machine.state))

    def ReportCompletion(self, request: wire.Completion, context: Context) -> wire.CompletionAck:  # noqa: N802 - RPC
        """Take a worker's report; answer when all have completed, or after a while."""
        del context
        master = self._master
        with master.changed:
            seat, refusal = self._seat(request.epoch, request.worker, request.incarnation)
            if seat is None:
                return wire.CompletionAck(message=refusal.message, failed=refusal.failed)
            seat.completed(request)
            master.changed.notify_all()
            master.changed.wait_for(master.machine.is_terminal, LINGER)
            finished = master.machine.state is SortMasterState.COMPLETED
            failed = master.machine.state is SortMasterState.FAILED
            seat.dismissed = finished
            master.changed.notify_all()
            return wire.CompletionAck(success=not failed, message=master.failure, finished=finished, failed=failed)

    def _seat(self, epoch: int, index: int, incarnation: int) -> tuple[Seat | None, wire.Ack]:
        """Find a worker's place; without one, give the answer that refuses it."""
        master = self._master
        state = str(master.machine.state)
        seat = master.seats.get(index)
        if epoch != master.epoch or seat is None or seat.incarnation != incarnation:
            return None, wire.Ack(message=f"there is no such worker in sort {master.epoch}", state=state)
        if master.machine.state is SortMasterState.FAILED:
            return None, wire.Ack(message=master.failure, state=state, failed=True)
        return seat, wire.Ack()

    def _problem(self, request: wire.Registration) -> str:
        """Say why a new worker cannot be taken; nothing when it can."""
        master = self._master
        other = next(iter(master.seats.values()), None)
        form = (request.record_length, request.key_length)
        most = most_boundaries(request.key_length)
        problems = {
            self._stranger(request): master.machine.state is not SortMasterState.REGISTERING
            or len(master.seats) >= master.workers,
            f"there is no place {request.index} among {master.workers} workers": request.index >= master.workers,
            f"another worker has the place {request.index}": request.index in master.seats,
            "its registration makes no sense": not 0 < request.key_length <= request.record_length
            or not (request.block_records and request.window_records),
            f"keys of {request.key_length:,} bytes allow for {most:,} partitions at most": master.partitions > most,
            f"its records have {form[0]} bytes and keys of {form[1]}, unlike those of the worker before it": other
            is not None
            and form != (other.record_length, other.key_length),
        }
        return next((problem for problem, has in problems.items() if has), "")

    def _stranger(self, request: wire.Registration) -> str:
        """Say to a worker that comes when all places are taken who has them, and what to do."""
        master = self._master
        seats = sorted(master.seats.values(), key=lambda seat: seat.index)
        named = [f"worker {seat.index} ({seat.address}) with {seat.records:,} records" for seat in seats[:NAMED]]
        more = [f"{len(seats) - NAMED} more"] if len(seats) > NAMED else []
        return (
            f"the sort is in state {master.machine.state} and has its {master.workers} workers already, "
            f"{', '.join([*named, *more])}; this one with {request.records:,} records is none of them. A worker that "
            "is started again needs the input, the output and the --temp that it had; another sort needs a master of "
            "its own, with another --temp"
        )

    def _place(self, wanted: int) -> int:
        if wanted >= 0:
            return wanted
        return next(place for place in range(self._master.workers) if place not in self._master.seats)
