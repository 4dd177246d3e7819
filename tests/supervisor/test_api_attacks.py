"""Clients that open connections, send slowly, send too much or read nothing: health, supervision and others go on."""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.responses import Response

from api_support import HERE, supervisor_at
from interlock import Interlock
from interlock.config import Config
from interlock.postgres.connection import connect
from interlock.store.access import TokenScope, create_token
from interlock.supervisor.http import middleware
from interlock.supervisor.http.auth import Caller
from interlock.supervisor.http.connections import ConnectionLimits
from interlock.supervisor.http.middleware import RequestLimits, RequestLimitsMiddleware
from interlock.supervisor.http.problems import Problem
from interlock.supervisor.http.server import MAX_HEADER_BYTES, ApiServer
from interlock.supervisor.http.tasks import MAX_WAIT_S
from pool_support import kill

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Iterator

    from starlette.requests import Request

    from pool_support import Fleet

pytestmark = pytest.mark.flow

FILE_LIMIT = 1024
MAX_LOG_BYTES = 200_000
TIMEOUT_S = 60
ATTACKER, OTHER = "127.0.0.1", "127.0.0.2"
SLOW_BODY = (
    b"POST /api/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n%s\r\n{"
)


async def make_token(url: str, name: str = "test") -> str:
    async with connect(url) as connection:
        return (await create_token(connection, name, TokenScope.ADMIN, actor="test"))[1]


@contextmanager
def sockets(address: str, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections that send the same bytes and nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 1024)), hard))
    with ExitStack() as stack:
        opened = [stack.enter_context(open_socket(address)) for _ in range(count)]
        for each in opened:
            with suppress(OSError):  # it was closed for a newer one
                each.sendall(sent)
        yield opened


def open_socket(address: str, source: str = ATTACKER) -> socket.socket:
    url = httpx.URL(address)
    return socket.create_connection((url.host, url.port or 80), TIMEOUT_S, (source, 0))


def client_of(address: str, token: str, source: str = ATTACKER) -> httpx.Client:
    return httpx.Client(
        base_url=address,
        transport=httpx.HTTPTransport(local_address=source),
        headers={"Authorization": f"Bearer {token}"},
        timeout=TIMEOUT_S,
    )


def async_client_of(address: str, token: str, source: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=address,
        transport=httpx.AsyncHTTPTransport(local_address=source),
        headers={"Authorization": f"Bearer {token}"},
        timeout=TIMEOUT_S,
    )


def assert_served(address: str, token: str) -> None:
    """Assert that health and the API answer on new connections, from the address of the attacker and from another."""
    for source in (ATTACKER, OTHER):
        for _ in range(3):
            with client_of(address, token, source) as client:
                assert client.get("/healthz").status_code == 200
                assert client.get("/readyz").status_code == 200
                assert client.get("/api/tasks").status_code == 200
                assert client.post("/api/tasks", json={"type": "elsewhere", "namespace": "none"}).status_code == 201


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0


def assert_small(log: str) -> None:
    assert len(log) < MAX_LOG_BYTES
    assert "Traceback" not in log


@pytest.mark.chaos
async def test_half_open_connections_stop_neither_the_api_nor_supervision(url: str, fleet: Fleet) -> None:
    token = await make_token(url)
    worker = await fleet.add()
    with supervisor_at(url, "--app", "worker_app:app", file_limit=FILE_LIMIT, INTERLOCK_LOG_LEVEL="info") as (
        process,
        address,
        said,
    ):
        first = await fleet.alive(worker)
        with sockets(address, 1100):
            await asyncio.to_thread(assert_served, address, token)
            kill(first["pid"])
            await fleet.alive(worker, generation=2)
            await fleet.state_of(await fleet.enqueue("add", a=1, b=2), "done")
            await asyncio.to_thread(assert_served, address, token)
            assert count_open_files(process.pid) <= FILE_LIMIT - 100  # left for the database and for worker processes
            await asyncio.to_thread(stop, process)
    assert_small(said.all())


