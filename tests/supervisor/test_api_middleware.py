"""The middleware and problem details of the API: limits, hosts, origins, headers, the docs page."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest

from api_support import HERE, api_at, supervisor_at
from interlock import Interlock
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.supervisor.http.app import create_api
from interlock.supervisor.http.middleware import LOOPBACK_HOSTS, RequestLimits, RequestLimitsMiddleware
from interlock.supervisor.http.problems import CODES
from interlock.supervisor.http.server import bind_socket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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
        httpx.AsyncClient(transport=httpx.ASGITransport(app=create_api(app, config)), base_url=HERE) as client,
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


async def test_requests_over_the_concurrency_limit_are_429() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive, send
        await release.wait()

    release = asyncio.Event()
    limited = RequestLimitsMiddleware(slow, RequestLimits(None, max_body_bytes=1024, timeout_s=5.0, max_concurrent=2))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=limited), base_url=HERE) as client:
        inside = [asyncio.create_task(client.get("/")) for _ in range(2)]
        await asyncio.sleep(0)
        refused = problem(await client.get("/"), "too_many_requests")
        assert refused["status"] == 429
        release.set()
        await asyncio.gather(*inside, return_exceptions=True)


async def test_a_websocket_of_another_origin_is_closed() -> None:
    heard: list[str] = []
    said: list[dict[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        del receive, send
        heard.append(scope["path"])

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    limited = RequestLimitsMiddleware(inner, RequestLimits(LOOPBACK_HOSTS, max_body_bytes=1024, timeout_s=5.0))
    for host, origin in (("localhost:1", "http://evil.example"), ("evil.example", "http://evil.example")):
        headers = [(b"host", host.encode()), (b"origin", origin.encode())]
        await limited({"type": "websocket", "path": "/bad", "headers": headers}, receive, send)
    assert [message["type"] for message in said] == ["websocket.close", "websocket.close"]
    headers = [(b"host", b"localhost:1"), (b"origin", b"http://localhost:1")]
    await limited({"type": "websocket", "path": "/good", "headers": headers}, receive, send)
    assert heard == ["/good"]
