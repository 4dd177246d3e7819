"""The process executor: reuse of children, cancellation, crashes, and the end of every process."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import structlog

import executor_handlers as handlers
from executor_handlers import Definition, Kept, attempt_at, gone
from interlock.process_groups import ProcessGroups
from interlock.worker.executors.base import EngineError, HandlerError
from interlock.worker.executors.processes import ProcessExecutor
from processes import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = pytest.mark.flow


@asynccontextmanager
async def processes(size: int = 1, **options: Any) -> AsyncIterator[ProcessExecutor]:
    groups = ProcessGroups()
    executor = ProcessExecutor(size, groups, **{"grace": 0.2, **options})
    try:
        yield executor
    finally:
        await executor.close()
        await groups.close()
        assert not executor.pids


@pytest.fixture
async def executor() -> AsyncIterator[ProcessExecutor]:
    async with processes() as it:
        yield it


async def run(executor: ProcessExecutor, function: Callable[..., Any], **given: Any) -> Any:
    return await executor.run(Definition(function), attempt_at(given), {})


def start(
    executor: ProcessExecutor, function: Callable[..., Any], line: Kept, **given: Any
) -> tuple[asyncio.Task[Any], Any]:
    context = attempt_at(given, line)
    task = asyncio.create_task(executor.run(Definition(function, context_parameter="context"), context, {}))
    return task, context


async def test_a_child_process_is_reused(executor: ProcessExecutor) -> None:
    assert await run(executor, handlers.add, first=2, second=3) == 5
    first = await run(executor, handlers.process_id)
    assert first != os.getpid()
    assert await run(executor, handlers.process_id) == first
    assert await run(executor, handlers.coroutine, word="done") == "DONE"


async def test_a_task_of_an_app_is_decoded_and_encoded_in_the_child() -> None:
    for reference in ("executor_handlers:app", None):
        async with processes(app_reference=reference) as executor:
            assert await executor.run(handlers.next_day, attempt_at({"day": "2026-01-31"}), {}) == "2026-02-01"
            with pytest.raises(HandlerError, match="argument 'day'") as caught:
                await executor.run(handlers.next_day, attempt_at({"day": "soon"}), {})
            assert not caught.value.retryable


async def test_the_error_names_an_app_or_task_that_the_child_does_not_find() -> None:
    async with processes(app_reference="executor_handlers:app") as executor:
        with pytest.raises(HandlerError, match="has no task 'other'") as caught:
            await executor.run(Definition(name="other"), attempt_at(), {})
        assert not caught.value.retryable
    async with processes(app_reference="no_such_module:app") as executor:
        with pytest.raises(HandlerError, match="no module 'no_such_module'"):
            await executor.run(handlers.next_day, attempt_at(), {})


async def test_concurrency_is_the_number_of_processes(tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    async with processes(2) as executor:
        met = await asyncio.gather(
            run(executor, handlers.meet, mine=ours, other=theirs), run(executor, handlers.meet, mine=theirs, other=ours)
        )
        pids = await asyncio.gather(*(run(executor, handlers.process_id) for _ in range(20)))
    assert len(set(met)) == 2
    assert set(pids) <= set(met)


@pytest.mark.parametrize(
    ("how", "error_type", "message", "retryable", "retry_after"),
    [
        ("permanent", "PermanentError", "no such customer", False, None),
        ("later", "RetryableError", "busy", True, 12.5),
        ("unknown", "LookupError", "what is this?", True, None),
        ("exit", "SystemExit", "good bye", True, None),
    ],
)
async def test_an_exception_keeps_its_details(
    executor: ProcessExecutor,
    how: str,
    error_type: str,
    message: str,
    retryable: bool,  # noqa: FBT001 - a column of the table
    retry_after: float | None,
) -> None:
    with pytest.raises(HandlerError) as caught:
        await run(executor, handlers.fail, how=how)
    document = caught.value.document
    assert "raise known[how]" in document.pop("traceback")
    assert document == {"type": error_type, "message": message, "retryable": retryable}
    assert caught.value.retry_after == retry_after
    assert await run(executor, handlers.add, first=1, second=1) == 2


async def test_progress_cost_logs_and_checkpoints_reach_the_context(executor: ProcessExecutor) -> None:
    line = Kept()
    context = attempt_at({}, line)
    context.deadline = datetime(2026, 1, 1, tzinfo=UTC)
    with structlog.testing.capture_logs() as logged:
        said = await executor.run(Definition(handlers.tell, context_parameter="context"), context, {})
    assert said == {
        "stored": True,
        "restored": {"done": 1},
        "fence": 7,
        "last": False,
        "id": str(handlers.TASK_ID),
        "deadline": "2026-01-01T00:00:00+00:00",
    }
    assert line.progress.get_nowait() == {"fraction": 0.25, "message": "a quarter", "type": "unusual"}
    assert line.checkpoints == [{"done": 1}]
    assert context.cost == 1.5
    heard = [(entry["event"], entry["log_level"], entry.get("logger"), entry.get("details")) for entry in logged]
    assert heard == [("careful", "warning", None, {"number": 3}), ("from a library", "error", "library", None)]
    assert logged[0]["task_id"] == str(handlers.TASK_ID)


async def test_a_handler_gets_the_refusal_of_its_checkpoint(executor: ProcessExecutor) -> None:
    task, _ = start(executor, handlers.tell_in_loop, Kept(stored=False))
    assert await task is False
    task, _ = start(executor, handlers.tell_in_loop, Kept(fails=True))
    with pytest.raises(HandlerError, match="the database is away") as caught:
        await task
    assert caught.value.retryable


async def test_a_handler_resumes_from_its_checkpoint(executor: ProcessExecutor) -> None:
    context = attempt_at(checkpoint={"page": 3})
    definition = Definition(handlers.restored, context_parameter="context")
    assert await executor.run(definition, context, {}) == {"page": 3}


async def test_cancelling_kills_a_stuck_handler_and_its_children(executor: ProcessExecutor) -> None:
    line = Kept()
    task, context = start(executor, handlers.stuck, line)
    said = await line.progress.get()
    task.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert context.cancelled
    assert context.cancel_reason == "stopped by the worker"
    assert gone(said["pid"])
    assert eventually(lambda: gone(said["child"]))
    assert await run(executor, handlers.process_id) != said["pid"]


async def test_cancelling_twice_kills_at_once() -> None:
    async with processes(grace=60) as executor:
        line = Kept()
        task, _ = start(executor, handlers.stuck, line)
        said = await line.progress.get()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(60):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert eventually(lambda: gone(said["pid"]))


async def test_a_handler_that_stops_when_cancelled_keeps_its_process() -> None:
    async with processes(grace=60) as executor:
        line = Kept()
        task, _ = start(executor, handlers.polite, line)
        said = await line.progress.get()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await run(executor, handlers.process_id) == said["pid"]


async def test_a_cancel_message_does_not_stop_the_handler(executor: ProcessExecutor) -> None:
    line = Kept()
    task, context = start(executor, handlers.polite, line)
    await line.progress.get()
    context.cancel_reason = "wrong customer"
    executor.cancel(context)
    assert await task == "stopped: wrong customer"
    executor.cancel(context)


async def test_after_a_cancel_message_sigterm_follows_at_once_and_cleanup_runs(tmp_path: Path) -> None:
    note = tmp_path / "note"
    async with processes(grace=60) as executor:
        line = Kept()
        task, context = start(executor, handlers.tidy, line, note=str(note))
        said = await line.progress.get()
        executor.cancel(context)
        task.cancel()
        async with asyncio.timeout(60):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert note.read_text() == "tidied"
        assert gone(said["pid"])


async def test_a_foreign_sigterm_does_not_stop_a_handler(executor: ProcessExecutor) -> None:
    line = Kept()
    task, context = start(executor, handlers.polite, line)
    os.kill((await line.progress.get())["pid"], signal.SIGTERM)
    executor.cancel(context)
    assert await task == "stopped: stopped by the worker"


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("how", "words"),
    [("exit", "exited with code 3"), ("SIGSEGV", "killed by SIGSEGV"), ("SIGKILL", "killed by SIGKILL")],
)
async def test_a_crash_is_retryable_and_the_next_handler_runs(executor: ProcessExecutor, how: str, words: str) -> None:
    with pytest.raises(HandlerError, match=words) as caught:
        await run(executor, handlers.crash, how=how)
    assert caught.value.retryable
    assert caught.value.error_type == "ProcessCrashed"
    assert await run(executor, handlers.add, first=1, second=2) == 3


@pytest.mark.chaos
async def test_a_child_that_was_killed_while_idle_is_replaced(executor: ProcessExecutor) -> None:
    first = await run(executor, handlers.process_id)
    os.kill(first, signal.SIGKILL)
    while executor.pids:
        await asyncio.sleep(0)
    assert await run(executor, handlers.process_id) != first


async def test_handlers_that_cannot_be_imported_are_refused(executor: ProcessExecutor) -> None:
    with pytest.raises(HandlerError, match="top level of a module") as caught:
        await run(executor, lambda: None)
    assert not caught.value.retryable


async def test_a_result_that_is_not_json_is_a_permanent_error(executor: ProcessExecutor) -> None:
    with pytest.raises(HandlerError, match="not JSON") as caught:
        await run(executor, handlers.not_json)
    assert not caught.value.retryable


async def test_large_messages_up_to_the_limit() -> None:
    async with processes(max_line_bytes=3 * 1024 * 1024) as executor:
        big = "x" * (2 * 1024 * 1024)
        assert await run(executor, handlers.repeat, text=big, times=1) == big
        with pytest.raises(HandlerError, match="longer than the worker accepts") as caught:
            await run(executor, handlers.repeat, text=big, times=2)
        assert not caught.value.retryable
        assert await run(executor, handlers.repeat, text="x", times=2) == "xx"


async def test_close_stops_running_handlers_and_refuses_new_ones() -> None:
    async with processes() as executor:
        line = Kept()
        task, _ = start(executor, handlers.stuck, line)
        said = await line.progress.get()
        async with asyncio.timeout(60):
            await executor.close()
        assert gone(said["pid"])
        with pytest.raises(HandlerError, match="killed by SIGKILL"):
            await task
        with pytest.raises(EngineError, match="closing"):
            await run(executor, handlers.add, first=1, second=1)


@pytest.mark.chaos
def test_children_die_with_a_killed_worker() -> None:
    pids = handlers.kill_worker_of('handlers.stuck, context_parameter="context"')
    assert eventually(lambda: all(map(gone, pids)))