@pytest.mark.chaos
async def test_slow_bodies_take_no_place_of_others(url: str) -> None:
    token = await make_token(url)
    header = f"Authorization: Bearer {token}\r\n".encode()
    with (
        supervisor_at(url, INTERLOCK_LOG_LEVEL="info") as (process, address, said),
        sockets(address, 600, SLOW_BODY % header),
    ):
        await asyncio.to_thread(assert_served, address, token)
        await asyncio.to_thread(stop, process)
    assert_small(said.all())


@pytest.mark.chaos
async def test_a_huge_header_is_refused_and_not_kept_in_memory(url: str) -> None:
    token = await make_token(url)
    with supervisor_at(url) as (process, address, said):
        before = peak_memory(process.pid)
        with open_socket(address) as attacker:
            attacker.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                attacker.sendall(b"a" * 150_000_000)
        for end in (b"", b"\r\n\r\n"):  # also when all of it arrives at once
            with open_socket(address) as attacker:
                start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "
                attacker.sendall(start.ljust(MAX_HEADER_BYTES + 1 - len(end), b"a") + end)
                answer = read_all(attacker)
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert b"application/problem+json" in answer
            assert b'"code":"head_too_large"' in answer
        assert peak_memory(process.pid) - before < 50_000
        await asyncio.to_thread(assert_served, address, token)
        await asyncio.to_thread(stop, process)
    assert_small(said.all())


def count_open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def peak_memory(pid: int) -> int:
    """Return the most memory that a process ever had, in kB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1])


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    read = bytearray()
    try:
        while part := connection.recv(65_536):
            read += part
    except ConnectionResetError:
        pass
    return bytes(read)


@asynccontextmanager
async def serving(url: str, *, total: int = 50, **settings: Any) -> AsyncIterator[tuple[str, str]]:
    """Serve the API in this process with short timeouts; return its address and a token."""
    times = {name: settings.pop(name) for name in ("head_timeout", "write_timeout") if name in settings}
    config = Config(database_url=url, supervisor_port=0, **settings)
    server = ApiServer(Interlock(config=config), config, limits=ConnectionLimits(total, total // 2, **times))
    token = await make_token(url)
    await server.start()
    try:
        yield server.url, token
    finally:
        await server.stop()


Dial = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    """Return a function that opens connections, which are closed at the end."""
    opened: list[asyncio.StreamWriter] = []

    async def open_one(address: str, source: str = ATTACKER) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = httpx.URL(address)
        reader, writer = await asyncio.open_connection(url.host, url.port, local_addr=(source, 0))
        opened.append(writer)
        return reader, writer

    yield open_one
    for writer in opened:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def exchange(dial: Dial, address: str, sent: bytes) -> bytes:
    """Send bytes on a connection of its own, and return what comes until the server closes it."""
    reader, writer = await dial(address)
    writer.write(sent)
    async with asyncio.timeout(TIMEOUT_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


def get(path: str, token: str | None = None, *, close: bool = True) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: localhost"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    lines += ["Connection: close"] if close else []
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def closes(reader: asyncio.StreamReader) -> None:
    """Wait until the server has closed the connection without a response."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.read() == b""
    except ConnectionResetError:
        pass


async def test_a_head_that_does_not_arrive_in_time_closes_the_connection(url: str, dial: Dial) -> None:
    async with serving(url, head_timeout=0.5) as (address, _):
        silent, _ = await dial(address)
        dripping, drip = await dial(address)
        reused, again = await dial(address)
        again.write(get("/healthz", close=False))
        await reused.readuntil(b'"ok"}')
        again.write(b"GET /heal")
        waiting = asyncio.gather(closes(silent), closes(dripping), closes(reused))
        drip.write(b"GET / HTTP/1.1\r\n")
        while not waiting.done():
            drip.write(b"X-A: a\r\n")
            await asyncio.sleep(0.05)
        await waiting


