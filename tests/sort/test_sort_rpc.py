"""RPCs: each call checks the state, wrong ones are refused with its name, and repeated calls change nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import xxhash

from interlock.errors import SortError
from interlock.sort import rpc, wire_pb2
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.keys import Boundary
from interlock.sort.data.plan import Member, Plan, Roster
from interlock.sort.master.master import Master, run_master
from interlock.sort.master.roster import check_disk_space
from interlock.sort.master.service import MasterService
from interlock.sort.rpc import MASTER, METHODS, WORKER, Peer, Server, Unreachable, call_with_retry
from interlock.sort.settings import Settings
from interlock.sort.worker.worker import Worker
from processes import eventually
from sort_cluster import output_bytes, random_rows, sorted_bytes, write_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.sort.data.records import Source

pytestmark = pytest.mark.flow

EPOCH = 77
ROOT = Path(__file__).parents[2] / "src"


def test_the_generated_code_matches_the_protocol(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}",
         "interlock/sort/wire.proto"],
        check=True,
    )  # fmt: skip
    for name in ("wire_pb2.py", "wire_pb2.pyi"):
        made = (tmp_path / "interlock" / "sort" / name).read_text()
        assert (ROOT / "interlock" / "sort" / name).read_text() == made, f"make {name} again from wire.proto"


def test_the_methods_match_the_protocol() -> None:
    declared = {
        service.full_name: {
            method.name: (method.input_type.name, method.output_type.name, method.client_streaming)
            for method in service.methods
        }
        for service in wire_pb2.DESCRIPTOR.services_by_name.values()
    }
    assert declared == {
        service: {
            name: (method.request.DESCRIPTOR.name, method.response.DESCRIPTOR.name, method.is_stream)
            for name, method in methods.items()
        }
        for service, methods in METHODS.items()
    }


@pytest.mark.parametrize("size", [0, 1, 127, 128, 20_000])
def test_a_chunk_is_encoded_like_its_message(size: int) -> None:
    head, data = wire.ShuffleDataChunk(epoch=3, block=5, counts=[1, 2], checksum=9), bytes(range(256)) * 100
    found = wire.ShuffleDataChunk.FromString(rpc.encode_chunk(rpc.Chunk(head, memoryview(data)[:size])))
    assert found.data == data[:size]
    assert (found.epoch, found.block, list(found.counts), found.checksum) == (3, 5, [1, 2], 9)
    again = rpc.decode_chunk(found.SerializeToString())
    assert again.data == data[:size]
    assert again.head == head


@pytest.mark.parametrize("message", [b"\x0a", b"\x0a\x05ab", b"\x08\x80", b"\x0b\x00"])
def test_a_malformed_message_is_refused(message: bytes) -> None:
    with pytest.raises(rpc.MalformedMessage, match=f"a message of {len(message)} bytes is no chunk"):
        rpc.decode_chunk(message)


class Refusal(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str = "said so") -> None:
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED"])
def test_retryable_calls_are_retried_until_the_timeout(code: str) -> None:
    left = [Refusal(grpc.StatusCode[code])] * 2

    def call() -> str:
        if left:
            raise left.pop()
        return "done"

    assert call_with_retry(call, "a call", 10.0) == "done"
    left = [Refusal(grpc.StatusCode[code])] * 100
    with pytest.raises(Unreachable, match=rf"a call: no answer within 0\.1 s: {code}: said so"):
        call_with_retry(call, "a call", 0.1)


def test_other_refusals_are_errors_at_once() -> None:
    def call() -> str:
        raise Refusal(grpc.StatusCode.UNIMPLEMENTED)

    with pytest.raises(SortError, match="a call was refused: UNIMPLEMENTED: said so"):
        call_with_retry(call, "a call", 10.0)


def test_a_message_that_is_too_large_is_an_error_at_once() -> None:
    def call() -> str:
        raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Sent message larger than max (9 vs. 8)")

    with pytest.raises(SortError, match="a call was refused: RESOURCE_EXHAUSTED: CLIENT: Sent message larger than max"):
        call_with_retry(call, "a call", 600.0)


class FakePeer:
    """A fake master and worker that records the calls it receives."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.states: list[str] = []
        self.samples: list[wire.Sample] = []
        self.reports: list[wire.Completion] = []
        self.chunks: list[rpc.Chunk] = []
        self.finished = False

    def RegisterWorker(self, request: wire.Registration, _: Any) -> wire.Registered:  # noqa: N802 - RPC
        self.registration = request
        return wire.Registered(
            success=True, epoch=EPOCH, index=0, workers=2, partitions=2, starts=1, protocol=rpc.PROTOCOL_VERSION
        )

    def SendSample(self, request: wire.Sample, _: Any) -> wire.Ack:  # noqa: N802 - RPC
        return self._note(self.samples, request)

    def NotifyPhaseComplete(self, request: wire.PhaseComplete, _: Any) -> wire.Ack:  # noqa: N802 - RPC
        return self._note(self.states, request.state)

    def ReportCompletion(self, request: wire.Completion, _: Any) -> wire.CompletionAck:  # noqa: N802 - RPC
        self._note(self.reports, request)
        return wire.CompletionAck(success=True, finished=True)

    def ShuffleData(self, messages: Iterator[bytes], _: Any) -> wire.ShuffleAck:  # noqa: N802 - RPC
        for piece in map(rpc.decode_chunk, messages):
            self._note(self.chunks, piece)
        return wire.ShuffleAck(success=True)

    def _nothing(self, *_: Any) -> wire.Ack:
        return wire.Ack()

    SetPartitionBoundaries = StartShuffle = StartMerge = GetStatus = _nothing

    def _note(self, notes: list[Any], what: Any) -> wire.Ack:
        with self.changed:
            notes.append(what)
            self.changed.notify_all()
        return wire.Ack(success=True)

    def wait(self, notes: list[Any], what: Any = None) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: what in notes if what is not None else bool(notes), 20), notes


