"""The calls of master and workers: which there are, how they are served, and how they are tried again.

Invariant: a call that may succeed later is tried again, with growing pauses, until its time is up; every other failure
is an error at once that names who was called and what was said.
"""

from __future__ import annotations

import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read once, when the library is loaded: what matters is raised

import grpc

from interlock.errors import SortError
from interlock.sort import wire_pb2 as wire

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from google.protobuf.message import Message

Answer = TypeVar("Answer")

RETRIED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
    }
)
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
CALL_TIMEOUT = 30.0
LARGEST_MESSAGE = 64 << 20  # a sample, or all boundaries; records go in small pieces
TOO_LARGE = "message larger than max"  # it is RESOURCE_EXHAUSTED, but no smaller the next time
OPTIONS = (
    ("grpc.max_receive_message_length", LARGEST_MESSAGE),
    ("grpc.max_send_message_length", LARGEST_MESSAGE),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a second server on it
    ("grpc.enable_http_proxy", 0),  # workers are named by their own addresses
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


# A field's tag is its number and, for bytes, a 2 in the lowest bits.
VARINT, BYTES = 0, 2
FIXED = {1: 8, 5: 4}  # bytes of the kinds of one length
DATA_TAG = bytes([wire.ShuffleDataChunk.DATA_FIELD_NUMBER << 3 | BYTES])


class Method(NamedTuple):
    """One call: what goes in, what comes out, whether what goes in is a stream."""

    asks: type[Message]
    answers: type[Message]
    streams: bool = False


MASTER = "interlock.sort.MasterService"
WORKER = "interlock.sort.WorkerService"
METHODS: dict[str, dict[str, Method]] = {
    MASTER: {
        "RegisterWorker": Method(wire.Registration, wire.Registered),
        "SendSample": Method(wire.Sample, wire.Ack),
        "NotifyPhaseComplete": Method(wire.PhaseComplete, wire.Ack),
        "ReportCompletion": Method(wire.Completion, wire.CompletionAck),
    },
    WORKER: {
        "SetPartitionBoundaries": Method(wire.PartitionConfig, wire.Ack),
        "StartShuffle": Method(wire.ShuffleStart, wire.Ack),
        "ShuffleData": Method(wire.ShuffleDataChunk, wire.ShuffleAck, streams=True),
        "StartMerge": Method(wire.MergeStart, wire.Ack),
        "GetStatus": Method(wire.StatusRequest, wire.WorkerStatus),
    },
}


class Piece(NamedTuple):
    """A ShuffleDataChunk whose data is where it was read or received: it is copied once, into the message."""

    head: wire.ShuffleDataChunk
    data: memoryview


def encode_piece(piece: Piece | wire.ShuffleDataChunk) -> bytes:
    """Encode a piece as the ShuffleDataChunk that it stands for."""
    if isinstance(piece, wire.ShuffleDataChunk):
        return piece.SerializeToString()
    return b"".join((piece.head.SerializeToString(), DATA_TAG, _varint(len(piece.data)), piece.data))


def decode_piece(message: bytes) -> Piece:
    """Take a ShuffleDataChunk apart without copying its data."""
    rest: list[memoryview] = []
    data, whole, at = memoryview(b""), memoryview(message), 0
    while at < len(message):
        tag, begin = _number(message, at)
        begin, end = _extent(message, tag & 7, begin)
        if end > len(message):
            raise ValueError("a message ends within a field")
        if tag == DATA_TAG[0]:
            data = whole[begin:end]
        else:
            rest.append(whole[at:end])
        at = end
    return Piece(wire.ShuffleDataChunk.FromString(b"".join(rest)), data)


def _extent(message: bytes, kind: int, at: int) -> tuple[int, int]:
    """Give where the value of a field of a kind begins and ends."""
    if kind == VARINT:
        return at, _number(message, at)[1]
    if kind == BYTES:
        size, begin = _number(message, at)
        return begin, begin + size
    if kind in FIXED:
        return at, at + FIXED[kind]
    raise ValueError(f"a message has a field of the unknown kind {kind}")


def _number(message: bytes, at: int) -> tuple[int, int]:
    """Read a number of seven bits a byte; give it and where it ends."""
    number = shift = 0
    while True:
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:  # noqa: PLR2004 - the eighth bit says that more follow
            return number, at


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:  # noqa: PLR2004 - seven bits a byte, the eighth says that more follow
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class Unreachable(SortError):  # noqa: N818 - a named outcome
    """Somebody did not answer in the time there was."""


def _check_address(host: str, port: int) -> None:
    """Refuse an address that is not this machine's, or is taken; the library would write a line of its own about it."""
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]
        raise SortError(
            f"cannot listen on {host}:{port}: {reason}; name an address of this machine, and a port that is free"
        ) from error


