"""Connections of HTTP clients: their number, how long each phase may last, and which one is closed for a new one.

Invariant: connections never use more file descriptors than `ConnectionLimits.total` plus `HEALTH_RESERVE`. A new
connection is admitted by closing one that waits for a request, so that clients which send nothing keep no other out; a
connection whose request is being handled is never closed for another. Heads are parsed by h11, whose buffer is limited,
and no head above the limit is handled.
"""

from __future__ import annotations

import ipaddress
import resource
import sys
import time
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import h11
from structlog.contextvars import bound_contextvars
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from interlock.supervisor.http.metrics import http_connections, http_connections_closed_total
from interlock.supervisor.http.problems import Problem
from interlock.supervisor.http.request_log import (
    REQUEST_ID_FIELD,
    REQUEST_ID_HEADER,
    choose_request_id,
    make_server_logger,
    request_log,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Iterator

    from interlock.config import Config

# Descriptors for the database, the worker processes, the log and programs that are being started.
RESERVED_FILES = 300
# Connections beyond the limit, on which only `/healthz` and `/readyz` are answered.
HEALTH_RESERVE = 16
MIN_CONNECTIONS = 16
MIN_WRITE_PROGRESS_BYTES = 4096
OVERLOADED = "overloaded"  # a key of the state of a request's scope
HEAD_TIMEOUT = "head_timeout"  # a reason to close a connection
_TOO_LARGE = 431

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Phase(Enum):
    """The phase of a connection: for what the server waits."""

    NEW = "new"  # the first head
    IDLE = "idle"  # the next head
    BODY = "body"
    BUSY = "busy"  # the response of the application


# Connections in these phases are closed when there are too many, the first ones first.
EVICTABLE = (Phase.NEW, Phase.IDLE, Phase.BODY)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits; times are in seconds. `proxies` forward other clients, so the limit per client does not apply."""

    total: int
    per_client: int
    proxies: tuple[Network, ...] = ()
    head_timeout: float = 10.0
    write_timeout: float = 10.0

    @classmethod
    def from_config(cls, config: Config) -> ConnectionLimits:
        """Return the limits of the configuration, lower ones if the process cannot open enough files.

        One client gets half of the connections.
        """
        wanted = config.supervisor_http_connections
        files = raise_file_limit(wanted + HEALTH_RESERVE + RESERVED_FILES)
        reserved = min(RESERVED_FILES, files // 2) + HEALTH_RESERVE
        total = max(MIN_CONNECTIONS, min(wanted, files - reserved))
        return cls(total, total // 2, parse_networks(config.supervisor_proxies))


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit of open files to `wanted`, or to the hard limit if that is lower; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised


def parse_networks(names: Iterable[str]) -> tuple[Network, ...]:
    """Parse addresses and networks, such as 10.0.0.7 and 10.1.0.0/16; ValueError if one is wrong."""
    return tuple(ipaddress.ip_network(name) for name in names)


@lru_cache(maxsize=4096)
def client_key(address: str) -> str:
    """Return the client that an address stands for: an IPv4 address, or an IPv6 network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            return str(ipaddress.ip_network((parsed, 64), strict=False))
        parsed = parsed.ipv4_mapped
    return str(parsed)


def is_in(address: str, networks: tuple[Network, ...]) -> bool:
    """Return whether an address belongs to one of the networks."""
    if not networks:
        return False
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in networks)


class _ClientConnections:
    """The connections of one client, by phase; in each phase the longest one there is the first."""

    __slots__ = ("by_phase", "count")

    def __init__(self) -> None:
        self.by_phase: dict[Phase, dict[ApiProtocol, None]] = {phase: {} for phase in Phase}
        self.count = 0

    def oldest_evictable(self) -> ApiProtocol | None:
        return next((connection for phase in EVICTABLE for connection in self.by_phase[phase]), None)


class ConnectionTable:
    """All connections of a server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.count = 0
        self._clients: dict[str, _ClientConnections] = {}

    def __iter__(self) -> Iterator[ApiProtocol]:
        for client in self._clients.values():
            for connections in client.by_phase.values():
                yield from connections

    def admit(self, connection: ApiProtocol) -> None:
        """Add a new connection: another one is closed for it if there are too many, else it is limited to health."""
        key = client_key(connection.address)
        client = self._clients.setdefault(key, _ClientConnections())
        limits = self.limits
        too_many_of_client = client.count >= limits.per_client and not is_in(connection.address, limits.proxies)
        victim = None
        if too_many_of_client:
            victim = client.oldest_evictable()
        elif self.count >= limits.total:
            victim = self._find_evictable()
        if victim is not None:
            victim.drop("evicted")
        elif too_many_of_client or self.count >= limits.total:
            connection.is_overload = True
        client.by_phase[Phase.NEW][connection] = None
        client.count += 1
        self.count += 1
        self._clients[key] = client  # the victim may have been the last of this client
        if connection.is_overload and self.count > limits.total + HEALTH_RESERVE:
            connection.drop("refused")

    def move(self, connection: ApiProtocol, phase: Phase) -> None:
        """Put a connection that is in the table last into a phase."""
        by_phase = self._clients[client_key(connection.address)].by_phase
        del by_phase[connection.phase][connection]
        by_phase[phase][connection] = None

    def remove(self, connection: ApiProtocol) -> None:
        """Remove a connection that is in the table."""
        key = client_key(connection.address)
        client = self._clients[key]
        del client.by_phase[connection.phase][connection]
        client.count -= 1
        self.count -= 1
        if not client.count:
            del self._clients[key]

    def evict(self) -> None:
        """Close a connection that waits for a request, because descriptors are short."""
        victim = self._find_evictable()
        if victim is not None:
            victim.drop("evicted")

    def check_deadlines(self) -> None:
        """Close the connections whose time is over."""
        now = time.monotonic()
        for connection in list(self):
            connection.check_deadlines(now)
        http_connections.set(self.count)

    def _find_evictable(self) -> ApiProtocol | None:
        """Return a connection to close: of the client that has the most, if one of its connections can be closed."""
        for client in sorted(self._clients.values(), key=lambda each: -each.count):
            found = client.oldest_evictable()
            if found is not None:
                return found
        return None


class _LimitedConnection(h11.Connection):
    """Refuses every head above the limit: h11 itself refuses one only if it is above it before its end has arrived."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=max_head_bytes)
        self._max_head_bytes = max_head_bytes

    def next_event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        """Return the next event; RemoteProtocolError for a head that is too large."""
        event = super().next_event()
        if isinstance(event, h11.Request) and _head_bytes(event) > self._max_head_bytes:
            raise h11.RemoteProtocolError("The head is too large", error_status_hint=_TOO_LARGE)
        return event


