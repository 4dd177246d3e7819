"""Failed attempts are logged once, with the traceback of the user's code, and given to the hooks of the app."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

import observed_app
from factories import enqueue, task_row, task_state
from interlock import DefinitionError, HandlerError, Interlock, serving
from interlock.config import Config
from interlock.log_context import TaskIdFilter, running_task
from processes import eventually
from worker_support import until, worker_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager

    from interlock.postgres.connection import Connection
    from interlock.worker.process import WorkerStateMachine

pytestmark = pytest.mark.flow

FAILURES = {"task_failed", "task_retried"}


def serving_observed(url: str, **options: Any) -> AbstractAsyncContextManager[WorkerStateMachine]:
    """Run a worker in this process with the tasks and hooks of observed_app."""
    here = Interlock(config=Config(database_url=url))
    here._tasks.update(observed_app.app.tasks)  # noqa: SLF001 - the same tasks, another place
    here._error_hooks.extend(observed_app.app.error_hooks)  # noqa: SLF001 - the same hooks
    return serving(here, duties=False, app_reference="observed_app:app", **options)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    observed_app.reported.clear()
    yield
    observed_app.reported.clear()


@pytest.mark.parametrize("executor", ["coroutine", "thread", "process", "command"])
async def test_each_failed_attempt_is_logged_once_at_error_with_its_facts(
    url: str, database: Connection, executor: str
) -> None:
    given = {} if executor == "command" else {"message": "no disk"}
    task = await enqueue(database, f"fail_in_{executor}", given, max_tries=2)
    with capture_logs() as logs:
        async with serving_observed(url):
            await until(lambda: len(observed_app.reported) == 2)
    found = [entry for entry in logs if entry["event"] in FAILURES]
    assert [(entry["event"], entry["log_level"]) for entry in found] == [
        ("task_retried", "error"),
        ("task_failed", "error"),
    ]
    first, last = found
    assert (first["task_id"], first["task_type"], first["attempt"]) == (str(task), f"fail_in_{executor}", 1)
    assert (first["tries"], first["max_tries"], last["tries"]) == (1, 2, 2)
    assert first["next_try_at"] is not None
    assert first["next_try_in_s"] == 0
    assert (last["next_try_at"], last["next_try_in_s"]) == (None, None)
    assert first["worker_id"]
    assert ("no such file" if executor == "command" else "ValueError: no disk") in first["error"]


@pytest.mark.parametrize("executor", ["coroutine", "thread", "process"])
@pytest.mark.parametrize("form", ["console", "json"])
async def test_the_traceback_begins_with_the_code_of_the_user(
    url: str, database: Connection, form: str, executor: str
) -> None:
    task = await enqueue(database, f"fail_in_{executor}", {"message": "no disk"}, max_tries=1)
    with worker_process(url, INTERLOCK_APP="observed_app:app", INTERLOCK_LOG_FORMAT=form) as process:
        eventually(lambda: task_state(url, task) == "error")
        process.terminate()
        output, _ = process.communicate(timeout=60)
    if form == "json":
        entries = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        (shown,) = [entry["exception"] for entry in entries if entry["message"] == "task_failed"]
    else:
        shown = output.partition("task_failed")[2]
    lines = shown[shown.index("Traceback") :].splitlines()
    assert "observed_app.py" in lines[1]
    assert f"in fail_in_{executor}" in lines[1]
    trace = "\n".join(lines[: lines.index("ValueError: no disk") + 1])
    assert "/interlock/" not in trace
    assert output.count("ValueError: no disk") >= 1
    stored = (await task_row(database, task))["error"]["traceback"]
    assert "/interlock/" not in stored


async def test_a_program_without_a_logging_configuration_logs_no_values_of_local_variables(
    url: str, database: Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    await enqueue(database, "fail_in_coroutine", {"message": "no disk"}, max_tries=1)
    async with serving_observed(url):
        await until(lambda: observed_app.reported)
    output = "".join(capfd.readouterr())
    assert "task_failed" in output
    assert "in fail_in_coroutine" in output
    assert output.count("the value of a local variable") == 0


async def test_a_cancellation_and_a_shutdown_are_not_logged_as_failures(url: str, database: Connection) -> None:
    canceled = await enqueue(database, "sleep_on", {})
    with capture_logs() as logs:
        async with serving_observed(url, concurrency=2, cancel_grace=0.05, grace=0.05) as worker:
            await until(lambda: len(worker.context.active) == 1)
            (attempt,) = worker.context.active.values()
            worker.components.runner.cancel(attempt, "not wanted")
            await until(lambda: not worker.context.active)
            returned = await enqueue(database, "sleep_on", {})
            await until(lambda: len(worker.context.active) == 1)
    assert (task_state(url, canceled), task_state(url, returned)) == ("canceled", "pending")
    assert [entry for entry in logs if entry["event"] in FAILURES] == []
    assert observed_app.reported == []


async def test_a_hook_gets_the_error_and_the_facts_and_a_broken_hook_changes_nothing(
    url: str, database: Connection
) -> None:
    task = await enqueue(database, "fail_in_coroutine", {"message": "no disk"}, max_tries=2)
    with capture_logs() as logs:
        async with serving_observed(url):
            await until(lambda: len(observed_app.reported) == 2)
            await until(lambda: task_state(url, task) == "error")
    (error, first), (_, last) = observed_app.reported
    assert isinstance(error, ValueError)
    assert (first.task_id, first.task_type, first.attempt, first.tries) == (task, "fail_in_coroutine", 1, 1)
    assert (first.will_retry, last.will_retry) == (True, False)
    assert first.next_try_at is not None
    assert last.next_try_at is None
    broken = [entry for entry in logs if entry["event"] == "error_hook_failed"]
    assert len(broken) == 2
    assert "observed_app.py" in broken[0]["hook"]
    assert broken[0]["error"] == "RuntimeError: the hook is broken"


async def test_a_hook_gets_a_handler_error_for_a_handler_in_another_process(url: str, database: Connection) -> None:
    await enqueue(database, "fail_in_process", {"message": "no disk"}, max_tries=1)
    async with serving_observed(url):
        await until(lambda: observed_app.reported)
    ((error, _),) = observed_app.reported
    assert isinstance(error, HandlerError)
    assert (error.error_type, error.message) == ("ValueError", "no disk")
    assert error.trace is not None
    assert "observed_app.py" in error.trace


def test_a_hook_that_cannot_take_the_two_arguments_is_refused_with_its_place() -> None:
    app = Interlock()

    def hook(error: BaseException) -> None: ...

    with pytest.raises(DefinitionError, match=r"hook hook must take two arguments.*test_failure_reports\.py:\d+"):
        app.on_error(hook)  # type: ignore[type-var]  # what the test is about


# --- the log records of handlers


def entries_of(output: str, message: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [entry for entry in entries if str(entry["message"]).startswith(message)]


@pytest.mark.parametrize("executor", ["coroutine", "thread", "process"])
async def test_records_of_logging_and_structlog_in_a_handler_carry_the_ids_of_the_task(
    url: str, database: Connection, executor: str
) -> None:
    tasks = [await enqueue(database, f"log_in_{executor}", {"number": number}) for number in range(3)]
    with worker_process(url, INTERLOCK_APP="observed_app:app", INTERLOCK_CONCURRENCY="3") as process:
        eventually(lambda: all(task_state(url, task) == "done" for task in tasks))
        process.terminate()
        output, _ = process.communicate(timeout=60)
    for kind in ("standard", "structured"):
        found = entries_of(output, kind)
        assert {entry["task_id"] for entry in found} == {str(task) for task in tasks}
        for entry in found:
            assert entry["task_type"] == f"log_in_{executor}"
            assert entry["attempt"] == 1
            assert entry["correlation_id"] == entry["task_id"]
            assert entry["worker_id"]
    assert {entry["logger"] for entry in entries_of(output, "standard")} == {"shop.mail"}
    if executor == "coroutine":
        assert {entry["task_id"] for entry in entries_of(output, "after a wait")} == {str(task) for task in tasks}
        assert {(entry["logger"], entry["number"]) for entry in entries_of(output, "standard")} == {
            ("shop.mail", number) for number in range(3)
        }


async def test_handlers_that_share_an_asyncio_task_do_not_share_ids(url: str, database: Connection) -> None:
    tasks = {number: await enqueue(database, "log_without_waiting", {"number": number}) for number in range(20)}
    with worker_process(url, INTERLOCK_APP="observed_app:app", INTERLOCK_CONCURRENCY="20") as process:
        eventually(lambda: all(task_state(url, task) == "done" for task in tasks.values()))
        process.terminate()
        output, _ = process.communicate(timeout=60)
    found = {entry["number"]: entry["task_id"] for entry in entries_of(output, "structured")}
    assert found == {number: str(task) for number, task in tasks.items()}
    outside = entries_of(output, "worker_stopped")
    assert outside
    assert all("task_id" not in entry for entry in outside)


async def test_what_a_handler_prints_stays_as_it_is(url: str, database: Connection) -> None:
    task = await enqueue(database, "print_only", {})
    with worker_process(url, INTERLOCK_APP="observed_app:app", PYTHONUNBUFFERED="1") as process:
        eventually(lambda: task_state(url, task) == "done")
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert "plain output" in output.splitlines()


class CollectingHandler(logging.Handler):
    """Keeps the records that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


