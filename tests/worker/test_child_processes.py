"""Processes that handlers start by themselves: they end with their worker, and their signals are their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from factories import enqueue, task_state
from interlock.process_groups import Descendants
from processes import clean_environment, eventually, is_process_running, running_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

WORKER = """
import asyncio, os, signal, subprocess, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from interlock import Interlock
from interlock.telemetry import configure_logging
from interlock.worker import WorkerSettings, WorkerStateMachine

app = Interlock()
pool = ProcessPoolExecutor(2, get_context("fork"))

@app.task
async def compute_in_coroutine() -> None:
    print("started", await asyncio.get_running_loop().run_in_executor(pool, os.getpid), flush=True)

@app.task
def compute_in_thread() -> None:
    print("started", pool.submit(os.getpid).result(), flush=True)

@app.task
async def leave_a_stubborn_process() -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    process.stdout.readline()
    print("started", process.pid, flush=True)

@app.task
async def detach_a_process() -> None:
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(["sleep", "3600"], stdout=nowhere, stderr=nowhere, start_new_session=True)
    print("started", process.pid, flush=True)

configure_logging("warning", "json", sys.stdout)
worker = WorkerStateMachine("parent", app, WorkerSettings(duties=False))
worker.run()
"""


@contextmanager
def parent(url: str) -> Iterator[subprocess.Popen[str]]:
    with running_process([sys.executable, "-c", WORKER], clean_environment(url)) as process:
        yield process


def started_child(process: subprocess.Popen[str]) -> int:
    """Read the id of the process that a handler started."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("started"):
            return int(line.split()[1])
    raise AssertionError("it ended without a child")


@pytest.mark.parametrize("kind", ["compute_in_coroutine", "compute_in_thread", "leave_a_stubborn_process"])
async def test_a_worker_ends_the_processes_that_its_handlers_left(url: str, database: Connection, kind: str) -> None:
    task = await enqueue(database, kind)
    with parent(url) as process:
        child = started_child(process)
        eventually(lambda: task_state(url, task) == "done")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0, "the watchdog would end it with 1"
    assert not is_process_running(child)


async def test_a_process_in_a_session_of_its_own_outlives_the_worker(url: str, database: Connection) -> None:
    await enqueue(database, "detach_a_process")
    with parent(url) as process:
        child = started_child(process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert is_process_running(child)
    os.kill(child, signal.SIGKILL)


async def test_a_signal_to_a_forked_process_is_none_to_its_worker(url: str, database: Connection) -> None:
    await enqueue(database, "compute_in_thread")
    with parent(url) as process:
        child = started_child(process)
        os.kill(child, signal.SIGINT)
        os.kill(child, signal.SIGTERM)
        eventually(lambda: not is_process_running(child))
        later = await enqueue(database, "detach_a_process")
        os.kill(started_child(process), signal.SIGKILL)
        eventually(lambda: task_state(url, later) == "done")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.unit
def test_descendants_are_ended_but_not_those_from_before_or_of_other_sessions() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
    before = subprocess.Popen(sleep)
    descendants = Descendants()
    # A shell that waits for a process of its own: both are descendants.
    ours = subprocess.Popen(["/bin/sh", "-c", "sleep 3600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    detached = subprocess.Popen(sleep, start_new_session=True)
    try:
        assert ours.stdout is not None
        grandchild = int(ours.stdout.readline())
        assert descendants.end(grace=10) == sorted([ours.pid, grandchild])
        assert ours.wait(10) in {-signal.SIGTERM, 0}, "the shell may see the end of its child first"
        eventually(lambda: not is_process_running(grandchild))
        assert (before.poll(), detached.poll()) == (None, None)
    finally:
        for process in (before, ours, detached):
            process.kill()
            process.communicate()
