"""Traces: one trace from the client through workers and orchestrators, links of batches, errors, and none when off."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import traced_app
from api_support import api_at
from factories import enqueue_by_sql
from interlock import InputError, Interlock, TaskFailedError
from interlock.config import Config
from interlock.tracing import parse_traceparent_header
from interlock.worker.run import serving
from interlock.worker.settings import WorkerSettings
from processes import clean_environment, eventually, running_process
from traced_app import as_document
from worker_support import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

Span = dict[str, Any]
GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Span]]:
    """Set a tracer provider for this test; return a function that reads the spans that have ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # the API allows to set one once
    return lambda: [as_document(span) for span in exporter.get_finished_spans()]


@pytest.fixture
async def app(url: str) -> AsyncIterator[Interlock]:
    """Open the traced app on the database of this test."""
    traced_app.app.config = Config(database_url=url)
    async with traced_app.app as opened:
        yield opened


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span["name"] == name]


def one(spans: list[Span], name: str) -> Span:
    (span,) = named(spans, name)
    return span


async def traceparents(database: Connection, table: str = "tasks") -> list[str | None]:
    rows = await (await database.execute(f"select traceparent from interlock.{table} order by id".encode())).fetchall()
    return [row["traceparent"] for row in rows]


def parts(traceparent: str | None) -> str:
    """Return trace and span of a traceparent."""
    assert traceparent is not None
    return traceparent[3:-3]


def identity(span: Span) -> str:
    return f"{span['trace']}-{span['span']}"


@contextmanager
def processes(url: str, file: Path) -> Iterator[None]:
    """Run a worker and an orchestrator, which write their spans to a file."""
    environment = clean_environment(url, SPANS=str(file), INTERLOCK_APP="traced_app:app")
    orchestrator = str(Path(traced_app.__file__))
    with (
        running_process([sys.executable, "-m", "interlock.worker"], environment),
        running_process([sys.executable, orchestrator], environment),
    ):
        yield


async def test_one_trace_leads_from_the_client_through_workers_and_orchestrators(
    url: str, tmp_path: Path, app: Interlock, spans: Callable[[], list[Span]]
) -> None:
    file = tmp_path / "spans.jsonl"
    with processes(url, file):
        job = await app.submit("chain")
        assert await asyncio.wait_for(job.result(), 90) == {"in_process": 3}

        def read() -> list[Span]:
            found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            return found if len(named(found, "settle")) == len(named(found, "advance")) == 3 else []

        others = await asyncio.to_thread(eventually, read)
    submitted = one(spans(), "submit chain")
    assert submitted["kind"] == "PRODUCER"
    assert submitted["attributes"]["messaging.message.id"] == str(job.id)
    assert {span["trace"] for span in others} == {submitted["trace"]}, "one trace"
    runs = [one(others, f"process {name}") for name in ("in_coroutine", "in_thread", "in_process")]
    for run, step in zip(runs, ("in_coroutine", "in_thread", "in_process"), strict=True):
        assert (run["kind"], run["parent"], run["links"]) == ("CONSUMER", submitted["span"], [identity(submitted)])
        assert run["attributes"]["messaging.system"] == "interlock"
        assert run["attributes"]["messaging.operation.type"] == "process"
        assert run["attributes"]["messaging.destination.name"] == "default"
        assert run["attributes"]["interlock.job.id"] == str(job.id)
        assert run["attributes"]["interlock.step"] == step
        assert run["attributes"]["interlock.outcome"] == "succeed"
    # the spans of handlers, wherever they run, are children of the run
    for run, name in zip(runs, ("of the coroutine", "of the thread", "of the process"), strict=True):
        assert one(others, name)["parent"] == run["span"]
    assert {span["parent"] for span in named(others, "settle")} == {run["span"] for run in runs}
    assert {span["parent"] for span in named(others, "claim")} == {submitted["span"]}
    assert {span["attributes"]["messaging.operation.type"] for span in named(others, "claim")} == {"receive"}
    for advanced in named(others, "advance"):
        assert (advanced["kind"], advanced["parent"]) == ("CONSUMER", submitted["span"])
        assert advanced["attributes"]["messaging.destination.name"] == "orchestration_step_results"
    worker, orchestrator = one(others, "process in_thread")["pid"], named(others, "advance")[0]["pid"]
    assert len({worker, orchestrator, one(others, "of the process")["pid"], os.getpid()}) == 4


