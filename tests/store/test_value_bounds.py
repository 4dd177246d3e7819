"""Bounds of task options, for any client: no task can be stored that others cannot read or run."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from interlock import Interlock, WorkerSettings
from interlock.config import Config
from interlock.errors import ConfigError, DefinitionError, InputError, StatementError
from interlock.model.options import NewTask
from interlock.postgres.connection import connect
from interlock.store.enqueue import enqueue_task
from interlock.store.tasks import until_next_run
from interlock.worker.maintenance.webhooks import is_public

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

BEYOND_SQL = [
    {"timeout_seconds": "'infinity'"},
    {"timeout_seconds": "'NaN'"},
    {"timeout_seconds": "1e12"},
    {"run_at": "'infinity'"},
    {"run_at": "'-infinity'"},
    {"run_at": "'0044-03-15 BC'"},
    {"delay": "interval '9000 years'"},
]


@pytest.fixture
async def app(url: str) -> AsyncIterator[Interlock]:
    app = Interlock(url)

    @app.task
    async def first() -> None: ...

    @app.task
    async def second() -> None: ...

    async with app:
        yield app


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 1e12},
        {"timeout": timedelta.max},
        {"delay": 1e12},
        {"delay": 1e300},
        {"delay": [1]},
        {"run_at": datetime(9999, 1, 1, tzinfo=UTC)},
        {"run_at": datetime(9998, 12, 31, 23, tzinfo=timezone(timedelta(hours=-2)))},
        {"run_at": datetime(1969, 12, 31, tzinfo=UTC)},
        {"tags": 5},
        {"tags": [5]},
        {"tags": "one"},
    ],
    ids=str,
)
def test_options_out_of_bounds_are_refused_by_name(options: Any) -> None:
    app = Interlock("postgresql://nowhere")

    @app.task
    async def first() -> None: ...

    with pytest.raises(InputError, match=f"task first: {next(iter(options))} must be"):
        first.options(**options)


def test_a_rhythm_has_the_same_bound() -> None:
    app = Interlock("postgresql://nowhere")
    with pytest.raises(DefinitionError, match="every must be at most"):

        @app.periodic(every=1e300)
        @app.task
        async def first() -> None: ...


async def test_tags_of_a_generator_are_kept(app: Interlock) -> None:
    handle = await app.tasks["first"].options(tags=(tag for tag in "ab")).enqueue()  # type: ignore[arg-type]  # a list is wanted
    assert (await handle.status()).tags == ["a", "b"]


@pytest.mark.parametrize("options", BEYOND_SQL, ids=str)
async def test_sql_is_held_to_the_same_bounds(database: Connection, options: dict[str, str]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(psycopg.errors.CheckViolation):
        await database.execute(f"select interlock.enqueue('first', {name} => {value})".encode())


async def test_an_idle_worker_need_not_know_of_more_than_a_day(database: Connection) -> None:
    await enqueue_task(database, NewTask("first", {}, run_at=datetime(9998, 1, 1, tzinfo=UTC)), actor="me")
    found = await until_next_run(database, types=["first"], namespaces=["default"])
    assert found.remaining == timedelta(days=1)


@pytest.mark.parametrize("key", ["unique_key", "request_id", "task_id"])
async def test_a_key_that_a_task_of_another_type_has_is_refused(app: Interlock, url: str, key: str) -> None:
    options: Any = {key: "0198c1a2-0000-7000-8000-000000000000"}
    first, second = app.tasks["first"].options(**options), app.tasks["second"].options(**options)
    has = await first.enqueue()
    told = f"{key} .*{options[key]}.* is taken by task {has.id}, of type first; one of type second needs its own"
    with pytest.raises(InputError, match=told):
        await second.enqueue()
    with pytest.raises(InputError, match=told):
        await app.enqueue_many([app.tasks["second"].prepare(), second.prepare()])
    async with connect(url) as connection:
        with pytest.raises(InputError, match=told):
            await second.enqueue_with(connection)
    with psycopg.connect(url) as blocking:
        with pytest.raises(InputError, match=told):
            second.enqueue_with(blocking)
        blocking.rollback()
        with pytest.raises(psycopg.Error, match=told) as refused:
            blocking.execute(*second.enqueue_statement())
        assert refused.value.sqlstate == "IL007"
    assert [task.id for task in await app.find()] == [has.id]
    assert (await first.enqueue()).id == has.id


async def test_a_blocking_connection_gives_the_engine_s_own_errors(app: Interlock, url: str) -> None:
    task = app.tasks["first"]
    with psycopg.connect(url) as blocking:
        blocking.execute("set default_transaction_read_only = on")
        blocking.commit()
        with pytest.raises(StatementError, match="read-only"):
            task.enqueue_with(blocking)
        blocking.rollback()
        with pytest.raises(StatementError, match="read-only"):
            await task.enqueue_many([{}], connection=blocking)


async def test_an_app_names_a_callback_url_for_tasks_that_name_none(url: str, database: Connection) -> None:
    app = Interlock(url, callback_url="https://example.org/all")

    @app.periodic(every=3600)
    @app.task
    async def first() -> None: ...

    @app.task(callback_url="https://example.org/own")
    async def second() -> None: ...

    async with app:
        await app.enqueue_many([first.prepare(), second.prepare(), first.options(callback_url="http://a:1").prepare()])
        query = "select callback_url from interlock.tasks order by id"
        stored = [row["callback_url"] for row in await (await database.execute(query)).fetchall()]
        assert stored == ["https://example.org/all", "https://example.org/own", "http://a:1"]
        (row,) = await (await database.execute("select options from interlock.schedules")).fetchall()
        assert row["options"]["callback_url"] == "https://example.org/all"


@pytest.mark.parametrize("text", ["", "http://", "ftp://a", "http://a\r\nb", "http://a:99999", "http://[", 5], ids=str)
def test_a_url_that_nothing_can_be_posted_to_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="callback_url must be an http or https URL"):
        Interlock("postgresql://nowhere", callback_url=text)
    with pytest.raises(DefinitionError, match="callback_url must be an http or https URL"):
        Interlock("postgresql://nowhere").task(callback_url=text)(lambda: None)


def test_a_url_that_is_given_beside_a_configuration_changes_nothing_else() -> None:
    config = Config(callback_secret="s", worker_name="w")  # noqa: S106 - no real password
    assert Interlock("postgresql://nowhere", config=config).config == replace(
        config, database_url="postgresql://nowhere"
    )


def test_gauges_are_kept_where_the_settings_serve_metrics() -> None:
    assert WorkerSettings.of(Config(metrics_port=9000)).gauges
    assert not WorkerSettings.of(Config()).gauges


async def test_acts_are_refused_in_words(app: Interlock) -> None:
    for namespace in ("", "a\0"):
        with pytest.raises(InputError, match="namespace must be"):
            await app.pause(namespace)
    with pytest.raises(InputError, match="limit must be 0 or more"):
        await app.find(limit=-1)


@pytest.mark.parametrize("address", ["fec0::1", "3fff::1", "3fff:fff::1"])
def test_addresses_of_a_site_or_of_examples_are_not_public(address: str) -> None:
    assert not is_public(address)
