"""The app whose tasks the worker tests run, in this process or in others."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

from interlock import Interlock, PermanentError, RetryableError, TaskContext
from interlock.model.backoff import Backoff

app = Interlock()


@app.task
async def add(a: int, b: int) -> int:
    return a + b


@app.task(max_tries=2, backoff=Backoff.none())
async def fail(message: str) -> None:
    raise ValueError(message)


@app.task
async def fail_for_good() -> None:
    raise PermanentError("of no use")


@app.task(max_tries=1)
async def fail_strangely() -> None:
    raise ValueError("a \x00 and a \ud800")


@app.task
async def answer_strangely() -> str:
    return "a \x00 in the result"


@app.task(max_tries=3)
async def fail_later(ctx: TaskContext) -> int:
    if ctx.tries < 3:
        raise RetryableError("not yet", retry_after=0)
    return ctx.tries


@app.task
async def nap(ctx: TaskContext, seconds: float) -> int:
    ctx.progress(0.5, "half way")
    await asyncio.sleep(seconds)
    return ctx.attempt


@app.task
def block(seconds: float) -> str:
    time.sleep(seconds)
    return "woke up"


@app.task
async def block_the_loop(seconds: float) -> str:
    time.sleep(seconds)  # noqa: ASYNC251 - a handler that blocks the loop
    return "woke up"


@app.task(timeout=0.05, max_tries=1)
async def too_slow() -> None:
    await asyncio.sleep(60)


@app.task
async def careful(ctx: TaskContext) -> int:
    """Resume from the last checkpoint, and kill the process once on the way."""
    done: int = ctx.restore(0)
    if done == 0:
        await ctx.checkpoint(3)
        os._exit(9)
    return done


@app.task(transactional=True, max_tries=1)
async def transact(ctx: TaskContext, *, good: bool) -> None:
    await ctx.connection.execute("insert into public.written values (1)")
    if not good:
        raise ValueError("roll this back")


@app.task
async def costly(ctx: TaskContext) -> None:
    ctx.cost = 1.25


@app.task
async def obedient(ctx: TaskContext) -> str:
    """Run until a cancellation is requested, then return."""
    while not ctx.cancelled:
        await asyncio.sleep(0.01)
    raise RuntimeError("stopped because it was asked to")


class UnshowableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class ForeignError(Exception):
    document = "something of its own"
    retry_after = "30"


@app.task(max_tries=1)
async def fail_oddly(kind: str) -> None:
    if kind == "unshowable":
        raise UnshowableError
    if kind == "foreign":
        raise ForeignError("with attributes that mean something else")
    asyncio.current_task().cancel()  # type: ignore[union-attr]  # a handler runs in a task
    await asyncio.sleep(0)


@app.task(max_tries=2, backoff=lambda _: 1 / 0)
async def fail_with_a_broken_backoff() -> None:
    raise ValueError("no")


@app.task(max_tries=1)
async def report_nonsense(ctx: TaskContext, *, nul: bool) -> None:
    if nul:
        ctx.progress(0.5, "a \x00")
    ctx.progress(0.5, counts={1: 2})


@app.task(transactional=True, max_tries=1)
async def transact_too_late(ctx: TaskContext) -> None:
    await ctx.connection.execute("insert into public.written values (1)")


@app.task(transactional=True)
async def transact_slowly(ctx: TaskContext) -> None:
    await ctx.connection.execute("insert into public.written values (1)")
    await asyncio.sleep(3600)


@app.task
async def stubborn() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


@app.task(timeout=0.3, max_tries=1)
async def swallow_timeout(ctx: TaskContext) -> str:
    """Ignore every cancellation; end when the process-wide event `let_go` is set, and try to write."""
    while not let_go.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue
    late.append(await ctx.checkpoint("late"))
    return "late"


@app.task
async def swallow_cancel() -> None:
    """The same without a timeout and a context."""
    while not let_go.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue


@app.task(transactional=True, timeout=0.3, max_tries=1)
async def swallow_in_transaction(ctx: TaskContext) -> None:
    await ctx.connection.execute("insert into public.written values (1)")
    while not let_go.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue


@app.task(timeout=0.3, max_tries=1)
def block_past_timeout() -> str:
    let_go.wait()
    return "late"


let_go = threading.Event()
late: list[bool] = []


@app.task
async def grow(megabytes: int, seconds: float) -> int:
    """Allocate memory and hold it for a while."""
    taken = bytearray(megabytes * 1_000_000)
    taken[::4096] = b"x" * len(taken[::4096])  # untouched pages do not count
    await asyncio.sleep(seconds)
    return len(taken)


@app.task
async def kill_worker(after: float) -> None:
    """Kill the process of the worker, with everything that runs in it."""
    await asyncio.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)
