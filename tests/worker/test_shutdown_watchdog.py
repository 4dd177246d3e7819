"""The watchdog: a process whose event loop is blocked by a handler still reacts to signals and ends in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest

from factories import enqueue, run_sql, task_state
from interlock.store.task_admin import recover_expired_tasks
from interlock.store.tasks import read_tasks
from processes import HELPERS, clean_environment, eventually, has_taken_signal, running_process
from worker_support import serving, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.postgres.connection import Connection

pytestmark = [pytest.mark.flow, pytest.mark.chaos]

# A worker whose handlers block in ways that a signal can and cannot interrupt; each says when it has begun to.
WORKER = """
import hashlib, sys, time
from interlock import Interlock
from interlock.telemetry import configure_logging
from interlock.worker import WorkerSettings, WorkerStateMachine

app = Interlock()

@app.task
async def sleep(seconds: float) -> None:
    print("blocked", flush=True)
    time.sleep(seconds)

@app.task
async def compute(seconds: float) -> None:
    print("blocked", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

@app.task
async def spin(seconds: float) -> None:
    print("blocked", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

configure_logging("info", "json", sys.stdout)
limit, lease = map(float, sys.argv[1:])
worker = WorkerStateMachine("watched", app, WorkerSettings(shutdown_limit=limit, lease=lease, duties=False))
"""

IN_A_THREAD = """
import threading

@app.task
async def leave() -> None:
    worker.request_shutdown()

thread = threading.Thread(target=worker.run)
thread.start()
thread.join()
"""


@contextmanager
def watched(url: str, limit: float, lease: float = 30) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WORKER + "worker.run()", str(limit), str(lease)]
    with running_process(command, clean_environment(url)) as process:
        yield process


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"it ended without {word!r}")


def last_words(output: str) -> dict[str, str]:
    said = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return next((line for line in said if line["message"] == "worker_killed_by_watchdog"), {})


@pytest.mark.parametrize("kind", ["sleep", "compute", "spin"])
async def test_a_blocked_worker_ends_at_its_limit(url: str, database: Connection, kind: str) -> None:
    task = await enqueue(database, kind, {"seconds": 3600})
    with watched(url, limit=2, lease=3) as process:
        read_until(process, "blocked")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        took = time.monotonic() - began
    assert process.returncode == 1
    assert took >= 2, "it has its time"
    killed = last_words(output)
    assert (killed["worker_id"], killed["level"]) == ("watched", "error")
    assert killed["reason"] == "the worker has not stopped within 2 s"
    assert killed["blocked_in"].startswith(f"{kind} (<string>:"), "whoever reads it learns what to mend"
    assert (await read_tasks(database, [task]))[0]["state"] == "running", "nothing was written"

    async def recovered() -> bool:
        return [found.id for found in await recover_expired_tasks(database, actor="me")] == [task]

    while not await recovered():
        assert time.monotonic() < began + 60


async def test_a_second_signal_to_a_blocked_worker_ends_it_in_a_moment(url: str, database: Connection) -> None:
    await enqueue(database, "sleep", {"seconds": 3600})
    with watched(url, limit=30) as process:
        read_until(process, "blocked")
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        eventually(lambda: has_taken_signal(process, signal.SIGINT))  # two signals at once are one
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert time.monotonic() - began < 25, "less than the limit"
    assert process.returncode == 1
    assert last_words(output)["reason"] == "a second signal came while the event loop was blocked"


async def test_a_worker_that_was_blocked_for_a_while_stops_in_good_order(url: str, database: Connection) -> None:
    task = await enqueue(database, "sleep", {"seconds": 3})
    with watched(url, limit=30) as process:
        read_until(process, "blocked")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert not last_words(output)
    stopped = [json.loads(line) for line in output.splitlines() if '"worker_stopped"' in line]
    assert stopped[0]["seconds"] >= 1, "the time counts from the signal, and not from when it was heard"
    assert (await read_tasks(database, [task]))[0]["state"] == "done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_idle_worker_stops_at_once_and_with_success(url: str, number: signal.Signals) -> None:
    with watched(url, limit=30) as process:
        read_until(process, "backing_off")
        began = time.monotonic()
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert time.monotonic() - began < 25, "less than the limit"
    assert process.returncode == 0
    assert not last_words(output)


async def test_the_watchdog_ignores_a_second_signal_if_not_blocked(url: str, database: Connection) -> None:
    task = await enqueue(database, "sleep", {"seconds": 0.01})
    with watched(url, limit=30) as process:
        eventually(lambda: task_state(url, task) == "done")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert not last_words(output)


def test_ctrl_c_ends_the_worker_command(url: str) -> None:
    environment = os.environ | {"INTERLOCK_DATABASE_URL": url, "PYTHONPATH": str(HELPERS)}
    with subprocess.Popen(
        [sys.executable, "-m", "interlock", "worker", "--app", "worker_app:app"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "backing_off" in line:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors


async def test_a_worker_beside_other_work_has_no_watchdog_and_leaves_signals_alone(url: str) -> None:
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    async with serving(url) as worker:
        await until(lambda: worker.context.connection)
        assert "interlock-watchdog" not in {thread.name for thread in threading.enumerate()}
        during = signal.set_wakeup_fd(before)
    assert during == before


def test_a_worker_in_a_thread_runs_without_signals(url: str) -> None:
    """Outside the main thread there are no signals to receive."""
    run_sql(url, "select interlock.enqueue('leave')")
    done = subprocess.run(
        [sys.executable, "-c", WORKER + IN_A_THREAD, "30", "30"],
        env=os.environ | {"INTERLOCK_DATABASE_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with psycopg.connect(url) as connection:
        assert connection.execute("select state from interlock.tasks").fetchall() == [("done",)]
