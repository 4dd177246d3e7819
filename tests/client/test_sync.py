"""The blocking facade: the same answers for code that is not async, from any thread, with and without an event loop."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from structlog.testing import capture_logs

import sync_app
from interlock import Interlock, SyncHandle, serving
from interlock.config import Config
from interlock.errors import InputError, MigrationError, StoreError, TaskFailedError
from interlock.orchestrator.run import orchestrating
from interlock.testing import drain
from interlock.worker.settings import WorkerSettings
from jobs_support import app_at as jobs_at
from processes import clean_environment, eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.store

WAIT_S = 60


@pytest.fixture
def app(url: str) -> Iterator[Interlock]:
    app = make_app(url)
    yield app
    app.sync.close()


def make_app(url: str) -> Interlock:
    app = Interlock(url, actor="django")

    @app.task
    def double(n: int) -> int:
        return n * 2

    @app.task(max_tries=1)
    def fail() -> None:
        raise ValueError("no")

    app.workflow("rest").sleep("nap", 0)
    return app


def sync_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "interlock-sync"]


# --- answers


def test_enqueue_and_wait_block_until_there_is_a_result(app: Interlock) -> None:
    handle = app.tasks["double"].options(priority=3).enqueue_sync(n=4)
    assert handle.created
    assert repr(handle) == f"<SyncHandle double {handle.id}>"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.wait, WAIT_S)
        app.sync.run(drain(app))
        assert waiting.result() == 8
    assert app.sync.handle(str(handle.id)).result() == 8
    assert handle.status().state == "done"
    assert [line.to_state for line in handle.history()] == ["pending", "running", "done"]
    assert app.sync.explain(handle.id).state == "done"


def test_errors_come_through_as_they_are(app: Interlock) -> None:
    with pytest.raises(InputError, match="argument 'n'"):
        app.tasks["double"].enqueue_sync(n="x")
    handle = app.tasks["fail"].enqueue_sync()
    with pytest.raises(TimeoutError):
        handle.wait(0.05)
    app.sync.run(drain(app))
    with pytest.raises(TaskFailedError, match="ValueError: no"):
        handle.wait()
    assert handle.requeue("again")
    assert handle.cancel("enough") == "canceled"


def test_bulk_and_operations_by_filter_block_too(app: Interlock) -> None:
    double = app.tasks["double"]
    handles = app.sync.enqueue_many(double, [{"n": n} for n in range(100)])
    assert all(isinstance(handle, SyncHandle) for handle in handles)
    (prepared,) = app.sync.enqueue_prepared([double.options(tags=["x"]).prepare(1)])
    assert len(app.sync.find(states=["pending"], limit=500)) == 101
    assert app.sync.cancel(tag="x", preview=True).count == 1
    assert app.sync.cancel(tag="x").count == 1
    assert app.sync.requeue(states=["canceled"]).count == 1
    assert prepared.status().state == "pending"
    assert app.sync.pause("default", "lunch") == 101
    assert app.sync.resume("default") == 101


def test_many_threads_share_one_background_thread(app: Interlock) -> None:
    before = len(sync_threads())
    with ThreadPoolExecutor(16) as pool:
        handles = list(pool.map(lambda n: app.tasks["double"].enqueue_sync(n=n), range(100)))
    assert len({handle.id for handle in handles}) == 100
    assert len(sync_threads()) == before + 1


def test_the_app_opens_with_the_first_call_and_again_after_close(app: Interlock) -> None:
    app.sync.close()
    for _ in range(2):
        assert app.sync.find() == []
        with app.sync as tasks:
            assert tasks.find() == []
        assert not app.is_open
        app.sync.close()
        assert not sync_threads()


def test_an_app_that_cannot_be_opened_leaves_no_thread_behind(make_database: Callable[[str], str]) -> None:
    app = make_app(make_database("template0"))
    for call in (app.sync.open, app.sync.find):
        with pytest.raises(MigrationError):
            call()
    assert not sync_threads()


# --- where blocking code runs


def use_everything(app: Interlock) -> None:
    """Do what blocking code does: enqueue, submit, wait. A worker and an orchestrator run elsewhere."""
    handle = app.tasks["double"].enqueue_sync(n=4)
    assert handle.wait(WAIT_S) == 8
    assert app.sync.submit("rest").wait(WAIT_S) == {"nap": None}
    assert app.sync.job(app.sync.submit("rest").id).wait(WAIT_S) == {"nap": None}


@asynccontextmanager
async def engine_at(url: str) -> AsyncIterator[None]:
    """Run a worker and an orchestrator for the tasks of `make_app`, on an app object of their own."""
    other = make_app(url)
    async with (
        orchestrating(Interlock(config=Config(database_url=url))),
        serving(other, WorkerSettings(concurrency=4)),
    ):
        yield


@pytest.fixture
def engine(url: str) -> Iterator[None]:
    """Run a worker and an orchestrator in a thread."""
    started, stopping = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        async with engine_at(url):
            started.set()
            await stopping.wait()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, run())
        assert started.wait(WAIT_S)
        yield
        loops[0].call_soon_threadsafe(stopping.set)
        running.result(WAIT_S)


@pytest.mark.usefixtures("engine")
def test_in_the_main_thread_without_a_loop(app: Interlock) -> None:
    use_everything(app)


@pytest.mark.usefixtures("engine")
def test_in_a_thread_without_a_loop(app: Interlock) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(use_everything, app).result(WAIT_S)


async def test_in_a_thread_while_the_app_is_open_in_another_loop(app: Interlock, url: str) -> None:
    async with app, engine_at(url):
        await asyncio.to_thread(use_everything, app)
        assert not sync_threads(), "it uses the connections of the open app"


@pytest.mark.usefixtures("engine")
async def test_in_a_coroutine_of_a_loop_that_does_not_have_the_app_open_it_works_and_warns_once(app: Interlock) -> None:
    with capture_logs() as logs:
        use_everything(app)
    warnings = [entry for entry in logs if entry["event"] == "event_loop_blocked"]
    assert len(warnings) == 1
    assert "await task.enqueue(...)" in warnings[0]["remedy"]
    with pytest.raises(StoreError, match=r"open in another event loop.*`async with app:`.*enqueue_sync"):
        await app.tasks["double"].enqueue(n=1)
    async with app:  # its own connections
        assert (await app.tasks["double"].enqueue(n=1)).created


async def test_in_a_coroutine_of_the_loop_of_the_app_it_is_refused_with_the_remedy(app: Interlock) -> None:
    async with app:
        handle = await asyncio.to_thread(app.tasks["double"].enqueue_sync, n=1)
        job = await asyncio.to_thread(app.sync.submit, "rest")
        calls: dict[str, Callable[[], Any]] = {
            "await task.enqueue": lambda: app.tasks["double"].enqueue_sync(n=1),
            "await app.submit": lambda: app.sync.submit("rest"),
            "await app.find": app.sync.find,
            "await handle.result": lambda: handle.wait(1),
            "await job.wait": lambda: job.wait(1),
        }
        for remedy, call in calls.items():
            with pytest.raises(StoreError, match=remedy):
                call()
        assert len(await app.find()) == 2


async def test_a_coroutine_in_another_loop_fails_at_once_with_the_remedy(app: Interlock) -> None:
    async with app:
        for call in (lambda: app.tasks["double"].enqueue(n=1), lambda: app.submit("rest"), app.find):
            with pytest.raises(StoreError, match=r"open in another event loop.*enqueue_sync"):
                await asyncio.to_thread(asyncio.run, call())


async def test_blocking_code_in_another_loop_uses_the_connections_of_the_open_app(app: Interlock) -> None:
    async def block() -> bool:
        return app.tasks["double"].enqueue_sync(n=1).created

    async with app:
        assert await asyncio.to_thread(asyncio.run, block())
        assert not sync_threads()


async def test_a_call_ends_when_the_loop_of_the_app_does(app: Interlock) -> None:
    """The server's loop stops without closing the app while a thread waits for a result."""
    loop = asyncio.new_event_loop()
    server = threading.Thread(target=loop.run_forever, daemon=True)
    server.start()
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(app.open(), loop))
    handle = await asyncio.to_thread(app.tasks["double"].enqueue_sync, n=1)
    waiting = asyncio.create_task(asyncio.to_thread(handle.wait))
    completions = app._opened[loop].completions  # noqa: SLF001 - to see that the wait has begun
    while not completions._futures:  # noqa: SLF001 - the same
        await asyncio.sleep(0.01)
    loop.call_soon_threadsafe(loop.stop)
    with pytest.raises(StoreError, match="ended before the call did"):
        await asyncio.wait_for(waiting, WAIT_S)
    server.join()
    assert (await asyncio.to_thread(handle.status)).state == "pending", "the next call opens the app again"
    await asyncio.to_thread(_close_in, loop, app)