async def test_batches_of_several_traces_have_a_link_to_each(app: Interlock, spans: Callable[[], list[Span]]) -> None:
    first, second = [await traced_app.released_together.enqueue() for _ in range(2)]
    async with serving(app, WorkerSettings(concurrency=10, duties=False)):
        await until(lambda: len(traced_app.started) == 2)
        traced_app.released.set()  # both outcomes are there before the settler runs
        await asyncio.wait_for(asyncio.gather(first.result(), second.result()), 60)
    producers = named(spans(), "enqueue released_together")
    assert len({span["trace"] for span in producers}) == 2, "no span was active"
    claim, settle = one(spans(), "claim"), one(spans(), "settle")
    runs = named(spans(), "process released_together")
    assert claim["parent"] is None
    assert sorted(claim["links"]) == sorted(map(identity, producers))
    assert claim["attributes"]["messaging.batch.message_count"] == 2
    assert settle["parent"] is None
    assert sorted(settle["links"]) == sorted(map(identity, runs))
    assert (claim["kind"], settle["kind"]) == ("CLIENT", "CLIENT")
    assert settle["attributes"]["messaging.operation.type"] == "settle"


async def test_errors_are_recorded_with_the_attempt(app: Interlock, spans: Callable[[], list[Span]]) -> None:
    failing, hanging = await traced_app.fails.enqueue(), await traced_app.hangs.enqueue()
    async with serving(app, WorkerSettings(concurrency=2, duties=False)):
        for handle in (failing, hanging):
            with pytest.raises(TaskFailedError):
                await asyncio.wait_for(handle.result(), 60)
    attempts = sorted(named(spans(), "process fails"), key=lambda span: int(span["attributes"]["interlock.attempt"]))
    assert [span["attributes"]["interlock.outcome"] for span in attempts] == ["retry", "fail"]
    for span in attempts:
        assert span["status"] == "ERROR"
        assert span["attributes"]["error.type"] == "KeyError"
        (event,) = span["events"]
        assert event["exception.type"] == "KeyError"
        assert "traced_app.py" in event["exception.stacktrace"]
    assert len({span["trace"] for span in attempts}) == 1, "a retry stays in the trace"
    assert one(spans(), "process hangs")["attributes"]["error.type"] == "TimeoutError"


async def test_every_way_to_enqueue_continues_the_active_trace(
    database: Connection, app: Interlock, spans: Callable[[], list[Span]]
) -> None:
    task = traced_app.in_coroutine
    with trace.get_tracer("client").start_as_current_span("request") as request:
        await task.enqueue()
        await task.enqueue_many([{}] * 60)  # by COPY
        await app.enqueue_many([task.prepare(), traced_app.fails.prepare()])
        await asyncio.to_thread(task.enqueue_sync)
        async with app.connection() as connection:
            await task.enqueue_with(connection)
            await connection.execute(*task.enqueue_statement())
            await connection.execute(*app.submit_statement("chain"))
        await app.submit("chain")
    found = spans()
    expected = f"{request.get_span_context().trace_id:032x}"
    assert {span["trace"] for span in found} == {expected}
    stored = [parts(each) for each in await traceparents(database)]
    assert len(stored) == 1 + 60 + 2 + 1 + 1 + 1 + 3
    assert {each[:32] for each in stored} == {expected}
    assert stored.count(identity(one(found, "enqueue"))) == 2
    many = [span for span in found if span["attributes"].get("messaging.batch.message_count") == 60]
    assert stored.count(identity(many[0])) == 60
    assert stored.count(identity(one(found, "request"))) == 1, "the statement continues the active span"
    assert identity(one(found, "request")) in map(parts, await traceparents(database, "jobs"))


async def test_a_given_traceparent_is_stored_and_continued(
    database: Connection, app: Interlock, spans: Callable[[], list[Span]]
) -> None:
    handle = await traced_app.in_coroutine.options(traceparent=GIVEN).enqueue()
    await enqueue_by_sql(database, type="in_coroutine", traceparent=GIVEN)
    assert await traceparents(database) == [GIVEN, GIVEN]
    async with serving(app, WorkerSettings(concurrency=2, duties=False)):
        await asyncio.wait_for(handle.result(), 60)
        await asyncio.to_thread(eventually, lambda: len(named(spans(), "process in_coroutine")) == 2)
    assert {span["trace"] for span in named(spans(), "process in_coroutine")} == {GIVEN[3:35]}
    assert {span["parent"] for span in named(spans(), "process in_coroutine")} == {GIVEN[36:52]}
    with pytest.raises(InputError, match="traceparent must be a W3C traceparent, such as 00-4bf9"):
        traced_app.in_coroutine.options(traceparent="00-zz")


