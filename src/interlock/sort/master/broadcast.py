"""Calls of the master to the workers: status polls, signals that start a phase, and the broadcast of a failure.

The master never waits for an answer, so that one slow worker delays no other.

Invariant: a worker that waits for a signal gets it as soon as the phase allows, and again while it seems to be lost.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc

from interlock.lifecycle import SortMasterState, SortWorkerState
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.plan import Plan
from interlock.sort.master.roster import STATE_RANK
from interlock.sort.rpc import RETRYABLE_CODES

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from interlock.sort.master.master import Master
    from interlock.sort.master.roster import RegisteredWorker

CALL_TIMEOUT_S = 10.0
RESEND_INTERVAL_S = 1.0  # after which a signal that had no effect is sent again
ABORT_TIMEOUT_S = 3.0


def poll_status(master: Master, worker: RegisteredWorker) -> None:
    """Request the status of a worker, unless a request is in progress."""
    if worker.status_call is not None and not worker.status_call.done():
        return
    incarnation, asked_at = worker.incarnation, time.monotonic()
    worker.status_call = worker.peer.start_call("GetStatus", wire.StatusRequest(epoch=master.epoch), CALL_TIMEOUT_S)

    def answered(future: Any) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        status = future.result()
        with master.changed:
            if worker.incarnation == incarnation == status.incarnation and status.state in STATE_RANK:
                worker.record_status(status, asked_at)
                master.changed.notify_all()

    worker.status_call.add_done_callback(answered)


def send_signal(master: Master, worker: RegisteredWorker) -> None:
    """Send a worker the signal that it waits for, if the phase allows it."""
    due = _due_signal(master, worker)
    if due is None:
        return
    method, message = due
    now = time.monotonic()
    mark = (worker.state, master.roster_version)
    if worker.signaled == mark and now - worker.signaled_at < RESEND_INTERVAL_S:
        return
    worker.signaled, worker.signaled_at = mark, now
    future = worker.peer.start_call(method, message, CALL_TIMEOUT_S)
    version, incarnation = master.roster_version, worker.incarnation

    def answered(future: Any) -> None:
        refusal = _find_refusal(future)
        if refusal and worker.incarnation == incarnation:
            with master.changed:
                master.record_failure(f"worker {worker.index} ({worker.address}) refused {method}: {refusal}")
                master.changed.notify_all()
        if future.cancelled() or future.exception() is not None:
            return
        answer = future.result()
        with master.changed:
            if answer.success and worker.signaled == mark:
                if method == "StartShuffle":
                    worker.roster_version = version
                worker.record_heartbeat(answer.state)

    worker.signal_call = future
    future.add_done_callback(answered)


def _find_refusal(future: Any) -> str:
    """Return why a signal was refused for good; empty if it was accepted, or may be later."""
    if future.cancelled():
        return ""
    error = future.exception()
    if error is None:
        answer = future.result()
        return str(answer.message) if answer.invalid else ""
    code = error.code()
    is_lasting = code not in RETRYABLE_CODES and code is not grpc.StatusCode.CANCELLED
    return f"{code.name}: {error.details()}" if is_lasting else ""


def broadcast_failure(master: Master) -> None:
    """Tell all workers that the sort has failed."""
    message = wire.StatusRequest(epoch=master.epoch, abort=master.failure)
    calls = [worker.peer.start_call("GetStatus", message, ABORT_TIMEOUT_S) for worker in master.workers.values()]
    for call in calls:
        try:
            call.result()
        except grpc.RpcError:
            continue  # it has exited already, or learns of the failure at its next call


def _due_signal(master: Master, worker: RegisteredWorker) -> tuple[str, Message] | None:
    """Return method and message of the signal for a worker in its state; None if there is nothing to send."""
    phase, state = master.machine.state, worker.state
    if state == SortWorkerState.WAITING_FOR_PARTITION_CONFIG:
        plan = master.plan
        if plan is None or not master.has_begun(SortMasterState.SORTING):
            return None
        current = Plan(plan.epoch, plan.partitions, plan.windows, plan.boundaries, master.roster())
        return "SetPartitionBoundaries", current.message()
    if state == SortWorkerState.WAITING_FOR_MERGE_SIGNAL and phase is SortMasterState.MERGING:
        return "StartMerge", wire.MergeStart(epoch=master.epoch)
    if phase in {SortMasterState.SHUFFLING, SortMasterState.MERGING} and _needs_roster(master, worker):
        return "StartShuffle", wire.ShuffleStart(epoch=master.epoch, roster=master.roster().message())
    return None


def _needs_roster(master: Master, worker: RegisteredWorker) -> bool:
    """Return whether a worker waits for the shuffle, or takes part in it with an outdated roster."""
    if worker.state == SortWorkerState.WAITING_FOR_SHUFFLE_SIGNAL:
        return True
    return worker.has_reached(SortWorkerState.SHUFFLING) and worker.roster_version < master.roster_version
