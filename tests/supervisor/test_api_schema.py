"""Schemathesis: generated requests get responses that the OpenAPI document declares, and no 5xx."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from interlock.config import Config
from interlock.postgres.connection import connect
from interlock.store.access import TokenScope, create_token
from interlock.supervisor.http.server import ApiServer
from jobs_support import app_at
from processes import data_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from schemathesis import Case

    AnyCase = Case[Any]

pytestmark = pytest.mark.flow

EXAMPLES = int(os.environ.get("INTERLOCK_TEST_EXAMPLES") or 3)  # of each operation
ENDLESS = "/api/events"  # a stream; tests/supervisor/test_api_events.py
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not os.environ.get("INTERLOCK_TEST_EXAMPLES"),
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@contextmanager
def served(url: str) -> Iterator[str]:
    """Serve the API from another thread; yield its URL."""
    config = Config(database_url=url, supervisor_port=0, data_dir=Path(data_dir()))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> ApiServer:
        app = app_at(url)
        app.config = replace(app.config, data_dir=config.data_dir)
        server = ApiServer(app, config)
        await server.start()
        return server

    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        try:
            yield server.url
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


async def admin(url: str) -> str:
    async with connect(url) as connection:
        return (await create_token(connection, "fuzz", TokenScope.ADMIN, actor="test"))[1]


def known_ids(client: httpx.Client) -> dict[str, str]:
    """Create one of each resource, so that not every path answers 404."""
    client.post("/api/pools", json={"name": "gates", "desired": 0})
    return {
        "worker_id": client.post("/api/workers", json={}).json()["id"],
        "job_id": client.post("/api/jobs", json={"workflow": "gates"}).json()["id"],
        "task_id": client.post("/api/tasks", json={"type": "x"}).json()["id"],
        "limit_key": client.put("/api/limits/mail:*", json={"max_running": 5}).json()["key"],
        "id": client.post("/api/tasks", json={"type": "x"}).json()["id"],
        "name": client.put("/api/schedules/gates", json={"workflow": "gates", "every": 60}).json()["name"],
    }


def fuzz(operation: Any, attempt: Callable[[AnyCase, bool], None]) -> None:
    """Make up requests to one operation, good ones and bad ones."""
    good = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    bad = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE) if can_be_bad(operation) else good

    @SETTINGS
    @given(case=good | bad, real=st.booleans())
    def run(case: AnyCase, real: bool) -> None:  # noqa: FBT001 - hypothesis draws it
        attempt(case, real)

    run()


def can_be_bad(operation: Any) -> bool:
    return bool(operation.body or operation.query or operation.path_parameters)


def send(address: str, secret: dict[str, str], known: dict[str, str], case: AnyCase, real: bool) -> None:  # noqa: FBT001 - as drawn
    """Send a request, about something that is there or about anything, and check the answer."""
    if real:
        there = {name: known[name] for name in case.path_parameters if name in known}
        case.path_parameters = {**case.path_parameters, **there}
    if "wait" in case.query:
        case.query["wait"] = 0.01  # no worker runs the task
    # no supervisor starts the workers of the pools that were made up, and readiness tells so
    checks = [check for check in CHECKS if case.path != "/readyz" or check is not not_a_server_error]
    case.call_and_validate(base_url=address, headers=secret, checks=checks)


@pytest.mark.timeout(600)  # making up the requests takes ten seconds of processor time
def test_generated_requests_get_documented_responses_and_no_server_error(url: str) -> None:
    secret = {"Authorization": f"Bearer {asyncio.run(admin(url))}"}
    with served(url) as address, httpx.Client(base_url=address, headers=secret, timeout=60) as client:
        known = known_ids(client)
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        seen: set[str] = set()
        for found in schema.get_all_operations():
            assert isinstance(found, Ok)
            operation = found.ok()
            if operation.path != ENDLESS:
                fuzz(operation, partial(send, address, secret, known))
            seen.add(operation.label)
    assert len(seen) == sum(len(operations) for operations in schema.raw_schema["paths"].values()) == 70