MADE_BY_REQUESTS = (
    ("/api/tasks", {"type": "in_coroutine"}),
    ("/api/tasks/bulk", {"tasks": [{"type": "in_coroutine"}, {"type": "other"}]}),
    ("/api/jobs", {"workflow": "chain"}),
    ("/api/jobs/bulk", {"jobs": [{"workflow": "chain"}]}),
)


@pytest.mark.parametrize("traced", ["with a provider", ""])
async def test_tasks_and_jobs_of_a_request_continue_the_trace_of_its_header(
    url: str, database: Connection, app: Interlock, request: pytest.FixtureRequest, traced: str
) -> None:
    spans = request.getfixturevalue("spans") if traced else list
    async with api_at(url, app=app) as client:
        for path, body in MADE_BY_REQUESTS:
            answer = await client.post(path, json=body, headers={"traceparent": GIVEN})
            assert answer.status_code == 201, answer.text
    stored = [*await traceparents(database), *await traceparents(database, "jobs")]
    assert len(stored) == 3 + 2 * 3 + 2
    assert {(each or "")[:35] for each in stored} == {GIVEN[:35]}
    if traced:
        producers = [span["name"].split()[0] for span in spans() if span["kind"] == "PRODUCER"]
        assert producers == ["enqueue", "enqueue", "submit", "submit"]
        assert GIVEN[36:52] in {span["parent"] for span in spans()}
        assert GIVEN not in stored, "they continue the span of the supervisor"
    else:
        assert set(stored) == {GIVEN}


async def test_invalid_headers_and_those_of_untraced_apps_are_ignored(url: str, database: Connection) -> None:
    assert parse_traceparent_header([GIVEN]) == GIVEN
    assert parse_traceparent_header([f"cc{GIVEN[2:]}-what-the-future-will-be"]) == GIVEN
    invalid = [
        GIVEN.upper(),
        f"{GIVEN}-more",
        f"ff{GIVEN[2:]}",
        f"cc{GIVEN[2:]}.x",
        GIVEN[:-1],
        "00-" + "0" * 32 + GIVEN[35:],
    ]
    assert [parse_traceparent_header([text]) for text in invalid] == [None] * len(invalid)
    assert parse_traceparent_header([GIVEN, GIVEN]) is None
    async with api_at(url) as client:
        for header in (invalid[0], ""):
            answer = await client.post("/api/tasks", json={"type": "x"}, headers={"traceparent": header})
            assert answer.status_code == 201
    async with api_at(url, tracing=False) as client:
        await client.post("/api/tasks", json={"type": "x"}, headers={"traceparent": GIVEN})
    assert await traceparents(database) == [None, None, None]


async def test_a_stored_text_that_is_no_traceparent_starts_a_new_trace(
    database: Connection, app: Interlock, spans: Callable[[], list[Span]]
) -> None:
    await enqueue_by_sql(database, type="in_coroutine", traceparent="nonsense")
    async with serving(app, WorkerSettings(duties=False)):
        await asyncio.to_thread(eventually, lambda: named(spans(), "process in_coroutine"))
    assert one(spans(), "process in_coroutine")["parent"] is None


async def test_nothing_is_traced_with_the_setting_off(
    database: Connection, app: Interlock, spans: Callable[[], list[Span]]
) -> None:
    app.config = replace(app.config, tracing=False)
    handle = await traced_app.in_coroutine.enqueue()
    async with serving(app, WorkerSettings(duties=False)):
        await asyncio.wait_for(handle.result(), 60)
    assert [span["name"] for span in spans()] == ["of the coroutine"]
    assert await traceparents(database) == [None]


async def test_without_a_provider_nothing_is_stored(database: Connection, app: Interlock) -> None:
    assert app.tracer is None
    await traced_app.in_coroutine.enqueue()
    await traced_app.in_coroutine.enqueue_many([{}] * 60)
    await app.submit("chain")
    assert set(await traceparents(database)) | set(await traceparents(database, "jobs")) == {None}


@pytest.mark.cold  # a forked process has the imports of the fork server
def test_opentelemetry_is_not_imported_unless_the_application_does() -> None:
    code = "import sys, interlock.cli.run, interlock.worker.run; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
