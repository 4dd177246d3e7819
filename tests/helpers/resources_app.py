"""The app of the tests of lifespan and dependencies; it records what happens as lines of the file RESOURCES_LOG."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from interlock import Depends, Interlock, TaskContext
from interlock.log_context import running_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


def note(line: str) -> None:
    path = os.environ.get("RESOURCES_LOG")
    if path is not None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {line}\n")


@asynccontextmanager
async def lifespan(app: Interlock) -> AsyncIterator[None]:
    note(f"start, app open: {app.is_open}")
    if os.environ.get("FAIL_AT_START"):
        raise ConnectionRefusedError("no cache server")
    if os.environ.get("HANG_AT_START"):
        await asyncio.sleep(3600)
    yield
    note("stop")
    if os.environ.get("FAIL_AT_STOP"):
        raise RuntimeError("cannot stop")


app = Interlock(lifespan=lifespan)


class Pool:
    """A resource."""

    def __init__(self, name: str) -> None:
        self.name = name


async def open_pool() -> AsyncIterator[Pool]:
    note("open pool")
    if running_task.get() is not None:
        note("the pool belongs to an attempt")
    yield Pool("pool")
    note("close pool")


def open_session(pool: Annotated[Pool, Depends(open_pool, scope="worker")], context: TaskContext) -> Iterator[str]:
    note(f"open session {context.attempt}")
    try:
        yield f"{pool.name}/session"
    except ValueError:
        note("roll back")
        raise
    finally:
        note("close session")


async def get_region() -> str:
    return "eu"


def broken_cleanup() -> Iterator[int]:
    yield 1
    raise RuntimeError("cannot clean up")


@app.task(max_tries=1)
async def use_session(
    number: int,
    session: Annotated[str, Depends(open_session)],
    region: str = Depends(get_region),
    *,
    fail: bool = False,
) -> str:
    if fail:
        raise ValueError("no")
    return f"{session} {region} {number}"


@app.task(max_tries=1)
def use_in_thread(number: int, session: str = Depends(open_session), region: str = Depends(get_region)) -> str:
    return f"{session} {region} {number}"


@app.task(max_tries=1, executor="process")
def use_in_process(number: int, session: str = Depends(open_session), region: str = Depends(get_region)) -> str:
    note("handler in a process")
    return f"{session} {region} {number}"


async def fail_async() -> AsyncIterator[int]:
    raise OSError("no pool")
    yield 1


def fail_blocking() -> Iterator[int]:
    raise OSError("no session")
    yield 1


def fail_plainly() -> int:
    raise OSError("no region")


@app.task(max_tries=1)
async def use_failing_async(value: int = Depends(fail_async)) -> int:
    return value


@app.task(max_tries=1)
async def use_failing_kept(value: int = Depends(fail_async, scope="worker")) -> int:
    return value


@app.task(max_tries=1)
async def use_failing_blocking(value: int = Depends(fail_blocking)) -> int:
    return value


@app.task(max_tries=1)
def use_failing_plainly(value: int = Depends(fail_plainly)) -> int:
    return value


@app.task(max_tries=1, executor="process")
def use_failing_in_process(value: int = Depends(fail_blocking)) -> int:
    return value


@app.task(max_tries=1)
async def use_broken_cleanup(value: int = Depends(broken_cleanup)) -> int:
    return value


@app.task
def block(seconds: float) -> None:
    note("block")
    time.sleep(seconds)
    note("block ended")


flow = app.workflow("resources_flow")


@flow.step
async def fetch(number: int, region: str = Depends(get_region)) -> str:
    return f"{region}{number}"


@flow.step(after=[fetch])
async def store(fetch: str, session: str = Depends(open_session)) -> str:
    return f"{session} {fetch}"
