"""What the master tells the workers, without waiting for any of them.

Invariant: whoever waits for a signal gets it as soon as the phase allows, and again if it seems to have been lost.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc

from interlock.lifecycle import SortMasterState, SortWorkerState
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.plan import Plan

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from interlock.sort.master.master import Master
    from interlock.sort.master.roster import Seat

ANSWERED_WITHIN = 10.0
AGAIN = 1.0  # seconds after which a signal that changed nothing is given again
STOPPED_WITHIN = 3.0


def ask_status(master: Master, seat: Seat) -> None:
    """Ask a worker how far it is, unless it still owes an answer."""
    if seat.asked is not None and not seat.asked.done():
        return
    incarnation = seat.incarnation
    seat.asked = seat.peer.start("GetStatus", wire.StatusRequest(epoch=master.epoch), ANSWERED_WITHIN)

    def answered(future: Any) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        status = future.result()
        with master.changed:
            if seat.incarnation == incarnation == status.incarnation:
                seat.status = status
                seat.roster_version = status.roster_version
                seat.hear(status.state)
                master.changed.notify_all()

    seat.asked.add_done_callback(answered)


def signal(master: Master, seat: Seat) -> None:
    """Tell a worker what it waits for, if it is time."""
    due = _due(master, seat)
    if due is None:
        return
    method, message = due
    now = time.monotonic()
    mark = (seat.state, master.roster_version)
    if seat.signalled == mark and now - seat.signalled_at < AGAIN:
        return
    seat.signalled, seat.signalled_at = mark, now
    future = seat.peer.start(method, message, ANSWERED_WITHIN)
    version = master.roster_version

    def answered(future: Any) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        answer = future.result()
        with master.changed:
            if answer.success and seat.signalled == mark:
                if method == "StartShuffle":
                    seat.roster_version = version
                seat.hear(answer.state)

    seat.signal = future
    future.add_done_callback(answered)


def withdraw(master: Master) -> None:
    """Tell all workers that the sort has failed."""
    message = wire.StatusRequest(epoch=master.epoch, abort=master.failure)
    calls = [seat.peer.start("GetStatus", message, STOPPED_WITHIN) for seat in master.seats.values()]
    for call in calls:
        try:
            call.result()
        except grpc.RpcError:
            continue  # it is gone already, or will hear it when it next calls


def _due(master: Master, seat: Seat) -> tuple[str, Message] | None:
    """Choose what a worker in its state is to be told."""
    phase, state = master.machine.state, seat.state
    if state == SortWorkerState.WAITING_FOR_PARTITION_CONFIG and master.plan is not None:
        return "SetPartitionBoundaries", _present(master, master.plan).message()
    if state == SortWorkerState.WAITING_FOR_MERGE_SIGNAL and phase is SortMasterState.MERGING:
        return "StartMerge", wire.MergeStart(epoch=master.epoch)
    if phase in {SortMasterState.SHUFFLING, SortMasterState.MERGING} and _lacks_roster(master, seat):
        return "StartShuffle", wire.ShuffleStart(epoch=master.epoch, roster=master.roster().message())
    return None


def _lacks_roster(master: Master, seat: Seat) -> bool:
    """Tell whether a worker waits for the shuffle, or takes part in it without knowing where all the others are."""
    if seat.state == SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL:
        return True
    return seat.reached(SortWorkerState.SHUFFLING) and seat.roster_version < master.roster_version


def _present(master: Master, plan: Plan) -> Plan:
    return Plan(plan.epoch, plan.partitions, plan.windows, plan.boundaries, master.roster())
