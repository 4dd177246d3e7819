"""The middleware and problem details of the API: limits, hosts, origins, headers, the docs page."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import psycopg
import pytest
from prometheus_client import generate_latest
from starlette.responses import Response, StreamingResponse
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from api_support import ADMIN_HEADERS, HERE, api_at, supervisor_at
from interlock import Interlock, telemetry
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.supervisor.http import workers
from interlock.supervisor.http.app import create_api
from interlock.supervisor.http.connections import client_key, parse_networks
from interlock.supervisor.http.middleware import LOOPBACK_HOSTS, STREAM_PATHS, RequestLimits, RequestLimitsMiddleware
from interlock.supervisor.http.problems import CODES
from interlock.supervisor.http.request_log import LineLimit, RequestLog
from interlock.supervisor.http.server import bind_socket
from interlock.telemetry import metrics_registry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, MutableMapping

pytestmark = pytest.mark.flow

JSON = {"Content-Type": "application/json"}
MEMBERS = {"type", "title", "status", "detail", "instance", "code"}


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with api_at(url, supervisor_body_limit=2048) as client:
        yield client


def problem(answer: httpx.Response, code: str) -> dict[str, Any]:
    """Assert that a response is a problem detail with this code, and return it."""
    assert answer.headers["content-type"] == "application/problem+json"
    said: dict[str, Any] = answer.json()
    assert said.keys() >= MEMBERS
    assert (said["code"], said["status"], said["status"]) == (code, answer.status_code, CODES[code][0])
    assert said["type"] == f"urn:interlock:problem:{code}"
    return said


async def test_every_refusal_is_a_problem_detail_with_a_code(client: httpx.AsyncClient) -> None:
    problem(await client.get("/nothing/here"), "unknown_path")
    wrong = await client.delete("/api/workers")
    problem(wrong, "method_not_allowed")
    assert wrong.headers["allow"]
    problem(await client.post("/api/workers", content=b"{", headers=JSON), "bad_request")
    problem(await client.post("/api/workers", content=b"[" * 2000, headers=JSON), "bad_request")
    problem(await client.post("/api/workers", content=b"a=b"), "unsupported_media_type")
    problem(await client.post("/api/workers", content=b"{}" + b" " * 3000, headers=JSON), "body_too_large")


async def test_a_validation_error_names_the_field_and_not_the_value(client: httpx.AsyncClient) -> None:
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/api/workers", {"concurrency": "hunter2"}, "concurrency"),
        ("/api/workers", {"surprise": 1}, "surprise"),
        ("/api/workers", {"workspace_id": "a\0b"}, "workspace_id"),
        ("/api/workers", {"app": "os.system('rm')"}, "app"),
        ("/api/jobs", {"input": {}}, "workflow"),
        ("/api/jobs", {"workflow": "x", "worker_count": 11}, "worker_count"),
        ("/api/tasks", {"type": "x", "input": {"a": ["\0"]}}, "input"),
        ("/api/tasks", {"type": "x", "input": {"a": 2**70}}, "input"),
        ("/api/tasks", {"type": "x", "run_at": "2030-01-01T00:00:00"}, "run_at"),
        ("/api/tasks", {"type": "x", "priority": 40_000}, "priority"),
    ]
    for path, body, field in bodies:
        said = problem(await client.post(path, json=body), "invalid_request")
        assert said["errors"][0]["field"] == field
        assert "hunter2" not in str(said)
    said = problem(await client.get("/api/workers", params={"limit": 0}), "invalid_request")
    assert said["errors"][0]["field"] == "query.limit"
    for cursor in ("x", "bm90aGluZw", "WyIxIl0"):
        said = problem(await client.get("/api/workers", params={"cursor": cursor}), "invalid_request")
        assert said["errors"][0]["field"] == "query.cursor"
    problem(await client.get("/api/jobs/not-an-id"), "invalid_request")


async def test_very_many_errors_of_one_body_are_described_as_one(url: str) -> None:
    many: dict[str, Any] = {f"k{number}": [] for number in range(30_000)}
    bodies = [
        ("/api/tasks", many, "body", "has more than 20000 errors"),
        ("/api/tasks/bulk", {"tasks": [{"a": 1, "b": 2}] * 10_000}, "body", "has more than 20000 errors"),
        ("/api/jobs", {"workflow": "x", "attributes": many}, "attributes", "must be at most 50, got 30000"),
    ]
    async with api_at(url) as client:
        for path, body, field, message in bodies:
            said = problem(await client.post(path, json=body), "invalid_request")
            assert said["errors"] == [{"field": field, "message": message}]


async def test_a_chunked_body_is_refused_at_the_size_limit(client: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 1000

    problem(await client.post("/api/workers", content=endless(), headers=JSON), "body_too_large")


async def test_other_origins_and_unknown_hosts_are_refused(client: httpx.AsyncClient) -> None:
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io:80", ""):
        problem(await client.get("/api/workers", headers={"Host": host}), "unknown_host")
    for host in ("localhost:8321", "127.0.0.1:1", "[::1]:8321", "LOCALHOST"):
        assert (await client.get("/api/workers", headers={"Host": host})).status_code == 200, host
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        problem(await client.post("/api/workers", json={}, headers=headers), "cross_origin")
    same = await client.post("/api/workers", json={}, headers={"Origin": HERE, "Sec-Fetch-Site": "same-origin"})
    assert same.status_code == 201
    assert "access-control-allow-origin" not in same.headers
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert (await client.options("/api/workers", headers=asked)).status_code == 405


async def test_host_names_can_be_added(url: str) -> None:
    async with api_at(url, supervisor_names=("box.internal",)) as client:
        assert (await client.get("/api/workers", headers={"Host": "box.internal:8321"})).status_code == 200


async def test_every_response_has_the_security_headers(client: httpx.AsyncClient) -> None:
    for path in ("/api/workers", "/healthz", "/nothing", "/docs"):
        headers = (await client.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"


async def test_a_request_that_times_out_is_503_and_changes_nothing(client: httpx.AsyncClient, url: str) -> None:
    worker = (await client.post("/api/workers", json={})).json()["id"]
    path, body = f"/api/workers/{worker}/start", {"request_id": "k"}
    with psycopg.connect(url) as holder:
        holder.execute("select 1 from interlock.workers where id = %s for update", [worker])
        async with api_at(url, supervisor_timeout=1.0) as hasty:
            late = await hasty.post(path, json=body)
        problem(late, "timeout")
        assert late.headers["retry-after"] == "1"
    assert (await client.post(path, json=body)).json()["status"] == "RUNNING"


async def test_an_unexpected_error_is_a_500_without_details(url: str) -> None:
    config = Config(database_url=url)
    async with Interlock(config=config) as app:
        api = create_api(app, config)

        @api.get("/broken")
        async def broken() -> None:
            raise RuntimeError("the password is hunter2")

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=api), base_url=HERE) as client:
            answer = await client.get("/broken")
    said = problem(answer, "internal_error")
    assert "hunter2" not in str(said)
    assert "Traceback" not in str(said)


async def test_without_a_database_requests_are_503_and_healthz_is_200(url: str) -> None:
    config = Config(database_url=url, supervisor_timeout=4.0)
    async with (
        Interlock(config=config) as app,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=create_api(app, config)), base_url=HERE, headers=ADMIN_HEADERS
        ) as client,
    ):
        assert (await client.get("/readyz")).status_code == 200
        name = url.rpartition("/")[2].partition("?")[0]
        with psycopg.connect(url.replace(f"/{name}", "/postgres"), autocommit=True) as other:
            other.execute(f'alter database "{name}" allow_connections false'.encode())
            other.execute(b"select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
            answers = await asyncio.gather(client.get("/readyz"), client.get("/api/workers"))
            assert (await client.get("/healthz")).status_code == 200
            other.execute(f'alter database "{name}" allow_connections true'.encode())
        for answer in answers:
            problem(answer, "database_unavailable")


async def test_the_docs_page_is_self_contained_and_lists_every_path(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    texts = [page.text]
    for name in ("docs.js", "docs.css"):
        assert f"docs/{name}" in page.text
        part = await client.get(f"/docs/{name}")
        assert part.status_code == 200
        texts.append(part.text)
    assert not any("http://" in text or "https://" in text for text in texts)
    described = (await client.get("/openapi.json")).json()
    assert {"/api/workers", "/api/jobs/{job_id}/approve", "/api/tasks/{task_id}/result"} <= described["paths"].keys()
    refusals = described["paths"]["/api/workers/{worker_id}/start"]["post"]["responses"]["409"]
    assert refusals["content"].keys() == {"application/problem+json"}


async def test_the_openapi_document_is_encoded_once(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await client.get("/openapi.json")
    assert first.headers["content-type"] == "application/json"
    monkeypatch.delattr(json, "dumps")
    monkeypatch.delattr(orjson, "dumps")
    assert (await client.get("/openapi.json")).content == first.content


@pytest.mark.chaos
def test_ctrl_c_stops_the_supervisor_and_a_port_in_use_is_an_error(url: str) -> None:
    with supervisor_at(url) as (process, address, said):
        assert httpx.get(f"{address}/healthz").json() == {"status": "ok"}
        assert "server" not in httpx.get(f"{address}/healthz").headers
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot be served on 127.0.0.1:{port}: Address already in use"):
            bind_socket("127.0.0.1", port).__enter__()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "Traceback" not in said.all()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/healthz")


async def test_requests_over_the_concurrency_limits_are_429_and_health_is_answered() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/healthz":
            await release.wait()
        await Response("done")(scope, receive, send)

    release = asyncio.Event()
    limits = RequestLimits(None, max_body_bytes=1024, timeout_s=30.0, max_concurrent=3, max_of_client=2)
    limited = RequestLimitsMiddleware(slow, limits)

    def client_at(address: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(limited, client=(address, 1)), base_url=HERE)

    async with client_at("10.0.0.1") as client, client_at("10.0.0.2") as other:
        inside = [asyncio.create_task(client.get("/")) for _ in range(2)]
        await asyncio.sleep(0)
        refused = problem(await client.get("/"), "too_many_requests")
        assert "this client has 2 concurrent requests" in refused["detail"]
        inside.append(asyncio.create_task(other.get("/")))
        await asyncio.sleep(0)
        problem(await other.get("/"), "too_many_requests")
        assert (await client.get("/healthz")).status_code == 200
        release.set()
        assert [answer.status_code for answer in await asyncio.gather(*inside)] == [200, 200, 200]


class Stream:
    """A stream behind the middleware: what it has sent, and when it began and ended."""

    def __init__(self, **limits: Any) -> None:
        self.stopping = asyncio.Event()
        limited = RequestLimits(None, max_body_bytes=1024, timeout_s=0.2, **limits)
        self.app = RequestLimitsMiddleware(self._endless, limited, stopping=self.stopping)

    async def _endless(self, scope: Any, receive: Any, send: Any) -> None:
        async def ticks() -> AsyncIterator[bytes]:
            while True:
                yield b"tick"
                await asyncio.sleep(0.01)

        await StreamingResponse(ticks(), media_type="text/event-stream")(scope, receive, send)

    async def open(self, method: str = "GET") -> tuple[asyncio.Task[None], list[dict[str, Any]]]:
        """Open a stream; return the task that ends with it, and the list of its messages."""
        sent: list[dict[str, Any]] = []
        begun, asked = asyncio.Event(), False

        async def send(message: Any) -> None:
            sent.append(message)
            begun.set()

        async def receive() -> Any:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": "http", "method": method, "path": "/api/events", "query_string": b"", "headers": []}
        task = asyncio.create_task(self.app(scope, receive, send))
        await begun.wait()
        return task, sent


async def test_streams_have_no_timeout_a_limit_of_their_own_and_end_with_the_server() -> None:
    stream = Stream(max_streams=2, max_concurrent=1)
    before = generate_latest(metrics_registry).count(b"http_request_duration_seconds_count")
    (one, sent), (two, _) = await stream.open(), await stream.open()
    refused, answer = await stream.open()
    await refused
    assert answer[0]["status"] == 429
    await asyncio.sleep(0.3)  # longer than the timeout of requests
    assert not one.done()
    stream.stopping.set()
    async with asyncio.timeout(30):
        await asyncio.gather(one, two)
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    late, answer = await stream.open()
    await late
    assert answer[0]["status"] == 503
    assert generate_latest(metrics_registry).count(b"http_request_duration_seconds_count") == before


async def test_a_head_request_for_a_stream_gets_the_headers_and_ends() -> None:
    task, sent = await Stream().open("HEAD")
    async with asyncio.timeout(30):
        await task
    assert sent[0]["status"] == 200
    assert not any(message.get("body") for message in sent[1:])


async def test_head_is_answered_wherever_get_is(client: httpx.AsyncClient) -> None:
    described = (await client.get("/openapi.json")).json()["paths"]
    paths = [path for path, operations in described.items() if "get" in operations and "{" not in path]
    for path in STREAM_PATHS & set(paths):
        paths.remove(path)  # it has no end
        head = await client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"].startswith("text/event-stream")
    for path in (*paths, "/docs", "/openapi.json", "/api/workers/none"):
        full, head = await client.get(path), await client.head(path)
        assert head.status_code == full.status_code, path
        assert head.content == b"", path
        assert head.headers["content-type"] == full.headers["content-type"]
        assert int(head.headers["content-length"]) > 0


async def test_a_wrong_method_names_the_allowed_ones(client: httpx.AsyncClient) -> None:
    for method, path, allowed in (
        ("DELETE", "/api/workers", "GET, HEAD, POST"),
        ("PATCH", "/healthz", "GET, HEAD"),
        ("GET", "/api/workers/x/start", "POST"),
        ("HEAD", "/api/workers/x/start", "POST"),
    ):
        answer = await client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


async def test_every_response_has_the_id_of_its_request(client: httpx.AsyncClient) -> None:
    for path in ("/healthz", "/api/workers", "/nothing", "/docs"):
        assert (await client.get(path, headers={"X-Request-ID": "order-17:3"})).headers["x-request-id"] == "order-17:3"
        made = [(await client.get(path)).headers["x-request-id"] for _ in range(2)]
        assert made[0] != made[1]
    for bad in ("a b", "x" * 129, "<script>", ""):
        answer = await client.get("/nothing", headers={"X-Request-ID": bad})
        assert re.fullmatch("[0-9a-f]{24}", answer.headers["x-request-id"])
        assert answer.json()["http_request_id"] == answer.headers["x-request-id"]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MutableMapping[str, Any]]]:
    """Return the log lines of the test."""
    monkeypatch.setitem(telemetry._levels, "info", True)  # noqa: FBT003, SLF001 - simulates configured logging
    with capture_logs(processors=[merge_contextvars]) as written:
        yield written


async def test_log_lines_have_client_actor_and_request_id_and_no_control_characters(
    client: httpx.AsyncClient, lines: list[MutableMapping[str, Any]]
) -> None:
    await client.get("/api/workers", headers={"X-Request-ID": "r-1"})
    await client.get("/a%0A%1B[31m%C2%9B%E2%80%AEb" + "c" * 2000)
    first, second = [line for line in lines if line["event"] == "request"]
    assert {
        "client": "127.0.0.1",
        "actor": "token:test",
        "http_request_id": "r-1",
        "status": 200,
    }.items() <= first.items()
    assert second["path"].startswith(r"/a\n\x1b[31m\x9b\u202eb")
    assert len(second["path"]) < 1000


async def test_lines_about_a_refusal_or_a_failure_have_client_actor_and_request_id(
    client: httpx.AsyncClient, lines: list[MutableMapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = (await client.post("/api/workers", json={})).json()["id"]
    headers = {"X-Request-ID": "r-2"}
    assert (await client.post(f"/api/supervisor/workers/{worker}/pause", headers=headers)).status_code == 409

    async def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(workers, "read_worker", fail)
    assert (await client.get(f"/api/workers/{worker}", headers=headers)).status_code == 500
    for event in ("invalid_transition_attempted", "request_failed"):
        (line,) = [line for line in lines if line["event"] == event]
        assert {"client": "127.0.0.1", "actor": "token:test", "http_request_id": "r-2"}.items() <= line.items()


def test_log_lines_are_limited_and_the_suppressed_ones_are_counted(lines: list[MutableMapping[str, Any]]) -> None:
    now = 0.0
    limited = RequestLog({"burst": LineLimit(1, 3)}, clock=lambda: now)
    for _ in range(10):
        limited.write("info", "burst")
    limited.write("info", "another")
    now = 10.0
    limited.report_suppressed()
    limited.report_suppressed()
    limited.write("info", "burst")
    assert [line["event"] for line in lines] == [*["burst"] * 3, "another", "log_lines_suppressed", "burst"]
    assert (lines[4]["kind"], lines[4]["lines"]) == ("burst", 7)


async def test_a_trusted_proxy_names_its_clients(lines: list[MutableMapping[str, Any]]) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await Response("done")(scope, receive, send)

    limits = RequestLimits(None, max_body_bytes=1024, timeout_s=5.0, proxies=parse_networks(["10.0.0.0/24"]))
    for peer in ("10.0.0.9", "10.0.1.9"):
        transport = httpx.ASGITransport(RequestLimitsMiddleware(answer, limits), client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url=HERE) as client:
            await client.get("/", headers={"X-Forwarded-For": "6.6.6.6, 192.0.2.7, 10.0.0.8"})
    assert [line["client"] for line in lines] == ["192.0.2.7", "10.0.1.9"]


def test_an_ipv6_client_is_its_network_and_a_mapped_address_is_ipv4() -> None:
    assert client_key("2001:db8::1") == client_key("2001:db8::ffff:2") != client_key("2001:db8:0:1::1")
    assert client_key("::ffff:192.0.2.7") == "192.0.2.7"


async def test_websockets_are_closed() -> None:
    said: list[dict[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(f"the application was called: {scope}, {receive}, {send}")

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    limited = RequestLimitsMiddleware(inner, RequestLimits(LOOPBACK_HOSTS, max_body_bytes=1024, timeout_s=5.0))
    await limited({"type": "websocket", "path": "/", "headers": []}, receive, send)
    assert [message["type"] for message in said] == ["websocket.close"]
