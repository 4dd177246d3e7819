"""Every RPC of both services in every state: accepted or refused as the protocol says, and no call breaks a barrier.

The tables are written from the state diagrams and phases of the sort, not from the code: a worker does nothing that its
state does not allow, and the master accepts no report that its phase does not allow.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import orjson
import pytest
import xxhash

from interlock.errors import SortError
from interlock.lifecycle import SORT_MASTER, SORT_WORKER, SortMasterState, SortWorkerState
from interlock.machine import StateMachine
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.keys import Boundary
from interlock.sort.data.line_order import LineOrder, parse_line_order
from interlock.sort.data.plan import Member, Plan, Roster
from interlock.sort.master.master import Master, run_master
from interlock.sort.rpc import MASTER, METHODS, PROTOCOL_VERSION, WORKER, Peer, Server
from interlock.sort.settings import Settings
from interlock.sort.worker.worker import Worker, run_worker
from sort_cluster import output_bytes, random_rows, sorted_bytes, write_source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from interlock.sort.data.records import Source

pytestmark = pytest.mark.flow

M, W = SortMasterState, SortWorkerState
RUNNING = {M.REGISTERING, M.SAMPLING, M.SORTING, M.SHUFFLING, M.MERGING}
EPOCH = 77
ROWS = random_rows(31, 3_000)


def registration(**changes: Any) -> wire.Registration:
    fields: dict[str, Any] = {
        "identity": "a", "index": 0, "records": 10, "record_length": 100, "key_length": 10, "block_records": 5,
        "window_records": 5, "incarnation": 1, "address": "127.0.0.1:1", "state": "Initializing",
        "protocol": PROTOCOL_VERSION, "free_output": 1 << 40, "free_temp": 1 << 40, "room": 1 << 30,
    }  # fmt: skip
    return wire.Registration(**{**fields, **changes})


# The states of the master in which each call of a worker is accepted.
MASTER_ACCEPTS = {
    "a new worker": {M.REGISTERING},
    "a worker that was restarted": RUNNING | {M.COMPLETED},
    "a sample": RUNNING,
    "a worker failed": RUNNING,
    "it waits for the config": RUNNING,
    "it has sorted": {M.SORTING, M.SHUFFLING, M.MERGING},
    "it shuffles": {M.SHUFFLING, M.MERGING},
    "it has shuffled": {M.SHUFFLING, M.MERGING},
    "it has completed": {M.MERGING, M.COMPLETED},
    # these states are never reported by this call, but by a failure, a completion or an answer to the master
    **{f"it is {state}": set() for state in (W.INITIALIZING, W.SAMPLING, W.SORTING, W.MERGING, W.COMPLETED, W.FAILED)},
}
REPORTED = {
    "it waits for the config": "WaitingForPartitionConfig",
    "it has sorted": "WaitingForShuffleSignal",
    "it shuffles": "Shuffling",
    "it has shuffled": "WaitingForMergeSignal",
}


def calls_to_the_master(master: Master) -> dict[str, tuple[str, Any]]:
    own: dict[str, Any] = {"epoch": master.epoch, "worker": 0, "incarnation": 1}
    calls: dict[str, tuple[str, Any]] = {
        "a new worker": ("RegisterWorker", registration(identity="new", index=1)),
        "a worker that was restarted": ("RegisterWorker", registration()),
        "a sample": ("SendSample", wire.Sample(**own, records=10, keys=b"k" * 10, positions=bytes(8))),
        "a worker failed": ("NotifyPhaseComplete", wire.PhaseComplete(**own, state="Failed", message="disk full")),
        "it has completed": ("ReportCompletion", wire.Completion(**own, records=10)),
    }
    for name in MASTER_ACCEPTS:
        if name.startswith("it ") and name not in calls:
            state = REPORTED.get(name, name.removeprefix("it is "))
            calls[name] = ("NotifyPhaseComplete", wire.PhaseComplete(**own, state=state, success=True))
    return calls


@contextmanager
def master_in(state: SortMasterState, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Master, Peer]]:
    """Serve a master of two workers, of which one is registered, that has come to a state by the usual way."""
    monkeypatch.setattr("interlock.sort.master.service.COMPLETION_WAIT_S", 0.01)
    master = Master(2, Settings(), None, "127.0.0.1", 0, threading.Event())
    master.server.start()
    peer = Peer(MASTER, master.server.address, "the master")
    assert peer.call_once("RegisterWorker", registration()).success
    for event, _ in zip(
        ("start_sampling", "set_boundaries", "start_shuffle", "start_merge", "complete"),
        range(list(SORT_MASTER.states).index(state) if state is not M.FAILED else 1),
        strict=False,
    ):
        master.begin(next(one for one in SORT_MASTER.events if one == event), "")
    if state in {M.MERGING, M.COMPLETED}:
        master.workers[0].record_heartbeat("WaitingForMergeSignal")
    if state is M.FAILED:
        master.machine.transition(next(one for one in SORT_MASTER.events if one == "fail"), "")
        master.failure = "worker 1 is lost"
    assert master.machine.state is state
    try:
        yield master, peer
    finally:
        peer.close()
        master.close()


@pytest.mark.parametrize("state", list(SortMasterState))
def test_the_master_checks_its_state_at_every_call(state: SortMasterState, monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()
    for name, accepting in MASTER_ACCEPTS.items():
        with master_in(state, monkeypatch) as (master, peer):
            method, message = calls_to_the_master(master)[name]
            before = (master.machine.state, {one.state for one in master.workers.values()}, master.roster_version)
            answer = peer.call_once(method, message)
            called.add(method)
            assert answer.success == (state in accepting), (name, answer)
            if not answer.success:
                assert str(state) in answer.message or "worker 1 is lost" in answer.message, (name, answer.message)
                after = (master.machine.state, {one.state for one in master.workers.values()}, master.roster_version)
                assert after == before, "a refused call changes nothing"
                assert [one.report for one in master.workers.values()] == [None]
                assert master.failure in {"", "worker 1 is lost"}
    assert called == set(METHODS[MASTER])


def test_a_registration_with_a_wrong_order_of_lines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    good = parse_line_order(["2,2n", "1.3,1.5r"], separator=",", unique=True).json()
    key = good["keys"][0]
    wrong = [
        b"{", b"[]", b"7", b"null", b'"keys"', b"{}", b'{"keys": 7}', b'{"keys": [7]}',
        *(orjson.dumps({**good, **changes}) for changes in (
            {"other": 1}, {"separator": "x"}, {"separator": 10}, {"separator": 256}, {"unique": None}, {"keys": ["x"]},
            {"reverse": 1},
        )),
        *(orjson.dumps({**good, "keys": [{**key, **changes}]}) for changes in (
            {"first_field": -1}, {"first_field": "1"}, {"last_field": ""}, {"last_characters": 1 << 40},
            {"numeric": "yes"}, {"first_character": 1.5}, {"other": 1},
        )),
    ]  # fmt: skip
    lengths = {"record_length": 1, "key_length": 1}
    with master_in(M.REGISTERING, monkeypatch) as (master, peer):
        for identity in ("a", "new"):  # a worker that was restarted, and another one
            for lines in wrong:
                message = registration(identity=identity, index=1, lines=lines.decode(), incarnation=2, **lengths)
                answer = peer.call_once("RegisterWorker", message)
                assert (answer.success, answer.message) == (False, "its registration is inconsistent"), lines
            records = registration(identity=identity, index=1, lines=orjson.dumps(good).decode(), incarnation=2)
            assert peer.call_once("RegisterWorker", records).message == "its registration is inconsistent"
        restarted = registration(lines=orjson.dumps(good).decode(), incarnation=2, **lengths)
        change = peer.call_once("RegisterWorker", restarted).message
        assert f"{LineOrder.from_json(good)} instead of records of one length" in change
        assert [worker.incarnation for worker in master.workers.values()] == [1]
        master.workers.clear()
        assert peer.call_once("RegisterWorker", restarted).success
        assert master.workers[0].line_order == LineOrder.from_json(good)


# The states of a worker in which each call of the master or another worker is accepted.
WORKER_ACCEPTS = {
    "SetPartitionBoundaries": {W.WAITING_FOR_PARTITION_CONFIG},
    "StartShuffle": {W.WAITING_FOR_SHUFFLE_SIGNAL},
    "StartShuffle, newer": {W.WAITING_FOR_SHUFFLE_SIGNAL, W.SHUFFLING, W.WAITING_FOR_MERGE_SIGNAL, W.MERGING,
                            W.COMPLETED},
    "StartMerge": {W.WAITING_FOR_MERGE_SIGNAL},
    "GetStatus": set(SortWorkerState),
    "ShuffleData": {W.SORTING, W.WAITING_FOR_SHUFFLE_SIGNAL, W.SHUFFLING, W.WAITING_FOR_MERGE_SIGNAL, W.MERGING,
                    W.COMPLETED},
}  # fmt: skip
MOVES = {
    "SetPartitionBoundaries": W.SORTING,
    "StartShuffle": W.SHUFFLING,
    "StartMerge": W.MERGING,
}


@contextmanager
def worker_in(place: Path, source: Source, state: SortWorkerState) -> Iterator[tuple[Worker, Peer, Plan]]:
    """Serve a worker of two that is in a state, with the plan that it has from there on."""
    for name in ("out", "temp"):
        (place / name).mkdir(parents=True, exist_ok=True)
    settings = Settings(block_records=500, window_records=400)
    worker = Worker("127.0.0.1:1", source, place / "out", settings, place / "temp", 0, "127.0.0.1")
    worker.epoch, worker.index, worker.worker_count = EPOCH, 0, 2
    worker.machine = StateMachine(SORT_WORKER, state, observer=worker.journal)
    other = Member(1, "127.0.0.1:1", 5, 100, 500)
    roster = Roster(3, (Member(0, worker.address, worker.incarnation, source.records, 500), other))
    plan = Plan(EPOCH, 2, 1, (Boundary(b"\x80" + bytes(9), 0),), roster)
    has_plan = state not in {W.INITIALIZING, W.SAMPLING, W.WAITING_FOR_PARTITION_CONFIG, W.FAILED}
    if has_plan:
        worker.runner.accept(plan, 0)
    if has_plan and state not in {W.SORTING, W.WAITING_FOR_SHUFFLE_SIGNAL}:
        worker.roster = roster
    worker.server.start()
    peer = Peer(WORKER, worker.address, "the worker")
    try:
        yield worker, peer, plan
    finally:
        peer.close()
        worker.server.stop()
        worker.runner.close()


def calls_to_a_worker(plan: Plan) -> dict[str, Any]:
    data = bytes(10_000)
    chunk = wire.ShuffleDataChunk(
        epoch=EPOCH, worker=1, block=0, partition=0, size=len(data), counts=[100], data=data,
        checksum=xxhash.xxh3_64_intdigest(data),
    )  # fmt: skip
    newer = Roster(4, plan.roster.members)
    return {
        "SetPartitionBoundaries": plan.message(),
        "StartShuffle": wire.ShuffleStart(epoch=EPOCH, roster=plan.roster.message()),
        "StartShuffle, newer": wire.ShuffleStart(epoch=EPOCH, roster=newer.message()),
        "StartMerge": wire.MergeStart(epoch=EPOCH),
        "GetStatus": wire.StatusRequest(epoch=EPOCH),
        "ShuffleData": [chunk],
    }


@pytest.mark.parametrize("state", list(SortWorkerState))
def test_a_worker_checks_its_state_at_every_call(tmp_path: Path, state: SortWorkerState) -> None:
    source = write_source(tmp_path / "in", random_rows(1, 1_000))
    called = set()
    for name, accepting in WORKER_ACCEPTS.items():
        with worker_in(tmp_path / name, source, state) as (worker, peer, plan):
            message = calls_to_a_worker(plan)[name]
            method = name.partition(",")[0]
            answer = peer.call_once(method, iter(message) if isinstance(message, list) else message)
            called.add(method)
            assert answer.state == str(worker.machine.state)
            if method == "GetStatus":
                assert answer.state == str(state)
            elif state in accepting:
                assert answer.success, (name, answer)
                is_first = name in MOVES or state is W.WAITING_FOR_SHUFFLE_SIGNAL
                assert worker.machine.state is (MOVES[method] if method in MOVES and is_first else state)
            else:
                assert not answer.success, name
                assert f"in state {state}" in answer.message
                assert worker.machine.state is state
    assert called == set(METHODS[WORKER])


def test_data_in_ordinary_states_is_no_warning_and_in_others_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_source(tmp_path / "in", random_rows(1, 1_000))
    warned = set()
    for state in sorted(WORKER_ACCEPTS["ShuffleData"]):
        caplog.clear()
        with worker_in(tmp_path / state, source, state) as (_, peer, plan):
            assert peer.call_once("ShuffleData", iter(calls_to_a_worker(plan)["ShuffleData"])).success
        if any("received shuffle data in state" in record.getMessage() for record in caplog.records):
            warned.add(state)
    assert warned == {W.SORTING, W.MERGING, W.COMPLETED}


def test_calls_with_wrong_content_are_refused_and_named(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", random_rows(1, 1_000))
    with worker_in(tmp_path / "a", source, W.WAITING_FOR_PARTITION_CONFIG) as (worker, peer, plan):
        good = plan.message()
        wrong: dict[str, wire.PartitionConfig] = {}
        for name in ("do not divide 2 windows", "do not divide 6 windows", "not one of 2 workers", "another worker"):
            wrong[name] = wire.PartitionConfig()
            wrong[name].CopyFrom(good)
        wrong["do not divide 2 windows"].positions.append(3)
        wrong["do not divide 6 windows"].windows = 3
        del wrong["not one of 2 workers"].roster.members[1]
        wrong["another worker"].roster.members[0].records = 7
        for words, message in wrong.items():
            answer = peer.call_once("SetPartitionBoundaries", message)
            assert (answer.success, answer.invalid) == (False, True)
            assert words in answer.message
        assert worker.machine.state is W.WAITING_FOR_PARTITION_CONFIG
        assert peer.call_once("SetPartitionBoundaries", good).success


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x08\x80", b"\xff" * 50, b"\x4a\xff\xff\xff\x0f"])
def test_a_malformed_message_is_refused_and_changes_nothing(tmp_path: Path, data: bytes) -> None:
    source = write_source(tmp_path / "in", random_rows(1, 1_000))
    with (
        worker_in(tmp_path / "a", source, W.SHUFFLING) as (worker, peer, plan),
        grpc.insecure_channel(worker.address) as channel,
    ):
        send: Any = channel.stream_unary(f"/{WORKER}/ShuffleData")
        with pytest.raises(grpc.RpcError) as raised:
            send(iter([data]))
        assert raised.value.code() in {grpc.StatusCode.ABORTED, grpc.StatusCode.INVALID_ARGUMENT}
        worker.check()  # the worker has not failed
        good = calls_to_a_worker(plan)["ShuffleData"]
        broken = wire.ShuffleDataChunk()
        broken.CopyFrom(good[0])
        broken.counts[:] = [1] * 7
        with pytest.raises(grpc.RpcError, match="has 7 windows, not 1"):
            peer.call_once("ShuffleData", iter([broken]))
        worker.check()
        assert peer.call_once("ShuffleData", iter(good)).success
        assert worker.runner.receiver is not None
        assert worker.runner.receiver.is_complete()


def test_early_reports_break_no_barrier(tmp_path: Path) -> None:
    """A peer with the index of a worker reports every state and a completion early; the sort completes all the same."""
    source = write_source(tmp_path / "in", ROWS)
    settings = Settings(block_records=500, window_records=300, lost_after_s=30.0, register_timeout_s=30.0)
    address: Future[str] = Future()
    seen: dict[int, wire.Registration] = {}
    answers: list[tuple[str, bool]] = []
    stop = threading.Event()

    class Eavesdropper:
        """Passes calls on to the master, and follows each one with false reports in the name of the caller."""

        def __init__(self, peer: Peer) -> None:
            self._peer = peer

        def RegisterWorker(self, request: wire.Registration, _: Any) -> Any:  # noqa: N802 - RPC
            answer = self._peer.call_once("RegisterWorker", request)
            seen[answer.index] = request
            self._lie(answer.epoch, answer.index, request.incarnation)
            return answer

        def SendSample(self, request: wire.Sample, _: Any) -> Any:  # noqa: N802 - RPC
            self._lie(request.epoch, request.worker, request.incarnation)
            return self._peer.call_once("SendSample", request)

        def NotifyPhaseComplete(self, request: wire.PhaseComplete, _: Any) -> Any:  # noqa: N802 - RPC
            answer = self._peer.call_once("NotifyPhaseComplete", request)
            self._lie(request.epoch, request.worker, request.incarnation)
            return answer

        def ReportCompletion(self, request: wire.Completion, _: Any) -> Any:  # noqa: N802 - RPC
            return self._peer.call_once("ReportCompletion", request)

        def _lie(self, epoch: int, index: int, incarnation: int) -> None:
            own: dict[str, Any] = {"epoch": epoch, "worker": index, "incarnation": incarnation}
            for state in ("WaitingForShuffleSignal", "Shuffling", "WaitingForMergeSignal", "Merging", "Completed"):
                message = wire.PhaseComplete(**own, state=state, success=True)
                answers.append((state, self._peer.call_once("NotifyPhaseComplete", message).success))

    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(run_master, 2, settings=settings, on_listening=address.set_result, stop=stop)
        peer = Peer(MASTER, address.result(20), "the master")
        false = Server(MASTER, Eavesdropper(peer), "127.0.0.1")
        false.start()
        try:
            early = peer.call_once("ReportCompletion", wire.Completion(epoch=1, worker=0, incarnation=1))
            assert not early.success
            workers = [
                pool.submit(
                    run_worker, false.address, source.share(index, 2), tmp_path / "out", settings=settings, index=index,
                    work_dir=tmp_path / f"temp-{index}",
                )
                for index in range(2)
            ]  # fmt: skip
            assert running.result(60).records == len(ROWS)
            assert [worker.result(60).index for worker in workers] == [0, 1]
        finally:
            stop.set()
            false.stop()
            peer.close()
    assert output_bytes(tmp_path / "out") == sorted_bytes(ROWS)
    refused = {state for state, success in answers if not success}
    assert refused >= {"Merging", "Completed", "WaitingForMergeSignal", "WaitingForShuffleSignal"}


def test_a_worker_that_refuses_the_plan_fails_the_sort_by_its_name() -> None:
    address: Future[str] = Future()

    class Refuser:
        def __init__(self) -> None:
            self.epoch = 0

        def GetStatus(self, _: Any, __: Any) -> wire.WorkerStatus:  # noqa: N802 - RPC
            return wire.WorkerStatus(state="WaitingForPartitionConfig", incarnation=1)

        def SetPartitionBoundaries(self, _: Any, __: Any) -> wire.Ack:  # noqa: N802 - RPC
            return wire.Ack(message="the boundaries of the plan are not in order", invalid=True)

        def _nothing(self, *_: Any) -> wire.Ack:
            return wire.Ack()

        StartShuffle = StartMerge = ShuffleData = _nothing

    worker = Server(WORKER, Refuser(), "127.0.0.1")
    worker.start()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_master, 1, settings=Settings(lost_after_s=60.0), on_listening=address.set_result)
        peer = Peer(MASTER, address.result(20), "the master")
        answer = peer.call_once("RegisterWorker", registration(address=worker.address))
        own: dict[str, Any] = {"epoch": answer.epoch, "worker": 0, "incarnation": 1}
        peer.call_once("SendSample", wire.Sample(**own, records=10, keys=b"k" * 10, positions=bytes(8)))
        peer.call_once(
            "NotifyPhaseComplete", wire.PhaseComplete(**own, state="WaitingForPartitionConfig", success=True)
        )
        with pytest.raises(SortError, match=r"refused SetPartitionBoundaries: the boundaries of the plan are not in"):
            running.result(60)
        peer.close()
    worker.stop()