def _head_bytes(request: h11.Request) -> int:
    """Return the size of the head of a request as it is usually written."""
    line = len(request.method) + len(request.target) + len(b"  HTTP/1.1\r\n\r\n")
    return line + sum(len(name) + len(value) + len(b": \r\n") for name, value in request.headers)


class ApiProtocol(H11Protocol):
    """An HTTP/1.1 connection whose heads, pauses and unread responses are limited in time."""

    def __init__(self, table: ConnectionTable, **options: Any) -> None:
        super().__init__(**options)
        if self.config.h11_max_incomplete_event_size is not None:
            self.conn = _LimitedConnection(self.config.h11_max_incomplete_event_size)
        self.logger = make_server_logger()
        self.address = ""
        self.phase = Phase.NEW
        self.is_overload = False
        self._table = table
        self._in_table = False
        self._deadline = float("inf")  # for the head
        self._head_begun = False
        self._unsent_bytes = 0
        self._unsent_since = float("inf")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, or close it."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._deadline = time.monotonic() + self._table.limits.head_timeout
        self._in_table = True
        self._table.admit(self)
        if self.is_overload:
            self.app_state = {**self.app_state, OVERLOADED: True}

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._leave_table()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Parse what was received."""
        if not self._head_begun and self.phase is Phase.IDLE:
            self._head_begun = True
            self._deadline = time.monotonic() + self._table.limits.head_timeout
        super().data_received(data)
        self._update_phase()

    def on_response_complete(self) -> None:
        """Wait for the next head; if nothing comes within the keep-alive timeout, the base class closes."""
        self._head_begun = False
        self._deadline = float("inf")
        super().on_response_complete()
        self._update_phase()

    def shutdown(self) -> None:
        """Close the connection, after the response if a request is being handled."""
        if self.phase is Phase.BUSY:
            super().shutdown()
        elif self.phase is Phase.BODY:
            self.transport.abort()  # nothing was done for the request
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer a head or a body that cannot be parsed with a problem, unless a response has begun; then close."""
        error = sys.exception()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            if getattr(error, "error_status_hint", 0) == _TOO_LARGE:
                limit = self.config.h11_max_incomplete_event_size
                problem = Problem("head_too_large", f"the limit is {limit} bytes", {"limit": limit})
            else:
                problem = Problem("bad_request", f"{msg.rstrip('.')}: {error}")
            self._send_problem(problem)
        cycle = self._last_cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def check_deadlines(self, now: float) -> None:
        """Close the connection if its head, its next request or the reading of a response takes too long."""
        if self.phase in {Phase.NEW, Phase.IDLE} and now >= self._deadline:
            self.drop(HEAD_TIMEOUT)
            return
        size = self.transport.get_write_buffer_size()
        if not size:
            self._unsent_since = float("inf")
        elif self._unsent_since == float("inf") or size <= self._unsent_bytes - MIN_WRITE_PROGRESS_BYTES:
            self._unsent_since = now
        elif now - self._unsent_since >= self._table.limits.write_timeout:
            self.drop("write_timeout")
        self._unsent_bytes = size

    def drop(self, reason: str) -> None:
        """Close the connection at once, without a response."""
        http_connections_closed_total.labels(reason).inc()
        request_log.write(
            "info" if reason == HEAD_TIMEOUT else "warning",  # browsers open connections that they do not use
            "connection_closed",
            kind=f"connection_closed:{reason}",
            reason=reason,
            client=self.address,
            phase=self.phase.value,
        )
        self._leave_table()
        self.transport.abort()

    def _send_problem(self, problem: Problem) -> None:
        request_id = choose_request_id(None)
        with bound_contextvars(**{REQUEST_ID_FIELD: request_id}):
            response = problem.response("")
            request_log.write(
                "warning", "request_not_read", status=problem.status, client=self.address, detail=problem.detail
            )
        headers = [(b"connection", b"close"), (REQUEST_ID_HEADER.encode(), request_id.encode()), *response.raw_headers]
        start = h11.Response(status_code=problem.status, headers=headers, reason=problem.title.encode())
        for part in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")

    @property
    def _last_cycle(self) -> RequestResponseCycle | None:
        """The last request and its response; None before the first one."""
        return self.cycle

    def _update_phase(self) -> None:
        cycle = self._last_cycle
        if cycle is None or cycle.response_complete:
            phase = Phase.NEW if cycle is None else Phase.IDLE
        else:
            phase = Phase.BODY if cycle.more_body else Phase.BUSY
        if phase is not self.phase and self._in_table:
            self._table.move(self, phase)
            self.phase = phase

    def _leave_table(self) -> None:
        if self._in_table:
            self._in_table = False
            self._table.remove(self)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore upgrades: there are no WebSockets here."""
