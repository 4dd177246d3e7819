"""The coroutine and thread executors, and the behaviour that all executors share."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

import executor_handlers as handlers
from executor_handlers import Definition, Kept, attempt_at, gone
from interlock.errors import ConfigError, PermanentError, RetryableError
from interlock.process_groups import ProcessGroups
from interlock.worker.executors.base import EngineError, HandlerError
from interlock.worker.executors.dispatch import Executors
from processes import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from interlock.client.context import TaskContext

pytestmark = pytest.mark.flow

word = contextvars.ContextVar("word", default="unset")


@asynccontextmanager
async def opened(threads: int = 1, processes: int = 1) -> AsyncIterator[Executors]:
    executors = Executors(threads=threads, processes=processes, grace=0.2)
    try:
        yield executors
    finally:
        await executors.close()


@pytest.fixture
async def executors() -> AsyncIterator[Executors]:
    async with opened() as it:
        yield it


async def run(executors: Executors, kind: str, function: Callable[..., Any], **arguments: Any) -> Any:
    definition = Definition(function, kind)
    return await executors.get(definition).run(definition, attempt_at(arguments), arguments)


async def test_a_coroutine_runs_in_the_loop_with_its_context_and_arguments(executors: Executors) -> None:
    async def handler(ctx: TaskContext, name: str) -> tuple[str, int, bool]:
        return name, ctx.fence, threading.current_thread() is threading.main_thread()

    definition = Definition(handler, "coroutine", context_parameter="ctx")
    arguments = {"name": "Ada"}
    assert await executors.get(definition).run(definition, attempt_at(), arguments) == ("Ada", 7, True)
    assert arguments == {"name": "Ada"}


async def test_a_thread_runs_outside_the_loop_with_its_context_arguments_and_variables(executors: Executors) -> None:
    def handler(ctx: TaskContext, name: str) -> tuple[str, int, str, bool]:
        seen = word.get()
        word.set("changed")
        return name, ctx.fence, seen, threading.current_thread() is threading.main_thread()

    word.set("set")
    definition = Definition(handler, "thread", context_parameter="ctx")
    assert await executors.get(definition).run(definition, attempt_at(), {"name": "Ada"}) == ("Ada", 7, "set", False)
    assert word.get() == "set"
    assert await run(executors, "thread", handlers.coroutine, word="loop") == "LOOP"


def stop(error: BaseException) -> Any:
    raise error


async def stop_later(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(("kind", "function"), [("coroutine", stop_later), ("thread", stop)])
@pytest.mark.parametrize("error", [ValueError("no"), PermanentError("never"), RetryableError("busy", retry_after=2)])
async def test_an_exception_is_passed_on_unchanged(
    executors: Executors, kind: str, function: Callable[..., Any], error: Exception
) -> None:
    with pytest.raises(type(error)) as caught:
        await run(executors, kind, function, error=error)
    assert caught.value is error


@pytest.mark.parametrize(
    ("kind", "function", "error"),
    [
        ("coroutine", stop_later, SystemExit(2)),
        ("coroutine", stop_later, asyncio.CancelledError()),
        ("thread", stop, SystemExit(2)),
        ("thread", stop, KeyboardInterrupt()),
        ("thread", stop, StopIteration()),
        ("thread", stop, asyncio.CancelledError()),
    ],
)
async def test_a_handler_cannot_end_its_worker(
    executors: Executors, kind: str, function: Callable[..., Any], error: BaseException
) -> None:
    with pytest.raises(HandlerError) as caught:
        await run(executors, kind, function, error=error)
    assert caught.value.document["type"] == type(error).__name__
    assert caught.value.document["retryable"] is True
    assert await run(executors, "thread", handlers.add, first=1, second=1) == 2


async def test_cancelling_a_coroutine_cancels_the_handler(executors: Executors) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def handler() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(run(executors, "coroutine", handler))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


class Stuck:
    """A handler that holds its thread until the test lets it go."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.seen: list[TaskContext] = []
        self._release = threading.Event()
        self._ended = threading.Event()

    def __call__(self, context: TaskContext) -> str:
        self.seen.append(context)
        self.started.set()
        assert self._release.wait(60)
        self._ended.set()
        return "too late"

    def let_go(self) -> None:
        self._release.set()
        assert self._ended.wait(60)

    async def start(self, executors: Executors) -> asyncio.Task[Any]:
        definition = Definition(self, "thread", context_parameter="context")
        task = asyncio.create_task(executors.get(definition).run(definition, attempt_at(), {}))
        await asyncio.to_thread(self.started.wait, 60)
        return task