async def test_a_new_connection_replaces_the_oldest_one_that_waits(url: str, dial: Dial) -> None:
    async with serving(url, total=16) as (address, token):
        waiting = [await dial(address) for _ in range(8)]  # all that one client gets
        other = await dial(address, OTHER)
        assert b" 200 " in await exchange(dial, address, get("/api/tasks", token))
        await closes(waiting[0][0])
        for reader, writer in [*waiting[2:], other]:  # these were left alone
            writer.write(get("/healthz"))
            assert b" 200 " in await reader.read()


async def test_health_is_answered_when_all_connections_are_busy(url: str, dial: Dial) -> None:
    async with serving(url, total=8) as (address, token), async_client_of(address, token, OTHER) as client:
        task = (await client.post("/api/tasks", json={"type": "elsewhere"})).json()["id"]
        busy = [await dial(address) for _ in range(4)]  # all that one client gets
        for reader, writer in busy:
            writer.write(get("/healthz", close=False))
            await reader.readuntil(b'"ok"}')  # so that the next request is read before a new connection is accepted
        for _, writer in busy:
            writer.write(get(f"/api/tasks/{task}/result?wait={MAX_WAIT_S}", token))
        refused = await exchange(dial, address, get("/api/tasks", token))
        assert b" 429 " in refused
        assert b'"code":"too_many_requests"' in refused
        for path in ("/healthz", "/readyz"):
            assert b" 200 " in await exchange(dial, address, get(path))
        assert not any(reader.at_eof() for reader, _ in busy)
        assert (await client.post(f"/api/tasks/{task}/cancel")).status_code == 200
        for reader, _ in busy:
            assert b" 200 " in await reader.read()


async def test_an_unknown_token_is_refused_before_the_body_arrives(url: str, dial: Dial) -> None:
    async with serving(url) as (address, _):
        reader, writer = await dial(address)
        writer.write(SLOW_BODY % b"Authorization: Bearer il_wrong\r\n")
        async with asyncio.timeout(TIMEOUT_S):  # a body that does not arrive is answered with 408
            assert b"HTTP/1.1 401 " in await reader.readuntil(b"\r\n\r\n")


async def test_a_slow_body_is_refused_and_a_partial_one_is_not_used(
    url: str, dial: Dial, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "MIN_BODY_TIMEOUT_S", 0.5)
    async with serving(url) as (address, token):
        header = f"Authorization: Bearer {token}\r\n".encode()
        slow = await exchange(dial, address, SLOW_BODY % header)
        assert b"HTTP/1.1 408 " in slow
        assert b'"code":"request_timeout"' in slow
        reader, writer = await dial(address)
        writer.write((SLOW_BODY % header)[:-1] + b'{"type": "cut"}')  # valid JSON, yet not all that was announced
        await exchange(dial, address, get("/api/tasks", token))  # meanwhile the server reads the part
        writer.write_eof()
        await reader.read()
    assert fleet.rows("select type from interlock.tasks") == []  # the server has stopped, after all requests


async def test_requests_with_broken_framing_are_refused_and_the_connection_is_closed(url: str, dial: Dial) -> None:
    smuggled = get("/api/tasks?smuggled=1")
    start = b"POST /api/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    shapes = {
        "length and chunks": b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "two lengths": b"Content-Length: 0\r\nContent-Length: 6\r\n\r\n",
        "a signed length": b"Content-Length: +6\r\n\r\n",
        "an unknown coding": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "two codings": b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "a space before the colon": b"Content-Length : 6\r\n\r\n",
        "a bad chunk": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        "a line without a colon": b"nonsense\r\n\r\n",
    }
    async with serving(url) as (address, _):
        for name, rest in shapes.items():
            answer = await exchange(dial, address, start + rest + smuggled)
            assert re.match(rb"HTTP/1.1 40\d ", answer), name
            assert answer.count(b"HTTP/1.1 ") == 1, name
        garbage = await exchange(dial, address, get("/healthz", close=False) + b"\x00\xff garbage\r\n\r\n" + smuggled)
        assert re.findall(rb"HTTP/1.1 (\d+) ", garbage) == [b"200", b"400"]