@contextmanager
def at_work(place: Path, source: Source, fake: FakePeer) -> Iterator[tuple[Worker, Peer, str, Any]]:
    """Run a worker whose master and only other worker is the fake."""
    master, other = Server(MASTER, fake, "127.0.0.1"), Server(WORKER, fake, "127.0.0.1")
    master.start()
    other.start()
    (place / "out").mkdir()
    (place / "temp").mkdir()
    settings = Settings(block_records=300, window_records=300, lost_after_s=20.0, register_timeout_s=20.0)
    worker = Worker(master.address, source, place / "out", settings, place / "temp", None, "127.0.0.1")
    peer = Peer(WORKER, worker.address, "the worker")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(worker.run)
        try:
            yield worker, peer, other.address, running
        finally:
            worker.fail(SortError("the test is over"))
            running.exception()
            peer.close()
            master.stop()
            other.stop()


def chunk_of(rows: np.ndarray[Any, np.dtype[np.uint8]], counts: list[int], **changes: Any) -> wire.ShuffleDataChunk:
    data = rows.tobytes()
    fields = {"epoch": EPOCH, "worker": 1, "block": 0, "partition": 0, "offset": 0, "size": len(data),
              "counts": counts, "checksum": xxhash.xxh3_64_intdigest(data), "data": data}  # fmt: skip
    return wire.ShuffleDataChunk(**{**fields, **changes})


def refused(answer: wire.Ack | wire.ShuffleAck, state: str) -> bool:
    return not answer.success and answer.state == state and state in answer.message


def test_a_worker_checks_its_state_at_every_call(tmp_path: Path) -> None:
    mine, theirs = random_rows(1, 1_000), random_rows(2, 200)
    theirs[:, 0] = 0
    theirs = theirs[np.lexsort(theirs[:, 9::-1].T)]
    fake = FakePeer()
    with at_work(tmp_path, write_source(tmp_path / "in", mine), fake) as (worker, peer, address, running):
        fake.wait(fake.samples)
        members = (Member(0, worker.address, worker.incarnation, 1_000, 300), Member(1, address, 5, 200, 300))
        roster = Roster(3, members)
        plan = Plan(EPOCH, 2, 1, (Boundary(b"\x80" + bytes(9), 0),), roster)
        start = wire.ShuffleStart(epoch=EPOCH, roster=roster.message())
        waiting = "WaitingForPartitionConfig"
        await_state(peer, waiting)
        assert refused(peer.call_once("StartShuffle", start), waiting)
        assert refused(peer.call_once("StartMerge", wire.MergeStart(epoch=EPOCH)), waiting)
        assert refused(peer.call_once("ShuffleData", iter([chunk_of(theirs, [200])])), waiting)
        stranger = peer.call_once("SetPartitionBoundaries", Plan(1, 2, 1, plan.boundaries, roster).message())
        assert not stranger.success
        assert "takes part in sort 77, not in 1" in stranger.message

        assert peer.call_once("SetPartitionBoundaries", plan.message()).success
        fake.wait(fake.states, "WaitingForShuffleSignal")
        assert refused(peer.call_once("SetPartitionBoundaries", plan.message()), "WaitingForShuffleSignal")
        check_damaged_data(peer, theirs)
        assert peer.call_once("ShuffleData", iter([chunk_of(theirs, [200])])).success, "data before its time is taken"
        assert peer.call_once("ShuffleData", iter([chunk_of(theirs, [200])])).success, "the same again changes nothing"

        assert peer.call_once("StartShuffle", start).success
        fake.wait(fake.states, "WaitingForMergeSignal")
        assert refused(peer.call_once("StartShuffle", start), "WaitingForMergeSignal")
        check_what_was_sent(fake, mine)
        assert peer.call_once("StartMerge", wire.MergeStart(epoch=EPOCH)).success
        report = running.result(20)
    assert output_bytes(tmp_path / "out") == sorted_bytes(np.concatenate([mine[mine[:, 0] < 128], theirs]))
    assert [one.records for one in report.partitions] == [report.records]
    assert fake.reports[0].partitions[0].records == report.records


