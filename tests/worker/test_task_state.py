"""TaskStateMachine: the transitions and invariants of seed 000 on the real class."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from interlock.client.context import TaskContext
from interlock.errors import InvalidTransitionError
from interlock.lifecycle import TASK_TRANSITIONS, TaskEvent, TaskRowEvent, TaskState
from interlock.store.tasks import ClaimedTask, Outcome
from interlock.worker.attempt import TaskStateMachine
from interlock.worker.outcome import Interruption
from worker_app import app

if TYPE_CHECKING:
    from collections.abc import Coroutine

pytestmark = pytest.mark.unit


def claimed(task_type: str = "add", **fields: Any) -> ClaimedTask:
    values: dict[str, Any] = {"attempt": 1, "tries": 1, "max_tries": 3} | fields
    return ClaimedTask(id=uuid4(), type=task_type, namespace="default", **values)


def processing(task_type: str = "add", **fields: Any) -> TaskStateMachine:
    """Return a claimed attempt in PROCESSING."""
    until = time.monotonic() + 30
    return TaskStateMachine.of_claim(claimed(task_type, **fields), "w", app.tasks[task_type], lease_until=until)


def machine(*events: TaskEvent) -> TaskStateMachine:
    made = TaskStateMachine(task_id="t", task_type="add", worker_id="w")
    for event in events:
        made.transition(event)
    return made


CLAIMED = (TaskEvent.CLAIM_REQUESTED, TaskEvent.CLAIM_SUCCEEDED)


class Answers:
    """A runner whose handler returns or raises as given, and whose settle is acknowledged or lost."""

    def __init__(self, *, output: Any = None, error: Exception | None = None, written: bool = True) -> None:
        self.output = output
        self.error = error
        self.written = written
        self.outcome: Outcome | None = None

    async def run_handler(self, attempt: TaskStateMachine) -> Any:
        assert attempt.state is TaskState.PROCESSING
        if self.error is not None:
            raise self.error
        return self.output

    async def settle(self, attempt: TaskStateMachine) -> None:
        assert attempt.state is TaskState.REPORTING
        self.outcome = attempt.outcome
        attempt.finish(written=self.written)

    async def abandon(self, attempt: TaskStateMachine) -> None:
        assert attempt.state is TaskState.ABANDONED

    def leak(self, attempt: TaskStateMachine, settling: Coroutine[Any, Any, None]) -> None:
        settling.close()
        raise AssertionError(f"the handler of {attempt.task_id} ends when it is cancelled")

    def end_leak(self, attempt: TaskStateMachine) -> None:
        raise AssertionError(f"the handler of {attempt.task_id} ends when it is cancelled")


class Endless(Answers):
    """A runner whose handler never returns."""

    def __init__(self) -> None:
        super().__init__()
        self.started = asyncio.Event()

    async def run_handler(self, attempt: TaskStateMachine) -> Any:
        await super().run_handler(attempt)
        self.started.set()
        await asyncio.Event().wait()


def test_task_pending_to_claiming() -> None:
    assert machine().transition(TaskEvent.CLAIM_REQUESTED) is TaskState.CLAIMING


def test_task_claim_success_to_processing() -> None:
    assert machine(*CLAIMED).state is TaskState.PROCESSING
    assert processing().state is TaskState.PROCESSING


def test_task_claim_failure_to_failed() -> None:
    assert machine(TaskEvent.CLAIM_REQUESTED, TaskEvent.CLAIM_FAILED).state is TaskState.FAILED


async def test_task_processing_success_to_reporting() -> None:
    attempt = processing()
    outcome = await attempt.process(Answers(output={"sum": 3}))
    assert attempt.state is TaskState.REPORTING
    assert outcome is not None
    assert (outcome.event, outcome.output) == (TaskRowEvent.SUCCEED, {"sum": 3})


async def test_task_processing_failure_to_reporting() -> None:
    attempt = processing()
    outcome = await attempt.process(Answers(error=ValueError("no")))
    assert attempt.state is TaskState.REPORTING
    assert outcome is not None
    assert (outcome.event, outcome.reason) == (TaskRowEvent.RETRY, "ValueError: no")


async def test_task_reporting_success_to_completed() -> None:
    attempt = processing()
    await attempt.execute(Answers(output=1))
    result = attempt.result()
    assert result.final_state is TaskState.COMPLETED
    assert (result.output, result.error) == ({"result": 1}, None)
    assert result.duration_ms is not None


async def test_task_reporting_failure_to_failed() -> None:
    attempt = processing()
    await attempt.execute(Answers(output=1, written=False))
    assert attempt.result().final_state is TaskState.FAILED


async def test_task_lease_expired_to_abandoned() -> None:
    attempt = processing()
    answers = Endless()
    attempt.running = asyncio.create_task(attempt.execute(answers))
    await answers.started.wait()
    attempt.interrupt(Interruption.LEASE_LOST)
    await attempt.running
    assert attempt.result().final_state is TaskState.ABANDONED
    assert answers.outcome is None, "nothing is written"


async def test_task_shutdown_during_processing() -> None:
    attempt = processing()
    answers = Endless()
    attempt.running = asyncio.create_task(attempt.execute(answers))
    await answers.started.wait()
    attempt.interrupt(Interruption.SHUTDOWN)
    await attempt.running
    assert [move.event for move in attempt.history][2] is TaskEvent.SHUTDOWN_REQUESTED
    assert answers.outcome is not None
    assert answers.outcome.event is TaskRowEvent.RETURN


def test_task_shutdown_during_claiming() -> None:
    attempt = TaskStateMachine.not_started(claimed(), "w", TaskEvent.SHUTDOWN_REQUESTED, "which shuts down")
    assert attempt.state is TaskState.ABANDONED
    assert attempt.outcome is not None
    assert attempt.outcome.event is TaskRowEvent.RETURN


def test_task_is_terminal_completed() -> None:
    done = machine(*CLAIMED, TaskEvent.PROCESSING_SUCCEEDED, TaskEvent.REPORT_SUCCEEDED)
    assert done.state is TaskState.COMPLETED
    assert done.is_terminal()
    assert not machine(*CLAIMED).is_terminal()


def test_task_invalid_transition_raises_error() -> None:
    with pytest.raises(InvalidTransitionError, match="'report_succeeded' is not allowed in state 'pending'"):
        machine().transition(TaskEvent.REPORT_SUCCEEDED)


def test_task_processing_has_valid_lease() -> None:
    attempt = processing()
    assert attempt.context.lease_timeout is not None
    assert attempt.context.lease_timeout > datetime.now(UTC)
    assert attempt.lease_until > time.monotonic()


def test_task_processing_has_lease_acquired_time() -> None:
    attempt = processing()
    assert attempt.context.lease_acquired_at is not None
    assert attempt.context.lease_acquired_at <= datetime.now(UTC)


def test_task_terminal_state_no_transitions() -> None:
    for state in (TaskState.COMPLETED, TaskState.FAILED, TaskState.ABANDONED):
        attempt = machine()
        attempt.state = state
        for event in TaskEvent:
            assert not attempt.can_transition(event)
            with pytest.raises(InvalidTransitionError):
                attempt.transition(event)
        assert attempt.state is state


async def test_task_reporting_has_output_or_error() -> None:
    seen = []

    class Look(Answers):
        async def settle(self, attempt: TaskStateMachine) -> None:
            seen.append((attempt.context.output_data, attempt.context.error))
            await super().settle(attempt)

    await processing().execute(Look(output={"a": 1}))
    await processing().execute(Look(output=None))
    await processing().execute(Look(output=[1]))
    await processing().execute(Look(error=ValueError("no")))
    assert seen == [
        ({"a": 1}, None),
        ({"result": None}, None),
        ({"result": [1]}, None),
        (None, "ValueError: no"),
    ]
    for output, error in seen:
        assert (output is None) is (error is not None), "T-INV4"


def test_task_transitions_are_atomic() -> None:
    attempt = machine(*CLAIMED)
    ready = threading.Barrier(8)
    won: list[TaskState] = []

    def race(event: TaskEvent) -> None:
        ready.wait()
        with suppress(InvalidTransitionError):
            won.append(attempt.transition(event))

    events = [TaskEvent.PROCESSING_SUCCEEDED, TaskEvent.LEASE_EXPIRED] * 4
    threads = [threading.Thread(target=race, args=[event]) for event in events]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert won == [attempt.state]
    assert len(attempt.history) == 3


def test_a_context_has_the_required_fields_and_needs_no_arguments() -> None:
    fields = {
        "lease_acquired_at",
        "lease_timeout",
        "input_data",
        "output_data",
        "error",
        "cost",
        "processing_started_at",
        "processing_completed_at",
    }
    empty = TaskContext()
    assert {name: getattr(empty, name) for name in fields} == dict.fromkeys(fields)
    now = datetime.now(UTC)
    given: dict[str, Any] = {name: now for name in fields if name.endswith(("_at", "_timeout"))}
    given |= {"input_data": {"a": 1}, "output_data": {"b": 2}, "error": "no", "cost": 0.5}
    full = TaskContext(**given)
    assert {name: getattr(full, name) for name in fields} == given


def test_the_time_until_the_claim_and_the_claim_itself_are_timed() -> None:
    sent_at = time.time() - 2
    attempt = TaskStateMachine.of_claim(
        claimed(waited_s=5.0), "w", app.tasks["add"], lease_until=time.monotonic() + 30, requested_at=sent_at
    )
    pending, claiming = (move.lasted for move in attempt.history)
    assert pending == pytest.approx(5)
    assert 2 <= claiming < 32
    assert attempt.context.lease_acquired_at is not None
    assert attempt.context.lease_acquired_at.timestamp() >= sent_at + 2


async def test_a_last_failed_try_and_a_permanent_error_end_the_task() -> None:
    answers = Answers(error=ValueError("no"))
    await processing(tries=3, max_tries=3).execute(answers)
    assert answers.outcome is not None
    assert answers.outcome.event is TaskRowEvent.FAIL
    assert answers.outcome.error is not None
    assert answers.outcome.error["retryable"] is True


def test_the_transition_table_is_the_required_one() -> None:
    assert len(TASK_TRANSITIONS) == 10
