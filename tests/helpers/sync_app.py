"""An app whose handlers and scripts are blocking code that enqueues, submits and waits."""

from __future__ import annotations

from typing import Any

from interlock import Interlock

app = Interlock()
app.workflow("rest").sleep("nap", 0)

WAIT_S = 60


@app.task
def double(n: int) -> int:
    return n * 2


def enqueue_and_submit(n: int) -> list[Any]:
    handle = double.enqueue_sync(n=n)
    job = app.sync.submit("rest")
    return [handle.wait(WAIT_S), job.wait(WAIT_S)]


@app.task
def in_thread(n: int) -> list[Any]:
    return enqueue_and_submit(n)


@app.task(executor="process")
def in_process(n: int) -> list[Any]:
    return enqueue_and_submit(n)
