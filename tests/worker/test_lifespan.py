"""The lifespan of an app and the dependencies of its handlers, in real worker processes."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

import resources_app
from factories import enqueue, task_row, task_state
from interlock import DefinitionError, Depends, Interlock, serving
from interlock.config import Config
from interlock.errors import LifespanError
from interlock.lifecycle import WorkerState
from processes import eventually
from worker_support import until, worker_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from subprocess import Popen

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


def noted(notes: Path) -> list[tuple[str, str]]:
    """List what the app noted, each with the id of the process."""
    text = notes.read_text(encoding="utf-8") if notes.exists() else ""
    return [(pid, what) for pid, _, what in (line.partition(" ") for line in text.splitlines())]


def lines(notes: Path) -> list[str]:
    return [what for _, what in noted(notes)]


def resources_process(url: str, notes: Path, **variables: str) -> AbstractContextManager[Popen[str]]:
    return worker_process(url, INTERLOCK_APP="resources_app:app", RESOURCES_LOG=str(notes), **variables)


def stop(process: Popen[str]) -> tuple[int, str]:
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


async def test_the_lifespan_starts_before_the_first_claim_and_stops_after_the_last_task(
    url: str, database: Connection, notes: Path
) -> None:
    task = await enqueue(database, "block", {"seconds": 1})
    with resources_process(url, notes) as process:
        eventually(lambda: "block" in lines(notes))
        code, output = stop(process)
    assert code == 0, output
    assert lines(notes) == ["start, app open: True", "block", "block ended", "stop"]
    assert task_state(url, task) == "done"


async def test_a_failing_start_stops_the_worker_before_it_claims_and_names_the_line(
    url: str, database: Connection, notes: Path
) -> None:
    task = await enqueue(database, "block", {"seconds": 1})
    with resources_process(url, notes, FAIL_AT_START="1") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    last = output.splitlines()[-1]
    assert "the lifespan of the app failed at" in last
    source = inspect.getsource(resources_app).splitlines()
    (line,) = [number for number, text in enumerate(source, 1) if "raise ConnectionRefusedError" in text]
    assert f"resources_app.py:{line}" in last
    assert "ConnectionRefusedError: no cache server" in last
    assert task_state(url, task) == "pending"
    assert (await task_row(database, task))["attempt"] == 0


@pytest.mark.usefixtures("database")
async def test_a_start_that_hangs_is_canceled_by_a_signal(url: str, notes: Path) -> None:
    with resources_process(url, notes, HANG_AT_START="1") as process:
        eventually(lambda: lines(notes))
        code, output = stop(process)
    assert code == 0, output
    assert lines(notes) == ["start, app open: True"]


@pytest.mark.usefixtures("database")
async def test_a_failing_stop_is_logged_and_the_worker_ends_as_usual(url: str, notes: Path) -> None:
    with resources_process(url, notes, FAIL_AT_STOP="1") as process:
        eventually(lambda: lines(notes))
        eventually(lambda: process.poll() is None)
        code, output = stop(process)
    assert code == 0, output
    entries = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    (failed,) = [entry for entry in entries if entry["message"] == "lifespan_failed"]
    assert (failed["phase"], failed["error"], failed["level"]) == ("stop", "RuntimeError: cannot stop", "error")
    assert "resources_app.py" in failed["exception"].splitlines()[1]


async def test_a_stop_that_hangs_is_cut_off_within_the_limit_of_the_shutdown(url: str, database: Connection) -> None:
    del database
    reached: list[str] = []

    async def hang() -> AsyncIterator[int]:
        yield 1
        reached.append("cleanup")
        await asyncio.sleep(3600)

    @asynccontextmanager
    async def lifespan(_: Interlock) -> AsyncIterator[None]:
        yield
        reached.append("stop")
        await asyncio.sleep(3600)

    app = Interlock(url, lifespan=lifespan)

    @app.task
    async def use(value: int = Depends(hang, scope="worker")) -> int:
        return value

    with capture_logs() as logs:
        async with asyncio.timeout(60), app, serving(app, duties=False, shutdown_limit=2, grace=0.5):
            assert await (await use.enqueue()).result(timeout=30) == 1
    assert reached == ["cleanup", "stop"]
    assert {"dependency_cleanup_timed_out", "lifespan_stop_timed_out"} <= {entry["event"] for entry in logs}


async def test_the_block_of_a_served_app_begins_after_the_start_of_the_lifespan(url: str, database: Connection) -> None:
    del database
    order: list[str] = []

    @asynccontextmanager
    async def lifespan(_: Interlock) -> AsyncIterator[None]:
        await asyncio.sleep(0.05)
        order.append("started")
        yield
        order.append("stopped")

    app = Interlock(url, lifespan=lifespan)
    async with asyncio.timeout(60), app, serving(app, duties=False) as worker:
        order.append("block")
        assert worker.state in {WorkerState.RECOVERING, WorkerState.RUNNING}
    assert order == ["started", "block", "stopped"]


async def test_a_served_app_whose_lifespan_fails_raises_before_the_block(url: str, database: Connection) -> None:
    del database
    begun: list[str] = []

    @asynccontextmanager
    async def lifespan(_: Interlock) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        raise ConnectionRefusedError("no cache server")
        yield

    app = Interlock(url, lifespan=lifespan)
    with pytest.raises(LifespanError, match="no cache server"):
        async with asyncio.timeout(60), app, serving(app, duties=False):
            begun.append("block")
    assert begun == []


async def test_a_cancellation_during_the_start_stops_the_lifespan(url: str, database: Connection) -> None:
    del database
    order: list[str] = []
    starting = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: Interlock) -> AsyncIterator[None]:
        starting.set()
        try:
            await asyncio.sleep(3600)
        finally:
            order.append("cleaned up")
        yield

    app = Interlock(url, lifespan=lifespan)

    async def serve() -> None:
        async with app, serving(app, duties=False):
            order.append("block")

    async with asyncio.timeout(60):
        served = asyncio.create_task(serve())
        await starting.wait()
        served.cancel()
        with pytest.raises(asyncio.CancelledError):
            await served
    assert order == ["cleaned up"]


async def test_a_lifespan_that_yields_a_value_or_is_no_context_manager_is_refused(url: str) -> None:
    @asynccontextmanager
    async def yields_state(_: Interlock) -> AsyncIterator[dict[str, int]]:
        yield {"pool": 1}

    async def no_manager(_: Interlock) -> None: ...

    app = Interlock(url, lifespan=yields_state)  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(LifespanError, match=r"test_lifespan\.py:\d+ yields .* must yield nothing"):
        async with asyncio.timeout(60), app, serving(app, duties=False):
            pytest.fail("the block began")
    with pytest.raises(
        DefinitionError, match=r"lifespan no_manager must be an async function that yields once.*py:\d+"
    ):
        Interlock(lifespan=no_manager)  # type: ignore[arg-type]  # what the test is about


async def test_dependencies_are_made_per_attempt_or_once_per_process_and_cleaned_up(
    url: str, database: Connection, notes: Path
) -> None:
    tasks = [await enqueue(database, "use_session", {"number": number}) for number in range(2)]
    with resources_process(url, notes) as process:
        eventually(lambda: all(task_state(url, task) == "done" for task in tasks))
        code, output = stop(process)
    assert code == 0, output
    assert [(await task_row(database, task))["output"] for task in tasks] == [
        "pool/session eu 0",
        "pool/session eu 1",
    ]
    session = ["open session 1", "close session"]
    assert lines(notes) == ["start, app open: True", "open pool", *session, *session, "close pool", "stop"]


async def test_the_error_of_a_handler_reaches_the_generators_and_stays_the_outcome(
    url: str, database: Connection, notes: Path
) -> None:
    task = await enqueue(database, "use_session", {"number": 1, "fail": True}, max_tries=1)
    with resources_process(url, notes) as process:
        eventually(lambda: task_state(url, task) == "error")
        stop(process)
    assert (await task_row(database, task))["error"]["message"] == "no"
    assert lines(notes)[2:5] == ["open session 1", "roll back", "close session"]


async def test_handlers_in_threads_and_processes_get_dependencies_of_their_own_process(
    url: str, database: Connection, notes: Path
) -> None:
    in_thread = await enqueue(database, "use_in_thread", {"number": 1})
    with resources_process(url, notes) as process:
        eventually(lambda: task_state(url, in_thread) == "done")
        in_process = [await enqueue(database, "use_in_process", {"number": number}) for number in range(2)]
        eventually(lambda: all(task_state(url, task) == "done" for task in in_process))
        code, output = stop(process)
    assert code == 0, output
    assert (await task_row(database, in_thread))["output"] == "pool/session eu 1"
    assert (await task_row(database, in_process[1]))["output"] == "pool/session eu 1"
    by_process: dict[str, list[str]] = {}
    for pid, what in noted(notes):
        by_process.setdefault(pid, []).append(what)
    worker = by_process.pop(str(process.pid))
    assert worker == ["start, app open: True", "open pool", "open session 1", "close session", "close pool", "stop"]
    for child in by_process.values():  # one or two, without a lifespan
        assert child[0] == "open pool"
        assert child[-1] == "close pool"
        assert child.count("open pool") == child.count("close pool") == 1
    assert sum(child.count("close session") for child in by_process.values()) == 2


async def test_the_traceback_of_a_failing_provider_begins_with_the_provider(
    url: str, database: Connection, notes: Path
) -> None:
    providers = {
        "use_failing_async": "fail_async",
        "use_failing_kept": "fail_async",
        "use_failing_blocking": "fail_blocking",
        "use_failing_plainly": "fail_plainly",
        "use_failing_in_process": "fail_blocking",
    }
    tasks = {type_: await enqueue(database, type_, {}, max_tries=1) for type_ in providers}
    with resources_process(url, notes) as process:
        eventually(lambda: all(task_state(url, task) == "error" for task in tasks.values()))
        _, output = stop(process)
    entries = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    first_frames = {
        entry["task_type"]: entry["exception"].splitlines()[1] for entry in entries if entry["message"] == "task_failed"
    }
    assert first_frames.keys() == providers.keys()
    for type_, provider in providers.items():
        assert "resources_app.py" in first_frames[type_]
        assert first_frames[type_].endswith(f"in {provider}")


async def test_an_error_in_a_cleanup_is_logged_and_changes_no_outcome(url: str, database: Connection) -> None:
    task = await enqueue(database, "use_broken_cleanup", {}, max_tries=1)
    here = Interlock(config=Config(database_url=url))
    here._tasks.update(resources_app.app.tasks)  # noqa: SLF001 - the same tasks, another place
    with capture_logs() as logs:
        async with serving(here, duties=False):
            await until(lambda: task_state(url, task) == "done")
    (failed,) = [entry for entry in logs if entry["event"] == "dependency_cleanup_failed"]
    assert failed["error"] == "RuntimeError: cannot clean up"
    assert "resources_app.py" in failed["provider"]