async def test_a_worker_inside_an_application_leaves_the_root_logger_alone(url: str, database: Connection) -> None:
    """The application adds the filter to its own handlers."""
    handler = CollectingHandler()
    handler.addFilter(TaskIdFilter())
    before = logging.getLogger().handlers[:]
    observed_app.logger.addHandler(handler)
    try:
        task = await enqueue(database, "log_in_thread", {"number": 1})
        async with serving_observed(url):
            await until(lambda: task_state(url, task) == "done")
            assert logging.getLogger().handlers == before
        observed_app.logger.warning("outside")
    finally:
        observed_app.logger.removeHandler(handler)
    inside, outside = handler.records
    assert (vars(inside)["task_id"], vars(inside)["task_type"]) == (str(task), "log_in_thread")
    assert vars(outside)["task_id"] is None
    assert running_task.get() is None


async def test_an_idle_worker_logs_its_cycle_once_at_info_and_once_more_after_a_task(
    url: str, database: Connection
) -> None:
    def cycles(output: list[str]) -> int:
        return sum("no_tasks_available" in line for line in output)

    with worker_process(url, INTERLOCK_APP="observed_app:app", INTERLOCK_WAKE_MODE="polling") as process:
        assert process.stdout is not None
        lines: list[str] = []
        reading = asyncio.create_task(asyncio.to_thread(lambda: lines.extend(process.stdout or ())))
        await until(lambda: cycles(lines) == 1)
        await asyncio.sleep(2)  # about five cycles, which leave no event to wait for
        assert cycles(lines) == 1
        await enqueue(database, "print_only", {})
        await until(lambda: cycles(lines) == 2)
        await asyncio.sleep(2)
        process.terminate()
        await reading
    assert cycles(lines) == 2