async def given_up(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_thread_is_abandoned_and_replaced(executors: Executors) -> None:
    stuck = Stuck()
    await given_up(await stuck.start(executors))
    assert stuck.seen[0].cancelled
    assert stuck.seen[0].cancel_reason == "stopped by the worker"
    assert executors.abandoned_threads == 1
    # the only slot is free again
    assert await run(executors, "thread", handlers.add, first=1, second=2) == 3
    stuck.let_go()
    async with asyncio.timeout(60):
        while executors.abandoned_threads:
            await asyncio.sleep(0)
    assert await run(executors, "thread", handlers.add, first=1, second=2) == 3


async def test_a_handler_that_waits_for_a_thread_and_is_cancelled_never_runs(executors: Executors) -> None:
    first, second = Stuck(), Stuck()
    holding = await first.start(executors)
    definition = Definition(second, "thread", context_parameter="context")
    waiting = asyncio.create_task(executors.get(definition).run(definition, attempt_at(), {}))
    await asyncio.sleep(0)
    await given_up(waiting)
    first.let_go()
    assert await holding == "too late"
    assert await run(executors, "thread", handlers.add, first=1, second=2) == 3
    assert not second.seen


async def test_concurrency_is_the_number_of_threads_and_threads_are_reused() -> None:
    async with opened(threads=3) as executors:
        together = threading.Barrier(3)

        def meet() -> int:
            together.wait(60)
            return threading.get_ident()

        met = await asyncio.gather(*(run(executors, "thread", meet) for _ in range(3)))
        seen = await asyncio.gather(*(run(executors, "thread", threading.get_ident) for _ in range(100)))
        assert len(set(met)) == 3
        assert set(seen) <= set(met)


def test_a_thread_may_return_after_its_loop_has_closed() -> None:
    stuck = Stuck()
    before = set(threading.enumerate())  # threads of other tests among them

    async def give_up() -> None:
        async with opened() as executors:
            await given_up(await stuck.start(executors))

    asyncio.run(give_up())
    (thread,) = (it for it in set(threading.enumerate()) - before if it.name.startswith("interlock-handler"))
    stuck.let_go()
    thread.join(60)
    assert not thread.is_alive()


SCRIPT = """
import asyncio, threading
import executor_handlers as handlers
from interlock.worker.executors.dispatch import Executors

started = threading.Event()

def stuck():
    started.set()
    threading.Event().wait()

async def main():
    executors = Executors(threads=1, processes=1)
    definition = handlers.Definition(stuck, "thread")
    task = asyncio.create_task(executors.get(definition).run(definition, handlers.attempt_at(), {}))
    await asyncio.to_thread(started.wait)
    task.cancel()
    await asyncio.wait([task])
    await executors.close()
    print("closed", executors.abandoned_threads)

asyncio.run(main())
"""


def test_a_stuck_thread_does_not_keep_the_process_alive() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=handlers.surroundings(), timeout=60)
    assert done.stdout == "closed 1\n"


@pytest.mark.parametrize("kind", ["thread", "process", "command"])
async def test_a_transactional_task_runs_as_a_coroutine_only(executors: Executors, kind: str) -> None:
    definition = Definition(handlers.add, kind, command=("true",), transactional=True)
    with pytest.raises(PermanentError, match=f"must run as a coroutine, not as a {kind}"):
        await executors.get(definition).run(definition, attempt_at(), {})


async def test_each_kind_has_one_executor_and_an_unknown_kind_is_refused(executors: Executors) -> None:
    made = [executors.get(Definition(executor=kind)) for kind in ("coroutine", "thread", "process", "command")]
    assert len(set(map(id, made))) == 4
    assert executors.get(Definition(executor="thread")) is made[1]
    with pytest.raises(ConfigError, match="unknown executor 'fiber'; use one of coroutine, thread, process, command"):
        executors.get(Definition(executor="fiber"))


async def test_close_is_safe_before_the_first_run_and_twice() -> None:
    executors = Executors(threads=1, processes=1)
    await executors.close()
    await executors.close()
    with pytest.raises(EngineError, match="closing"):
        await run(executors, "process", handlers.add, first=1, second=2)
    executors = Executors(threads=1, processes=1)
    assert await run(executors, "process", handlers.add, first=1, second=2) == 3
    assert await run(executors, "thread", handlers.add, first=1, second=2) == 3
    await asyncio.gather(executors.close(), executors.close())
    await executors.close()
    for kind in ("process", "thread", "command"):
        with pytest.raises(EngineError, match="closing"):
            await run(executors, kind, handlers.add)


async def test_a_cancelled_close_leaves_no_process() -> None:
    executors = Executors(threads=1, processes=1, grace=60)
    definition = Definition(handlers.stuck, "process", context_parameter="context")
    executor = executors.get(definition)
    running = asyncio.create_task(executor.run(definition, attempt_at(), {}))
    while not (children := getattr(executor, "pids")):  # noqa: B009 - only this kind has them
        await asyncio.sleep(0.01)
    closing = asyncio.create_task(executors.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    with pytest.raises(HandlerError, match="SIGKILL"):
        await running
    eventually(lambda: all(map(gone, children)))


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_an_executor_of_size_zero_is_refused(kind: str) -> None:
    executors = Executors(threads=0, processes=0)
    with pytest.raises(ValueError, match="at least one"):
        executors.get(Definition(executor=kind))


async def test_a_thread_can_wait_for_a_checkpoint(executors: Executors) -> None:
    line = Kept()

    def handler(context: TaskContext) -> bool:
        return context.checkpoint([1]).wait(30)

    definition = Definition(handler, "thread", context_parameter="context")
    assert await executors.get(definition).run(definition, attempt_at({}, line), {}) is True
    assert line.checkpoints == [[1]]


@pytest.mark.chaos
async def test_a_killed_reaper_is_replaced() -> None:
    groups = ProcessGroups()
    first = groups.start(["sleep", "600"])
    reaper = groups.reaper_pid
    assert reaper is not None
    os.kill(reaper, 9)
    assert eventually(lambda: gone(reaper))
    second = groups.start(["sleep", "600"])
    assert groups.reaper_pid not in {None, reaper}
    await groups.close()  # the new one knows of both
    assert await first.wait(60)
    assert await second.wait(60)