class Server:
    """Serves one service on a port of its own."""

    def __init__(self, service: str, handlers: Any, host: str, port: int = 0, threads: int = 64) -> None:
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        _check_address(host, port)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="interlock-sort-rpc")
        self._server = grpc.server(self._pool, options=OPTIONS)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, _handlers(service, handlers)),)
        )
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise SortError(f"cannot listen on {host}:{port}: is the address one of this machine, and free?") from error
        self.address = f"{host}:{self.port}"

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()

    def stop(self, grace: float | None = None) -> None:
        """Answer no more; safe to call twice."""
        self._server.stop(grace).wait()
        self._pool.shutdown(wait=True)


class Peer:
    """Somebody who is called: the master, or another worker. The connection is made when it is first needed."""

    def __init__(self, service: str, address: str, who: str) -> None:
        self.address = address
        self.who = who
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._calls: dict[str, Any] = {
            name: (self._channel.stream_unary if method.streams else self._channel.unary_unary)(
                f"/{service}/{name}",
                request_serializer=encode_piece if method.streams else method.asks.SerializeToString,
                response_deserializer=method.answers.FromString,
            )
            for name, method in METHODS[service].items()
        }

    def once(self, method: str, message: Message | Iterable[Message | Piece], timeout: float = CALL_TIMEOUT) -> Any:
        """Call once; raises grpc.RpcError."""
        return self._calls[method](message, timeout=timeout)

    def start(self, method: str, message: Message | Iterable[Message | Piece], timeout: float = CALL_TIMEOUT) -> Any:
        """Begin a call and give its future."""
        return self._calls[method].future(message, timeout=timeout)

    def call(self, method: str, message: Message, patience: float, stop: threading.Event | None = None) -> Any:
        """Call until it succeeds, for so many seconds at most."""
        return persist(lambda: self.once(method, message), f"{method} at {self.who} ({self.address})", patience, stop)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _may_succeed_later(code: grpc.StatusCode, details: str | None) -> bool:
    return code in RETRIED and TOO_LARGE not in (details or "")


def persist(call: Callable[[], Answer], what: str, patience: float, stop: threading.Event | None = None) -> Answer:
    """Make a call, again and again with growing pauses when it may succeed later."""
    until = time.monotonic() + patience
    pause = FIRST_PAUSE
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if not _may_succeed_later(code, details):
                raise SortError(f"{what} was refused: {code.name}: {details}") from error
            if stop is not None and stop.is_set():
                raise Unreachable(f"{what}: given up without an answer: {code.name}: {details}") from error
            if time.monotonic() + pause > until:
                raise Unreachable(f"{what}: no answer within {patience:g} s: {code.name}: {details}") from error
        wait = pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries, guards nothing
        if stop is None:
            time.sleep(wait)
        else:
            stop.wait(wait)
        pause = min(pause * 2, LONGEST_PAUSE)


def _handlers(service: str, handlers: Any) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    made: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in METHODS[service].items():
        make = grpc.stream_unary_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        made[name] = make(
            getattr(handlers, name),
            request_deserializer=decode_piece if method.streams else method.asks.FromString,
            response_serializer=method.answers.SerializeToString,
        )
    return made
