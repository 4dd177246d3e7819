"""Wrong calls of the client raise readable errors at the call, before anything is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from factories import declare_limit_keys
from interlock import Interlock
from interlock.errors import ConfigError, DefinitionError, InputError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.postgres.connection import Connection

LONG = "é" * 1_001
TOLD = "must have at most 2,000 bytes in UTF-8"


def nowhere() -> Interlock:
    return Interlock("postgresql://nowhere")


@pytest.fixture
async def app(url: str) -> AsyncIterator[Interlock]:
    app = Interlock(url)

    @app.task
    async def mail(to: str) -> None: ...

    async with app:
        yield app


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"cron": 5}, "schedule 'mail': 5 is not a cron expression"),
        ({"cron": b"* * * * *"}, "is not a cron expression"),
        ({"cron": ["*"] * 5}, "is not a cron expression"),
        ({"cron": "* * * * *", "timezone": 5}, "schedule 'mail': 5 is not a known time zone"),
        ({"cron": "* * * * *", "timezone": None}, "None is not a known time zone"),
        ({"every": "5"}, "schedule 'mail': every must be a positive number"),
        ({"every": True}, "every must be a positive number"),
        ({"every": 5, "missed": []}, "missed must be one of"),
        ({"every": 5, "name": 5}, "the name of a schedule must be a non-empty string"),
        ({"every": 5, "name": ""}, "the name of a schedule must be a non-empty string"),
        ({"every": 5, "name": LONG}, TOLD),
        ({"every": 5, "arguments": []}, "arguments must be a mapping"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schedule_of_a_wrong_kind_is_refused_where_it_is_declared(schedule: Any, message: str) -> None:
    app = nowhere()
    with pytest.raises(DefinitionError, match=message):

        @app.periodic(**schedule)
        @app.task
        async def mail() -> None: ...

    assert not app.schedules


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cron": 5}, r"unknown option 'cron'; declare a schedule above the task: @app.periodic\(cron=...\)"),
        ({"name": ""}, "the name of a task must be a non-empty string"),
        ({"name": []}, "the name of a task must be a non-empty string"),
        ({"name": LONG}, f"the name of a task {TOLD}"),
        ({"namespace": LONG}, f"namespace {TOLD}"),
        ({"limit_key": LONG}, f"limit_key {TOLD}"),
        ({"tags": ["short", LONG]}, f"each of the tags {TOLD}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_task_of_a_wrong_kind_is_refused_where_it_is_declared(options: Any, message: str) -> None:
    with pytest.raises(DefinitionError, match=message) as refused:
        nowhere().task(**options)(lambda: None)
    assert len(str(refused.value)) < 300, "nobody wants to read all of it"


@pytest.mark.parametrize(
    ("key", "limit", "message"),
    [
        ("k", {"max_running": "x"}, "limit 'k': max_running must be a whole number from 1"),
        ("k", {"max_running": -1}, "max_running must be a whole number"),
        ("k", {"max_running": True}, "max_running must be a whole number"),
        ("k", {"max_running": 1.5}, "max_running must be a whole number"),
        ("k", {"max_running": 2**31}, "max_running must be a whole number"),
        ("k", {"max_starts": "x", "per": 1}, "max_starts must be a whole number"),
        ("k", {"max_starts": 1, "per": "x"}, "limit 'k': per must be a positive number of seconds"),
        ("k", {"max_starts": 1, "per": True}, "per must be a positive number"),
        ("", {"max_running": 1}, "the key of a limit must be a non-empty string"),
        (" ", {"max_running": 1}, "the key of a limit must be a non-empty string"),
        (5, {"max_running": 1}, "the key of a limit must be a non-empty string"),
        (None, {"max_running": 1}, "the key of a limit must be a non-empty string"),
        ([], {"max_running": 1}, "the key of a limit must be a non-empty string"),
        ("a\0", {"max_running": 1}, "without the character NUL"),
        (LONG, {"max_running": 1}, f"the key of a limit {TOLD}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_limit_is_refused_at_its_declaration(key: Any, limit: Any, message: str) -> None:
    app = nowhere()
    with pytest.raises(DefinitionError, match=message):
        app.limit(key, **limit)
    assert not app.limits


@pytest.mark.parametrize(
    "given", [{"actor": 5}, {"actor": ""}, {"max_connections": "x"}, {"max_connections": 0}], ids=str
)
def test_an_invalid_app_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given))} must be"):
        Interlock("postgresql://nowhere", **given)


@pytest.mark.parametrize("given", [{"name": "x" * 501}, {"name": "x", "version": "1" * 101}], ids=["name", "version"])
def test_the_names_and_versions_of_workflows_have_an_end(given: Any) -> None:
    with pytest.raises(DefinitionError, match="at most") as refused:
        nowhere().workflow(**given).sleep("rest", 1)
    assert len(str(refused.value)) < 1000
    with pytest.raises(DefinitionError, match="at most 500 letters"):
        nowhere().workflow("x").sleep("y" * 501, 1)


@pytest.mark.parametrize("command", [5, "ls -l", [5], []], ids=str)
def test_a_command_that_is_no_list_of_texts_is_refused(command: Any) -> None:
    with pytest.raises(DefinitionError, match="a command is a list of non-empty strings"):
        nowhere().command_task("x", command)


@pytest.mark.store
@pytest.mark.parametrize("given", [5, None, "ab", {"to": "a"}], ids=str)
async def test_many_are_a_list(app: Interlock, given: Any) -> None:
    with pytest.raises(InputError, match="enqueue_many takes a list of"):
        await app.enqueue_many(given)
    with pytest.raises(InputError, match="enqueue_many takes a list of mappings"):
        await app.tasks["mail"].enqueue_many(given)


@pytest.mark.store
async def test_elements_of_many_are_checked_before_any_is_stored(app: Interlock) -> None:
    mail = app.tasks["mail"]
    for wrong in (5, None, {"to": "a"}, "mail", mail, mail.options(priority=1)):
        with pytest.raises(InputError, match=r"takes tasks of task.prepare\(...\), but element 1 is"):
            await app.enqueue_many([mail.prepare("a"), wrong])  # type: ignore[list-item]  # the point
    for wrong, message in (
        ({}, "missing a required argument: 'to'"),
        (5, "must be a mapping"),
        (None, "must be a mapping"),
    ):
        with pytest.raises(InputError, match=message):
            await mail.enqueue_many([{"to": "a"}] * 60 + [wrong])  # type: ignore[list-item]  # the point

    def broken() -> Any:
        yield {"to": "a"}
        raise LookupError("of the caller's own")

    with pytest.raises(LookupError, match="of the caller's own"):
        await mail.enqueue_many(broken())
    assert await app.find() == []


@pytest.mark.store
@pytest.mark.parametrize("name", ["unique_key", "request_id", "limit_key", "tags"])
async def test_keys_that_no_index_can_hold_are_refused_before_they_are_sent(app: Interlock, name: str) -> None:
    async with app.connection() as connection:
        await declare_limit_keys(connection, LONG[1:])
    mail = app.tasks["mail"]
    value: Any = [LONG] if name == "tags" else LONG
    with pytest.raises(InputError, match=rf"{name} must have at most 2,000 bytes in UTF-8, got 2,002 in 'é+'…"):
        await mail.options(**{name: value}).enqueue("a")
    with pytest.raises(InputError, match=f"namespace {TOLD}"):
        await app.pause(LONG)
    fits: Any = [LONG[1:]] if name == "tags" else LONG[1:]
    assert (await mail.options(**{name: fits}).enqueue("a")).created


@pytest.mark.store
@pytest.mark.parametrize(("name", "index"), [("unique_key", "unique"), ("request_id", "request")])
async def test_sql_refuses_them_too_and_names_the_index(database: Connection, name: str, index: str) -> None:
    """As text of which nothing repeats, so that it cannot be compressed."""
    long = "(select string_agg(md5(n::text), '') from generate_series(1, 200) as n)"
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match=f"exceeds btree .* maximum .*tasks_{index}"):
        await database.execute(f"select interlock.enqueue('mail', {name} => {long})".encode())
