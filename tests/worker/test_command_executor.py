"""The command executor: the JSON-lines protocol, cancellation, and the end of every process."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog

import executor_handlers as handlers
from executor_handlers import Definition, Kept, attempt_at, gone
from interlock.process_groups import ProcessGroups
from interlock.worker.executors.base import EngineError, HandlerError
from interlock.worker.executors.commands import CommandExecutor
from processes import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.flow

EXAMPLES = Path(__file__).parents[2] / "examples" / "handlers"
LANGUAGES = {"word_count.sh": "sh", "word_count.pl": "perl", "word_count.mjs": "node"}


@asynccontextmanager
async def commands(**options: Any) -> AsyncIterator[CommandExecutor]:
    groups = ProcessGroups()
    executor = CommandExecutor(groups, **{"grace": 0.2, **options})
    try:
        yield executor
    finally:
        await executor.close()
        await groups.close()
        assert not executor.pids


@pytest.fixture
async def executor() -> AsyncIterator[CommandExecutor]:
    async with commands() as it:
        yield it


def shell(script: str) -> Definition:
    return Definition(executor="command", command=("sh", "-c", script))


def example(name: str) -> Definition:
    interpreter = LANGUAGES[name]
    if shutil.which(interpreter) is None:
        pytest.skip(f"{interpreter} is not installed")
    return Definition(executor="command", command=(interpreter, str(EXAMPLES / name)))


async def run(executor: CommandExecutor, script: str, line: Kept | None = None, **given: Any) -> Any:
    return await executor.run(shell(script), attempt_at(given, line), {})


@pytest.mark.parametrize("name", LANGUAGES)
async def test_the_examples_count_words(executor: CommandExecutor, name: str) -> None:
    line = Kept()
    context = attempt_at({"text": 'one "two"\nthree\tfour\\ five'}, line)
    assert await executor.run(example(name), context, {}) == {"words": 5}
    assert line.progress.get_nowait()["fraction"] == 0.5


async def test_a_program_resumes_from_its_checkpoint(executor: CommandExecutor) -> None:
    line = Kept()
    context = attempt_at({"text": "a b\nc\nd e f"}, line, checkpoint={"lines": 2, "words": 100})
    assert await executor.run(example("word_count.pl"), context, {}) == {"words": 103}
    assert line.checkpoints == [{"lines": 3, "words": 103}]
    assert context.stored_checkpoint == {"lines": 3, "words": 103}


async def test_a_program_gets_the_refusal_of_its_checkpoint(executor: CommandExecutor) -> None:
    context = attempt_at({"text": "a b"}, Kept(stored=False))
    with pytest.raises(HandlerError, match="stopped half-way") as caught:
        await executor.run(example("word_count.pl"), context, {})
    assert caught.value.document == {
        "type": "Stopped",
        "message": "stopped half-way",
        "traceback": None,
        "retryable": True,
    }


async def test_a_program_can_fail_permanently_and_send_cost_and_logs(executor: CommandExecutor) -> None:
    definition = example("word_count.mjs")
    with pytest.raises(HandlerError, match="text must be a string") as caught:
        await executor.run(definition, attempt_at({"text": 3}), {})
    assert not caught.value.retryable
    context = attempt_at({"text": "x" * 10})
    with structlog.testing.capture_logs() as logged:
        await executor.run(definition, context, {})
    assert context.cost == 0.00001
    assert [(entry["event"], entry["details"]) for entry in logged] == [("counting", {"characters": 10})]


async def test_the_first_line_is_the_task_message(executor: CommandExecutor) -> None:
    said = await run(executor, """IFS= read -r task; printf '{"type":"result","output":%s}' "$task" """, to="a@b")
    assert said == {
        "type": "task",
        "task_id": str(handlers.TASK_ID),
        "task_type": "example",
        "namespace": "default",
        "attempt": 7,
        "tries": 2,
        "max_tries": 3,
        "job_id": None,
        "job": None,
        "step": None,
        "correlation_id": None,
        "input": {"to": "a@b"},
        "checkpoint": None,
        "deadline": None,
    }


async def test_an_error_carries_retry_after(executor: CommandExecutor) -> None:
    with pytest.raises(HandlerError) as caught:
        await run(executor, """echo '{"type":"error","message":"busy","error_type":"Busy","retry_after":30}'""")
    assert (caught.value.error_type, caught.value.retry_after, caught.value.retryable) == ("Busy", 30, True)


async def test_exit_code_0_without_a_result_is_null(executor: CommandExecutor) -> None:
    assert await run(executor, "true", unread="x" * 1_000_000) is None


async def test_a_failed_program_reports_the_end_of_its_stderr(executor: CommandExecutor) -> None:
    with structlog.testing.capture_logs() as logged, pytest.raises(HandlerError) as caught:
        await run(executor, "for n in $(seq 30); do echo line $n >&2; done; exit 4")
    assert caught.value.retryable
    assert caught.value.error_type == "CommandFailed"
    assert "exited with code 4" in caught.value.message
    assert "line 30" in caught.value.message
    assert "line 10\n" not in caught.value.message
    assert [entry["line"] for entry in logged][:2] == ["line 1", "line 2"]
    with pytest.raises(HandlerError, match="was killed by SIGKILL"):
        await run(executor, "kill -9 $$")


async def test_a_result_counts_whatever_the_exit_code(executor: CommandExecutor) -> None:
    assert await run(executor, """echo '{"type":"result","output":[1]}'; exit 1""") == [1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Hello, world", "not JSON: 'Hello, world'"),
        ("[1, 2]", r"not an object with a type: '\[1, 2\]'"),
        ('{"type":"dance"}', "unknown type 'dance'"),
        ('{"type":"progress","fraction":7}', "invalid progress message .*from 0 to 1"),
        ('{"type":"progress","fraction":"half"}', "invalid (progress|cost) message"),
        ('{"type":"cost","value":"much"}', "invalid (progress|cost) message"),
    ],
)
async def test_an_invalid_line_is_a_permanent_protocol_error(executor: CommandExecutor, line: str, words: str) -> None:
    with pytest.raises(HandlerError, match=words) as caught:
        await run(executor, f"echo; echo '{line}'; sleep {handlers.LONG}")
    assert caught.value.error_type == "ProtocolError"
    assert not caught.value.retryable


async def test_the_length_of_lines_is_limited() -> None:
    async with commands(max_line_bytes=1000) as executor:
        with pytest.raises(HandlerError, match="longer than the worker accepts"):
            await run(executor, f"""printf '"%02000d"\\n' 1; sleep {handlers.LONG}""")
    async with commands() as executor:
        with structlog.testing.capture_logs() as logged:
            assert await run(executor, "printf '%0200000d\\n' 1 >&2; echo end >&2") is None
        assert "left out" in logged[0]["line"]
        assert logged[-1]["line"] == "end"


async def test_the_error_names_a_missing_program(executor: CommandExecutor) -> None:
    with pytest.raises(HandlerError, match="'no-such-program' of task 'example' cannot be started: No such file"):
        await executor.run(Definition(executor="command", command=("no-such-program",)), attempt_at(), {})
    with pytest.raises(HandlerError, match="has no command to run"):
        await executor.run(Definition(executor="command"), attempt_at(), {})


SAY_PIDS = """sleep 600 & printf '{"type":"progress","details":{"pid":%d,"child":%d}}\\n' $$ $!"""


async def test_cancelling_kills_a_program_that_ignores_sigterm_and_its_children(executor: CommandExecutor) -> None:
    line = Kept()
    task = asyncio.create_task(run(executor, f"trap '' TERM; {SAY_PIDS}; while :; do wait; done", line))
    said = await line.progress.get()
    task.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert gone(said["pid"])
    assert eventually(lambda: gone(said["child"]))


async def test_leftover_children_of_a_program_are_killed(executor: CommandExecutor) -> None:
    line = Kept()
    assert await run(executor, SAY_PIDS, line) is None
    said = line.progress.get_nowait()
    assert eventually(lambda: gone(said["child"]))


async def test_a_program_gets_the_cancel_message_first() -> None:
    script = """read task; echo '{"type":"progress"}'; read cancel; echo "$cancel" >&2; exit 0"""
    async with commands(grace=60) as executor:
        line = Kept()
        context = attempt_at({}, line)
        task = asyncio.create_task(executor.run(shell(script), context, {}))
        await line.progress.get()
        context.cancel_reason = "wrong customer"
        with structlog.testing.capture_logs() as logged:
            executor.cancel(context)
            assert await task is None
        assert logged[0]["line"] == '{"type":"cancel","reason":"wrong customer"}'


async def test_after_a_cancel_message_sigterm_follows_at_once() -> None:
    script = """trap 'echo stopped >&2; exit 0' TERM; echo '{"type":"progress"}'; while :; do sleep 0.01; done"""
    async with commands(grace=60) as executor:
        line = Kept()
        context = attempt_at({}, line)
        task = asyncio.create_task(executor.run(shell(script), context, {}))
        await line.progress.get()
        executor.cancel(context)
        task.cancel()
        async with asyncio.timeout(60):
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_close_stops_running_programs_and_refuses_new_ones(executor: CommandExecutor) -> None:
    line = Kept()
    task = asyncio.create_task(run(executor, f"{SAY_PIDS}; wait", line))
    said = await line.progress.get()
    async with asyncio.timeout(60):
        await executor.close()
    with pytest.raises(HandlerError, match="was killed by SIGTERM"):
        await task
    assert gone(said["pid"])
    with pytest.raises(EngineError, match="closing"):
        await run(executor, "true")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_concurrent_programs_leak_no_descriptors(executor: CommandExecutor) -> None:
    await run(executor, "true")
    before = descriptors()
    script = """IFS= read -r task; echo '{"type":"result","output":1}'"""
    assert sum(await asyncio.gather(*(run(executor, script) for _ in range(40)))) == 40
    async with asyncio.timeout(60):
        while descriptors() > before:
            await asyncio.sleep(0)


@pytest.mark.chaos
def test_programs_die_with_a_killed_worker() -> None:
    command = ("sh", "-c", f"{SAY_PIDS}; while :; do wait; done")
    pids = handlers.kill_worker_of(f"executor='command', command={command!r}")
    assert eventually(lambda: all(map(gone, pids)))