def await_state(peer: Peer, state: str) -> None:
    for _ in range(2_000):
        if peer.call_once("GetStatus", wire.StatusRequest(epoch=EPOCH)).state == state:
            return
    pytest.fail(f"the worker never was {state}")


def check_damaged_data(peer: Peer, rows: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Damaged or unexpected data is refused, and none of it is stored."""
    cases = [
        ([chunk_of(rows, [200], checksum=1)], "ABORTED", "wrong checksum"),
        ([chunk_of(rows, [200], offset=100)], "ABORTED", "arrived after 0 of 20000 bytes were received"),
        ([chunk_of(rows[:100], [200])], "ABORTED", "ended too early"),
        ([chunk_of(rows, [200], partition=1)], "INVALID_ARGUMENT", "expects no slice"),
        ([chunk_of(rows, [200], epoch=78)], "INVALID_ARGUMENT", "expects no slice"),
        ([chunk_of(rows, [4_000_000_000])], "INVALID_ARGUMENT", "rows, of a block of at most"),
    ]
    for chunks, code, words in cases:
        with pytest.raises(grpc.RpcError) as caught:
            peer.call_once("ShuffleData", iter(chunks))
        assert caught.value.code().name == code
        assert words in str(caught.value.details())


def check_what_was_sent(fake: FakePeer, mine: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Every block was sent once, in messages within the limits, with matching checksums, and no own rows."""
    assert {head.block for head, _ in fake.chunks} == {0, 1, 2, 3}
    assert {(head.worker, head.partition) for head, _ in fake.chunks} == {(0, 1)}
    assert all(head.checksum == xxhash.xxh3_64_intdigest(data) for head, data in fake.chunks)
    assert all(len(rpc.encode_chunk(piece)) < rpc.MAX_MESSAGE_BYTES for piece in fake.chunks)
    assert sum(len(data) for _, data in fake.chunks) == int((mine[:, 0] >= 128).sum()) * 100


def test_an_aborted_worker_ends_with_the_reason_of_the_sort(tmp_path: Path) -> None:
    fake = FakePeer()
    with at_work(tmp_path, write_source(tmp_path / "in", random_rows(1, 100)), fake) as (_, peer, _, running):
        fake.wait(fake.samples)
        peer.call_once("GetStatus", wire.StatusRequest(epoch=1, abort="of another sort"))
        with suppress(grpc.RpcError):  # it may end before it has answered
            peer.call_once("GetStatus", wire.StatusRequest(epoch=EPOCH, abort="worker 1 is lost"))
        with pytest.raises(SortError, match="worker 1 is lost"):
            running.result(20)
        assert set(fake.states) <= {"WaitingForPartitionConfig"}, "a failure that the master knows of is not reported"


def test_a_master_registers_only_workers_that_fit(tmp_path: Path) -> None:
    master = Master(2, Settings(register_timeout_s=5.0), tmp_path, "127.0.0.1", 0, threading.Event())
    handlers: Any = MasterService(master)

    def ask(identity: str, **changes: Any) -> wire.Registered:
        fields = {"index": -1, "record_length": 100, "key_length": 10, "block_records": 1, "window_records": 1,
                  "incarnation": 1, "address": f"{identity}:1", "state": "Initializing",
                  "protocol": rpc.PROTOCOL_VERSION}  # fmt: skip
        answer: wire.Registered = handlers.RegisterWorker(
            wire.Registration(identity=identity, **{**fields, **changes}), None
        )
        return answer

    assert "'bogus' is not a state of a worker" in ask("a", state="bogus").message
    assert "registration is inconsistent" in ask("a", key_length=0).message
    assert (
        "keys of 33,554,432 bytes allow for 1 partitions" in ask("a", key_length=1 << 25, record_length=1 << 25).message
    )
    assert "index 2 is too large for a sort of 2 workers" in ask("a", index=2).message
    assert ask("a", index=1).index == 1
    assert "another worker has the index 1" in ask("b", index=1).message
    assert "its records have 50 bytes" in ask("b", record_length=50).message
    assert ask("b").index == 0
    assert "has its 2 workers already" in ask("c").message
    again = ask("a", incarnation=2, address="elsewhere:1")
    assert (again.index, again.starts) == (1, 2)
    assert master.roster().members[1].address == "elsewhere:1"
    fewer = ask("a", incarnation=3, block_records=5, records=7)
    assert "7 instead of 0 records; 5 instead of 1 records a block, which follow from --memory" in fewer.message
    stale = handlers.NotifyPhaseComplete(wire.PhaseComplete(epoch=master.epoch, worker=1, incarnation=1), None)
    assert not stale.success
    own: dict[str, Any] = {"epoch": master.epoch, "worker": 1, "incarnation": 2}
    bogus = handlers.NotifyPhaseComplete(wire.PhaseComplete(**own, state="bogus", success=True), None)
    assert "'bogus' is not a state" in bogus.message
    ragged = handlers.SendSample(wire.Sample(**own, keys=bytes(25), positions=bytes(17)), None)
    assert "different numbers of positions and keys" in ragged.message
    for worker in master.workers.values():
        worker.records, worker.free_output, worker.room = 1_000_000, 150_000_000, 1 << 30
        worker.output_disk = worker.temp_disk = f"disk {worker.index}"
        worker.free_temp = worker.free_output
    check_disk_space([master.workers[0], master.workers[1]])
    master.workers[1].room = 100_000_000
    master.workers[1].free_output = master.workers[1].free_temp = 149_999_999
    with pytest.raises(SortError, match=r"worker 1 \(elsewhere:1\) need 150,000,000 bytes"):
        check_disk_space([master.workers[0], master.workers[1]])
    master.workers[1].room, master.workers[1].free_temp = 1 << 30, 150_000_000
    master.workers[1].output_disk = "disk 0"
    with pytest.raises(SortError, match=r"worker 0 \(b:1\) and worker 1 \(elsewhere:1\) need 200,000,000 bytes"):
        check_disk_space([master.workers[0], master.workers[1]])
    master.close()


def until_due(peer: Peer, method: str, message: Any) -> Any:
    """Call until the master has come to the phase of the call; return the answer."""

    def ask() -> Any:
        answer = peer.call_once(method, message)
        return answer if answer.success or answer.failed else None

    return eventually(ask)


@pytest.mark.parametrize("written", [9, 11])
def test_a_master_fails_if_the_number_of_written_records_differs(written: int) -> None:
    address: Future[str] = Future()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_master, 1, settings=Settings(lost_after_s=20.0), on_listening=address.set_result)
        peer = Peer(MASTER, address.result(20), "the master")
        registered = peer.call_once(
            "RegisterWorker",
            wire.Registration(
                identity="a", index=-1, records=10, record_length=100, key_length=10, block_records=5, window_records=5,
                incarnation=1, address="127.0.0.1:1", state="Initializing", free_output=1 << 20, free_temp=1 << 20,
                room=1 << 30, output_disk="a", temp_disk="b", protocol=rpc.PROTOCOL_VERSION),
        )  # fmt: skip
        own = {"epoch": registered.epoch, "worker": 0, "incarnation": 1}
        peer.call_once("SendSample", wire.Sample(**own, records=10, keys=b"k" * 10, positions=bytes(8)))
        for state in ("WaitingForPartitionConfig", "WaitingForShuffleSignal", "WaitingForMergeSignal"):
            assert until_due(peer, "NotifyPhaseComplete", wire.PhaseComplete(**own, state=state, success=True)).success
        answer = until_due(peer, "ReportCompletion", wire.Completion(**own, records=written))
        with pytest.raises(SortError, match=f"10 records were read, but {written} were written"):
            running.result(20)
        peer.close()
    assert answer.failed
    assert "were written" in answer.message


def test_a_peer_with_another_protocol_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def babble() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        peer = Peer(MASTER, f"127.0.0.1:{port}", "the master")
        with pytest.raises(SortError, match=rf"RegisterWorker at the master \(127\.0\.0\.1:{port}\)"):
            peer.call("RegisterWorker", wire.Registration(), 0.3)
        peer.close()
        thread.join()


@pytest.mark.cold
@pytest.mark.parametrize("module", ["cli.sort.implementation", "sort.__main__", "sort.master.broadcast"])
def test_grpc_is_quiet_in_every_process(module: str) -> None:
    code = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc': print(os.environ.get('GRPC_VERBOSITY'))\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"import interlock.{module}\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "ERROR\n", "set before the first import of gRPC, which reads it once"


def test_the_version_of_the_protocol_is_raised_with_every_change_of_its_messages() -> None:
    """A change of the messages needs a new version, and its checksum here."""
    checksums = {3: "f31eff1bbe407c52"}
    assert xxhash.xxh3_64_hexdigest(wire.DESCRIPTOR.serialized_pb) == checksums[rpc.PROTOCOL_VERSION]