def _close_in(loop: asyncio.AbstractEventLoop, app: Interlock) -> None:
    loop.run_until_complete(app.close())
    loop.close()


@pytest.mark.parametrize("kind", ["in_thread", "in_process"])
async def test_in_a_handler_of_a_worker(url: str, kind: str) -> None:
    """A child process gets the worker's database: neither its environment nor its app names one."""
    sync_app.app.config = Config(database_url=url)
    settings = WorkerSettings(concurrency=4, processes=1)
    async with orchestrating(jobs_at(url)), sync_app.app, serving(sync_app.app, settings):
        handle = await sync_app.app.tasks[kind].enqueue(n=4)
        assert await handle.result(WAIT_S) == [8, {"nap": None}]
        assert {task.type for task in await sync_app.app.find()} >= {kind, "double"}


async def test_in_an_endpoint_that_is_not_async(app: Interlock, url: str) -> None:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with app:
            yield

    api = FastAPI(lifespan=lifespan)

    @api.get("/double")
    def double(n: int) -> dict[str, Any]:
        job = app.sync.submit("rest")
        return {"n": app.tasks["double"].enqueue_sync(n=n).wait(WAIT_S), "job": job.wait(WAIT_S)}

    server = uvicorn.Server(uvicorn.Config(api, port=0, log_level="warning"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with engine_at(url), httpx.AsyncClient(timeout=WAIT_S) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/double?n=4")
    assert answer.json() == {"n": 8, "job": {"nap": None}}
    server.should_exit = True
    await running


# --- whole processes


def script(path: Path, url: str, text: str) -> subprocess.Popen[str]:
    file = path / "script.py"
    head = "import asyncio, os, sys\nfrom sync_app import app, double\n"
    file.write_text(head + textwrap.dedent(text))
    environment = clean_environment(url, PYTHONWARNINGS="error")
    return subprocess.Popen(
        [sys.executable, file], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")
    return out


@pytest.mark.usefixtures("engine")
def test_in_a_script_that_opens_and_closes_nothing(tmp_path: Path, url: str) -> None:
    assert output(script(tmp_path, url, "print(double.enqueue_sync(n=4).wait(60))")) == "8\n"


def test_a_script_on_the_embedded_server_leaves_nothing_running(tmp_path: Path, embedded_dir: Path) -> None:
    text = f"""
    from pathlib import Path
    from interlock.config import Config
    app.config = Config(data_dir=Path({str(embedded_dir / "db")!r}))
    print(double.enqueue_sync(n=4).status().state)
    """
    assert output(script(tmp_path, "postgresql://unused", text)) == "pending\n"
    assert not (embedded_dir / "db" / "postmaster.pid").exists()


@pytest.mark.usefixtures("engine")
def test_in_a_script_before_and_after_it_has_a_loop(tmp_path: Path, url: str) -> None:
    text = """
    print(double.enqueue_sync(n=1).wait(60))

    async def main():
        async with app:
            print(await (await double.enqueue(n=2)).result(60))

    asyncio.run(main())
    print(double.enqueue_sync(n=3).wait(60))
    """
    assert output(script(tmp_path, url, text)) == "2\n4\n6\n"


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("opened", ["in_background", "in_loop"])
def test_after_a_fork_the_child_connects_by_itself(tmp_path: Path, url: str, opened: str) -> None:
    text = """
    handle = double.enqueue_sync(n=1)

    def fork():
        child = os.fork()
        if child == 0:
            print(handle.wait(60), double.enqueue_sync(n=2).wait(60), app.sync.submit("rest").wait(60), flush=True)
            app.sync.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    async def in_loop():
        async with app:
            await asyncio.to_thread(fork)
            print(await (await double.enqueue(n=3)).result(60))

    def in_background():
        fork()
        print(double.enqueue_sync(n=3).wait(60))

    """
    call = "asyncio.run(in_loop())" if opened == "in_loop" else "in_background()"
    assert output(script(tmp_path, url, f"{textwrap.dedent(text)}\n{call}")) == "2 4 {'nap': None}\n6\n"


def test_ctrl_c_ends_a_wait_and_the_process(tmp_path: Path, url: str) -> None:
    process = script(tmp_path, url, "handle = double.enqueue_sync(n=1)\nprint('waits', flush=True)\nhandle.wait()")
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    app = make_app(url)

    def waits() -> bool:
        return bool(app.sync.run(_count_waiters(app)))

    eventually(waits)
    app.sync.close()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "never" not in err
    assert process.returncode == -signal.SIGINT


async def _count_waiters(app: Interlock) -> int:
    async with app.connection() as connection:
        cursor = await connection.execute("select count(*) as count from interlock.waiters")
        row = await cursor.fetchone()
        return 0 if row is None else int(row["count"])
