"""Submitting in other people's transactions: `interlock.submit(...)` in SQL and `app.submit_statement()`."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from factories import step, workflow
from interlock import Interlock, JobState
from interlock.config import Config
from interlock.errors import InputError, JobFailedError
from interlock.postgres.query import PARAMSTYLES
from interlock.store.workflows import put_workflow
from jobs_support import manual_worker_at, orchestrator_at

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

READ = "select id, created from interlock.submit({}) as made"


async def submit_by_sql(database: Connection, *values: Any, **named: Any) -> tuple[UUID, bool]:
    arguments = ", ".join([*["%s"] * len(values), *(f"{name} => %s" for name in named)])
    cursor = await database.execute(READ.format(arguments).encode(), [*values, *named.values()])
    (row,) = await cursor.fetchall()
    return row["id"], row["created"]


async def test_a_job_of_an_sql_transaction_runs_after_its_commit(
    url: str, jobs: Interlock, database: Connection
) -> None:
    async with orchestrator_at(url), manual_worker_at(database):
        with psycopg.connect(url) as own:
            (id_, created) = own.execute("select * from interlock.submit('chain', '{\"n\": 1}')").fetchall()[0]
            assert created
            assert await jobs.find_jobs() == [], "not before the commit"
            own.commit()
        job = jobs.job(id_)
        assert await job.wait(30) == {"third": "third"}
        history = await job.history()
    events = ["create", "validate", "allocate_resources", "success"]
    assert [record.event for record in history] == events
    assert (await job.status()).input == {"n": 1}
    assert history[0].actor == "interlock", "the role of the session"


async def test_a_job_of_a_transaction_that_is_rolled_back_does_not_exist(url: str, jobs: Interlock) -> None:
    with psycopg.connect(url) as own:
        own.execute(*jobs.submit_statement("chain", request_id="r"))
        own.rollback()
    assert await jobs.find_jobs() == []
    assert (await jobs.submit("chain", request_id="r")).created


async def test_an_invalid_input_fails_the_job_with_the_reason(url: str, jobs: Interlock, database: Connection) -> None:
    id_, _ = await submit_by_sql(database, "strict", '{"order": "x"}')
    assert (await jobs.job(id_).status()).status == JobState.SUBMITTED
    async with orchestrator_at(url):
        with pytest.raises(JobFailedError, match=r"workflow strict: input\.order: must be of type integer"):
            await jobs.job(id_).wait(30)
    history = await jobs.job(id_).history()
    assert [(record.to_state, record.event) for record in history] == [("SUBMITTED", "create"), ("FAILED", "reject")]


async def test_without_a_worker_the_job_is_pending_with_the_reason(
    url: str, jobs: Interlock, database: Connection
) -> None:
    id_, _ = await submit_by_sql(database, "chain")
    async with orchestrator_at(url), asyncio.timeout(30):
        while (status := await jobs.job(id_).status()).status != JobState.PENDING:
            await asyncio.sleep(0.01)
    assert status.reason == "no live worker serves namespace 'default'"
    assert len(await jobs.job(id_).steps()) == 3


async def test_wrong_calls_are_refused_by_the_database(jobs: Interlock, database: Connection) -> None:
    async def refusal(*values: Any, **named: Any) -> tuple[str, str]:
        with pytest.raises(psycopg.Error) as refused:
            await submit_by_sql(database, *values, **named)
        return str(refused.value.sqlstate), str(refused.value.diag.message_primary)

    code, message = await refusal("nothing")
    assert code == "IL009"
    assert message.startswith("there is no workflow nothing; known are ")
    assert "chain" in message
    assert (await refusal("chain", version="9"))[1].startswith("there is no workflow chain version 9")
    assert await refusal("chain", "[]") == ("IL009", "workflow chain: input must be a JSON object")
    assert (await refusal("chain", on_conflict="queue"))[0] == "IL009"
    first, _ = await submit_by_sql(database, "chain", key="k", request_id="r")
    conflict = f"workflow chain: job {first} has the key 'k' and has not ended"
    assert await refusal("chain", key="k", on_conflict="reject") == ("IL008", conflict)
    code, message = await refusal("chain", '{"n": 1}', key="k", request_id="r")
    assert (code, f"for job {first} with another input" in message) == ("IL007", True)
    assert await submit_by_sql(database, "chain", key="k", request_id="r") == (first, False)
    assert await submit_by_sql(database, "chain", key="k", on_conflict="return_existing") == (first, False)
    assert len(await jobs.find_jobs()) == 1


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"request_id": " "}, "request_id must be a non-empty string"),
        ({"key": ""}, "key must be a non-empty string"),
        ({"key": "k", "on_conflict": "maybe"}, "on_conflict must be one of reject, return_existing"),
        ({"key": "k", "debounce": "-1 s"}, "debounce must be greater than 0"),
        ({"key": "k", "debounce": "1 s", "debounce_max": "0 s"}, "debounce_max must be greater than 0"),
        ({"worker_count": 11}, "worker_count must be from 1 to 10, got 11"),
        ({"timeout_seconds": 0}, "timeout_seconds must be greater than 0"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds must be greater than 0"),
        ({"tags": ["a", ""]}, "each of the tags must be a non-empty string"),
        ({"tags": ["a", None]}, "each of the tags must be a non-empty string"),
        ({"tags": [str(number) for number in range(101)]}, "tags must be at most 100, got 101"),
        ({"attributes": "[]"}, "attributes must be a JSON object"),
        ({"attributes": '{"a": [1]}'}, "attributes must be a flat object"),
        ({"attributes": '{"a": null}'}, "attributes must be a flat object"),
        ({"callback_url": "ftp://x"}, "callback_url must be an http or https URL"),
        ({"callback_url": "http://a b"}, "callback_url must be an http or https URL"),
    ],
)
async def test_sql_refuses_the_options_that_python_refuses(
    jobs: Interlock, database: Connection, options: dict[str, Any], fault: str
) -> None:
    with pytest.raises(psycopg.Error) as refused:
        await submit_by_sql(database, "chain", **options)
    assert refused.value.sqlstate == "IL009"
    assert str(refused.value.diag.message_primary).startswith(f"workflow chain: {fault}")
    assert await jobs.find_jobs() == []


async def test_a_signal_is_kept_for_a_job_that_waits_to_be_validated(url: str, database: Connection) -> None:
    await put_workflow(database, workflow(step("go", kind="signal", signal="go"), name="signaled"))
    app = Interlock(config=Config(database_url=url))
    async with app:
        id_, _ = await submit_by_sql(database, "signaled")
        job = app.job(id_)
        assert await job.signal("go", 7) == "sent"
        with pytest.raises(InputError, match="it waits for go"):
            await job.signal("stop")
        async with orchestrator_at(url), manual_worker_at(database):
            assert await job.wait(30) == {"go": 7}


async def test_a_statement_stores_what_app_submit_stores(url: str, jobs: Interlock) -> None:
    options: Any = {
        "request_id": "r",
        "worker_count": 3,
        "timeout": 60,
        "tags": ["a", 'b"c'],
        "attributes": {"customer": "x", "n": 1},
        "callback_url": "https://example.org/hook",
        "key": "k",
        "on_conflict": "reject",
        "debounce": 5,
        "debounce_max": 60,
        "correlation_id": "01a1ec91-00f5-77f6-a389-2863fc05cdda",
    }
    sql, parameters = jobs.submit_statement("chain", {"n": 7}, **options)
    with psycopg.connect(url) as own:
        (id_, created) = own.execute(sql, parameters).fetchall()[0]
    assert created
    stored = await jobs.job(id_).status()
    await jobs.job(id_).cancel()
    expected = await (await jobs.submit("chain", {"n": 7}, **{**options, "request_id": "s"})).status()
    left_out = ("id", "request_id", "status", "reason", "deadline_at", "created_at", "updated_at")
    for name in (name for name in stored.__slots__ if name not in left_out):
        assert getattr(stored, name) == getattr(expected, name), name
    assert (stored.status, expected.status) == (JobState.SUBMITTED, JobState.SUBMITTED)


@pytest.mark.parametrize("style", PARAMSTYLES)
async def test_a_statement_is_written_in_every_paramstyle(jobs: Interlock, style: str) -> None:
    sql, parameters = jobs.submit_statement("chain", {"n": 1}, tags=["x"], key="k").styled(style)
    names = list(jobs.submit_statement("chain").parameters)
    marks = [PARAMSTYLES[style](str(name), place) for place, name in enumerate(names, 1)]
    assert all(mark in sql for mark in marks)
    values = list(parameters.values()) if isinstance(parameters, dict) else list(parameters)
    assert len(values) == len(names)
    assert all(value is None or isinstance(value, str) for value in values)


async def test_a_statement_runs_as_the_frameworks_run_it(url: str, jobs: Interlock) -> None:
    django = jobs.submit_statement("chain", {"n": 1}, request_id="r", key="k", tags=["x"])
    # text() of SQLAlchemy replaces :name by the parameter style of the driver, here pyformat
    named, parameters = django.styled("named")
    sqlalchemy = re.sub(r"(?<![:\w]):(\w+)", r"%(\1)s", named)
    positional, values = django.styled("format")
    with psycopg.connect(url) as own, own.cursor() as cursor:
        found = [
            cursor.execute(sql, given).fetchall()
            for sql, given in (tuple(django), (sqlalchemy, parameters), (positional, values))
        ]
    (id_, created), *again = (row for rows in found for row in rows)
    assert created
    assert again == [(id_, False)] * 2


async def test_the_sql_of_the_guide_runs_as_printed(jobs: Interlock, database: Connection) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```sql\n(.*?)```", guide, flags=re.DOTALL)
    await put_workflow(database, workflow(step("a"), name="order_fulfillment"))
    (made,) = await (await database.execute(block.encode())).fetchall()
    status = await jobs.job(made["id"]).status()
    assert (made["created"], status.workflow, status.key) == (True, "order_fulfillment", "customer-7")


async def test_a_statement_is_checked_when_it_is_made(url: str, jobs: Interlock) -> None:
    with pytest.raises(InputError, match=r"input\.order"):
        jobs.submit_statement("strict", {"order": "x"})
    with pytest.raises(InputError, match="worker_count must be"):
        jobs.submit_statement("chain", worker_count=0)
    with pytest.raises(InputError, match="a submit_statement takes no parent"):
        jobs.submit_statement("chain", parent="01a1ec91-00f5-77f6-a389-2863fc05cdda")
    other = Interlock(config=Config(database_url=url))
    with pytest.raises(InputError, match="must be a JSON object"):
        other.submit_statement("elsewhere", [1])
    assert "elsewhere" in dict(other.submit_statement("elsewhere").parameters).values()