async def test_a_client_that_reads_nothing_is_disconnected(url: str) -> None:
    async with serving(url, write_timeout=0.5) as (address, _):
        with socket.socket() as attacker:
            attacker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            target = httpx.URL(address)
            attacker.connect((target.host, target.port))
            attacker.settimeout(TIMEOUT_S)
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                await asyncio.to_thread(attacker.sendall, get("/openapi.json", close=False) * 200_000)


async def test_a_stop_does_not_wait_for_clients_that_send_nothing(
    url: str, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(url) as (address, token):
        idle = [await dial(address) for _ in range(3)]
        body = await dial(address)
        body[1].write(SLOW_BODY % f"Authorization: Bearer {token}\r\n".encode())
        assert b" 200 " in await exchange(dial, address, get("/healthz"))
    assert "timeout graceful shutdown exceeded" not in caplog.text  # as uvicorn reports clients that it waited for
    for reader, _ in [*idle, body]:
        await closes(reader)


async def test_one_token_does_not_take_all_streams(url: str, dial: Dial) -> None:
    async def open_stream(address: str, token: str) -> bytes:
        reader, writer = await dial(address)
        writer.write(get("/api/events", token))
        return await reader.readuntil(b"\r\n\r\n")

    async with serving(url, total=160) as (address, token):
        for _ in range(50):
            assert b" 200 " in await open_stream(address, token)
        assert b" 429 " in await open_stream(address, token)
        assert b" 200 " in await open_stream(address, await make_token(url, "other"))
        assert b" 200 " in await exchange(dial, address, get("/api/tasks", token))


async def test_a_body_that_no_endpoint_reads_is_not_waited_for(url: str, dial: Dial) -> None:
    async with serving(url) as (address, token):
        header = f"Authorization: Bearer {token}\r\n".encode()
        for path, status in ((b"/nowhere", b"404"), (b"/api/nowhere", b"404"), (b"/docs", b"405")):
            reader, writer = await dial(address)
            writer.write((SLOW_BODY % header).replace(b"/api/tasks", path))
            async with asyncio.timeout(TIMEOUT_S):  # a body that does not arrive is answered with 408
                assert b"HTTP/1.1 %s " % status in await reader.readuntil(b"\r\n\r\n")


class Guarded:
    """An application behind the limits. The tokens `valid` are known; the check of others lasts until `release`."""

    def __init__(self, **limits: Any) -> None:
        self.valid = {"a", "b"}
        self.release = asyncio.Event()
        self.checking = 0
        self.checks: Counter[str] = Counter()
        self.slow: set[str] = set()
        limited = RequestLimits(None, max_body_bytes=1000, timeout_s=TIMEOUT_S, **limits)
        self._app = RequestLimitsMiddleware(self._answer, limited, authenticate=self._authenticate)

    async def wait_for_checks(self, count: int) -> None:
        """Wait until so many checks are in progress."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.checking < count:
                await asyncio.sleep(0)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await Response("done")(scope, receive, send)

    async def _authenticate(self, request: Request) -> Caller:
        token = request.headers["authorization"].removeprefix("Bearer ")
        self.checks[token] += 1
        if token not in self.valid or token in self.slow:
            self.checking += 1
            await self.release.wait()
            self.checking -= 1
        if token not in self.valid:
            raise Problem("unknown_token", "the token is unknown")
        caller = request.state.caller = Caller(f"token:{token}", TokenScope.ADMIN)
        return caller

    async def send(self, path: str, token: str | None = None, source: str = ATTACKER, content: Any = None) -> int:
        """Send a request; return the status of its response."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        transport = httpx.ASGITransport(self._app, client=(source, 1))
        async with httpx.AsyncClient(transport=transport, base_url=HERE, headers=headers) as client:
            return (await client.post(path, content=content)).status_code

    @asynccontextmanager
    async def arriving(self, size: int, path: str, token: str | None, source: str = ATTACKER) -> AsyncIterator[None]:
        """Send a request whose body has arrived except for its end; it is answered with 200 after the context."""
        arrived, end = asyncio.Event(), asyncio.Event()

        async def parts() -> AsyncIterator[bytes]:
            yield b" " * size
            arrived.set()
            await end.wait()

        request = asyncio.create_task(self.send(path, token, source, parts()))
        await arrived.wait()
        try:
            yield
        finally:
            end.set()
        assert await request == 200


async def test_checks_of_unknown_tokens_take_no_place_of_valid_ones() -> None:
    guarded = Guarded(max_concurrent=6, max_of_client=6)
    assert await guarded.send("/api/tasks", "a") == 200
    unknown = [asyncio.create_task(guarded.send("/api/tasks", f"x{number}")) for number in range(12)]
    await guarded.wait_for_checks(1)
    for _ in range(3):
        assert await guarded.send("/api/tasks", "a") == 200
    assert await guarded.send("/api/tasks", "b", OTHER) == 200  # new, and from another address
    assert 1 <= guarded.checking <= 2
    guarded.valid.remove("a")  # a token that was valid is checked like any other
    guarded.release.set()
    assert await guarded.send("/api/tasks", "a") == 401
    assert await asyncio.gather(*unknown) == [401] * 12


async def test_requests_that_bring_the_same_unknown_token_share_checks() -> None:
    guarded = Guarded()
    requests = [asyncio.create_task(guarded.send("/api/tasks", "x")) for _ in range(20)]
    await guarded.wait_for_checks(1)
    guarded.release.set()
    assert await asyncio.gather(*requests) == [401] * 20
    assert guarded.checks["x"] == 2
    guarded.release.clear()
    guarded.slow.add("a")
    requests = [asyncio.create_task(guarded.send("/api/tasks", "a")) for _ in range(20)]
    await guarded.wait_for_checks(1)
    requests[3].cancel()
    guarded.release.set()
    assert await asyncio.gather(*requests[:3], *requests[4:]) == [200] * 19


async def test_slow_checks_of_few_tokens_refuse_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "TOKEN_CHECK_WAIT_S", 0.0)  # a request that waits for a turn is refused
    guarded = Guarded(max_concurrent=6, max_of_client=4)
    guarded.slow |= {"a", "b"}
    requests = [asyncio.create_task(guarded.send("/api/missing", "a")) for _ in range(12)]
    await guarded.wait_for_checks(1)
    others = [asyncio.create_task(guarded.send("/api/tasks", "b", source)) for source in (ATTACKER, OTHER)]
    await guarded.wait_for_checks(3)
    guarded.release.set()
    assert await asyncio.gather(*requests, *others) == [200] * 14
    guarded.release.clear()  # and when the tokens are known
    requests = [asyncio.create_task(guarded.send("/api/missing", "a")) for _ in range(12)]
    await guarded.wait_for_checks(12)
    guarded.slow.remove("b")
    assert await guarded.send("/api/tasks", "b", OTHER) == 200
    guarded.release.set()
    assert await asyncio.gather(*requests) == [200] * 12


async def test_bodies_without_a_token_take_no_memory_of_those_with_one() -> None:
    guarded = Guarded(max_unauthenticated_bytes=2000)
    async with AsyncExitStack() as stack:
        for number in range(4):  # each address gets a quarter
            source = f"127.0.0.{number + 1}"
            await stack.enter_async_context(guarded.arriving(500, "/ui/session", None, source))
            assert await guarded.send("/ui/session", None, source, b"{}") == 429
        assert await guarded.send("/ui/session", None, "127.0.0.9", b"{}") == 429
        assert await guarded.send("/api/tasks", "a", content=b"{}") == 200
    assert await guarded.send("/ui/session", None, "127.0.0.9", b"{}") == 200


async def test_the_bodies_of_one_token_take_no_memory_of_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_BUFFERED_BYTES", 0)  # four bodies of the largest size remain
    guarded = Guarded()
    async with guarded.arriving(600, "/api/tasks", "a"), guarded.arriving(400, "/api/tasks", "a"):
        assert await guarded.send("/api/tasks", "a", content=b"{}") == 429
        assert await guarded.send("/api/tasks", "b", content=b"{}") == 200
    assert await guarded.send("/api/tasks", "a", content=b"{}") == 200
