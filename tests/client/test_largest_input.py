"""The size limit of inputs: every way to store one refuses it with the size, the limit, the setting and a remedy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from api_support import api_at
from interlock import DefinitionError, InputError, Interlock
from interlock.config import Config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

LIMIT = 2_000
TOO_LONG = "x" * LIMIT
REFUSAL = (
    r"the input has 2,\d\d\d bytes of JSON, and at most 2,000 are stored \(setting `largest_input`\); "
    "store it elsewhere and pass a reference to it"
)


@pytest.fixture
async def app(url: str) -> AsyncIterator[Interlock]:
    """Open an app with a task, a workflow and a low limit."""
    app = Interlock(config=Config(database_url=url, largest_input=LIMIT))

    @app.task
    async def read(text: str) -> None:
        pass

    flow = app.workflow("flow", input_schema={"type": "object"})

    @flow.step
    async def note() -> None:
        pass

    async with app:
        yield app


def one(app: Interlock) -> Coroutine[Any, Any, Any]:
    return app.tasks["read"].enqueue(TOO_LONG)


def with_options(app: Interlock) -> Coroutine[Any, Any, Any]:
    return app.tasks["read"].options(priority=3).enqueue(TOO_LONG)


def few(app: Interlock) -> Coroutine[Any, Any, Any]:
    return app.tasks["read"].enqueue_many([{"text": "a"}, {"text": TOO_LONG}])


def copied(app: Interlock) -> Coroutine[Any, Any, Any]:
    return app.tasks["read"].enqueue_many([*({"text": "a"} for _ in range(500)), {"text": TOO_LONG}])


async def prepared(app: Interlock) -> None:
    app.tasks["read"].prepare(TOO_LONG)


async def as_statement(app: Interlock) -> None:
    app.tasks["read"].enqueue_statement(TOO_LONG)


def submitted(app: Interlock) -> Coroutine[Any, Any, Any]:
    return app.submit("flow", {"text": TOO_LONG})


@pytest.mark.parametrize("store", [one, with_options, few, copied, prepared, as_statement, submitted])
async def test_an_input_over_the_limit_is_refused_and_nothing_is_stored(
    app: Interlock, database: Connection, store: Callable[[Interlock], Coroutine[Any, Any, Any]]
) -> None:
    with pytest.raises(InputError, match=REFUSAL):
        await store(app)
    stored = await database.execute("select id from interlock.tasks union all select id from interlock.jobs")
    assert await stored.fetchall() == []


async def test_an_input_at_the_limit_is_stored(app: Interlock) -> None:
    text = "x" * (LIMIT - len(json.dumps({"text": ""}, separators=(",", ":"))))
    assert (await app.tasks["read"].enqueue(text)).created
    with pytest.raises(InputError, match="has 2,001 bytes"):
        await app.tasks["read"].enqueue(text + "x")


def test_a_schedule_with_an_input_over_the_limit_is_refused_when_it_is_declared(app: Interlock) -> None:
    with pytest.raises(DefinitionError, match=f"schedule 'nightly': {REFUSAL}"):
        app.schedule("nightly", workflow="flow", input={"text": TOO_LONG}, every=60)


async def test_the_api_refuses_tasks_and_jobs_with_an_input_over_the_limit(app: Interlock, url: str) -> None:
    async with api_at(url, app=app) as client:
        for path, body in (
            ("/api/tasks", {"type": "unknown_here", "input": {"text": TOO_LONG}}),
            ("/api/tasks", {"type": "read", "input": {"text": TOO_LONG}}),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 422
            assert "setting `largest_input`" in answer.text


async def test_the_sql_function_has_a_limit_that_an_administrator_sets(database: Connection) -> None:
    enqueue = "select id from interlock.enqueue('read', jsonb_build_object('text', repeat('x', 2000)))"
    await database.execute("set interlock.largest_input = 2000")
    refusal = r"task read: the input has 2\d+ bytes, and at most 2000 are stored \(setting interlock.largest_input\)"
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match=refusal):
        await database.execute(enqueue)
    await database.execute("reset interlock.largest_input")
    assert len(await (await database.execute(enqueue)).fetchall()) == 1
