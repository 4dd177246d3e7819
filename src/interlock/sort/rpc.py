"""The gRPC services of master and workers: methods, server, client, retry with backoff, and the shuffle's encoding.

Invariant: a call that may succeed later is retried with exponential backoff until its timeout; every other failure is
an error at once that names the peer and its answer.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import grpc
from google.protobuf.message import DecodeError

from interlock.errors import SortError
from interlock.model.backoff import Backoff
from interlock.sort import wire_pb2 as wire
from interlock.sort.security import Security

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from google.protobuf.message import Message

Answer = TypeVar("Answer")

PROTOCOL_VERSION = 3  # to be raised with every change after which old and new processes do not understand each other

RETRYABLE_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
    }
)
TOO_LARGE = "message larger than max"  # details of a RESOURCE_EXHAUSTED that a retry cannot change
CALL_BACKOFF = Backoff.exponential(0.05, cap=2.0, jitter=0.5)
CALL_TIMEOUT_S = 30.0
MAX_MESSAGE_BYTES = 64 << 20  # a sample, or all boundaries; records are sent in small chunks
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server on it
    ("grpc.enable_http_proxy", 0),  # workers are addressed directly
    ("grpc.min_reconnect_backoff_ms", 2000),  # what an attempt to connect may take; one that is refused ends at once
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

NO_SECURITY = Security()  # of processes that listen on a loopback address, and of tests

# Protobuf wire types: the lowest three bits of a field's tag.
VARINT, LENGTH_DELIMITED = 0, 2
FIXED_SIZES = {1: 8, 5: 4}  # bytes, by wire type
DATA_TAG = bytes([wire.ShuffleDataChunk.DATA_FIELD_NUMBER << 3 | LENGTH_DELIMITED])


class Method(NamedTuple):
    """A method of a service: types of request and response, and whether requests are streamed."""

    request: type[Message]
    response: type[Message]
    is_stream: bool = False


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
        "ShuffleData": Method(wire.ShuffleDataChunk, wire.ShuffleAck, is_stream=True),
        "StartMerge": Method(wire.MergeStart, wire.Ack),
        "GetStatus": Method(wire.StatusRequest, wire.WorkerStatus),
    },
}


class Unreachable(SortError):  # noqa: N818 - a named outcome
    """A peer did not answer before the timeout."""


class Server:
    """Serves one service on a port of its own, to callers that have the token of the sort."""

    def __init__(
        self,
        service: str,
        handlers: Any,
        host: str,
        port: int = 0,
        threads: int = 64,
        security: Security = NO_SECURITY,
    ) -> None:
        security.check_host(host)
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        _check_address(host, port)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="interlock-sort-rpc")
        self._server = grpc.server(self._pool, interceptors=security.interceptors(), options=CHANNEL_OPTIONS)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, _method_handlers(service, handlers)),)
        )
        try:
            self.port = security.add_port(self._server, f"{host}:{port}")
        except RuntimeError as error:
            raise SortError(f"cannot listen on {host}:{port}: is the address one of this machine, and free?") from error
        self.address = f"{host}:{self.port}"

    def start(self) -> None:
        """Start to serve."""
        self._server.start()

    def stop(self, grace: float | None = None) -> None:
        """Stop to serve; calls in progress have `grace` seconds to end. Safe to call twice."""
        self._server.stop(grace).wait()
        self._pool.shutdown(wait=True)


class Peer:
    """A client of the master or of another worker; it connects at the first call."""

    def __init__(self, service: str, address: str, name: str, security: Security = NO_SECURITY) -> None:
        self.address = address
        self.name = name
        self._metadata = security.metadata()
        self._channel = security.open_channel(address, CHANNEL_OPTIONS)
        self._methods: dict[str, Any] = {
            name: (self._channel.stream_unary if method.is_stream else self._channel.unary_unary)(
                f"/{service}/{name}",
                request_serializer=encode_chunk if method.is_stream else method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            for name, method in METHODS[service].items()
        }

    def call_once(
        self, method: str, message: Message | Iterable[Message | Chunk], timeout: float = CALL_TIMEOUT_S
    ) -> Any:
        """Call without a retry; raises grpc.RpcError."""
        return self._methods[method](message, timeout=timeout, metadata=self._metadata)

    def start_call(
        self, method: str, message: Message | Iterable[Message | Chunk], timeout: float = CALL_TIMEOUT_S
    ) -> Any:
        """Start a call and return its future."""
        return self._methods[method].future(message, timeout=timeout, metadata=self._metadata)

    def call(self, method: str, message: Message, timeout: float, stop: threading.Event | None = None) -> Any:
        """Call, and retry until it succeeds or the timeout is over."""
        name = f"{method} at {self.name} ({self.address})"
        return call_with_retry(lambda: self.call_once(method, message), name, timeout, stop)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def call_with_retry(
    call: Callable[[], Answer], name: str, timeout: float, stop: threading.Event | None = None
) -> Answer:
    """Make a call; retry it with exponential backoff and jitter while it may succeed later."""
    deadline = time.monotonic() + timeout
    failures = 0
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code not in RETRYABLE_CODES or TOO_LARGE in (details or ""):
                raise SortError(f"{name} was refused: {code.name}: {details}") from error
            if stop is not None and stop.is_set():
                raise Unreachable(f"{name}: stopped without an answer: {code.name}: {details}") from error
            failures += 1
            delay_s = CALL_BACKOFF.delay(failures)
            if time.monotonic() + delay_s > deadline:
                raise Unreachable(f"{name}: no answer within {timeout:g} s: {code.name}: {details}") from error
        if stop is None:
            time.sleep(delay_s)
        else:
            stop.wait(delay_s)


class Chunk(NamedTuple):
    """A ShuffleDataChunk whose data stays where it was read or received: it is copied once, into the message."""

    head: wire.ShuffleDataChunk
    data: memoryview


def encode_chunk(chunk: Chunk | wire.ShuffleDataChunk) -> bytes:
    """Encode a chunk as a ShuffleDataChunk message."""
    if isinstance(chunk, wire.ShuffleDataChunk):
        return chunk.SerializeToString()
    return b"".join((chunk.head.SerializeToString(), DATA_TAG, _encode_varint(len(chunk.data)), chunk.data))


class MalformedMessage(SortError):  # noqa: N818 - a named outcome
    """A message is not one of the protocol."""


def decode_chunk(message: bytes) -> Chunk:
    """Decode a ShuffleDataChunk message without copying its data; raise MalformedMessage if it is none."""
    try:
        return _decode_chunk(message)
    except (ValueError, IndexError, DecodeError) as error:
        raise MalformedMessage(f"a message of {len(message):,} bytes is no chunk: {error}") from error


def _decode_chunk(message: bytes) -> Chunk:
    rest: list[memoryview] = []
    data, whole, at = memoryview(b""), memoryview(message), 0
    while at < len(message):
        tag, begin = _decode_varint(message, at)
        begin, end = _field_extent(message, tag & 7, begin)
        if end > len(message):
            raise ValueError("a message ends within a field")
        if tag == DATA_TAG[0]:
            data = whole[begin:end]
        else:
            rest.append(whole[at:end])
        at = end
    return Chunk(wire.ShuffleDataChunk.FromString(b"".join(rest)), data)


def _field_extent(message: bytes, wire_type: int, at: int) -> tuple[int, int]:
    """Return where the value of a field begins and ends."""
    if wire_type == VARINT:
        return at, _decode_varint(message, at)[1]
    if wire_type == LENGTH_DELIMITED:
        size, begin = _decode_varint(message, at)
        return begin, begin + size
    if wire_type in FIXED_SIZES:
        return at, at + FIXED_SIZES[wire_type]
    raise ValueError(f"a message has a field of the unknown wire type {wire_type}")


def _decode_varint(message: bytes, at: int) -> tuple[int, int]:
    """Decode a varint; return it and where it ends."""
    number = shift = 0
    while True:
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:  # noqa: PLR2004 - the eighth bit marks that more bytes follow
            return number, at


def _encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:  # noqa: PLR2004 - seven bits per byte, the eighth marks that more bytes follow
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _check_address(host: str, port: int) -> None:
    """Refuse an address that is not this machine's, or in use; gRPC itself would print a line of its own about it."""
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]
        raise SortError(
            f"cannot listen on {host}:{port}: {reason}; name an address of this machine, and a port that is free"
        ) from error


def _method_handlers(service: str, handlers: Any) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    made: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in METHODS[service].items():
        make = grpc.stream_unary_rpc_method_handler if method.is_stream else grpc.unary_unary_rpc_method_handler
        made[name] = make(
            getattr(handlers, name),
            # The handler of a stream decodes its messages: gRPC would print a traceback for a malformed one.
            request_deserializer=None if method.is_stream else method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )
    return made
