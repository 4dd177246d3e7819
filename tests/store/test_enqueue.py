"""Enqueueing: one, many, merged, held, and in the transactions of others; the same row whatever the way."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import dict_row, tuple_row

from factories import declare_limit_keys
from interlock import Backoff, Interlock
from interlock.errors import InputError, UnknownTaskError
from interlock.postgres.query import PARAMSTYLES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from interlock.client.task import AsyncTask
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store

FUTURE = datetime(2040, 1, 1, 12, tzinfo=UTC)
EVERYTHING: dict[str, Any] = {
    "priority": 7,
    "run_at": FUTURE,
    "timeout": timedelta(seconds=90),
    "max_tries": 9,
    "backoff": Backoff.linear(3),
    "namespace": 'here "and" \\ back',
    "tags": ["a,b", 'c"d', "e\\f\n", "ü"],
    "callback_url": "https://example.org/done?x=1",
    "correlation_id": uuid4(),
}
MERGING = {"unique_key": "u", "request_id": "r", "limit_key": "l", "task_id": uuid4()}
SUBJECT = 'quoted "x" back\\slash\ttab\nline %s :name ü'


@pytest.fixture
async def app(url: str) -> AsyncIterator[Interlock]:
    async with Interlock(url, actor="shop") as opened:
        yield opened


@pytest.fixture
def mail(app: Interlock) -> AsyncTask[[str, str], None]:
    @app.task(max_tries=3)
    async def mail(to: str, subject: str = "hi") -> None: ...

    return mail


async def rows(database: Connection) -> list[dict[str, Any]]:
    return await (await database.execute("select * from interlock.tasks order by id")).fetchall()


async def test_one_is_stored_as_its_definition_says(app: Interlock, mail: Any, database: Connection) -> None:
    handle = await mail.enqueue(to="a@b")
    (row,) = await rows(database)
    assert handle.created
    assert (row["id"], row["type"], row["input"], row["state"]) == (handle.id, "mail", {"to": "a@b"}, "pending")
    assert (row["max_tries"], row["priority"], row["namespace"], row["backoff"]) == (3, 0, "default", None)
    assert [(line.to_state, line.actor) for line in await handle.history()] == [("pending", "shop")]
    assert (await handle.status()).input == {"to": "a@b"}
    assert repr(app.handle(str(handle.id))) == f"<TaskHandle {handle.id}>"


async def test_every_way_stores_the_same_row(mail: Any, url: str, database: Connection) -> None:
    ways = mail.options(**EVERYTHING)
    arguments = {"to": "a@b", "subject": SUBJECT}
    await ways.enqueue(**arguments)
    await ways.enqueue_with(database, **arguments)
    await ways.enqueue_many([arguments])
    await ways.enqueue_many([arguments] * 60)  # enough for a COPY
    with psycopg.connect(url) as blocking:
        ways.enqueue_with(blocking, **arguments)
        await ways.enqueue_many([arguments], connection=blocking)
        for paramstyle in ("pyformat", "format"):
            blocking.execute(*ways.enqueue_statement(**arguments).styled(paramstyle))
    stored = await rows(database)
    assert len(stored) == 67
    for row in stored:
        for varying in ("id", "created_at", "updated_at"):
            row.pop(varying)
    assert all(row == stored[0] for row in stored)
    first = stored[0]
    assert first["input"] == arguments
    assert {name: first[name] for name in EVERYTHING if name not in {"timeout", "backoff"}} == {
        name: value for name, value in EVERYTHING.items() if name not in {"timeout", "backoff"}
    }
    assert first["timeout_seconds"] == 90
    assert Backoff.from_json(first["backoff"]) == Backoff.linear(3)


@pytest.mark.parametrize(
    "options", [{}, {"tags": []}, {"run_at": datetime(1999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)}]
)
async def test_a_copy_stores_what_a_statement_does(mail: Any, database: Connection, options: dict[str, Any]) -> None:
    await mail.options(**options).enqueue_many([{"to": "x"}])
    await mail.options(**options).enqueue_many([{"to": "x"}] * 50)
    await mail.options(**options).enqueue(to="x")  # without options, by a statement of its own
    stored = await rows(database)
    assert len(stored) == 52
    for row in stored:
        for varying in ("id", "created_at", "updated_at", *({"run_at"} - options.keys())):
            row.pop(varying)
    assert all(row == stored[0] for row in stored)
    assert stored[0]["tags"] == options.get("tags")


async def test_a_single_task_of_a_paused_namespace_waits(app: Interlock, mail: Any, database: Connection) -> None:
    await app.pause("default", reason="moving")
    handle = await mail.enqueue(to="x")
    (row,) = await rows(database)
    assert handle.created
    assert (row["id"], row["state"], row["held_by"]) == (handle.id, "waiting", "namespace")
    assert "moving" in row["reason"]
    await app.resume("default")
    assert (await handle.status()).state == "pending"


@pytest.mark.parametrize("style", PARAMSTYLES)
def test_a_statement_can_be_written_for_every_driver(style: str) -> None:
    @Interlock("postgresql://nowhere").task
    async def mail(to: str) -> None: ...

    sql, parameters = mail.options(delay=5, tags=["x"]).enqueue_statement("a").styled(style)
    assert len(parameters) == 19
    assert "::" not in sql  # which some would read as a parameter
    assert ("%(" in sql, ":delay" in sql, "?" in sql, ":17" in sql, "$17" in sql, "%s" in sql) == tuple(
        style == name for name in ("pyformat", "named", "qmark", "numeric", "dollar", "format")
    )
    values = parameters.values() if isinstance(parameters, dict) else parameters
    assert all(value is None or isinstance(value, str) for value in values)


async def test_a_statement_unpacks_and_answers_with_the_task(mail: Any, url: str) -> None:
    with psycopg.connect(url) as blocking:
        sql, parameters = mail.options(unique_key="k").enqueue_statement(to="a")
        ((id_, created),) = blocking.execute(sql, parameters).fetchall()
        assert blocking.execute(sql, parameters).fetchall() == [(id_, False)]
    assert created
    assert isinstance(id_, UUID)


@pytest.mark.parametrize("row_factory", [dict_row, tuple_row])
async def test_a_transactional_enqueue_commits_or_rolls_back(mail: Any, url: str, row_factory: Any) -> None:
    for keep in (True, False):
        async with await psycopg.AsyncConnection.connect(url, row_factory=row_factory) as mine:
            one = await mail.enqueue_with(mine, "a")
            many = await mail.enqueue_many([{"to": "b"}] * 60, connection=mine)
            with pytest.raises(UnknownTaskError, match="not committed yet"):
                await one.status()
            await (mine.commit() if keep else mine.rollback())
        with psycopg.connect(url, row_factory=row_factory) as blocking:
            other = mail.enqueue_with(blocking, "c")
            (blocking.commit if keep else blocking.rollback)()
        for handle in (one, many[-1], other):
            if keep:
                assert (await handle.status()).state == "pending"
            else:
                with pytest.raises(UnknownTaskError):
                    await handle.status()


async def test_another_driver_s_connection_is_refused_with_a_hint(mail: Any) -> None:
    with pytest.raises(TypeError, match="enqueue_statement"):
        mail.enqueue_with(object(), "a")


async def test_a_second_enqueue_of_a_unique_key_gives_the_first_task_and_says_so(app: Interlock, mail: Any) -> None:
    unique = mail.options(unique_key="order-1")
    handles = await asyncio.gather(*(unique.enqueue("a") for _ in range(50)))
    assert len({handle.id for handle in handles}) == 1
    assert sorted(handle.created for handle in handles) == [False] * 49 + [True]
    await handles[0].cancel()
    again = await unique.enqueue("a")
    assert again.created
    assert again.id != handles[0].id
    assert len(await app.find()) == 2


async def test_a_request_is_carried_out_once_even_after_its_task_has_ended(mail: Any) -> None:
    request = mail.options(request_id="r-1")
    handles = await asyncio.gather(*(request.enqueue("a") for _ in range(50)))
    await handles[0].cancel()
    late = await request.enqueue("a")
    assert {handle.id for handle in [*handles, late]} == {handles[0].id}
    assert sum(handle.created for handle in [*handles, late]) == 1


async def test_bulk_merges_like_one_by_one(app: Interlock, mail: Any, database: Connection) -> None:
    await declare_limit_keys(database, "l")
    first = await mail.options(unique_key="b").enqueue("b")
    tasks = [mail.options(unique_key=key).prepare(key) for key in "abcab"]
    handles = await app.enqueue_many([*tasks, mail.prepare("plain"), mail.options(**MERGING).prepare("all")])
    assert [handle.created for handle in handles] == [True, False, True, False, False, True, True]
    assert handles[0].id == handles[3].id
    assert handles[1].id == handles[4].id == first.id
    assert handles[6].id == MERGING["task_id"]
    assert [(await handle.status()).input["to"] for handle in handles] == ["a", "b", "c", "a", "b", "plain", "all"]


async def test_bulk_of_the_same_keys_at_once_neither_deadlocks_nor_doubles(app: Interlock, mail: Any) -> None:
    keys = [f"k{n}" for n in range(40)]

    async def enqueue(order: int) -> Sequence[Any]:
        wanted = keys if order % 2 else keys[::-1]
        return await app.enqueue_many(mail.options(unique_key=key).prepare(key) for key in wanted)

    made = [handle for handles in await asyncio.gather(*map(enqueue, range(8))) for handle in handles]
    assert sum(handle.created for handle in made) == len({handle.id for handle in made}) == 40


@pytest.mark.parametrize("count", [3, 120])
async def test_bulk_enqueue_obeys_limits_and_pause(app: Interlock, mail: Any, count: int, database: Connection) -> None:
    await app.pause("default", "moving house")
    await declare_limit_keys(database, "few")
    inputs = [{"to": "x"}] * count
    await mail.enqueue_many(inputs)
    await mail.options(namespace="other", limit_key="few").enqueue_many(inputs)
    one = [await mail.enqueue("x"), await mail.options(namespace="other", limit_key="few").enqueue("x")]
    like = [await handle.status() for handle in one]
    stored = {(row["state"], row["held_by"], row["reason"]) for row in await rows(database)}
    assert stored == {(status.state, status.held_by, status.reason) for status in like}
    assert {status.held_by for status in like} == {"namespace", "limit"}
    assert await app.resume("default") == count + 1


@pytest.mark.parametrize("count", [3, 200])
async def test_bulk_stores_all_or_none(app: Interlock, mail: Any, count: int) -> None:
    with pytest.raises(InputError, match="argument 'to'"):
        await mail.enqueue_many([*[{"to": "x"}] * count, {"to": 3}])
    with pytest.raises(InputError, match="must be a mapping"):
        await mail.enqueue_many([*[{"to": "x"}] * count, ["x"]])
    assert await app.find() == []
    handles = await mail.enqueue_many({"to": str(n)} for n in range(count))
    assert [handle.id for handle in handles] == sorted(handle.id for handle in handles)
    assert [(await handle.status()).input["to"] for handle in handles[-2:]] == [str(count - 2), str(count - 1)]
    assert await mail.enqueue_many([]) == []


async def test_handles_of_copied_tasks_are_made_as_they_are_asked_for(app: Interlock, mail: Any) -> None:
    @app.task
    async def number(value: int) -> None: ...

    given = [*(mail.prepare(str(n)) for n in range(40)), *(number.prepare(n) for n in range(40)), mail.prepare("last")]
    handles = await app.enqueue_many(given)
    assert len(handles) == 81
    assert [repr(handles[place]).split()[1] for place in (0, 39, 40, 79, 80, -1, -2, -81)] == (
        ["mail", "mail", "number", "number", "mail", "mail", "number", "mail"]
    )
    assert [(await handles[place].status()).input for place in (39, 40, -1)] == [
        {"to": "39"},
        {"value": 0},
        {"to": "last"},
    ]
    assert [handle.id for handle in handles[38:42]] == [handle.id for handle in list(handles)[38:42]]
    assert (handles[-1].created, repr(handles)) == (True, "<81 tasks>")
    with pytest.raises(IndexError):
        handles[81]
    with pytest.raises(IndexError):
        handles[-82]


async def test_a_delay_counts_from_the_server_s_time(mail: Any, database: Connection) -> None:
    later = mail.options(delay=timedelta(hours=1))
    await later.enqueue("one")
    await later.enqueue_many([{"to": "few"}])
    await later.enqueue_many([{"to": "copied"}] * 60)
    for row in await rows(database):
        assert row["run_at"] - row["created_at"] == timedelta(hours=1)


async def test_options_add_up_and_the_last_word_counts(mail: Any) -> None:
    task = mail.options(run_at=FUTURE, priority=1).options(delay=5, tags=["x"]).options(priority=2).prepare("a")
    assert (task.run_at, task.delay, task.priority, task.tags) == (None, timedelta(seconds=5), 2, ("x",))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"colour": "red"}, "unknown option: colour"),
        ({"run_at": FUTURE, "delay": 1}, "exclude each other"),
        ({"run_at": datetime(2040, 1, 1)}, "time zone"),  # noqa: DTZ001 - the point
        ({"delay": -1}, "delay must be"),
        ({"task_id": "7"}, "task_id must be a UUID"),
        ({"backoff": lambda _: 1}, "cannot be stored"),
        ({"unique_key": ""}, "unique_key must be a non-empty string"),
        ({"max_tries": True}, "max_tries must be a whole number"),
    ],
)
async def test_invalid_options_are_refused(mail: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=f"task mail: .*{told}"):
        mail.options(**options)


async def test_sql_enqueues_too(app: Interlock, mail: Any, database: Connection) -> None:
    statement = "select id, created from interlock.enqueue('mail', '{\"to\": \"a\"}', unique_key => 'k', priority => 3)"
    row = await (await database.execute(statement)).fetchone()
    assert row is not None
    status = await app.handle(row["id"]).status()
    assert (status.input, status.priority, status.state) == ({"to": "a"}, 3, "pending")
    assert not (await mail.options(unique_key="k").enqueue("b")).created


async def test_schedules_and_limits_are_stored_when_the_app_is_opened(url: str, database: Connection) -> None:
    app = Interlock(url)

    @app.periodic(every=60, missed="skip")
    @app.task(namespace="reports", limit_key="few")
    async def report(day: str = "today") -> None: ...

    app.limit("few", max_running=2, max_starts=10, per=timedelta(minutes=1))
    for _ in range(2):
        async with app:
            assert report.name == "report"
    (schedule,) = await (await database.execute("select * from interlock.schedules")).fetchall()
    (limit,) = await (await database.execute("select * from interlock.limits")).fetchall()
    assert (schedule["type"], schedule["namespace"], schedule["missed"]) == ("report", "reports", "skip")
    assert (schedule["every"], schedule["options"]["limit_keys"]) == (timedelta(seconds=60), ["few"])
    assert (limit["max_running"], limit["max_starts"], limit["period"]) == (2, 10, timedelta(minutes=1))
